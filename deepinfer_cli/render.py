"""How results and messages look: stdout is the product, stderr is the story.

Tables are plain aligned text, so that they read the same in a terminal, a pipe and a log. JSON is strict.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import UsageError

Cell = str | int | float | bool | None


def out(text: str) -> None:
    """One piece of the result, on stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def note(text: str, *, quiet: bool = False) -> None:
    """One line of the story, on stderr; nothing when quiet."""
    if not quiet:
        sys.stderr.write(text + "\n")


def error(message: str, hint: str | None = None) -> None:
    """The error block: what and where, a blank line, one next step."""
    label = _paint("error:", "1;31", sys.stderr)
    tail = f"\n\n{_paint('hint:', '1;36', sys.stderr)} {hint}" if hint else ""
    sys.stderr.write(f"{label} {message}{tail}\n")


def panel(title: str, body: str, *, quiet: bool = False) -> None:
    """A titled block of the story, on stderr; nothing when quiet."""
    if not quiet:
        indented = "".join(f"  {line}\n" for line in body.splitlines())
        sys.stderr.write(f"{_paint(title, '1', sys.stderr)}\n{indented}")


def dim(text: str, stream: TextIO) -> str:
    """Text in the background: thinking, while the answer is to come."""
    return _paint(text, "2", stream)


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr while the block runs: call the yielded function with (done, total, words behind it).

    Only on a terminal; elsewhere, and when quiet, calls do nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, words="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.fields[words]}")
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words)
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=None, words="")
        yield lambda done, total, words="": bar.update(task, completed=done, total=total, words=words)


def _paint(text: str, code: str, stream: TextIO) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Aligned columns under a header line; a column of numbers is set to the right, None is shown as a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
    right = [
        bool(rows) and all(isinstance(row[i], int | float | None) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(columns))
    ]
    lines = []
    for row in [list(columns), *cells]:
        parts = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines) + "\n"


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinities are refused (ValueError), text stays readable."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent) + "\n"


def document(schema: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON result with the name of its schema and the version that wrote it in front."""
    from deepinfer_engine import __version__

    return {"schema": f"deepinfer/{schema}/1", "tool_version": __version__, **content}


def rows_text(form: OutputFormat, schema: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Rows in any form: an aligned table, one JSON document, one JSON object per line, or CSV with a header."""
    if form in (OutputFormat.table, OutputFormat.text):
        return table(columns, rows)
    objects = [dict(zip(columns, row, strict=True)) for row in rows]
    if form is OutputFormat.json:
        return json_text(document(schema, {"rows": objects}))
    if form is OutputFormat.jsonl:
        return "".join(json_text(item, indent=None) for item in objects)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if v is None else _cell(v) for v in row] for row in rows])
    return stream.getvalue()


def deliver(text: str, path: Path | None) -> None:
    """The result to stdout, or to a file through a temporary name beside it."""
    if path is None:
        out(text)
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as exc:
        raise UsageError(f"{path}: cannot be written: {exc.strerror}", hint="check the folder of --out") from None
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        part.chmod(0o644)  # mkstemp makes private files; a result is an ordinary one
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
