"""Lower programs to AscendC source ahead of time, without the hardware, and to binaries where bisheng is.

A source per program and sizes is written to ``<cache>/ascend950``; its name holds digests of what it is made of and of
its bytes. A binary has the same name with another ending.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from deepinfer_kernels import cpp
from deepinfer_kernels.ascend import families
from deepinfer_kernels.ascend.families import Program

PLATFORM = "ascend950"


@dataclass(frozen=True)
class Built:
    """What became of one program. source-only: ``path`` is AscendC; built, cached: ``path`` is a binary, made now or
    before; missing: it would be lowered (a dry run). ``detail``: what is known of it, or why it failed."""

    name: str
    ops: tuple[str, ...]
    status: Literal["built", "cached", "source-only", "missing", "failed"]
    seconds: float
    path: Path | None
    detail: str


def toolchain() -> str:
    """The release of tilelang, and bisheng where it is."""
    found = families.bisheng()
    return f"tilelang {families.tilelang.RELEASE}, {found or 'no bisheng'}"


def find(program: Program, cache: Path, ending: str = "asc") -> Path | None:
    """The newest intact source, or binary, of a program in a cache."""
    found = (cache / PLATFORM).glob(f"{program.stem()}-*.{ending}")
    newest = sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
    return next((path for path in newest if cpp.is_intact(path)), None)


def plan(wanted: Iterable[Program], cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    return [_found(p, cache) or Built(p.name, p.ops, "missing", 0.0, None, families.LABEL) for p in wanted]


def _found(program: Program, cache: Path) -> Built | None:
    """A program whose every step that can be done here is done."""
    binary = find(program, cache, "aibin")
    if binary is not None:
        return Built(program.name, program.ops, "cached", 0.0, binary, "binary unverified")
    source = find(program, cache)
    if source is not None and families.bisheng() is None:
        return Built(program.name, program.ops, "source-only", 0.0, source, families.LABEL)
    return None


def build(wanted: list[Program], cache: Path) -> list[Built]:
    """Lower what the cache does not have, as many at a time as there are cores.

    Raises ``cpp.CompilerError`` where the cache cannot be written.
    """
    with cpp.locked(cache / PLATFORM):
        one = partial(_build, cache=cache)
        workers = min(cpp.cores(), len([p for p in wanted if _found(p, cache) is None]))
        if workers <= 1:
            return [one(p) for p in wanted]
        # spawned, because a forked child would inherit torch's threads in whatever state they are
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(one, wanted, chunksize=4))


def _build(program: Program, cache: Path) -> Built:
    present = _found(program, cache)
    if present is not None:
        return present
    began = time.perf_counter()
    try:
        path = find(program, cache)
        if path is None:
            path = _write(program, lower(program).encode(), cache, "asc")
        if families.bisheng() is None:
            return Built(program.name, program.ops, "source-only", time.perf_counter() - began, path, families.LABEL)
        binary = _write(program, _compiled(path.read_text()), cache, "aibin")
    except Exception as exc:  # whatever a compiler raises is this program's result, the others go on
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        detail = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(exc).__name__)
        return Built(program.name, program.ops, "failed", time.perf_counter() - began, None, detail)
    return Built(program.name, program.ops, "built", time.perf_counter() - began, binary, "binary unverified")


def lower(program: Program) -> str:
    """The AscendC source of a program."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # ours is the only cache, none in the home folder
    from tilelang.tools.compile_only import compile_kernel_source

    logging.getLogger("tilelang").setLevel(logging.ERROR)
    module = importlib.import_module(f"deepinfer_kernels.ascend.{program.module}")
    made = getattr(module, program.name.partition(".")[2])(**dict(program.sizes))
    return compile_kernel_source(made, "ascend")


def _compiled(source: str) -> bytes:
    """The executable that bisheng makes of a source."""
    from tilelang.contrib.bisheng import compile_ascend

    return bytes(compile_ascend(source, target_format="aibin"))


def _write(program: Program, content: bytes, cache: Path, ending: str) -> Path:
    folder = cache / PLATFORM
    path = folder / f"{program.stem()}-{hashlib.sha256(content).hexdigest()[:8]}.{ending}"
    handle, part = tempfile.mkstemp(dir=folder, prefix=f".{program.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise
    return path
