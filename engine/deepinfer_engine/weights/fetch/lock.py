"""One fetch per destination: an advisory lock that the kernel releases when its holder dies, even by SIGKILL."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import ArtefactError, NotReadyError
from deepinfer_engine.weights.fetch.files import STATE_DIR

#: Seconds between two looks at a lock that somebody else holds.
_POLL_S = 0.25


def make_state_dir(dest: Path) -> Path:
    """Create the destination and its state folder, which must not be a link."""
    state = dest / STATE_DIR
    try:
        dest.mkdir(parents=True, exist_ok=True)
        state.mkdir(exist_ok=True)
    except OSError as exc:
        raise NotReadyError(f"{exc.filename}: cannot be created: {exc.strerror}",
                            hint="choose another --dest") from None  # fmt: skip
    if state.is_symlink():
        raise ArtefactError(f"{state}: a symbolic link; partial files would be written through it", hint="remove it")
    return state


@contextmanager
def destination_lock(dest: Path, *, wait: bool, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of ``dest``. While another process has it: wait and say for whom, or raise ``NotReadyError``."""
    path = make_state_dir(dest) / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as exc:
        raise NotReadyError(f"{path}: cannot be opened: {exc.strerror}", hint="choose another --dest") from None
    try:
        if not _taken(handle, path):
            holder = _holder(handle)
            if not wait:
                raise NotReadyError(f"{dest} is being fetched by {holder}",
                                    hint="wait for it, or leave out --no-wait")  # fmt: skip
            note(f"{dest} is being fetched by {holder}; waiting for it to end")
            while not _taken(handle, path):
                time.sleep(_POLL_S)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": started})
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        yield
    finally:
        os.close(handle)  # closing releases the lock


def _taken(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise NotReadyError(f"{path}: the file system cannot lock it: {exc.strerror}",
                            hint="choose a --dest on a local disk, or mount with locks") from None  # fmt: skip
    return True


def _holder(handle: int) -> str:
    """Who holds the lock, in words; the file may be half written."""
    try:
        raw = parse_json(os.pread(handle, 4096, 0))
        return printable(f"process {raw['pid']} on {raw['host']} since {raw['since']}")
    except (ValueError, KeyError, TypeError):
        return "another process"
