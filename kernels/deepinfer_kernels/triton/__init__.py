"""Triton kernels, one source for Hopper and Blackwell: one module per family, like the reference.

Nothing here is imported before an operation resolves to this backend, because importing triton takes a second.
"""
