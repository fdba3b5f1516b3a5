"""``Journal``: finished lines of a batch, kept as they come, so that a killed run loses nothing. No torch.

It lies beside the output file as ``OUT.part``: a header that names what the lines were computed from, then one JSON
line per finished request. A line is written by one call and counts only when its newline is there; a torn last line
is cut off on resume. The output file itself appears at the end, under its name at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer_engine.errors import ArtefactError, UsageError

#: seconds between two syncs to disk: what a power failure may cost
_SYNC_S = 1.0


class Journal:
    """Append-only record of one batch. ``done`` holds the input line numbers that are finished."""

    def __init__(self, out: Path, header: Mapping[str, Any], *, resume: bool, restarts: bool = False):
        """``restarts``: whoever started this process starts it again, so that ``resume`` allows a first time."""
        self.out = out
        self.path = out.with_name(out.name + ".part")
        self._header = json.dumps({"schema": "deepinfer/batch-journal/1", **header}, sort_keys=True)
        self._synced = time.monotonic()
        self.done: set[int] = set()
        resume = resume and not (restarts and not self.path.exists())
        if resume and not self.path.exists():
            raise UsageError(f"nothing to resume: {self.path} does not exist", hint="run without --resume")
        if not resume and self.path.exists():
            raise UsageError(
                f"{self.path} holds an unfinished run", hint="--resume continues it; remove the file to start afresh"
            )
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (0 if resume else os.O_EXCL)
        try:
            self._fd = os.open(self.path, flags, 0o644)
        except OSError as exc:
            raise UsageError(f"{self.path}: {exc.strerror}", hint="check the folder of --out") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise UsageError(f"{self.path} is in use by another run") from None
        try:
            if resume:
                self._recover()
            else:
                self._write(self._header)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: int, text: str) -> None:
        """Keep the output ``text`` (one JSON object) of an input line."""
        assert line not in self.done and "\n" not in text
        self._write(f"{line}\t{text}")
        self.done.add(line)

    def finish(self, *, ordered: bool) -> None:
        """Write the output file, in input order or as finished, and remove the journal."""
        os.fsync(self._fd)
        entries = [(int(line), text) for line, _, text in (e.partition("\t") for e in self._entries())]
        if ordered:
            entries.sort(key=lambda e: e[0])
        handle, name = tempfile.mkstemp(dir=self.out.parent, prefix=f".{self.out.name}.", suffix=".tmp")
        part = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.writelines(f"{text}\n" for _, text in entries)
                stream.flush()
                os.fsync(stream.fileno())
            part.chmod(0o644)  # mkstemp makes private files; a result is an ordinary one
            part.replace(self.out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self.path.unlink()

    def close(self) -> None:
        """Give the file free; what was appended stays."""
        os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self, text: str) -> None:
        data = f"{text}\n".encode()
        while data:
            data = data[os.write(self._fd, data) :]
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def _entries(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").split("\n")[1:-1]

    def _recover(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        header, *entries = data[:whole].decode("utf-8", errors="replace").split("\n")
        if not whole:  # killed before the header was complete
            self._write(self._header)
            return
        if header != self._header:
            raise ArtefactError(
                f"{self.path} belongs to another run: {_difference(header, self._header)}",
                hint="give the same file, model, profile and options, or remove it to start afresh",
            )
        for number, entry in enumerate(entries[:-1], start=2):
            line, tab, text = entry.partition("\t")
            if not tab or not line.isdecimal() or not text.startswith("{") or int(line) in self.done:
                raise ArtefactError(f"{self.path}: line {number} is damaged", hint="remove the file to start afresh")
            self.done.add(int(line))


def _difference(found: str, expected: str) -> str:
    try:
        old, new = json.loads(found), json.loads(expected)
    except ValueError:
        return "its header is damaged"
    if not isinstance(old, dict):
        return "its header is damaged"
    keys = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    return f"other {', '.join(keys)}"
