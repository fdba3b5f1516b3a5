"""Lower programs to AscendC source ahead of time, without the hardware, and to binaries where bisheng is.

A source per program and sizes is written to ``<cache>/ascend950``, named by digests of what it is made of; a binary's
name holds one of bisheng's version too.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.ascend import families
from deepinfer_kernels.ascend.families import Program
from deepinfer_kernels.kernel_cache import Built, Job
from deepinfer_kernels.processes import BuildError, answer

PLATFORM = "ascend950"


def toolchain() -> str:
    """The release of tilelang, and the version of bisheng where it is."""
    return f"tilelang {families.tilelang.RELEASE}, {_version() or 'no bisheng'}"


def _version() -> str | None:
    """What bisheng says of its version, None without one. Raises ``BuildError`` where it does not answer."""
    path = families.bisheng()
    said = None if path is None else answer(path, "--version")
    if path is not None and not said:
        raise BuildError(f"{path} --version failed", families.BISHENG)
    return said.splitlines()[0] if said else None


def plan(wanted: Sequence[Program], cache: Path) -> list[Built]:
    """What ``build`` would find or have to do, program by program; nothing is written."""
    return _made(wanted, cache, kernel_cache.plan)


def build(wanted: Sequence[Program], cache: Path, note: Callable[[str], None] | None = None) -> list[Built]:
    """Lower what the cache does not have, and compile it where bisheng is, as ``kernel_cache.build``."""
    return _made(wanted, cache, partial(kernel_cache.build, note=note))


def _made(wanted: Sequence[Program], cache: Path, do: Callable[[list[Job]], list[Built]]) -> list[Built]:
    folder, version = cache / PLATFORM, _version()
    made = do([Job(p.name, folder, p.stem(), "asc", partial(_lowered, p)) for p in wanted])
    made = [replace(b, detail=b.detail or families.LABEL) for b in made]
    if version is None:
        return [replace(b, status="source-only") if b.path else b for b in made]
    lowered = [(i, b.path) for i, b in enumerate(made) if b.path is not None]
    compiler = kernel_cache.digest(version.encode())
    binaries = do(
        [
            Job(wanted[i].name, folder, f"{wanted[i].stem()}-{compiler}", "aibin", partial(_compiled, path))
            for i, path in lowered
        ]
    )
    for (i, _), binary in zip(lowered, binaries, strict=True):
        made[i] = replace(binary, detail=binary.detail or "binary unverified")
    return made


def lower(program: Program) -> str:
    """The AscendC source of a program."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # ours is the only cache, none in the home folder
    from tilelang.tools.compile_only import compile_kernel_source

    logging.getLogger("tilelang").setLevel(logging.ERROR)
    module = importlib.import_module(f"deepinfer_kernels.ascend.{program.module}")
    made = getattr(module, program.name.partition(".")[2])(**dict(program.sizes))
    return compile_kernel_source(made, "ascend")


def _lowered(program: Program) -> bytes:
    return lower(program).encode()


def _compiled(source: Path) -> bytes:
    """The executable that bisheng makes of a source."""
    from tilelang.contrib.bisheng import compile_ascend

    return bytes(compile_ascend(source.read_text(), target_format="aibin"))
