"""Compile families ahead of time into a kernel cache.

A library's file name holds digests of what it is made of (source, headers, flags, CPU), of the compiler's version and
of its own bytes, so whatever changes makes another file. It is written under a temporary name, then renamed, under a
lock of the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
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

from deepinfer_kernels.cpu.binary import FLAGS, built, content_key, file_digest, source

#: a source takes about two seconds; a busy machine may need many times that
_SECONDS = 300


class CompilerError(Exception):
    """There is no C++ compiler that answers, or the kernel cache cannot be written."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and the first line of its version."""

    path: str
    version: str

    @classmethod
    def find(cls) -> Compiler:
        """$CXX, or g++ on the path. Raises ``CompilerError``."""
        name = os.environ.get("CXX") or "g++"
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
        return hashlib.sha256(self.version.encode()).hexdigest()[:8]

    def made(self, family: str, cache: Path) -> Path | None:
        """The intact library of a family that this compiler has made, None without one."""
        path = built(family, cache, self.key)
        return path if path is not None and path.stem.endswith(file_digest(path)) else None


@dataclass(frozen=True)
class Built:
    """What became of one family. ``status`` missing: it would be built (a dry run); ``detail``: why it failed."""

    family: str
    status: Literal["built", "cached", "missing", "failed"]
    seconds: float
    path: Path | None = None
    detail: str | None = None


def plan(families: Iterable[str], compiler: Compiler, cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    found = [(family, compiler.made(family, cache)) for family in families]
    return [Built(family, "missing" if path is None else "cached", 0.0, path) for family, path in found]


def build(families: Iterable[str], compiler: Compiler, cache: Path) -> list[Built]:
    """Compile what the cache does not have, as many at a time as there are cores. Raises ``CompilerError``."""
    with _locked(cache / "cpu"), ThreadPoolExecutor(_cores()) as pool:
        return list(pool.map(lambda family: _compile(family, compiler, cache), families))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, made if needed; waits for another build to end."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise CompilerError(f"the kernel cache {folder} cannot be written: {exc.strerror}") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(family: str, compiler: Compiler, cache: Path) -> Built:
    present = compiler.made(family, cache)
    if present is not None:
        return Built(family, "cached", 0.0, present)
    began = time.perf_counter()
    handle, name = tempfile.mkstemp(dir=cache / "cpu", prefix=f".{family}-", suffix=".part")
    os.close(handle)
    part, target = Path(name), None
    try:
        detail = _run([compiler.path, *FLAGS, "-o", name, str(source(family))])
        if detail is None:
            target = cache / "cpu" / f"{family}-{content_key(family)}-{compiler.key}-{file_digest(part)}.so"
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return Built(family, "failed" if detail else "built", time.perf_counter() - began, target, detail)


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
