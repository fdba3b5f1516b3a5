"""The results folder of a sweep: what was asked (manifest), every row as it came, and what failed. No torch.

======================  ==================================================================
``manifest.json``       recipe, profile, model, machine, commit, state
``rows.jsonl``          one flat object per measurement, appended and synced as it comes
``rows.csv``            the same rows as a table, written at the end
``failures.jsonl``      cells that raised, with the message and for a bug its traceback
``requests/``           one file of requests per measurement, where there are requests
======================  ==================================================================

A row counts when its newline is there: a torn last line is cut off on resume. A folder is never overwritten; it is
continued only by the run it belongs to, and only when machine, build and model are the same.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from deepinfer_engine.config.strict_json import parse_json
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError

SCHEMA = "deepinfer/sweep/1"
#: One measurement: column to value, flat; units stand in the names.
Row = dict[str, Any]
State = Literal["running", "complete", "interrupted", "stopped", "partial"]

MANIFEST, ROWS, TABLE, FAILURES, REQUESTS = "manifest.json", "rows.jsonl", "rows.csv", "failures.jsonl", "requests"


@dataclass(frozen=True)
class Recorded:
    """A results folder, or a bare file of rows (then the manifest is empty)."""

    path: Path
    manifest: Mapping[str, Any]
    rows: tuple[Row, ...]


def read_recorded(path: Path) -> Recorded:
    """Rows of a results folder or of one ``.jsonl`` file; ``ArtefactError`` names the line that is wrong."""
    if not path.is_dir():
        return Recorded(path, {}, tuple(_read_lines(path)))
    if not (path / MANIFEST).is_file():
        raise ArtefactError(f"{path}: has no {MANIFEST}, so it is no results folder of a sweep")
    manifest = _read_manifest(path / MANIFEST)
    rows = path / ROWS
    return Recorded(path, manifest, tuple(_read_lines(rows)) if rows.is_file() else ())


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse_json(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ArtefactError(f"{path}: {exc}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ArtefactError(f"{path}: its schema is {found!r}, expected {SCHEMA!r}")
    if not isinstance(manifest.get("identity"), dict):
        raise ArtefactError(f"{path}: has no identity")
    return manifest


def _read_lines(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", hint="give a results folder or a .jsonl file of rows") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ArtefactError(f"{path}: cannot be read: {exc}") from None
    return [_parse_row(line, f"{path}:{n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _parse_row(line: str, where: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as exc:
        raise ArtefactError(f"{where}: {exc}") from None
    if not isinstance(row, dict):
        raise ArtefactError(f"{where}: is no object")
    nested = [key for key, value in row.items() if isinstance(value, dict | list)]
    if nested:
        raise ArtefactError(f"{where}: {nested[0]} is not a single value", hint="rows are flat: one value per column")
    return row


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV: columns in order of first appearance, an absent or undefined value is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row.get(column)) for column in columns])
    return stream.getvalue()


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def write_file(path: Path, data: str | bytes) -> None:
    """Write under a temporary name and rename."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as exc:
        raise NotReadyError(f"{path}: cannot be written: {exc.strerror}") from None
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        part.chmod(0o644)
        part.replace(path)
    except OSError as exc:
        raise NotReadyError(f"{path}: cannot be written: {exc.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


class Folder:
    """A results folder open for writing by one process. Mutates the folder; ``rows`` holds what is recorded so far."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, resume: bool):
        self.path = path
        self.rows: list[Row] = []
        self._manifest = dict(manifest)
        if resume:
            self._check_same(path)
        else:
            self._create(path)
        self._fd = self._lock(path / ROWS)
        try:
            if resume:
                self._recover()
                (path / FAILURES).unlink(missing_ok=True)  # what failed is tried again
            self.write_manifest("running")
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def done(self) -> set[tuple[int, int]]:
        """(cell, repeat) of every recorded row."""
        return {(row["cell"], row["repeat"]) for row in self.rows}

    def append(self, row: Row, requests: Sequence[Mapping[str, Any]] = ()) -> None:
        """Keep one row, on disk before this returns; its requests go to a file of their own first."""
        if requests:
            folder = self.path / REQUESTS
            folder.mkdir(exist_ok=True)
            lines = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in requests)
            write_file(folder / f"{row['cell']:03d}-{row['repeat']}.jsonl", lines)
        self._write(json.dumps(row, allow_nan=False, ensure_ascii=False))
        self.rows.append(row)

    def fail(self, failure: Mapping[str, Any]) -> None:
        """Note a cell that raised."""
        line = json.dumps(dict(failure), allow_nan=False, ensure_ascii=False) + "\n"
        with (self.path / FAILURES).open("a", encoding="utf-8") as stream:
            stream.write(line)

    def write_manifest(self, state: State) -> None:
        """Record how far the sweep is."""
        self._manifest |= {"state": state, "rows": len(self.rows)}
        write_file(
            self.path / MANIFEST, json.dumps(self._manifest, allow_nan=False, ensure_ascii=False, indent=2) + "\n"
        )

    def finish(self, state: State) -> None:
        """Write the table and the final state."""
        write_file(self.path / TABLE, csv_text(sorted(self.rows, key=lambda r: (r["cell"], r["repeat"]))))
        self.write_manifest(state)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)

    def _create(self, path: Path) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            known = path.is_dir() and (path / MANIFEST).is_file()
            raise UsageError(
                f"{path} exists and is not overwritten",
                hint="--resume continues it, --dir names another" if known else "--dir names another folder",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"{path}: cannot be created: {exc.strerror}", hint="check --dir") from None

    def _check_same(self, path: Path) -> None:
        """Refuse to continue a folder of another run."""
        if not (path / MANIFEST).is_file():
            raise UsageError(f"nothing to resume: {path} has no {MANIFEST}", hint="run without --resume")
        old = _read_manifest(path / MANIFEST)
        mine, theirs = self._manifest["identity"], old["identity"]
        other = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        if other:
            found = "; ".join(f"{k} was {_brief(theirs.get(k))}, now {_brief(mine.get(k))}" for k in other)
            raise UsageError(f"{path} belongs to another run: {found}", hint="--dir names another folder")
        if old.get("repeats", 1) > self._manifest["repeats"]:
            raise UsageError(
                f"{path} was started with {old['repeats']} repeats, {self._manifest['repeats']} are asked for",
                hint=f"give --repeats {old['repeats']} or more",
            )
        self._manifest["started_at"] = old.get("started_at", self._manifest.get("started_at"))

    def _lock(self, path: Path) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as exc:
            raise UsageError(f"{path}: {exc.strerror}", hint="check --dir") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise UsageError(f"{self.path} is in use by another run") from None
        return fd

    def _recover(self) -> None:
        path = self.path / ROWS
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        self.rows = _read_lines(path)
        seen: set[tuple[int, int]] = set()
        for n, row in enumerate(self.rows, 1):
            key = (row.get("cell"), row.get("repeat"))
            if not all(isinstance(part, int) for part in key) or key in seen:
                raise ArtefactError(f"{path}:{n}: is damaged or there twice", hint="start afresh in another folder")
            seen.add(key)  # pyright: ignore[reportArgumentType]

    def _write(self, text: str) -> None:
        data = f"{text}\n".encode()
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:24]}…{text[-24:]}"
