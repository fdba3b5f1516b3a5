"""Files of one commit of a repository: which paths are acceptable, and how their content is identified."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deepinfer_engine.config.strict_json import printable
from deepinfer_engine.errors import ArtefactError, CheckpointError

#: Folder of the destination where manifest, lock and partial files lie.
STATE_DIR = ".fetch"

#: Partial files are named by the escaped path plus a suffix; file systems allow 255 bytes.
_MAX_NAME_BYTES = 240

#: Bytes read at once for hashing; large enough that the interpreter costs nothing against SHA-256.
_HASH_BLOCK = 4 * 1024 * 1024

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit. ``digest`` is ``sha256:…`` for large files, ``git-sha1:…`` (blob id) for small ones."""

    path: str
    size: int
    digest: str


class Content(NamedTuple):
    """Identity of bytes: the SHA-256, and the git blob id where it was asked for (otherwise "")."""

    sha256: str
    git_sha1: str

    def matches(self, digest: str) -> bool:
        return digest in (f"sha256:{self.sha256}", f"git-sha1:{self.git_sha1}")


class _Hasher:
    """Hashes of a stream of ``size`` bytes; ``git`` asks for the blob id too (hashing 100 GB twice takes minutes)."""

    def __init__(self, size: int, *, git: bool):
        self._sha256 = hashlib.sha256()
        self._sha1 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None

    def update(self, block: bytes | memoryview) -> None:
        self._sha256.update(block)
        if self._sha1 is not None:
            self._sha1.update(block)

    def content(self) -> Content:
        return Content(self._sha256.hexdigest(), self._sha1.hexdigest() if self._sha1 is not None else "")


def hash_bytes(data: bytes) -> Content:
    """Identity of ``data``."""
    hasher = _Hasher(len(data), git=True)
    hasher.update(data)
    return hasher.content()


def hash_file(path: Path, digest: str, advance: Callable[[int], None], stopped: Callable[[], bool]) -> Content | None:
    """Identity of the file at ``path``, comparable with ``digest``; reports bytes as they are read.

    None when ``stopped`` said so. Raises OSError.
    """
    with path.open("rb", buffering=0) as file:
        hasher = _Hasher(os.fstat(file.fileno()).st_size, git=digest.startswith("git-sha1:"))
        buffer = bytearray(_HASH_BLOCK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            if stopped():
                return None
            hasher.update(view[:count])
            advance(count)
    return hasher.content()


def check_listing(files: Iterable[RemoteFile], where: str) -> tuple[RemoteFile, ...]:
    """The files, sorted by path, if every path is safe to create below the destination.

    Raises ``CheckpointError`` naming each path that would leave the destination, hide in its state folder, or collide
    with another path.
    """
    ordered = tuple(sorted(files, key=lambda f: f.path))
    problems: list[str] = []
    seen: dict[str, str] = {}
    for file in ordered:
        reason = _unsafe(file.path)
        if reason:
            problems.append(f"path {printable(file.path)!r}: {reason}")
            continue
        folded = file.path.casefold()
        if folded in seen:
            problems.append(f"paths {printable(seen[folded])!r} and {printable(file.path)!r} differ at most in case")
        seen[folded] = file.path
        if file.size < 0 or not _DIGEST.fullmatch(file.digest):
            problems.append(f"path {printable(file.path)!r}: size {file.size} or hash {file.digest!r} is not valid")
    for folded, path in seen.items():
        parent = folded.rpartition("/")[0]
        while parent:
            if parent in seen:
                problems.append(
                    f"path {printable(seen[parent])!r} is both a file and the folder of {printable(path)!r}"
                )
            parent = parent.rpartition("/")[0]
    if problems:
        raise CheckpointError(where, problems, hint="do not use this repository or mirror; nothing was written")
    return ordered


def _unsafe(path: str) -> str | None:
    parts = path.split("/")
    if not path.isprintable() or "\\" in path:
        return "holds a backslash or a character that cannot be printed"
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return "leaves the destination or is not a plain relative path"
    if parts[0].casefold() == STATE_DIR:
        return f"lies in {STATE_DIR}, which belongs to the destination"
    if len(escape(path).encode()) > _MAX_NAME_BYTES:
        return f"longer than {_MAX_NAME_BYTES} bytes"
    return None


def escape(path: str) -> str:
    """A file name that stands for ``path``, one to one."""
    return path.replace("%", "%25").replace("/", "%2F")


def local_path(root: Path, path: str) -> Path:
    """Where ``path`` lies below ``root``; raises ``ArtefactError`` when a folder on the way is a link or a file."""
    folder = root
    for part in path.split("/")[:-1]:
        folder = folder / part
        try:
            mode = folder.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
            raise ArtefactError(f"{folder}: {kind}; files of the checkpoint would be written through it",
                                hint="remove it, or choose another --dest")  # fmt: skip
    return root / path
