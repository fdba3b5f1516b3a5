"""Compile C++ sources into shared libraries for the CPU they run on, and find what was compiled before.

A library's name holds digests of what it is made of (source, headers, flags, CPU) and of the compiler's version. Any
two libraries of one ``Source`` compute the same, whichever compiler made them.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.kernel_cache import Built, Job, default_cache, digest
from deepinfer_kernels.processes import BuildError, Programs, answer, cores

#: a source takes about two seconds; a busy machine may need many times that
_SECONDS = 300


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and the first line of its version."""

    path: str
    version: str

    @classmethod
    def find(cls, name: str | None = None) -> Compiler:
        """``name``, else $CXX, else g++ on the path. Raises ``BuildError``."""
        name = name or os.environ.get("CXX") or "g++"
        hint = "install one (apt install g++), or name it in CXX"
        path = shutil.which(name)
        if path is None:
            raise BuildError(f"no C++ compiler: {name} is not on the path", hint)
        said = answer(path, "--version")
        if said is None:
            raise BuildError(f"{path} --version failed", hint)
        return cls(path, (said.splitlines() or [path])[0])

    @property
    def key(self) -> str:
        """Digest of the version, the compiler's part of a library's name."""
        return digest(self.version.encode())


@dataclass(frozen=True)
class Source:
    """A C++ file, the headers it may include and the flags that make it a library called ``name``."""

    name: str
    path: Path
    flags: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def library(self, cache: Path | None = None) -> Path | None:
        """The newest library of this very source and CPU in a cache, by whichever compiler; None without one."""
        found = kernel_cache.newest_first((cache or default_cache()) / "cpu", self.stem("*"), "so")
        return found[0] if found else None

    def intact(self, cache: Path | None = None) -> Path | None:
        """The newest of these whose bytes are those that were written."""
        return kernel_cache.find((cache or default_cache()) / "cpu", self.stem("*"), "so")

    def stem(self, compiler: str) -> str:
        """The first part of a library's name."""
        return f"{self.name}-{_content_key(self)}-{compiler}"


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
    parts = [path.read_bytes() for path in (source.path, *source.headers)]
    return digest(b"\0".join((*parts, *map(str.encode, (*source.flags, _cpu())))), 16)


def plan(sources: Iterable[Source], compiler: Compiler, cache: Path) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    return kernel_cache.plan(_jobs(sources, compiler, cache, Programs()))


def build(
    sources: Iterable[Source], compiler: Compiler, cache: Path, note: Callable[[str], None] | None = None
) -> list[Built]:
    """Compile what the cache does not have, as ``kernel_cache.build``; in threads, because a compiler is a process."""
    programs = Programs()

    def threaded(make: Callable[[Job], Built], jobs: Sequence[Job]) -> list[Built]:
        with ThreadPoolExecutor(cores()) as pool, programs:  # which all end before the lock is given up
            return list(pool.map(make, jobs))

    return kernel_cache.build(_jobs(sources, compiler, cache, programs), note, threaded)


def _jobs(sources: Iterable[Source], compiler: Compiler, cache: Path, programs: Programs) -> list[Job]:
    folder = cache / "cpu"
    return [
        Job(s.name, folder, s.stem(compiler.key), "so", functools.partial(_compiled, s, compiler, folder, programs))
        for s in sources
    ]


def _compiled(source: Source, compiler: Compiler, folder: Path, programs: Programs) -> bytes:
    """The library that a compiler makes of a source."""
    with kernel_cache.scratch(folder) as work:
        made = work / f"{source.name}.so"
        argv = [compiler.path, *source.flags, "-o", str(made), str(source.path)]
        status, said = programs.run(argv, _SECONDS)
        if status != 0:
            raise RuntimeError(said.strip() or f"exit status {status}")
        return made.read_bytes()
