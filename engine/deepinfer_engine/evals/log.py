"""The log of a run: one JSON line per finished sample, appended and synced, and nothing else to remember.

The first line states what is run (the identity); a log continues only under the same identity. A line that a killed
process left half-written is cut off and its sample runs again. The last line about a sample counts, so an errored
sample can be tried again without losing its history.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from deepinfer_engine.config.strict_json import parse_json
from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.evals.grade import OUTCOMES
from deepinfer_engine.evals.score import Sample

SCHEMA = "deepinfer/eval-log/1"


def digest_of(identity: Mapping[str, Any]) -> str:
    """SHA-256 of an identity's canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class LogContent:
    """A log as read: identity and the last record of every sample by key. ``bytes_used`` ends the last whole line."""

    identity: Mapping[str, Any]
    records: Mapping[str, Mapping[str, Any]]
    bytes_used: int

    @property
    def expected(self) -> int:
        """Samples a complete run has."""
        return int(self.identity["items"]) * len(self.identity["seeds"])

    @property
    def done(self) -> dict[str, Mapping[str, Any]]:
        """Records that need not be run again: all but the errored."""
        return {key: r for key, r in self.records.items() if r["outcome"] != "errored"}

    @property
    def complete(self) -> bool:
        return len(self.done) == self.expected

    def samples(self) -> list[Sample]:
        return [Sample(r["item"], r["sample"], r["outcome"], r.get("key")) for r in self.records.values()]


def read_log(path: Path) -> LogContent:
    """Read a log; ``ArtefactError`` (exit 4) names the line that is not one of ours."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", hint="check the path of the log") from None
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc.strerror}") from None
    return _parse(data, str(path))


def _parse(data: bytes, where: str) -> LogContent:
    lines = data.split(b"\n")[:-1]  # what follows the last newline is a line that was being written
    if not lines:
        raise ArtefactError(f"{where}: not a log of an evaluation (no complete line)")
    header = _object(lines[0], f"{where}:1")
    if header.get("schema") != SCHEMA or not isinstance(header.get("identity"), dict):
        raise ArtefactError(f"{where}:1: schema is {header.get('schema')!r}, expected {SCHEMA!r}")
    identity = header["identity"]
    if not isinstance(identity.get("items"), int) or not isinstance(identity.get("seeds"), list):
        raise ArtefactError(f"{where}:1: the identity lacks items or seeds")
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines[1:], 2):
        record = _object(line, f"{where}:{number}")
        item, sample = record.get("item"), record.get("sample")
        if not isinstance(item, str) or not isinstance(sample, int) or record.get("outcome") not in OUTCOMES:
            raise ArtefactError(f"{where}:{number}: not a sample of an evaluation")
        records[f"{item}/{sample}"] = record
    return LogContent(identity, records, sum(len(line) + 1 for line in lines))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as exc:
        raise ArtefactError(f"{where}: not valid JSON ({exc})") from None
    if not isinstance(value, dict):
        raise ArtefactError(f"{where}: expected a JSON object")
    return value


def choose_log(folder: Path, identity: Mapping[str, Any], started: str) -> Path:
    """The newest unfinished log of this identity in the folder, or the name of a new one.

    A finished log is never chosen: a check that is asked for again is run again. ``started`` is the time in the name.
    """
    stem = f"eval-{identity['task']}-{digest_of(identity)[:8]}"
    for path in sorted(folder.glob(f"{stem}-*.jsonl"), reverse=True):
        if b"\n" in path.read_bytes()[: 1 << 20] and not read_log(path).complete:
            return path
    path = folder / f"{stem}-{started}.jsonl"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{started}-{number}.jsonl"
    return path


class SampleLog:
    """An open log. ``append`` returns only when the line is on disk. One process writes a log at a time."""

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        """Create the log, or continue one of the same identity. ``UsageError`` when it belongs to another run."""
        self.path = path
        try:
            # one descriptor for lock, read and append, so that no other process can come in between
            self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        except OSError as exc:
            raise UsageError(f"{path}: cannot be written: {exc.strerror}", hint="check the folder of --log") from None
        try:
            self._start(identity)
        except BaseException:
            self._file.close()
            raise

    def _start(self, identity: Mapping[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{self.path}: another process is writing this log") from None
        data = self._file.read()
        if b"\n" in data:
            content = _parse(data, str(self.path))
            _same(self.path, content.identity, identity)
            self.content = content
            self._file.truncate(content.bytes_used)
            self._file.seek(content.bytes_used)
            return
        if data and not data.startswith(b'{"schema":'):
            raise UsageError(f"{self.path}: is not a log and will not be overwritten", hint="give another --log")
        self._file.truncate(0)
        self._file.seek(0)
        self._write({"schema": SCHEMA, "digest": digest_of(identity), "identity": identity})
        self.content = LogContent(identity, {}, self._file.tell())
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name of a new file is in its folder
        finally:
            os.close(folder)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one sample and wait until it is on disk."""
        self._write(record)

    def _write(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
        line += b"\n"
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to continue a log of another run, naming what differs."""
    plain: Any = json.loads(json.dumps(new, allow_nan=False))
    if old == plain:
        return
    names = sorted(key for key in old.keys() | plain.keys() if old.get(key) != plain.get(key))
    raise UsageError(
        f"{path}: belongs to another run; {', '.join(names)} differ",
        hint="give another --log, or repeat that run's options",
    )
