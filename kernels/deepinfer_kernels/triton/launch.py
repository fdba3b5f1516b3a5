"""The only place where a Triton kernel is launched, so that it can be recorded instead and compiled ahead of time."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deepinfer_kernels.triton import families

#: kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1): for tests
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
#: names of the kernels compiled in this process because no cache held them; does not grow once all shapes were met
compiled: list[str] = []


def _note(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(src.name)


triton.knobs.compilation.listener = _note
if families.folder is not None and "TRITON_CACHE_DIR" not in os.environ:
    triton.knobs.cache.dir = str(families.folder)


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, its run-time arguments by name, its compile-time constants, its options."""

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


_recorder: list[Callable[[Call], None]] = []


@contextmanager
def recording(record: Callable[[Call], None]) -> Iterator[None]:
    """Hand launches to ``record`` instead of a device; operations may be called with tensors without memory."""
    _recorder.append(record)
    try:
        yield
    finally:
        _recorder.pop()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """Run ``kernel`` on the current stream of its first tensor's device; an empty grid does nothing.

    ``args`` are the kernel's run-time arguments in order (tensors, None, int, float), ``constants`` its tl.constexpr
    ones, by name. Kernels do not specialise on integers, so the key of a compiled one is small: pointer alignment,
    dtypes and constants.
    """
    if _recorder:
        names = kernel.arg_names[: len(args)]
        options = {"num_warps": warps, "num_stages": stages}
        _recorder[-1](Call(kernel, dict(zip(names, args, strict=True)), constants, options))
        return
    if 0 in grid:
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    if INTERPRETED or device.index == torch.cuda.current_device():
        kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover n."""
    return -(-n // size)


def contiguous(x: Tensor) -> Tensor:
    """x itself or a contiguous copy."""
    return x if x.is_contiguous() else x.contiguous()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
