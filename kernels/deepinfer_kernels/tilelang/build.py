"""Compile TileLang programs ahead of time, for a GPU that need not be there.

A library per program and sizes is written to ``<cache>/<platform>``. Its name holds digests of what it is made of
(sources, sizes and the release of tilelang; the toolchain) and of its bytes. It contains the cubin.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepinfer_kernels import cpp
from deepinfer_kernels.tilelang import families
from deepinfer_kernels.tilelang.launch import Call, library

ARCHITECTURES = {"sm90": "sm_90a", "sm100": "sm_100a"}
#: machine of an ELF file: CUDA
_EM_CUDA = 190


@dataclass(frozen=True)
class Kernel:
    """A program with sizes, and the operation it was first met in."""

    op: str
    call: Call


@dataclass(frozen=True)
class Built(cpp.Built):
    """What became of one kernel; ``name``: its program, ``op``: the operation it is part of."""

    op: str = ""


def toolchain() -> str:
    """Versions of tilelang and of the nvcc it calls. Raises ``cpp.CompilerError`` without an nvcc that answers."""
    path = families.nvcc()
    try:
        if path is None:
            raise FileNotFoundError("nvcc")
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise cpp.CompilerError(f"nvcc --version failed: {exc}", "name a CUDA toolkit in CUDA_HOME") from None
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return f"tilelang {families.RELEASE}, nvcc {match[1] if match else 'of unknown version'}"


def kernels(launches: Iterable[tuple[str, Call]]) -> list[Kernel]:
    """The different kernels among launches, in order."""
    first: dict[Call, str] = {}
    for op, call in launches:
        first.setdefault(call, op)
    return [Kernel(op, call) for call, op in first.items()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def plan(wanted: Iterable[Kernel], platform: str, cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    tools = _digest(toolchain())
    found = [(k, library(k.call, cache / platform, tools)) for k in wanted]
    return [Built(k.call.program, "missing" if p is None else "cached", 0.0, p, op=k.op) for k, p in found]


def build(wanted: list[Kernel], platform: str, cache: Path) -> list[Built]:
    """Compile what the cache does not have, as many at a time as there are cores.

    Raises ``cpp.CompilerError`` where the cache cannot be written.
    """
    tools = toolchain()
    with cpp.locked(cache / platform):
        compile_one = partial(_compile, platform=platform, tools=tools, cache=cache)
        absent = [k for k in wanted if library(k.call, cache / platform, _digest(tools)) is None]
        workers = min(cpp.cores(), len(absent))
        if workers <= 1:
            return [compile_one(k) for k in wanted]
        # spawned, because a forked child would inherit torch's threads in whatever state they are
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(compile_one, wanted))


def _compile(kernel: Kernel, platform: str, tools: str, cache: Path) -> Built:
    call, folder = kernel.call, cache / platform
    present = library(call, folder, _digest(tools))
    if present is not None:
        return Built(call.program, "cached", 0.0, present, op=kernel.op)
    began = time.perf_counter()
    part = None
    try:
        handle, part = tempfile.mkstemp(dir=folder, prefix=f".{call.program}-", suffix=".so.part")
        os.close(handle)
        detail = _write(call, platform, Path(part))
        if detail is not None:
            return Built(call.program, "failed", time.perf_counter() - began, None, detail, op=kernel.op)
        digest = hashlib.sha256(Path(part).read_bytes()).hexdigest()[:8]
        path = folder / f"{call.stem()}-{_digest(tools)}-{digest}.so"
        Path(part).replace(path)
    except OSError as exc:
        detail = f"cannot write to {folder}: {exc.strerror}"
        return Built(call.program, "failed", time.perf_counter() - began, None, detail, op=kernel.op)
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)
    return Built(call.program, "built", time.perf_counter() - began, path, op=kernel.op)


def _write(call: Call, platform: str, path: Path) -> str | None:
    """Compile a program into a library; why it failed, in one line."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # ours is the only cache, none in the home folder
    try:
        import tilelang

        logging.getLogger("tilelang").setLevel(logging.ERROR)
        module = importlib.import_module(f"deepinfer_kernels.tilelang.{call.module}_cuda")
        name = call.program.partition(".")[2]
        made = tilelang.compile(
            getattr(module, name)(**dict(call.sizes)),
            target={"kind": "cuda", "arch": ARCHITECTURES[platform]},
            execution_backend="tvm_ffi",
            pass_configs=module.PASSES.get(name, {}),
        )
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".link-") as folder:
            made.export_library(f"{folder}/made.so")  # a linker wants a name that says what it makes
            Path(folder, "made.so").replace(path)
    except Exception as exc:  # whatever the compiler raises is this kernel's result, the others go on
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(exc).__name__)
    return None


def cubin(path: Path) -> bytes:
    """The CUDA code inside a library. Raises ``ValueError`` where there is none."""
    content = path.read_bytes()
    at = content.find(b"\x7fELF", 1)
    while at >= 0:
        if struct.unpack_from("<H", content, at + 18)[0] == _EM_CUDA:
            programs, sections = struct.unpack_from("<QQ", content, at + 32)
            size, count, section_size, section_count = struct.unpack_from("<HHHH", content, at + 54)
            return content[at : at + max(programs + size * count, sections + section_size * section_count)]
        at = content.find(b"\x7fELF", at + 1)
    raise ValueError(f"{path} contains no CUDA code")
