"""A half-fetched file that survives the process: the bytes (``.part``) and a journal of the ranges that are there.

The journal is text: a first line that identifies the content, then one line ``begin end`` per finished range. A range
is written down only after its bytes were flushed to the disk, so neither a killed process nor a power cut can leave a
journal that claims more than the file holds. Lines after a torn one are not believed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from deepinfer_engine.weights.fetch.files import RemoteFile, escape

_LINE = re.compile(rb"(\d{1,18}) (\d{1,18})")

Range = tuple[int, int]


def part_path(state: Path, file: RemoteFile) -> Path:
    return state / f"{escape(file.path)}.part"


def journal_path(state: Path, file: RemoteFile) -> Path:
    return state / f"{escape(file.path)}.journal"


def finished_ranges(state: Path, file: RemoteFile) -> list[Range]:
    """Ranges of ``file`` that an earlier fetch left behind, sorted and merged; empty when they are of other content."""
    part, journal = part_path(state, file), journal_path(state, file)
    try:
        if part.is_symlink() or part.stat().st_size != file.size:
            return []
        lines = journal.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    if lines[0] != _identity(file):
        return []
    found: list[Range] = []
    for line in lines[1:-1]:  # what follows the last newline is torn or empty
        match = _LINE.fullmatch(line)
        if not match or not int(match[1]) < int(match[2]) <= file.size:
            break
        found.append((int(match[1]), int(match[2])))
    return merge(found)


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes as sorted, disjoint, maximal ranges."""
    out: list[Range] = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def gaps(ranges: Iterable[Range], size: int, segment_bytes: int) -> list[Range]:
    """What ``ranges`` (sorted, disjoint) lack of ``[0, size)``, in pieces of at most ``segment_bytes``."""
    out: list[Range] = []
    at = 0
    for begin, end in [*ranges, (size, size)]:
        while at < begin:
            stop = min(begin, at + segment_bytes)
            out.append((at, stop))
            at = stop
        at = max(at, end)
    return out


def total(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _identity(file: RemoteFile) -> bytes:
    return f"{file.digest} {file.size}".encode()


class Partial:
    """An open partial file. Several threads may write disjoint ranges of it."""

    def __init__(self, state: Path, file: RemoteFile):
        """Open it, keeping what ``finished_ranges`` found; starts empty otherwise. Raises OSError."""
        self.file = file
        self.path = part_path(state, file)
        self._journal_path = journal_path(state, file)
        self.kept = finished_ranges(state, file)
        if not self.kept:
            self._journal_path.unlink(missing_ok=True)  # first, so that it never describes the empty file made below
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._data = os.open(self.path, flags if self.kept else flags | os.O_TRUNC, 0o666)
        try:
            os.ftruncate(self._data, file.size)
            self._rewrite_journal()
            self._journal = os.open(self._journal_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            os.close(self._data)
            raise
        self._lock = threading.Lock()

    def _rewrite_journal(self) -> None:
        # as merged ranges, so that a torn line of a killed process does not hide the lines after it
        lines = [_identity(self.file), *(b"%d %d" % r for r in self.kept)]
        part = self._journal_path.with_suffix(".journal-part")
        with part.open("wb") as file:
            file.write(b"\n".join(lines) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._journal_path)

    def write(self, offset: int, block: bytes) -> None:
        """Put ``block`` at ``offset``; durable only after ``commit``. Raises OSError."""
        view = memoryview(block)
        while view:
            count = os.pwrite(self._data, view, offset)
            offset += count
            view = view[count:]

    def commit(self, begin: int, end: int) -> None:
        """Flush the bytes of ``[begin, end)`` and note the range. Raises OSError."""
        os.fdatasync(self._data)
        with self._lock:
            os.write(self._journal, b"%d %d\n" % (begin, end))

    def close(self) -> None:
        os.close(self._data)
        os.close(self._journal)

    def discard(self) -> None:
        """Remove the bytes and the journal (the file stays open until ``close``)."""
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def promote(self, target: Path) -> None:
        """Give the finished file its final name, durably; a link at ``target`` is replaced, not followed."""
        os.fsync(self._data)
        os.replace(self.path, target)
        sync_folder(target.parent)
        self._journal_path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
