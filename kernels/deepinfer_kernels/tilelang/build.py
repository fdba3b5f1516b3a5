"""Compile TileLang programs ahead of time, for a GPU that need not be there.

A library per program and sizes is written to ``<cache>/<platform>``, named by digests of what it is made of (sources
and the release of tilelang; sizes; the toolchain). It contains the cubin.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepinfer_kernels import cuda_tools, kernel_cache
from deepinfer_kernels.kernel_cache import Job
from deepinfer_kernels.processes import BuildError, answer
from deepinfer_kernels.tilelang import families
from deepinfer_kernels.tilelang.launch import Call

ARCHITECTURES = {"sm90": "sm_90a", "sm100": "sm_100a"}
#: machine of an ELF file: CUDA
_EM_CUDA = 190


@dataclass(frozen=True)
class Kernel:
    """A program with sizes, and the operation it was first met in."""

    op: str
    call: Call

    @property
    def name(self) -> str:
        return self.call.program

    @property
    def sizes(self) -> dict[str, int | str]:
        return dict(self.call.sizes)


def toolchain() -> str:
    """Versions of what compiles: tilelang with what it loads, the nvcc it calls, the C++ compiler of launching code.

    Raises ``BuildError`` where one does not answer.
    """
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("tilelang", "apache-tvm-ffi", "z3-solver")]
    for name, path, hint in (
        ("nvcc", cuda_tools.find("nvcc").path, "name a CUDA toolkit in CUDA_HOME"),
        ("C++ compiler", families.host_compiler(), "apt install g++, or name one in CXX"),
    ):
        said = answer(path, "--version") if path else None
        if said is None:
            raise BuildError(f"{path or name} --version failed", hint)
        match = re.search(r"V(\d+\.\d+\.\d+)", said) if name == "nvcc" else None
        found.append(f"nvcc {match[1]}" if match else said.splitlines()[0])
    return ", ".join(found)


def kernels(launches: Iterable[tuple[str, Call]]) -> list[Kernel]:
    """The different kernels among launches, in order."""
    first: dict[Call, str] = {}
    for op, call in launches:
        first.setdefault(call, op)
    return [Kernel(op, call) for call, op in first.items()]


def jobs(wanted: Iterable[Kernel], platform: str, cache: Path) -> list[Job]:
    """What makes each kernel's library. Raises ``BuildError`` without its compilers."""
    tools, folder = kernel_cache.digest(toolchain().encode()), cache / platform
    return [
        Job(k.call.program, folder, f"{k.call.stem()}-{tools}", "so", partial(compile_one, k.call, platform, folder))
        for k in wanted
    ]


def compile_one(call: Call, platform: str, folder: Path) -> bytes:
    """The library of a program."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # ours is the only cache, none in the home folder
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
    with kernel_cache.scratch(folder) as work:
        made.export_library(f"{work}/made.so")  # a linker wants a name that says what it makes
        return (work / "made.so").read_bytes()


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
