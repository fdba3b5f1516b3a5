"""What TileLang computes, module by module, and whether it can here; imports no tilelang."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_kernels import cuda_tools
from deepinfer_kernels.kernel_cache import default_cache
from deepinfer_kernels.triton import families as triton

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes

#: module of operations → its operations
FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": ("attend_cached",),
    "experts": ("moe_experts",),
    "index": ("index_scores",),
}
#: as for Triton: a row's bits follow the batch; with True there is ``<operation>_invariant``, which is free of it
BATCH_DEPENDENT = {
    "attend_cached": True,
    "moe_experts": True,
}
#: operation → platforms on which it was measured to be faster than Triton's, which is taken first elsewhere
FASTER: dict[str, frozenset[str]] = {
    "attend_cached": frozenset({"sm90"}),
    "index_scores": frozenset({"sm90"}),
    "moe_experts": frozenset({"sm90"}),
}

#: the release that kernels are written for; the library of its run time is loaded into ours
RELEASE = "0.1.15"
#: releases of apache-tvm-ffi that this one was built against
FFI = ((0, 1, 11), (0, 1, 13))
#: the folder of libraries while an operation of an engine runs; other engines may have others, in other threads
folder: ContextVar[Path | None] = ContextVar("folder", default=None)


def missing(module: str, cache: Path | None = None) -> str | None:
    """What keeps a module's kernels from running here, in one sentence with the next step; None when nothing does."""
    here = platform()
    if not here.startswith("sm"):
        return here
    reason = triton.unusable()
    if reason is not None:  # it packs the weights of experts, and takes the sizes that programs have no form for
        return f"goes with triton, and {reason}"
    built = (cache or default_cache()) / here
    if next(built.glob(f"{module}.*-{source_key(module)}-*.so"), None) is None:
        return f"not built for this device: deepinfer build-kernels --target {here}"
    return None


def lacks(module: str, op: str, invariant: bool, shapes: Shapes, platform: str, cache: Path) -> str | None:
    """Why TileLang cannot compute an operation of a model of these sizes, in one sentence; None where it can."""
    from deepinfer_kernels.tilelang.shapes import absent

    outside = getattr(importlib.import_module(f"deepinfer_kernels.tilelang.{module}"), "outside", None)
    reason = None if outside is None else outside(shapes)
    if reason is not None:
        return reason
    names = absent(shapes, platform, cache, {op}, invariant=invariant)
    if not names:
        return None
    return f"{len(names)} of its kernels are not built for the sizes of this model, first {names[0]}"


def reading(fn: Callable[..., Any], cache: Path) -> Callable[..., Any]:
    """``fn``, with libraries taken from ``cache``."""
    here = cache / platform()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with from_folder(here):
            return fn(*args, **kwargs)

    return call


@contextmanager
def from_folder(path: Path) -> Iterator[None]:
    """Launches of this thread take libraries from ``path`` while it holds."""
    before = folder.set(path)
    try:
        yield
    finally:
        folder.reset(before)


def unusable() -> str | None:
    """What keeps TileLang from being loaded here; None when nothing does."""
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed: pip install 'deepinfer-cli[tilelang]'"
    version = importlib.metadata.version("tilelang").split("+")[0]
    if version != RELEASE:
        return f"tilelang {version}, kernels are written for {RELEASE}: pip install 'deepinfer-cli[tilelang]'"
    ffi = importlib.metadata.version("apache-tvm-ffi")
    if not FFI[0] <= tuple(int(p) for p in ffi.split(".")[:3] if p.isdigit()) < FFI[1]:
        return f"apache-tvm-ffi {ffi} does not fit tilelang {RELEASE}: pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"
    return None


def uncompilable() -> str | None:
    """What keeps TileLang from compiling here, which takes no device; None when nothing does."""
    reason = unusable()
    if reason is not None:
        return reason
    if importlib.util.find_spec("z3") is None:
        return "z3 is not installed: pip install 'deepinfer-cli[tilelang]'"
    nvcc = cuda_tools.find("nvcc")
    if nvcc.path is None:
        return f"{nvcc.absence}: {nvcc.fix()}"
    if host_compiler() is None:
        return "there is no C++ compiler for the code that launches: apt install g++, or name one in CXX"
    return None


def host_compiler() -> str | None:
    """The compiler of the code that launches, as TileLang looks for it; None without one."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    wanted = (named,) if named else ("g++", "gcc", "clang++", "clang", "c++", "cc")
    return next(filter(None, map(shutil.which, wanted)), None)


@functools.cache
def platform() -> str:
    """The platform of the current device, or why there is none."""
    reason = unusable()
    if reason is not None:
        return reason
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


@functools.cache
def source_key(module: str) -> str:
    """Digest of a module's programs, of the device code beside them and of the release that compiles them."""
    here = Path(__file__).parent
    parts = [f"tilelang {RELEASE}".encode(), (here / f"{module}_cuda.py").read_bytes()]
    parts += [path.read_bytes() for path in sorted(here.glob("*.cuh"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
