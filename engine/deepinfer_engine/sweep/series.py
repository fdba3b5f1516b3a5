"""From rows to what a picture shows: series of points, and the Pareto front. Pure; no torch, no matplotlib.

A series holds rows of one kind, one model, one machine, one file and one value of every ``by`` column: nothing else is
ever joined by a line. Repeats of a cell are one point with an interval. Points that a vendor published as curves are
read off its pictures; they are marks without a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.noise import Interval, interval, ratio
from deepinfer_engine.sweep.results import Row

Kind = Literal["measured", "simulated", "vendor"]
KINDS: tuple[Kind, ...] = ("measured", "simulated", "vendor")

#: Name of the source of published points.
VENDOR = "vendor"
#: Columns of the Pareto picture.
PER_USER, PER_GPU = "output_tok_s_user", "output_tok_s_gpu"


@dataclass(frozen=True)
class Point:
    """A point with the interval of y and the run it comes from, so that a picture can be traced to its rows."""

    x: float
    y: Interval
    run: str


@dataclass(frozen=True)
class Series:
    """Points that may share a line, in ascending x. ``model``: whose speed they are, "" where rows do not say."""

    label: str
    kind: Kind
    points: tuple[Point, ...]
    model: str = ""


@dataclass(frozen=True)
class Source:
    """Rows of one file and what to call them in a legend; empty for the sweep's own."""

    name: str
    rows: Sequence[Row]


def usable(row: Row) -> bool:
    """Whether a row may be drawn or compared: no request of it failed, and it ran to its end."""
    return not row.get("failed") and row.get("status", "complete") == "complete"


def curves(sources: Iterable[Source], x: str, y: str, by: Sequence[str]) -> tuple[Series, ...]:
    """One series per source, kind, model, machine and value of ``by``; rows without x or y are left out."""
    found: list[tuple[_Key, tuple[Point, ...]]] = []
    for source in sources:
        for key, rows in _grouped(source, x, y, by).items():
            named = [f"{columns.short(k)} {shown(v)}" for k, v in zip(by, key.values, strict=True) if v is not None]
            found.append((key._replace(values=(", ".join(named),)), _points(rows, x, y)))
    return _named(found)


class _Key(NamedTuple):
    """What the rows of a series have in common."""

    source: str
    kind: Kind
    model: Any
    platform: str
    hardware: Any
    values: tuple[Any, ...]


def _grouped(source: Source, x: str, y: str, by: Sequence[str]) -> dict[_Key, list[Row]]:
    """Drawable rows of a source by what they have in common. A width on the x axis changes the count of GPUs along a
    line; everywhere else another count is another machine."""
    wide = x in ("parallel.ep", "parallel.dp", "hardware.gpus")
    groups: dict[_Key, list[Row]] = {}
    for row in source.rows:
        if usable(row) and _number(row.get(x)) and _number(row.get(y)):
            platform = str(row.get("platform") or row.get("hardware") or "machine not named")
            machine = platform if wide else where(row, platform)
            key = _Key(source.name, _kind(row), row.get("model"), machine, row.get("hardware"),
                       tuple(row.get(k) for k in by))  # fmt: skip
            groups.setdefault(key, []).append(row)
    return groups


def _named(found: Sequence[tuple[_Key, tuple[Point, ...]]]) -> tuple[Series, ...]:
    """Series with labels that tell them apart, measured ones first; hardware is named where labels would be equal."""
    labels = [_label(key, hardware=False) for key, _ in found]
    out = [
        Series(_label(key, hardware=labels.count(label) > 1), key.kind, points, str(key.model or ""))
        for (key, points), label in zip(found, labels, strict=True)
        if points
    ]
    return tuple(sorted(out, key=lambda s: KINDS.index(s.kind)))


def _label(key: _Key, *, hardware: bool) -> str:
    name = "" if key.kind == "vendor" else key.source  # the mark says it
    machine = f"{key.platform} ({key.hardware})" if hardware and key.hardware else key.platform
    told = ", ".join(str(part) for part in (key.model, machine) if part)
    return ": ".join(part for part in (name, told, *key.values) if part)


def gains(
    sources: Iterable[Source], x: str, y: str, over: Mapping[str, Any], keys: Sequence[str]
) -> tuple[Series, ...]:
    """Gain in per cent of y over the cell that differs only by having the value of ``over``, by the value it has.

    ``over`` is one swept key with its base value; cells are matched by all other swept ``keys`` within one file.
    Published gains have a column of their own and need no base.
    """
    ((swept, base),) = over.items()
    rest = [k for k in keys if k != swept]
    found: list[tuple[_Key, tuple[Point, ...]]] = []
    for source in sources:
        groups = _grouped(source, x, y, (swept,))
        for key, rows in groups.items():
            against = groups.get(key._replace(values=(base,)), [])
            if key.values != (base,) and against:
                told = f"{columns.short(swept)} {shown(key.values[0])} over {shown(base)}"
                found.append((key._replace(values=(told,)), _gain_points(rows, against, x, y, rest)))
    return _named(found)


def _gain_points(rows: Sequence[Row], against: Sequence[Row], x: str, y: str, rest: Sequence[str]) -> tuple[Point, ...]:
    points = []
    for cell, found in _by(rows, ("cell", *rest)).items():
        bases = [r for r in against if tuple(r.get(k) for k in rest) == cell[1:]]
        quotient = ratio([float(r[y]) for r in bases], [float(r[y]) for r in found])
        if quotient is not None:
            mean = sum(float(r[x]) for r in found) / len(found)
            points.append(Point(mean, _percent(quotient), f"cell {cell[0]}"))
    return tuple(sorted(points, key=lambda p: (p.x, p.y.mean)))


def _percent(quotient: Interval) -> Interval:
    low, high = (None if v is None else 100 * (v - 1) for v in (quotient.low, quotient.high))
    return Interval(100 * (quotient.mean - 1), low, high, quotient.count)


def _by(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(k) for k in keys), []).append(row)
    return groups


def _points(rows: Sequence[Row], x: str, y: str) -> tuple[Point, ...]:
    """Repeats of a cell merged: mean x, interval of y."""
    cells: dict[Any, list[Row]] = {}
    for row in rows:  # rows of bench have no cell: the same x is the same question
        cells.setdefault(row.get("cell", f"at {row[x]}"), []).append(row)
    points = [
        Point(sum(float(r[x]) for r in found) / len(found), interval([float(r[y]) for r in found]), f"cell {cell}")
        for cell, found in cells.items()
    ]
    return tuple(sorted(points, key=lambda p: (p.x, p.y.mean)))


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points that no other one beats or equals in both coordinates, in ascending x.

    Of equal points the first stays; a point that ties in one coordinate and loses in the other is dominated.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x, -p.y.mean)):
        if not kept or point.y.mean > kept[-1].y.mean:
            kept.append(point)
    return tuple(reversed(kept))


def where(row: Row, platform: str) -> str:
    """The machine of a row in a few words: accelerators of its profile, or the processor."""
    gpus = row.get("gpus")
    return f"{gpus} x {platform}" if isinstance(gpus, int) and gpus else platform


def shown(value: Any) -> str:
    """A value as a recipe would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def summarise(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Interval | None]]:
    """Per cell, in cell order, the interval of every column over its usable repeats; None where no row has it."""
    cells: dict[int, list[Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(row)
    return [
        {column: _interval_of(found, column) for column in columns} for _, found in sorted(cells.items())
    ]  # fmt: skip


def _interval_of(rows: Sequence[Mapping[str, Any]], column: str) -> Interval | None:
    values = [float(r[column]) for r in rows if usable(dict(r)) and _number(r.get(column))]
    return interval(values) if values else None


def _kind(row: Row) -> Kind:
    kind = row.get("kind")
    if kind not in KINDS:
        raise ArtefactError(f"a row has the kind {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
