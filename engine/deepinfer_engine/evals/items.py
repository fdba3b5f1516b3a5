"""Questions: rows of a JSONL, CSV or Parquet file turned into items, checked before anything is asked.

Malformed rows, missing columns, repeated ids and answers that no grader could ever meet are refused with file and
line. A row is never skipped silently: what a recipe leaves out is counted.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.config.strict_json import describe_bytes, parse_json
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError
from deepinfer_engine.evals.task import Columns, LoadedTask

#: HLE with its images is 275 MB; no set of questions is larger.
MAX_BYTES = 1024 * 1024 * 1024

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One question. ``wrong`` holds the distractors of a multiple-choice question, in the file's order."""

    id: str
    question: str
    answer: str
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemSet:
    """The questions of a run and where they come from; ``sha256`` is the file's, ``skipped`` counts left-out rows."""

    source: str
    revision: str | None
    sha256: str
    items: tuple[Item, ...]
    skipped: int = 0


def load_items(loaded: LoadedTask, path: Path, *, source: str, revision: str | None = None) -> ItemSet:
    """Read the questions of a task from a file; ``source`` is how results and messages name it."""
    data = _read(path, source)
    rows = _rows(data, path, source)
    spec, columns = loaded.task.data, loaded.task.data.columns
    kept, skipped = [], 0
    if not rows:
        raise ArtefactError(f"{source}: no questions in it")
    if revision is not None and spec.rows is not None and len(rows) != spec.rows:
        raise ArtefactError(f"{source}: {len(rows)} rows at the pinned revision, the recipe says {spec.rows}")
    numbered = columns.id is None or all(columns.id not in row for row in rows)
    for number, row in enumerate(rows, 1):
        if spec.skip_where is not None and row.get(spec.skip_where) not in (None, "", {}, []):
            skipped += 1
            continue
        kept.append(_item(row, columns, f"{source}: row {number}", str(number) if numbered else None, loaded))
    _check_ids(kept, source)
    if not kept:
        raise ArtefactError(f"{source}: all {skipped} rows are left out by data.skip_where")
    return ItemSet(source, revision, hashlib.sha256(data).hexdigest(), tuple(kept), skipped)


def _item(row: Row, columns: Columns, where: str, number: str | None, loaded: LoadedTask) -> Item:
    from deepinfer_engine.evals.grade import check_gold

    mark = loaded.task.data.answer_after
    answer = _text(row, columns.answer, where)
    if mark is not None and mark in answer:
        answer = answer.rsplit(mark, 1)[1]
    answer = answer.strip()
    problem = check_gold(loaded.task.grader, answer)
    if problem is not None:
        raise ArtefactError(f"{where}: the answer {answer[:60]!r} {problem}")
    return Item(
        id=_text(row, columns.id, where) if number is None and columns.id is not None else str(number),
        question=_text(row, columns.question, where),
        answer=answer,
        wrong=tuple(_text(row, name, where) for name in columns.wrong),
    )


def _text(row: Row, column: str, where: str) -> str:
    if column not in row:
        raise ArtefactError(f"{where}: no column {column!r}; it has {', '.join(sorted(map(str, row)))[:200]}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ArtefactError(f"{where}: {column} is {type(value).__name__}, expected text or a number")
    text = str(value)
    if not text.strip():
        raise ArtefactError(f"{where}: {column} is empty")
    return text


def _check_ids(items: list[Item], source: str) -> None:
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ArtefactError(f"{source}: the id {item.id!r} occurs twice")
        seen.add(item.id)


# --------------------------------------------------------------------- files


def _read(path: Path, source: str) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ArtefactError(f"{source}: larger than {MAX_BYTES} bytes, the most that is read")
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{source}: no such file", hint="check the path of --data") from None
    except OSError as exc:
        raise UsageError(f"{source}: cannot be read: {exc.strerror or exc}") from None


def _rows(data: bytes, path: Path, source: str) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(data, source)
    if suffix not in (".jsonl", ".csv"):
        raise UsageError(f"{source}: the name ends in {suffix or 'nothing'}, expected .jsonl, .csv or .parquet")
    if found := describe_bytes(data[:64]):
        raise ArtefactError(f"{source}: this is {found}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ArtefactError(f"{source}: not UTF-8 at byte {exc.start}") from None
    return _csv_rows(text, source) if suffix == ".csv" else _jsonl_rows(text, source)


def _jsonl_rows(text: str, source: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as exc:
            raise ArtefactError(f"{source}:{number}: not valid JSON ({exc})") from None
        if not isinstance(value, dict):
            raise ArtefactError(f"{source}:{number}: {type(value).__name__}, expected a JSON object per line")
        rows.append(value)
    return rows


def _csv_rows(text: str, source: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, None)
        if not header or len(set(header)) != len(header):
            raise ArtefactError(f"{source}: the header line is missing or names a column twice")
        rows: list[Row] = []
        for cells in reader:
            if cells and len(cells) != len(header):
                raise ArtefactError(f"{source}:{reader.line_num}: {len(cells)} cells under {len(header)} columns")
            if cells:
                rows.append(dict(zip(header, cells, strict=True)))
        return rows
    except csv.Error as exc:
        raise ArtefactError(f"{source}:{reader.line_num}: not valid CSV ({exc})") from None


def _parquet_rows(data: bytes, source: str) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise NotReadyError(
            f"{source}: reading Parquet needs pyarrow", hint="pip install 'deepinfer-cli[eval]'"
        ) from None
    errors = importlib.import_module("pyarrow").lib.ArrowException
    try:
        return parquet.read_table(io.BytesIO(data)).to_pylist()
    except (errors, OSError) as exc:
        raise ArtefactError(f"{source}: not a readable Parquet file ({exc})") from None
