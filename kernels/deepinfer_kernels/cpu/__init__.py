"""Operations compiled from C++ for the CPU they run on, called through ctypes. ``fast`` numerics only.

One source and one library per family. A row of a result has the same bits whatever else is in the call, and there
are no threads inside, so every operation here is batch invariant. Experts keep the bytes of the checkpoint and decode
them where they multiply. Nothing is compiled by importing or calling: ``deepinfer_kernels.cpp`` does that ahead of
time, ``binary.Library`` loads what was built.
"""
