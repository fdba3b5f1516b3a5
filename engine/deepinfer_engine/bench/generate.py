"""Lengths and contents of a recipe's requests: fixed, random, of a file, of public traces, of an agent, real texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.bench.recipe import Load, Recipe
from deepinfer_engine.bench.workload import PlannedRequest, Segment
from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.sim.trace import TRACE_BLOCK, read_trace

#: stream of the prefix that all prompts share; requests and blocks count up from _FIRST
_SHARED = 1
_FIRST = 16
#: sigma of the log-normal growth of a session; 0.8 has a 90th percentile of twice the mean
_SPREAD = 0.8


@dataclass(frozen=True)
class Generated:
    """Requests in order, and how many of a file were skipped for their length.

    ``warmup`` None: requests of the same lengths and contents of their own.
    ``contents``: SHA-256 of texts that are sent.
    """

    requests: tuple[PlannedRequest, ...]
    skipped: int = 0
    warmup: tuple[PlannedRequest, ...] | None = None
    contents: str | None = None


def generate(spec: Recipe, folder: Path) -> Generated:
    """The requests of a recipe; files are looked for beside it. Raises ``UsageError`` or ``ArtefactError``."""
    load = spec.load
    if load.kind == "agent":
        return Generated(tuple(_agent(spec)))
    if load.kind == "mooncake":
        return _mooncake(spec, folder)
    if load.kind == "prompts":
        from deepinfer_engine.bench.prompts import read_prompts

        requests, warmup, contents = read_prompts(spec, _path(load, folder))
        return Generated(requests, warmup=warmup, contents=contents)
    lengths, arrivals = _lengths(spec, folder)
    kept = [(n, m, t) for (n, m), t in zip(lengths, arrivals, strict=True) if _fits(load, n, m)]
    kept = kept if spec.requests is None else kept[: spec.requests]
    _enough(spec, len(kept), len(lengths) - sum(_fits(load, n, m) for n, m in lengths))
    return Generated(
        tuple(_alone(i, load, n, m, t) for i, (n, m, t) in enumerate(kept)),
        sum(not _fits(load, n, m) for n, m in lengths),
    )


def _enough(spec: Recipe, have: int, skipped: int) -> None:
    if have < (spec.requests or 1):
        raise UsageError(
            f"{spec.name}: requests is {spec.requests}, {spec.load.file} holds {have} that fit ({skipped} are longer "
            "than load.max_input_tokens or load.max_output_tokens)",
            hint="lower requests, or raise what is accepted",
        )


def _fits(load: Load, n: int, m: int) -> bool:
    return (load.max_input_tokens is None or n <= load.max_input_tokens) and (
        load.max_output_tokens is None or m <= load.max_output_tokens
    )


def _alone(index: int, load: Load, n: int, m: int, arrival_s: float | None) -> PlannedRequest:
    """A request that shares the common prefix with the others, and nothing else."""
    shared = min(load.shared_prefix_tokens, n - 1)
    segments = (Segment(_SHARED, 0, shared),) if shared else ()
    own = Segment(_FIRST + index, 0, n - shared)
    return PlannedRequest(index, n, m, (*segments, own), arrival_s, seen_tokens=shared if index else 0)


def _lengths(spec: Recipe, folder: Path) -> tuple[list[tuple[int, int]], Sequence[float | None]]:
    """(prompt, answer) lengths, and arrival times where the source has them."""
    load = spec.load
    if load.kind in ("fixed", "random"):
        assert spec.requests is not None and load.input_tokens is not None and load.output_tokens is not None
        count, spread = spec.requests, load.spread or 0.0
        rng = np.random.default_rng([spec.seed, 0])
        columns = []
        for mean, least in ((load.input_tokens, load.shared_prefix_tokens + 1), (load.output_tokens, 1)):
            low, high = max(least, round(mean * (1 - spread))), round(mean * (1 + spread))
            columns.append(rng.integers(low, max(low, high) + 1, size=count).tolist())
        return list(zip(*columns, strict=True)), [None] * count
    path = _path(load, folder)
    if load.kind == "azure":
        trace = read_trace(path)
        _of_kind(path, ".csv", "azure")
        pairs = [(r.input_tokens, r.output_tokens) for r in trace.requests]
        times = [r.arrival_s for r in trace.requests]
    else:
        pairs = list(_read_lengths(path, load))
        times = [None] * len(pairs)
    return [(_scaled(n, load.scale), _scaled(m, load.scale)) for n, m in pairs], times


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _path(load: Load, folder: Path) -> Path:
    """A file beside the recipe, or from where the command runs."""
    assert load.file is not None
    beside = folder / load.file
    return beside if beside.is_file() else Path(load.file)


def _of_kind(path: Path, suffix: str, kind: str) -> None:
    if path.suffix != suffix:
        raise UsageError(f"{path}: load.kind {kind} reads {suffix} files")


def _read_lengths(path: Path, load: Load) -> Iterator[tuple[int, int]]:
    """Lengths of a .csv with a header or of a .jsonl of objects, by the recipe's column names."""
    _one_of = (".csv", ".jsonl")
    if path.suffix not in _one_of:
        raise UsageError(f"{path}: lengths are read from {' or '.join(_one_of)} files")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: Iterator[tuple[int, Any]]
            rows = enumerate(csv.DictReader(file), 2) if path.suffix == ".csv" else _objects(file, path)
            for number, row in rows:
                yield _length(row, load.input_column, path, number), _length(row, load.output_column, path, number)
    except FileNotFoundError:
        raise ArtefactError(f"{path}: no such file", hint="load.file is relative to the recipe") from None
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise ArtefactError(f"{path}: cannot be read: {exc}") from None


def _objects(file: Any, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as exc:
            raise ArtefactError(f"{path}:{number}: not JSON: {exc}") from None
        if not isinstance(value, dict):
            raise ArtefactError(f"{path}:{number}: expected an object")
        yield number, value


def _length(row: Any, column: str, path: Path, number: int) -> int:
    if column not in row:
        known = ", ".join(str(k) for k in row if k is not None)
        raise ArtefactError(
            f"{path}:{number}: has no column {column!r}; it has {known}",
            hint="name it with load.input_column and load.output_column",
        )
    value = row[column]
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArtefactError(f"{path}:{number}: {column} is {value!r}, expected an integer of 1 or more")
    return value


def _mooncake(spec: Recipe, folder: Path) -> Generated:
    """Prompts made of the trace's blocks; the last id of a prompt may stand for less than a block."""
    load = spec.load
    path = _path(load, folder)
    _of_kind(path, ".jsonl", "mooncake")
    block = _scaled(TRACE_BLOCK, load.scale)
    seen: set[int] = set()
    out: list[PlannedRequest] = []
    skipped = 0
    for request in read_trace(path).requests:
        n, m = _scaled(request.input_tokens, load.scale), _scaled(request.output_tokens, load.scale)
        if not _fits(load, n, m):
            skipped += 1
            continue
        if spec.requests is not None and len(out) == spec.requests:
            continue
        segments, left, hit, fresh = [], n, 0, False
        for number in request.blocks:
            count = min(block, left)
            if count <= 0:
                break
            segments.append(Segment(_FIRST + number, 0, count))
            fresh = fresh or number not in seen
            hit += 0 if fresh else count
            left -= count
        if left > 0:  # the trace names no block for the rest: nobody shares it
            segments.append(Segment(-(1 << 40) - len(out), 0, left))
        seen.update(request.blocks)
        out.append(PlannedRequest(len(out), n, m, tuple(segments), request.arrival_s, seen_tokens=min(hit, n)))
    _enough(spec, len(out), skipped)
    return Generated(tuple(out), skipped)


# ------------------------------------------------------------------- sessions


@dataclass(frozen=True)
class SessionShape:
    """Prompt lengths of a session that grows evenly: its first prompt, its last, and the growth of a turn."""

    first: float
    last: float
    growth: float


def session_shape(load: Load) -> SessionShape:
    """The session whose mean prompt and hit rate are the asked ones; ``UsageError`` when there is none.

    With n turns, mean prompt M, hit rate h and a system prompt of S tokens shared by all sessions: everything but S is
    new once, so the last prompt is S + n (1 − h) M; the mean of an even growth gives the first as 2 M − last. For
    M = 77,000, h = 0.96, n = 30, S = 2,000: the last prompt has 94,400 tokens, the first 59,600, a turn adds 1,200.
    """
    assert load.input_tokens and load.output_tokens and load.turns and load.hit_rate
    mean, turns, shared = load.input_tokens, load.turns, load.shared_prefix_tokens
    last = shared + turns * (1 - load.hit_rate) * mean
    first = 2 * mean - last
    growth = (last - first) / (turns - 1)
    if first < shared + 1:
        raise UsageError(
            f"no session of {turns} turns has a mean prompt of {mean} tokens and a hit rate of {load.hit_rate:g}: its "
            f"first prompt would have {first:.0f} tokens, {shared} are shared",
            hint="fewer load.turns, a higher load.hit_rate or a shorter load.shared_prefix_tokens",
        )
    if growth < load.output_tokens + 1:
        raise UsageError(
            f"a turn of this session adds {growth:.1f} tokens (mean prompt {mean}, hit rate {load.hit_rate:g}, {turns} "
            f"turns), an answer alone has {load.output_tokens}",
            hint="more load.turns, a lower load.hit_rate or shorter load.output_tokens",
        )
    return SessionShape(first, last, growth)


def _agent(spec: Recipe) -> Iterator[PlannedRequest]:
    """Sessions one after the other, each turn after the one before. Answers in the context are planned ones.

    Growth is log-normal around its mean and scaled so that every session ends at the same length. Pauses are
    exponential.
    """
    load = spec.load
    assert spec.requests and load.turns and load.output_tokens
    shape, rng = session_shape(load), np.random.default_rng([spec.seed, 0])
    shared, index, session = load.shared_prefix_tokens, 0, 0
    while index < spec.requests:
        prompts = _growth(rng, shape, load.turns, load.output_tokens)
        pauses = rng.exponential(load.pause_s, load.turns) if load.pause_s else np.zeros(load.turns)
        before = 0
        for turn in range(min(load.turns, spec.requests - index)):
            n = prompts[turn]
            segments = (Segment(_SHARED, 0, shared),) if shared else ()
            yield PlannedRequest(
                index,
                n,
                load.output_tokens,
                (*segments, Segment(_FIRST + session, 0, n - shared)),
                after=None if turn == 0 else index - 1,
                pause_s=0.0 if turn == 0 else float(pauses[turn]),
                seen_tokens=before if turn else (shared if session else 0),
            )
            before, index = n, index + 1
        session += 1


def _growth(rng: np.random.Generator, shape: SessionShape, turns: int, least: int) -> list[int]:
    """Prompt lengths of one session: every turn adds at least an answer and one token."""
    draws = rng.lognormal(0.0, _SPREAD, turns - 1)
    spare = (shape.last - shape.first) - (turns - 1) * (least + 1)
    steps = least + 1 + draws / draws.sum() * spare
    return [round(float(v)) for v in shape.first + np.concatenate([[0.0], np.cumsum(steps)])]
