"""The only place where a Triton kernel is launched, so that it can be recorded instead and compiled ahead of time."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deepinfer_kernels.triton import families

#: kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1): for tests
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
#: see ``families``, which can be asked where there is no triton
compiled = families.compiled


def _note(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(src.name)


triton.knobs.compilation.listener = _note


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, its run-time arguments by name, its compile-time constants, its options."""

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


#: compiled kernels by what Triton compiles another one for, whichever cache they are from: the same sources, compiled
#: by this process's triton
_made: dict[tuple, Any] = {}
#: held while Triton, which knows one cache for a whole process, looks for a kernel in the cache of an engine
_finding = threading.Lock()
#: who is told of the launches of this thread instead
_recorder: ContextVar[Callable[[Call], None] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(record: Callable[[Call], None]) -> Iterator[None]:
    """Hand this thread's launches to ``record`` instead of a device; operations may be called with tensors without
    memory."""
    before = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(before)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """Run ``kernel`` on the current stream of its first tensor's device; an empty grid does nothing.

    ``args`` are the kernel's run-time arguments in order (tensors, None, int, float; one of the first two is a tensor),
    ``constants`` its tl.constexpr ones by name, in the order of its parameters.
    """
    recorder = _recorder.get()
    if recorder is not None:
        names = kernel.arg_names[: len(args)]
        options = {"num_warps": warps, "num_stages": stages}
        recorder(Call(kernel, dict(zip(names, args, strict=True)), constants, options))
        return
    if 0 in grid:
        return
    if INTERPRETED:
        kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)
        return
    device = (args[1] if args[0] is None else args[0]).get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, warps=warps, stages=stages, **constants)
        return
    # what Triton would compile another kernel for; nothing specialises on integers
    kinds = [(a.dtype, a.data_ptr() & 15) if isinstance(a, Tensor) else _kind(a) for a in args]
    # by its number: a kernel lives as long as its module, and hashing it takes longer than all the rest
    key = (id(kernel), device, warps, stages, *kinds, *constants.values())
    made = _made.get(key)
    if made is None:
        with reading():
            _made[key] = kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)
        return
    # as Triton's own launch from here on, without the 20 us that it takes to find the kernel
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    made.run(x, y, z, stream, made.function, made.packed_metadata, None, None, None, *args, *constants.values())


@contextmanager
def reading() -> Iterator[None]:
    """Triton looks for kernels in the cache of the operation that runs, and again in its own afterwards."""
    folder = families.folder.get()
    if folder is None:
        yield
        return
    with _finding, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def _kind(value: Any) -> Any:
    """What of a number or None matters to a compiled kernel: whether it is there, and fits 32 bits."""
    return None if value is None else isinstance(value, float) or value >> 31


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover n."""
    return -(-n // size)


def contiguous(x: Tensor) -> Tensor:
    """x itself or a contiguous copy."""
    return x if x.is_contiguous() else x.contiguous()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
