"""Adapters to vendor kernel libraries: layouts are converted here, the mathematics is theirs.

Libraries are probed by the functions they have. Nothing chooses an adapter by itself: a profile names it
(``kernels.overrides.linear: deep_gemm``), because what runs by default has been measured here, and most of these need
a device that was not at hand. ``families.ADAPTERS`` says of each adapter on which platforms it ran.

DeepEP has no adapter here: it moves rows between ranks, which is the engine's transport (``parallel.transport:
deepep``).
"""
