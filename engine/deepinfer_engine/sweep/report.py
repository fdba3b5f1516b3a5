"""What is made from a results folder: pictures, the table and the page. Reads rows only, so it can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepinfer_engine.config.strict_json import parse_json
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.sweep.page import page
from deepinfer_engine.sweep.recipe import Plot
from deepinfer_engine.sweep.results import FAILURES, Recorded, Row, read_recorded, write_file
from deepinfer_engine.sweep.series import Source, usable
from deepinfer_engine.sweep.table import Table, tabulate

PAGE = "index.html"


def sources(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Rows of other runs, named after their file or folder."""
    found = [read_recorded(path) for path in paths]
    for one in found:
        for n, row in enumerate(one.rows, 1):
            if row.get("kind") not in ("measured", "simulated"):
                raise ArtefactError(
                    f"{one.path}:{n}: kind is {row.get('kind')!r}, expected measured or simulated",
                    hint="give rows that bench or sweep wrote",
                )
    return tuple(Source(one.path.stem, [_named(row) for row in one.rows]) for one in found)


def _named(row: Row) -> Row:
    """A row of bench under the names that sweeps use; a row of a sweep as it is."""
    if "concurrency" in row and "workload.arrivals.concurrency" not in row:
        return row | {"workload.arrivals.concurrency": row["concurrency"]}
    return row


def table_of(recorded: Recorded) -> Table:
    """One line per cell."""
    return tabulate(recorded.rows, tuple(recorded.manifest.get("keys", ())))


def write_report(path: Path, plots: Sequence[Plot], extra: Sequence[Source] = ()) -> tuple[str, ...]:
    """Write pictures and page of a folder; the sentences to be said about what could not be drawn."""
    recorded = read_recorded(path)
    keys = tuple(recorded.manifest.get("keys", ()))
    pictures = []
    if plots:
        from deepinfer_engine.sweep.plot import draw, require_matplotlib

        require_matplotlib()
        pictures = [draw(plot, (Source("", recorded.rows), *extra), keys) for plot in plots]
    for picture in pictures:
        if picture.png is not None:
            write_file(path / f"{picture.name}.png", picture.png)
    failures = _failures(path)
    text = page(recorded.manifest, table_of(recorded), recorded.rows, pictures, failures, _warnings(recorded))
    write_file(path / PAGE, text)
    return tuple(f"{picture.name}: {picture.note}" for picture in pictures if picture.png is None)


def _failures(path: Path) -> list[dict]:
    file = path / FAILURES
    if not file.is_file():
        return []
    try:
        return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as exc:
        raise ArtefactError(f"{file}: {exc}") from None


def _warnings(recorded: Recorded) -> list[str]:
    """What a reader must know before the numbers."""
    out = []
    state = recorded.manifest.get("state")
    if state != "complete":
        out.append(f"This sweep is not complete: {state}, {len(recorded.rows)} rows so far.")
    left_out = sum(not usable(row) for row in recorded.rows)
    if left_out:
        out.append(f"{left_out} rows have failed requests or ended early; they are neither drawn nor in the table.")
    if any(row.get("kind") == "simulated" for row in recorded.rows):
        out.append("Simulated rows come from laws fitted to published figures; nothing here was run for them.")
    return out
