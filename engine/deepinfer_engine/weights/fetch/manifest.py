"""``.fetch/manifest.json``: the listing of the commit that a destination holds, and the stamps of checked files.

A stamp says that a file had its right content when its size and modification time were what they still are, so that
510 GB are hashed once. The listing makes checks possible without the hub. Written under a temporary name, then renamed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_engine.config.strict_json import printable, read_json_object
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.weights.fetch.files import STATE_DIR, Content, RemoteFile, check_listing
from deepinfer_engine.weights.fetch.selection import Selection

SCHEMA = "deepinfer/fetch-manifest/1"


@dataclass(frozen=True)
class Stamp:
    """A checked file: its ``size`` and ``mtime_ns`` then, the ``commit`` it came from, its content."""

    size: int
    mtime_ns: int
    commit: str
    sha256: str
    git_sha1: str

    def holds(self, path: Path) -> bool:
        """Whether the file is as it was when it was checked."""
        try:
            status = path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)

    def matches(self, digest: str) -> bool:
        return Content(self.sha256, self.git_sha1).matches(digest)


@dataclass
class Manifest:
    """Mutable; ``save`` makes the present state durable."""

    repo: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]
    selection: Selection = Selection()  # noqa: RUF009  (frozen)
    stamps: dict[str, Stamp] = field(default_factory=dict)

    def stamp(self, path: str, where: Path, content: Content) -> None:
        """Remember that the file at ``where`` holds ``content``."""
        status = where.stat()
        self.stamps[path] = Stamp(status.st_size, status.st_mtime_ns, self.commit, content.sha256, content.git_sha1)

    def save(self, dest: Path) -> None:
        """Write atomically; raises OSError."""
        document = {
            "schema": SCHEMA,
            "repo": self.repo,
            "revision": self.revision,
            "commit": self.commit,
            "selection": self.selection.to_json(),
            "files": [vars(f) for f in self.files],
            "stamps": {path: vars(stamp) for path, stamp in sorted(self.stamps.items())},
        }
        target = manifest_path(dest)
        part = target.with_suffix(".json.part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False, ensure_ascii=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)


def manifest_path(dest: Path) -> Path:
    return dest / STATE_DIR / "manifest.json"


def load_manifest(dest: Path) -> Manifest | None:
    """The manifest of ``dest``, None where nothing was fetched yet; ``ArtefactError`` when it is not one."""
    path = manifest_path(dest)
    if not os.path.lexists(path):
        return None
    raw = read_json_object(path)
    try:
        return _parse(raw, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ArtefactError(f"{path}: not a manifest of a fetch ({printable(str(exc))})",
                            hint="remove it; the files that are there will be hashed again") from None  # fmt: skip


def _parse(raw: dict[str, Any], where: str) -> Manifest:
    if raw["schema"] != SCHEMA:
        raise ValueError(f"schema is {raw['schema']!r}, expected {SCHEMA!r}")
    for key in ("repo", "revision", "commit"):
        if not isinstance(raw[key], str):
            raise TypeError(f"{key} is not a string")
    files = check_listing((_remote_file(f) for f in raw["files"]), where)
    stamps = {path: _stamp(stamp) for path, stamp in raw["stamps"].items()}
    selection = Selection.from_json(raw["selection"])
    return Manifest(raw["repo"], raw["revision"], raw["commit"], files, selection, stamps)


def _remote_file(raw: dict[str, Any]) -> RemoteFile:
    file = RemoteFile(**raw)
    if not isinstance(file.path, str) or type(file.size) is not int or not isinstance(file.digest, str):
        raise TypeError(f"file {raw!r} has a field of a wrong type")
    return file


def _stamp(raw: dict[str, Any]) -> Stamp:
    stamp = Stamp(**raw)
    if type(stamp.size) is not int or type(stamp.mtime_ns) is not int or not isinstance(stamp.sha256, str):
        raise TypeError(f"stamp {raw!r} has a field of a wrong type")
    return stamp
