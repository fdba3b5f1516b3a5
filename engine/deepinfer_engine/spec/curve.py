"""The step-time curve: how long one decode step takes, by rows and drafts verified. Measured, made monotone, kept.

Three ways to run a step have columns of their own, each with the whole period (forward, drafting, sampling, host):
``off`` drafts nothing, ``fixed`` drafts and verifies all J of every row, ``adaptive`` verifies a budget that is split
by survival. Adaptive steps are measured at a few mean verify lengths; between them, and between the measured numbers of
rows, the curve is linear. A longer step can only be measured as a shorter one by noise, so the points are replaced by
the closest ones (least squares) that grow with rows and with drafts.

A curve belongs to one hardware, profile, weights and version; its file carries all four and is measured again when any
differs or it has grown old.

Worked example: rows 8 and 16, drafts 0, 3, 5; adaptive [[10, 13, 15], [12, 18, 22]] ms. 12 rows that verify 3 drafts
each (budget 36) take 15.5 ms.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from deepinfer_engine.config.strict_json import read_json_object
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError

Way = Literal["off", "fixed", "adaptive"]
SCHEMA_VERSION = 1

#: alternating projections of the monotone fit; a grid of ten by four settles within some tens
_PROJECTIONS = 200


class Load(NamedTuple):
    """A load to measure: ``rows`` decode rows that verify ``drafts`` each on one of the three paths."""

    path: Way
    rows: int
    drafts: int


@dataclass(frozen=True)
class StepCurve:
    """Milliseconds per step: ``off_ms`` and ``fixed_ms`` by ``rows``, ``adaptive_ms`` by rows and ``drafts`` per row.

    ``rows`` ascend; ``drafts`` ascend from 0 to ``draft_tokens``. Beyond the last rows the last slope goes on.
    """

    draft_tokens: int
    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    off_ms: tuple[float, ...]
    fixed_ms: tuple[float, ...]
    adaptive_ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise UsageError(f"rows of a step-time curve are {self.rows}, expected ascending numbers from 1")
        if list(self.drafts) != sorted(set(self.drafts)) or self.drafts[:1] != (0,) or len(self.drafts) < 2:
            raise UsageError(f"draft columns of a step-time curve are {self.drafts}, expected 0 and more, ascending")
        if self.drafts[-1] != self.draft_tokens:
            raise UsageError(f"the last draft column is {self.drafts[-1]}, expected {self.draft_tokens}")
        shapes = {len(self.off_ms), len(self.fixed_ms), len(self.adaptive_ms), len(self.rows)}
        if len(shapes) > 1 or {len(r) for r in self.adaptive_ms} != {len(self.drafts)}:
            raise UsageError("a step-time curve needs one time per number of rows and draft column")
        table = np.array(self.adaptive_ms)
        every = np.concatenate((table.ravel(), self.off_ms, self.fixed_ms))
        if not np.isfinite(every).all() or (every <= 0).any():
            raise UsageError("the times of a step-time curve must be finite and above 0 ms")
        falls = [np.diff(table, axis=0), np.diff(table, axis=1), np.diff(self.off_ms), np.diff(self.fixed_ms)]
        if any((d < 0).any() for d in falls):
            raise UsageError("the times of a step-time curve must not fall with rows or drafts")

    def off(self, rows: float) -> float:
        """A step of ``rows`` without drafts, ms."""
        return float(self._at_rows(np.array(self.off_ms), rows))

    def fixed(self, rows: float) -> float:
        """A step of ``rows`` that drafts and verifies all, ms."""
        return float(self._at_rows(np.array(self.fixed_ms), rows))

    def adaptive(self, rows: float, budget: np.ndarray) -> np.ndarray:
        """Steps of ``rows`` that share ``budget`` drafts, ms, in the shape of ``budget``."""
        column = self._at_rows(np.array(self.adaptive_ms), rows)
        return np.interp(np.asarray(budget) / rows, self.drafts, column)

    def _at_rows(self, by_rows: np.ndarray, rows: float) -> np.ndarray:
        grid = self.rows
        if rows <= grid[0] or len(grid) == 1:
            return by_rows[0]
        i = min(int(np.searchsorted(grid, rows)), len(grid) - 1)
        share = (rows - grid[i - 1]) / (grid[i] - grid[i - 1])
        return by_rows[i - 1] + share * (by_rows[i] - by_rows[i - 1])


def curve_loads(max_rows: int, draft_tokens: int) -> tuple[Load, ...]:
    """The loads that make a curve: powers of two up to ``max_rows`` and itself, few draft columns, three paths."""
    if max_rows < 1 or draft_tokens < 1:
        raise UsageError(f"{max_rows} rows and {draft_tokens} drafts make no curve, expected 1 or more of each")
    rows = sorted({2**i for i in range(max_rows.bit_length()) if 2**i <= max_rows} | {max_rows})
    columns = sorted({0, 1, (draft_tokens + 1) // 2, draft_tokens})
    out = [Load("off", r, 0) for r in rows] + [Load("fixed", r, draft_tokens) for r in rows]
    return (*out, *(Load("adaptive", r, d) for r in rows for d in columns))


def measure_curve(
    step_ms: Callable[[Load], float], max_rows: int, draft_tokens: int, *, rounds: int = 5, warmup: int = 1
) -> StepCurve:
    """The curve of an engine whose ``step_ms`` runs one step of a load and returns its period.

    Rounds over all loads, every second one backwards, so that a drift of the machine does not look like a slope;
    ``warmup`` rounds are thrown away. The median of a load's rounds counts.
    """
    loads = curve_loads(max_rows, draft_tokens)
    times: dict[Load, list[float]] = {load: [] for load in loads}
    for turn in range(warmup + rounds):
        for load in loads if turn % 2 == 0 else reversed(loads):
            taken = step_ms(load)
            if turn >= warmup:
                times[load].append(taken)
    return fit_curve({load: statistics.median(ms) for load, ms in times.items()})


def fit_curve(points: Mapping[Load, float]) -> StepCurve:
    """The monotone curve closest to measured points (ms), which must fill the grid of their rows and drafts.

    Raises ``UsageError`` for a hole, or a time that is not finite and positive.
    """
    for load, ms in points.items():
        if not math.isfinite(ms) or ms <= 0:
            raise UsageError(f"{load.path} step of {load.rows} rows took {ms!r} ms, expected a finite time above 0")
    rows = sorted({load.rows for load in points})
    columns = sorted({load.drafts for load in points if load.path == "adaptive"})
    if not columns:
        raise UsageError("a step-time curve needs adaptive points")
    last = columns[-1]

    def at(path: Way, r: int, d: int) -> float:
        load = Load(path, r, d)
        if load not in points:
            raise UsageError(f"no {path} step of {r} rows and {d} drafts was measured")
        return points[load]

    off = monotone(np.array([at("off", r, 0) for r in rows]))
    fixed = monotone(np.array([at("fixed", r, last) for r in rows]))
    table = monotone_table(np.array([[at("adaptive", r, d) for d in columns] for r in rows]))
    return StepCurve(
        draft_tokens=last,
        rows=tuple(rows),
        drafts=tuple(columns),
        off_ms=tuple(off.tolist()),
        fixed_ms=tuple(fixed.tolist()),
        adaptive_ms=tuple(tuple(row) for row in table.tolist()),
    )


def monotone(values: np.ndarray) -> np.ndarray:
    """The non-falling values closest to the given ones in least squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # [sum, count]
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    out = np.concatenate([np.full(int(count), total / count) for total, count in pools])
    return np.maximum.accumulate(out)  # equal pools may differ in the last bit


def monotone_table(table: np.ndarray) -> np.ndarray:
    """The table closest to the given one that falls along neither axis (Dykstra's alternating projections)."""
    out, by_rows, by_columns = table.copy(), np.zeros_like(table), np.zeros_like(table)
    for _ in range(_PROJECTIONS):
        before = out
        fitted = np.stack([monotone(r) for r in out + by_rows])
        by_rows = out + by_rows - fitted
        out = np.stack([monotone(c) for c in (fitted + by_columns).T], 1)
        by_columns = fitted + by_columns - out
        if np.abs(out - before).max() < 1e-9:
            break
    return np.maximum.accumulate(np.maximum.accumulate(out, axis=0), axis=1)


def curve_rows(curve: StepCurve) -> Iterator[dict[str, Any]]:
    """The curve as records for tables and files: path, rows, drafts per row, tokens of the step, ms."""
    for i, rows in enumerate(curve.rows):
        yield {"path": "off", "rows": rows, "drafts": 0, "tokens": rows, "step_ms": curve.off_ms[i]}
        for drafts, ms in zip(curve.drafts, curve.adaptive_ms[i], strict=True):
            tokens = rows * (1 + drafts)
            yield {"path": "adaptive", "rows": rows, "drafts": drafts, "tokens": tokens, "step_ms": ms}
        full = curve.draft_tokens
        tokens = rows * (1 + full)
        yield {"path": "fixed", "rows": rows, "drafts": full, "tokens": tokens, "step_ms": curve.fixed_ms[i]}


# ---------------------------------------------------------------- file


@dataclass(frozen=True)
class CurveKey:
    """What a curve was measured on: hardware in words, digests of profile and weights, version of this program."""

    hardware: str
    profile: str
    weights: str
    version: str

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"curve-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def save_curve(folder: Path, key: CurveKey, curve: StepCurve, *, measured_s: float) -> Path:
    """Keep a curve that was measured at ``measured_s`` (seconds of the wall clock); the file's path.

    Raises ``NotReadyError`` when the folder cannot be written.
    """
    path = folder / key.file_name
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    record = {
        "schema_version": SCHEMA_VERSION,
        "key": asdict(key),
        "measured_s": measured_s,
        "curve": asdict(curve),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(record, allow_nan=False, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as e:
        raise NotReadyError(f"cannot write {path}: {e.strerror}") from e
    finally:
        part.unlink(missing_ok=True)
    return path


class Kept(NamedTuple):
    """A curve from the cache, or in one sentence why there is none."""

    curve: StepCurve | None
    reason: str


def load_curve(folder: Path, key: CurveKey, *, ttl_s: float, now_s: float) -> Kept:
    """The kept curve of this key, no older than ``ttl_s``.

    Raises ``ArtefactError`` for a file that is not what ``save_curve`` writes, or is of another key.
    """
    path = folder / key.file_name
    if not path.exists():
        return Kept(None, "none was measured on this hardware with this profile, weights and version")
    record = read_json_object(path)
    wanted = {"schema_version", "key", "measured_s", "curve"}
    if set(record) != wanted or record["schema_version"] != SCHEMA_VERSION:
        raise _broken(path, f"expected the keys {', '.join(sorted(wanted))} of schema version {SCHEMA_VERSION}")
    if record["key"] != asdict(key):
        raise _broken(path, f"it belongs to {record['key']}")
    measured = record["measured_s"]
    if isinstance(measured, bool) or not isinstance(measured, int | float):
        raise _broken(path, f"measured_s is {measured!r}, expected a number")
    curve = _curve_from(path, record["curve"])
    age = now_s - measured
    if age < 0:
        return Kept(None, f"{path.name} claims to be measured {-age:.0f} s from now")
    if age > ttl_s:
        return Kept(None, f"{path.name} is {age:.0f} s old, spec.curve_ttl_s is {ttl_s:g}")
    return Kept(curve, f"measured {age:.0f} s ago")


def _curve_from(path: Path, value: Any) -> StepCurve:
    names = ("draft_tokens", "rows", "drafts", "off_ms", "fixed_ms", "adaptive_ms")
    if not isinstance(value, dict) or set(value) != set(names):
        raise _broken(path, f"curve must have the keys {', '.join(names)}")
    try:
        return StepCurve(
            draft_tokens=_ints(path, "draft_tokens", [value["draft_tokens"]])[0],
            rows=_ints(path, "rows", value["rows"]),
            drafts=_ints(path, "drafts", value["drafts"]),
            off_ms=_reals(path, "off_ms", value["off_ms"]),
            fixed_ms=_reals(path, "fixed_ms", value["fixed_ms"]),
            adaptive_ms=tuple(_reals(path, "adaptive_ms", row) for row in _list(path, value["adaptive_ms"])),
        )
    except UsageError as bad:
        raise _broken(path, bad.message) from None


def _list(path: Path, value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise _broken(path, f"expected a list, found {type(value).__name__}")
    return value


def _ints(path: Path, name: str, values: Any) -> tuple[int, ...]:
    for v in _list(path, values):
        if isinstance(v, bool) or not isinstance(v, int):
            raise _broken(path, f"{name} holds {v!r}, expected integers")
    return tuple(values)


def _reals(path: Path, name: str, values: Any) -> tuple[float, ...]:
    for v in _list(path, values):
        if isinstance(v, bool) or not isinstance(v, int | float):
            raise _broken(path, f"{name} holds {v!r}, expected numbers")
    return tuple(float(v) for v in values)


def _broken(path: Path, what: str) -> ArtefactError:
    return ArtefactError(f"{path}: not a step-time curve: {what}", hint="delete the file; it is measured again")
