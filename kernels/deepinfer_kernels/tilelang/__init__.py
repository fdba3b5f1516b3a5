"""TileLang kernels, compiled ahead of time; tilelang is imported by builds alone, while serving nothing compiles.

A module of operations and its programs are a pair of files. ``attention.py`` checks arguments and calls
``launch("attention.attend", sizes, *arguments)``; it imports torch only. ``attention_cuda.py`` holds a function
``attend(**sizes)`` that returns a ``T.prim_func`` of the same name, and ``PASSES``, program → pass configuration. A
build imports it, compiles what ``sizes`` name (ints, bools, strings; what differs between calls is a dynamic dimension
or a scalar argument) and writes a library with the cubin and the code that checks and launches it. To add one:

1. the two files; the programs may import the ``*.cuh`` beside them, which are part of every library's name, and no
   other module of ours; no ``from __future__ import annotations`` there, because TileLang evaluates annotations;
2. ``calls(shapes)`` in the module of operations: (operation, arguments, keyword arguments) of meta tensors, for every
   form that an engine may ask for; a build runs them and compiles the launches. ``launch.platform()`` says what they
   are for, sm90 or sm100, where programs differ;
3. a line in ``families.FAMILIES``, and in ``BATCH_DEPENDENT`` where a row's bits follow the batch (``True``: the module
   has ``<operation>_invariant`` too); in ``families.FASTER`` once it was measured to be faster than Triton's.

Arguments are torch tensors (contiguous, never None) and numbers, in the program's order; they are checked by the
library against the program's annotations. A launch goes to torch's current stream and can be captured in a graph once
the library has been called outside of one.
"""
