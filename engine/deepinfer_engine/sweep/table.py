"""The table of a sweep: one line per cell, swept keys first, then the mean of every shown metric with its noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.grid import Scalar
from deepinfer_engine.sweep.noise import Interval
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.series import shown, summarise, usable


@dataclass(frozen=True)
class Table:
    """``lines`` hold the values of the swept keys, then an interval or None per metric."""

    columns: tuple[str, ...]
    lines: tuple[tuple[Scalar | Interval, ...], ...]


def tabulate(rows: Sequence[Row], keys: Sequence[str]) -> Table:
    """Cells in order; a metric that no row has is left out. Rows with failed requests do not count."""
    metrics = [m for m in columns.SHOWN if any(usable(r) and isinstance(r.get(m), int | float) for r in rows)]
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row["cell"], row)
    found = summarise(rows, metrics)
    lines = [
        (*(first[cell].get(key) for key in keys), *(line[m] for m in metrics))
        for cell, line in zip(sorted(first), found, strict=True)
    ]
    return Table((*keys, *metrics), tuple(lines))


def figure_text(value: Interval) -> str:
    """A mean with half its 95 % interval: ``702 ± 31``; ``702`` when measured once."""
    mean = _rounded(value.mean)
    if value.high is None or value.high == value.mean:
        return mean
    return f"{mean} ± {_rounded(value.high - value.mean)}"


def _rounded(number: float) -> str:
    """Three significant digits, never fewer than the whole part."""
    if number == 0:
        return "0"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def markdown(table: Table) -> str:
    """The table as Markdown."""
    head = [columns.label(c) for c in table.columns]
    lines = [head, ["---"] * len(head)]
    for line in table.lines:
        lines.append([_cell(value) for value in line])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cell(value: Scalar | Interval) -> str:
    return figure_text(value) if isinstance(value, Interval) else "–" if value is None else shown(value)
