"""A folder for one run: removed when the run ends, by error or interrupt too, else by the next run that looks.

Its process holds a lock on a file in it for as long as it lives. A folder whose lock is free belonged to one that was
killed. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER = "owner"


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder (but for the lock) in ``parent``, after those of dead runs with this ``prefix`` are removed.

    Raises OSError where nothing can be made in ``parent``.
    """
    for left in parent.glob(f"{prefix}*"):
        _remove_dead(left)
    folder, lock = _claimed(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _claimed(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the held lock in it; another run may remove it between the two."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(lock, folder / _OWNER):
                return folder, lock
            os.close(lock)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _remove_dead(folder: Path) -> None:
    """Remove a folder whose process is gone; one that is in use, or is another user's, stays."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # killed before it had a lock, or about to get one: then it makes another folder
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
