"""Measuring an engine or an endpoint under a stated workload: recipe, workload, targets, metrics, result, writers."""
