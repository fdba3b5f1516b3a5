"""Find and load compiled families; check and pass tensors to them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.cpp import Source
from deepinfer_kernels.kernel_cache import is_intact

#: -ffp-contract=off: a * b + c rounds twice everywhere, or a tile's edge could differ from its middle
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
)

_FOLDER = Path(__file__).parent
#: how an argument is packed, by its letter (call.h)
_PACKED = {"p": "q", "i": "q", "f": "d"}


@functools.cache
def source(family: str) -> Source:
    """The C++ file of a family and how it is compiled."""
    return Source(family, _FOLDER / f"{family}.cpp", FLAGS, tuple(sorted(_FOLDER.glob("*.h"))))


class Library:
    """The functions of one family, as attributes once it is loaded.

    ``functions`` maps a name to its parameters, one letter each: p address (0: none), i integer, f float. Each
    returns an integer, 0 where the source returns nothing. The library is loaded once per process; any other built
    from the same source for the same CPU computes the same.
    """

    def __init__(self, family: str, **functions: str):
        self.family = family
        self.functions = functions
        self._loaded = False

    def missing(self, cache: Path | None = None) -> str | None:
        """Load the family from a kernel cache if there; otherwise what is missing and the next step."""
        path = source(self.family).library(cache)
        if path is None:
            return "not built for this machine: deepinfer build-kernels --target cpu"
        if self._loaded:
            return None
        try:
            if not is_intact(path):
                return f"{path} is damaged: delete it and build again"
            library = ctypes.CDLL(str(path))
            for name, parameters in self.functions.items():
                setattr(self, name, _packing(getattr(library, f"call_{name}"), parameters))
        except (OSError, AttributeError) as exc:
            return f"{path} cannot be loaded ({exc}): delete it and build again"
        self._loaded = True
        return None

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self.family}.{name} is called before the library of {self.family} is loaded")


def _packing(fn: Any, parameters: str) -> Callable[..., int]:
    """A function of the library, called with its arguments packed into one buffer."""
    pack = struct.Struct("".join(_PACKED[letter] for letter in parameters)).pack
    fn.argtypes, fn.restype = (ctypes.c_char_p,), ctypes.c_int64
    return lambda *arguments: fn(pack(*arguments))


def bf16(x: Tensor) -> Tensor:
    """x itself or a contiguous copy; TypeError unless bf16."""
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"compiled CPU operations take bfloat16 activations, got {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


def f32(x: Tensor) -> Tensor:
    """x as contiguous f32, converted where it is not."""
    if x.dtype is not torch.float32:
        x = x.float()
    return x if x.is_contiguous() else x.contiguous()


def i64(x: Tensor) -> Tensor:
    """x itself or a contiguous copy; TypeError unless int64."""
    if x.dtype is not torch.int64:
        raise TypeError(f"expected int64, got {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


def u8(x: Tensor) -> Tensor:
    """Bytes of x (uint8, int8, bool or an 8-bit float), contiguous."""
    if x.dtype is not torch.uint8:
        x = x.view(torch.uint8)
    return x if x.is_contiguous() else x.contiguous()
