"""Find and load compiled families; check and pass tensors to them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "w": ctypes.c_int32, "f": ctypes.c_float}


def default_cache() -> Path:
    """``deepinfer/kernels`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "deepinfer" / "kernels"


@functools.cache
def _cpu() -> str:
    """The instruction sets of this machine: a library is tuned to them and loads nowhere else."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"


def source(family: str) -> Path:
    """The C++ file of a family."""
    return _FOLDER / f"{family}.cpp"


@functools.cache
def content_key(family: str) -> str:
    """Digest of the family's source, all headers, the compiler's flags and the CPU's instruction sets."""
    digest = hashlib.sha256(source(family).read_bytes())
    for header in sorted(_FOLDER.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update("\n".join((*FLAGS, _cpu())).encode())
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The last part of a library's name: a digest of its bytes, so that a damaged file is told before it is mapped."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def built(family: str, cache: Path | None = None, compiler: str = "*") -> Path | None:
    """The newest library of this very source and CPU in a kernel cache, by whichever compiler; None without one."""
    found = (cache or default_cache()).glob(f"cpu/{family}-{content_key(family)}-{compiler}-*.so")
    return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name), default=None)


class Library:
    """The functions of one family, as attributes once it is loaded.

    ``functions`` maps a name to its parameters, one letter each: p pointer, i int64, w int32, f float; ``>i`` behind
    them means that an int64 is returned. The library is loaded once per process; any other built from the same
    source for the same CPU computes the same.
    """

    def __init__(self, family: str, **functions: str):
        self.family = family
        self.functions = functions
        self._loaded = False

    def missing(self, cache: Path | None = None) -> str | None:
        """Load the family from a kernel cache if there; otherwise what is missing and the next step."""
        path = built(self.family, cache)
        if path is None:
            return "not built for this machine: deepinfer build-kernels --target cpu"
        if self._loaded:
            return None
        try:
            if not path.stem.endswith(file_digest(path)):
                return f"{path} is damaged: delete it and build again"
            library = ctypes.CDLL(str(path))
            for name, signature in self.functions.items():
                parameters, _, result = signature.partition(">")
                fn = getattr(library, name)
                fn.argtypes = tuple(_TYPES[letter] for letter in parameters)
                fn.restype = _TYPES[result] if result else None
                setattr(self, name, fn)
        except (OSError, AttributeError) as exc:
            return f"{path} cannot be loaded ({exc}): delete it and build again"
        self._loaded = True
        return None

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self.family}.{name} is called before the library of {self.family} is loaded")


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
