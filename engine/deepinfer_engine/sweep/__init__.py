"""Sweeps: one measurement at every point of a grid over profile and workload keys, kept as rows, drawn and compared."""
