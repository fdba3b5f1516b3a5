"""Deciding what a step runs. Integers in, a frozen plan out; no torch, nothing of the runtime."""
