"""The kernel cache: folders of compiled files, each written by one build at a time and read by any process.

A file's name says what is in it, holds digests of everything that it is made of, and ends with a digest of its bytes:
whatever changes makes another file, and a damaged one is seen. It is written under a temporary name, then renamed,
under a lock of its folder; whoever gets the lock removes what a build that was killed left behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from deepinfer_kernels.processes import BuildError, spawned, terminable

#: another build is waited for this long before that is said
_PATIENCE_S = 1.5
#: what the system says when a disk takes no more; compilers pass it on in words
_FULL = (*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)), "File size limit exceeded")
#: how compilers begin the message of an error, which a heading like "Compilation error:" has none of
_SAYS = re.compile(r"\b(error|fatal)\b[^:]*:\s*\S", re.IGNORECASE)
_ROOM = "make room there, or set kernels.cache_dir to a writable folder"


def default_cache() -> Path:
    """``deepinfer/kernels`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "deepinfer" / "kernels"


def digest(content: bytes, letters: int = 8) -> str:
    """The first letters of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:letters]


def is_intact(path: Path) -> bool:
    """Whether a file's bytes are those its name promises; looked at before it is loaded."""
    try:
        return path.stem.endswith(digest(path.read_bytes()))
    except OSError:
        return False


def find(folder: Path, stem: str, ending: str) -> Path | None:
    """The newest intact file of a folder by the first part of its name, where ``*`` stands for anything."""
    return next(filter(is_intact, newest_first(folder, stem, ending)), None)


def newest_first(folder: Path, stem: str, ending: str) -> list[Path]:
    """Files of that name, intact or not."""

    def age(path: Path) -> tuple[int, str]:
        try:
            return path.stat().st_mtime_ns, path.name
        except FileNotFoundError:  # a build has replaced it meanwhile
            return 0, path.name

    return sorted(folder.glob(f"{stem}-*.{ending}"), key=age, reverse=True)


@dataclass(frozen=True)
class Job:
    """A file to be made: ``make`` gives its bytes and raises whatever its compiler says.

    ``stem``: the first part of its name, with digests of all that it is made of; ``served``: what else must hold of
    a file that is found. Jobs are sent to other processes.
    """

    name: str
    folder: Path
    stem: str
    ending: str
    make: Callable[[], bytes]
    served: Callable[[Path], bool] | None = None

    def find(self) -> Path | None:
        """What an earlier build has made."""
        path = find(self.folder, self.stem, self.ending)
        return path if path is not None and (self.served is None or self.served(path)) else None


@dataclass(frozen=True)
class Built:
    """What became of one job. ``status`` missing: it would be built (a dry run); source-only: the next compiler is not
    here. ``detail``: why it failed, or what else is known of it."""

    name: str
    status: Literal["built", "cached", "source-only", "missing", "failed"]
    seconds: float = 0.0
    path: Path | None = None
    detail: str | None = None


def plan(jobs: Iterable[Job]) -> list[Built]:
    """What ``build`` would find or have to do; nothing is written."""
    found = [(job, job.find()) for job in jobs]
    return [Built(job.name, "missing" if path is None else "cached", path=path) for job, path in found]


#: how several jobs are done at once: ``map`` for any function and jobs
Mapped = Callable[[Callable[[Job], Built], Sequence[Job]], Iterable[Built]]


def build(
    jobs: Sequence[Job], note: Callable[[str], None] | None = None, side_by_side: Mapped = spawned
) -> list[Built]:
    """Make what the cache, one folder of it, does not have; ``note`` is told when another build is waited for.

    Raises ``BuildError`` where the cache cannot be written.
    """
    made = plan(jobs)
    if all(b.status == "cached" for b in made):  # as in a cache that others keep, which need not be writable
        return made
    with locked(jobs[0].folder, note):
        made = plan(jobs)  # another build may have ended meanwhile
        absent = {job.stem: job for job, b in zip(jobs, made, strict=True) if b.status == "missing"}
        fresh = dict(zip(absent, side_by_side(_make, list(absent.values())), strict=True))
        return [fresh.get(job.stem, b) for job, b in zip(jobs, made, strict=True)]


def _make(job: Job) -> Built:
    began = time.perf_counter()
    try:
        content = job.make()
    except BuildError:
        raise
    except Exception as exc:  # whatever a compiler raises is this job's result, the others go on
        refuse_full_disk(str(exc), job.folder)
        detail = reason(str(exc)) or type(exc).__name__
        return Built(job.name, "failed", time.perf_counter() - began, detail=detail)
    damaged = newest_first(job.folder, job.stem, job.ending)
    path = job.folder / f"{job.stem}-{digest(content)}.{job.ending}"
    with scratch(job.folder) as work, writing(job.folder):
        part = work / path.name
        part.write_bytes(content)
        part.replace(path)
        for old in damaged:
            if old != path:
                old.unlink(missing_ok=True)
    detail = "what was there was damaged or incomplete" if damaged else None
    return Built(job.name, "built", time.perf_counter() - began, path, detail)


def reason(said: str) -> str | None:
    """The first line of a compiler's output that says an error, or speaks of one, or its first line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    says = (line for line in lines if _SAYS.search(line))
    speaks = (line for line in lines if "error" in line.lower())
    return next(chain(says, speaks, lines), None)


def refuse_full_disk(said: str, folder: Path) -> None:
    """Raise ``BuildError`` where a compiler says that a disk takes no more: that is nothing of what it compiles."""
    line = next((line.strip() for line in said.splitlines() if any(words in line for words in _FULL)), None)
    if line is not None:
        where = f"{folder}, or the folder of temporary files {tempfile.gettempdir()}"
        raise BuildError(f"{where}, cannot be written: {line}", _ROOM)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system says while a folder of the cache is written becomes a ``BuildError``."""
    try:
        yield
    except OSError as exc:
        raise BuildError(f"the kernel cache {folder} cannot be written: {exc.strerror}", _ROOM) from exc


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in a folder of the cache for what a compiler writes before it is whole; removed at the end."""
    with writing(folder):
        made = tempfile.mkdtemp(dir=folder, prefix=".", suffix=".part")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def locked(folder: Path, note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock of a folder, made if needed, for a build; waits for another build to end.

    Removes what builds left that were killed: their names begin with a dot and end with ``.part``.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with writing(folder):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            _wait(handle, folder, note)
            for left in folder.glob(".*.part"):
                # a compiler that outlives a killed build may still write there: then the next build removes it
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        with terminable():
            yield
    finally:
        os.close(handle)


def _wait(handle: int, folder: Path, note: Callable[[str], None] | None) -> None:
    asked = time.monotonic()
    while time.monotonic() < asked + _PATIENCE_S:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    if note is not None:
        note(f"waiting for another build, which holds {folder / '.lock'}")
    fcntl.flock(handle, fcntl.LOCK_EX)
