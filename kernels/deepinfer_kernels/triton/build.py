"""Compile kernels ahead of time for a GPU that need not be there.

Two things are written under ``<cache>/<platform>``: a cubin per kernel, named by digests of what it is made of (its
source and that of the functions it calls, the argument types, constants and options, the architecture, the versions
of triton and ptxas) and of its bytes; and Triton's own cache, where the same launches find their kernels at run time.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource

from deepinfer_kernels import cpp
from deepinfer_kernels.triton.launch import Call

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ARCHITECTURES = {"sm90": 90, "sm100": 100}


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile, in what can be sent to another process."""

    op: str
    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, op: str, call: Call) -> Kernel:
        """The kernel that a launch would compile at its first run."""
        signature, constants, aligned = [], [], []
        for i, name in enumerate(call.kernel.arg_names):
            value = call.constants[name] if name in call.constants else call.arguments[name]
            if name in call.constants or value is None:
                signature.append((name, "constexpr"))
                constants.append((i, value))
            elif isinstance(value, Tensor):
                signature.append((name, _POINTERS[value.dtype]))
                if not call.kernel.params[i].do_not_specialize_on_alignment:
                    aligned.append(i)  # every store and activation begins on 16 bytes
            else:
                signature.append((name, "fp32" if isinstance(value, float) else "i32"))
        fn = call.kernel.fn
        options = tuple(sorted(call.options.items()))
        return cls(op, fn.__module__, fn.__name__, tuple(signature), tuple(constants), tuple(aligned), options)

    @property
    def source(self) -> ASTSource:
        """What Triton compiles."""
        return ASTSource(
            fn=getattr(importlib.import_module(self.module), self.function),
            signature=dict(self.signature),
            constexprs={(i,): value for i, value in self.constants},
            attrs={(i,): [["tt.divisibility", 16]] for i in self.aligned},
        )

    def key(self, platform: str, toolchain: str) -> str:
        """Digest of everything the cubin depends on."""
        parts = (self.source.hash(), platform, toolchain, self.options)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Built(cpp.Built):
    """What became of one kernel; ``name``: its function, ``op``: the operation it is part of."""

    op: str = ""


def toolchain(platform: str) -> str:
    """Versions of triton and of the assembler it brings."""
    release = get_ptxas_version(ARCHITECTURES[platform]).strip().splitlines()[-1]
    return f"triton {importlib.metadata.version('triton')}, ptxas {release}"


def kernels(launches: Iterable[tuple[str, Call]]) -> list[Kernel]:
    """The different kernels among launches, in order."""
    return list(dict.fromkeys(Kernel.of(op, call) for op, call in launches))


def _find(kernel: Kernel, platform: str, tools: str, cache: Path) -> Path | None:
    """The intact cubin of a kernel, None without one."""
    found = (cache / platform).glob(f"{kernel.function[1:]}-{kernel.key(platform, tools)}-*.cubin")
    return next((path for path in found if cpp.is_intact(path)), None)


def plan(wanted: Iterable[Kernel], platform: str, cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    tools = toolchain(platform)
    found = [(k, _find(k, platform, tools, cache)) for k in wanted]
    return [Built(k.function[1:], "missing" if p is None else "cached", 0.0, p, op=k.op) for k, p in found]


def build(wanted: list[Kernel], platform: str, cache: Path) -> list[Built]:
    """Compile what the cache does not have, as many at a time as there are cores.

    Raises ``cpp.CompilerError`` where the cache cannot be written.
    """
    tools = toolchain(platform)
    with cpp.locked(cache / platform):
        compile_one = partial(_compile, platform=platform, tools=tools, cache=cache)
        workers = min(cpp.cores(), len([k for k in wanted if _find(k, platform, tools, cache) is None]))
        if workers <= 1:
            return [compile_one(k) for k in wanted]
        # spawned, because a forked child would inherit torch's threads in whatever state they are
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(compile_one, wanted, chunksize=4))


def _compile(kernel: Kernel, platform: str, tools: str, cache: Path) -> Built:
    name, folder = kernel.function[1:], cache / platform
    present = _find(kernel, platform, tools, cache)
    if present is not None:
        return Built(name, "cached", 0.0, present, op=kernel.op)
    began = time.perf_counter()
    triton.knobs.cache.dir = str(folder / "triton")
    try:
        target = GPUTarget("cuda", ARCHITECTURES[platform], 32)
        cubin = triton.compile(kernel.source, target=target, options=dict(kernel.options)).asm["cubin"]
    except Exception as exc:  # whatever the compiler raises is this kernel's result, the others go on
        detail = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        return Built(name, "failed", time.perf_counter() - began, None, detail, op=kernel.op)
    path = folder / f"{name}-{kernel.key(platform, tools)}-{hashlib.sha256(cubin).hexdigest()[:8]}.cubin"
    part = None
    try:
        handle, part = tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        Path(part).replace(path)
    except OSError as exc:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        detail = f"cannot write {path}: {exc.strerror}"
        return Built(name, "failed", time.perf_counter() - began, None, detail, op=kernel.op)
    return Built(name, "built", time.perf_counter() - began, path, op=kernel.op)
