"""``--compare A B``: for every cell that both sweeps have, the ratio of every speed and latency, with its noise. Pure.

A ratio differs when its 95 % interval leaves 1 out, and is within noise otherwise; without repeats nothing is known
about noise and nothing is concluded. Cells are matched by the values of the swept keys; the workloads must be the same,
and a cell whose share of cached prompt tokens differs is not compared, since a warm cache is not a faster engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.noise import Interval, interval, overall, ratio
from deepinfer_engine.sweep.results import Recorded, Row
from deepinfer_engine.sweep.series import shown, usable

Verdict = Literal["better", "worse", "within noise", "noise unknown", "other cache share", "undefined"]
#: Share of cached prompt tokens by which two cells may differ and still be one workload.
_HIT_SLACK = 0.01


@dataclass(frozen=True)
class Line:
    """One metric of one cell: A, B, B ÷ A with its interval, and what follows from it."""

    cell: str
    metric: str
    a: float | None
    b: float | None
    ratio: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All lines, per metric the ratio over all cells, and the cells only one side has."""

    lines: tuple[Line, ...]
    totals: Mapping[str, Interval]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(a: Recorded, b: Recorded, metrics: Sequence[str] = ()) -> Comparison:
    """Compare two results folders. UsageError when they are not of one workload or share no cell."""
    keys = _same_question(a, b)
    mine, theirs = _cells(a, keys), _cells(b, keys)
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise UsageError(f"{a.path} and {b.path} share no cell", hint="compare two runs of one recipe")
    wanted = metrics or [m for m in columns.COMPARED if _has(a.rows, m) and _has(b.rows, m)]
    if not wanted:
        raise UsageError(f"{a.path} and {b.path} share no metric")
    lines = [_line(_named(keys, key), m, mine[key], theirs[key]) for key in shared for m in wanted]
    totals = {}
    for metric in wanted:
        found = overall([line.ratio for line in lines if line.metric == metric and line.ratio and _counts(line)])
        if found is not None:
            totals[metric] = found
    return Comparison(
        tuple(lines),
        totals,
        tuple(_named(keys, key) for key in mine if key not in theirs),
        tuple(_named(keys, key) for key in theirs if key not in mine),
    )


def _same_question(a: Recorded, b: Recorded) -> tuple[str, ...]:
    """Swept keys of both; refuses folders that asked different questions."""
    for side in (a, b):
        if not side.manifest:
            raise UsageError(f"{side.path}: is no results folder", hint="give two folders that sweep wrote")
    found = [(side.manifest["identity"].get("workload"), tuple(side.manifest.get("keys", ()))) for side in (a, b)]
    if found[0] != found[1]:
        what = "workloads" if found[0][0] != found[1][0] else "swept keys"
        raise UsageError(
            f"{a.path} and {b.path} have other {what}; their ratio would say nothing",
            hint="compare two runs of one recipe",
        )
    return found[0][1]


def _cells(side: Recorded, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in side.rows:
        if usable(row):
            # the type tells true from 1, which are equal in Python
            cells.setdefault(tuple((type(row.get(k)).__name__, row.get(k)) for k in keys), []).append(row)
    return cells


def _named(keys: Sequence[str], values: Sequence[tuple[str, Any]]) -> str:
    return " ".join(f"{key}={shown(value)}" for key, (_, value) in zip(keys, values, strict=True)) or "the only cell"


def _has(rows: Sequence[Row], metric: str) -> bool:
    return any(isinstance(row.get(metric), int | float) for row in rows)


def _line(cell: str, metric: str, a: Sequence[Row], b: Sequence[Row]) -> Line:
    va, vb = ([float(r[metric]) for r in rows if isinstance(r.get(metric), int | float)] for rows in (a, b))
    means = [interval(v).mean if v else None for v in (va, vb)]
    found = ratio(va, vb)
    hits = (_hit_share(a), _hit_share(b))
    if hits[0] is not None and hits[1] is not None and abs(hits[0] - hits[1]) > _HIT_SLACK:
        return Line(cell, metric, means[0], means[1], found, "other cache share")
    return Line(cell, metric, means[0], means[1], found, _verdict(metric, found))


def _hit_share(rows: Sequence[Row]) -> float | None:
    shares = [float(r[columns.HIT_SHARE]) for r in rows if isinstance(r.get(columns.HIT_SHARE), int | float)]
    return sum(shares) / len(shares) if shares else None


def _verdict(metric: str, found: Interval | None) -> Verdict:
    if found is None:
        return "undefined"
    if found.low is None or found.high is None:
        return "noise unknown"
    if found.low <= 1 <= found.high:
        return "within noise"
    return "better" if (found.low > 1) == columns.higher_is_better(metric) else "worse"


def _counts(line: Line) -> bool:
    return line.verdict not in ("undefined", "other cache share")
