"""Aligned buffers and unbuffered files: reads and writes that leave the page cache alone where the file system can."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path


def open_direct(path: Path, flags: int, *, mode: int = 0o644) -> tuple[int, bool]:
    """(descriptor, whether it bypasses the page cache). File systems without direct I/O refuse the flag (EINVAL)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, mode), True
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC, mode), False


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """One write of all bytes; OSError when the file system took fewer (no room)."""
    done = os.pwritev(fd, [data], offset)
    if done != len(data):
        raise OSError(errno.ENOSPC, f"wrote {done} of {len(data)} bytes")


class Buffers(threading.local):
    """One page-aligned buffer per thread, grown when a larger one is asked for."""

    def __init__(self) -> None:
        self._buffer: mmap.mmap | None = None

    def get(self, size: int) -> memoryview:
        """A buffer of ``size`` bytes; valid until this thread asks again."""
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = mmap.mmap(-1, size)
        return memoryview(self._buffer)[:size]
