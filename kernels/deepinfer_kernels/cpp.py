"""Compile C++ sources into shared libraries for the CPU they run on, and find what was compiled before.

A library's file name holds digests of what it is made of (source, headers, flags, CPU), of the compiler's version and
of its own bytes, so whatever changes makes another file. It is written under a temporary name, then renamed, under a
lock of the folder. Any two libraries of one ``Source`` compute the same, whichever compiler made them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: a source takes about two seconds; a busy machine may need many times that
_SECONDS = 300


class CompilerError(Exception):
    """There is no compiler that answers, or the folder of libraries cannot be written; ``hint``: the next step."""

    def __init__(self, message: str, hint: str = "install one (apt install g++), or name it in CXX"):
        super().__init__(message)
        self.hint = hint


def default_cache() -> Path:
    """``deepinfer/kernels`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "deepinfer" / "kernels"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and the first line of its version."""

    path: str
    version: str

    @classmethod
    def find(cls, name: str | None = None) -> Compiler:
        """``name``, else $CXX, else g++ on the path. Raises ``CompilerError``."""
        name = name or os.environ.get("CXX") or "g++"
        path = shutil.which(name)
        if path is None:
            raise CompilerError(f"no C++ compiler: {name} is not on the path")
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as exc:
            raise CompilerError(f"{path} --version failed: {exc}") from exc
        return cls(path, (done.stdout.splitlines() or [path])[0])

    @property
    def key(self) -> str:
        """Digest of the version, the compiler's part of a library's name."""
        return _short(self.version.encode(), 8)


@dataclass(frozen=True)
class Source:
    """A C++ file, the headers it may include and the flags that make it a library called ``name``."""

    name: str
    path: Path
    flags: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def library(self, cache: Path | None = None, compiler: str = "*") -> Path | None:
        """The newest library of this very source and CPU in a cache, by whichever compiler; None without one."""
        found = ((cache or default_cache()) / "cpu").glob(f"{self.name}-{_content_key(self)}-{compiler}-*.so")
        return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name), default=None)

    def intact(self, cache: Path | None = None, compiler: str = "*") -> Path | None:
        """``library``, unless its bytes are not those that were written."""
        path = self.library(cache, compiler)
        return path if path is not None and is_intact(path) else None

    def made_as(self, compiler: Compiler, content: bytes) -> str:
        """The file name of a library with these bytes."""
        return f"{self.name}-{_content_key(self)}-{compiler.key}-{_short(content, 8)}.so"


def is_intact(library: Path) -> bool:
    """Whether a library's bytes are those its name promises; looked at before it is mapped."""
    return library.stem.endswith(_short(library.read_bytes(), 8))


def _short(content: bytes, letters: int) -> str:
    return hashlib.sha256(content).hexdigest()[:letters]


@functools.cache
def _cpu() -> str:
    """The instruction sets of this machine: a library is tuned to them and loads nowhere else."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"


@functools.cache
def _content_key(source: Source) -> str:
    """Digest of a source, its headers, the compiler's flags and the CPU's instruction sets."""
    parts = [source.path.read_bytes(), *(header.read_bytes() for header in source.headers)]
    return _short(b"".join(parts) + "\n".join((*source.flags, _cpu())).encode(), 16)


@dataclass(frozen=True)
class Built:
    """What became of one source. ``status`` missing: it would be built (a dry run); ``detail``: why it failed."""

    name: str
    status: Literal["built", "cached", "missing", "failed"]
    seconds: float
    path: Path | None = None
    detail: str | None = None


def plan(sources: Iterable[Source], compiler: Compiler, cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    found = [(source, source.intact(cache, compiler.key)) for source in sources]
    return [Built(source.name, "missing" if path is None else "cached", 0.0, path) for source, path in found]


def build(sources: Iterable[Source], compiler: Compiler, cache: Path) -> list[Built]:
    """Compile what the cache does not have, as many at a time as there are cores. Raises ``CompilerError``."""
    with locked(cache / "cpu"), ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(lambda source: _compile(source, compiler, cache), sources))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, made if needed; waits for another build to end."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise CompilerError(
            f"the folder of libraries {folder} cannot be written: {exc.strerror}",
            "set kernels.cache_dir to a writable folder",
        ) from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(source: Source, compiler: Compiler, cache: Path) -> Built:
    present = source.intact(cache, compiler.key)
    if present is not None:
        return Built(source.name, "cached", 0.0, present)
    began = time.perf_counter()
    handle, name = tempfile.mkstemp(dir=cache / "cpu", prefix=f".{source.name}-", suffix=".part")
    os.close(handle)
    part, target = Path(name), None
    try:
        detail = _run([compiler.path, *source.flags, "-o", name, str(source.path)])
        if detail is None:
            target = cache / "cpu" / source.made_as(compiler, part.read_bytes())
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return Built(source.name, "failed" if detail else "built", time.perf_counter() - began, target, detail)


def _run(command: list[str]) -> str | None:
    """Run the compiler; its first error line when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not finished in {_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {done.returncode}")
