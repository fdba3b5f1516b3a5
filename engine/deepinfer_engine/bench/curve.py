"""The step-time curve: milliseconds of a decode step by rows and tokens per row, measured here.

A step of B rows that verify d drafts each is a forward over B rows of 1 + d tokens with logits of every token. Drawing,
drafting and the host's planning are not in it. Loads are measured in rounds, every second round backwards, so that a
drift of the machine does not look like a slope; the median of a load's rounds counts, beside its extremes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_engine.bench.engine_target import EngineTarget, measured_on, usable_ids
from deepinfer_engine.bench.run import Interrupts, Progress
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError, Interrupted, UsageError
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.runtime.step_curve import StepTimer
from deepinfer_engine.spec.curve import curve_rows, monotone_table

#: tokens of context before the measured ones: more than a window, so that every layer kind has something to read
CONTEXT = 256


@dataclass(frozen=True)
class CurvePoint:
    """One load: rows, tokens per row, and what its rounds took in ms. ``fitted_ms``: the closest rising surface."""

    rows: int
    tokens_per_row: int
    median_ms: float
    min_ms: float
    max_ms: float
    fitted_ms: float

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.rows * self.tokens_per_row


@dataclass(frozen=True)
class MeasuredCurve:
    """Points in order of rows, then tokens; ``meta`` says on what.

    ``steps``: the curve of whole steps that chooses verify budgets (path, rows, drafts a row, tokens, step_ms); empty
    without speculation.
    """

    points: tuple[CurvePoint, ...]
    rounds: int
    meta: dict[str, Any]
    steps: tuple[dict[str, Any], ...] = ()


def curve_grid(max_rows: int, draft_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, tokens per row): powers of two up to the rows there are, and no draft, one, half of them, all."""
    rows = {2**i for i in range(max_rows.bit_length())} | {max_rows}
    return tuple(sorted(r for r in rows if r <= max_rows)), tuple(
        sorted({1, 2, 1 + (draft_tokens + 1) // 2, 1 + draft_tokens})
    )


def measure_step_curve(
    target: EngineTarget,
    *,
    max_rows: int | None = None,
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> MeasuredCurve:
    """Measure the curve on an open engine that is idle. ``max_rows`` None: all rows of the profile.

    Raises ``CapacityError`` when the rows do not fit the cache, ``Interrupted`` on Ctrl-C.
    """
    if rounds < 1 or warmup < 0:
        raise UsageError(f"{rounds} rounds after {warmup} for warming up, expected 1 or more and 0 or more")
    engine = target.engine
    limits = engine.scheduler.limits
    have = limits.dp * limits.rows
    if max_rows is not None and max_rows > have:
        raise CapacityError(f"{max_rows} rows, the profile has {have}", hint="raise sched.max_rows_per_rank")
    rows_at, tokens_at = curve_grid(max_rows or have, engine.config.dspark_block_size)
    steps = _Steps(target, rows_at[-1], tokens_at[-1])
    loads = [(r, t) for r in rows_at for t in tokens_at]
    times: dict[tuple[int, int], list[float]] = {load: [] for load in loads}
    began, done, total = time.perf_counter(), 0, (warmup + rounds) * len(loads)
    with Interrupts() as stop:
        for turn in range(warmup + rounds):
            for rows, tokens in loads if turn % 2 == 0 else reversed(loads):
                if stop.is_set():
                    raise Interrupted("interrupted; a curve with holes is not kept")
                taken = steps.run_ms(rows, tokens)
                if turn >= warmup:
                    times[rows, tokens].append(taken)
                done += 1
                if progress is not None:
                    phase = "measure" if turn >= warmup else "warmup"
                    progress(Progress(phase, done, total, 0, rows, 0, time.perf_counter() - began))
    middle = np.array([[statistics.median(times[r, t]) for t in tokens_at] for r in rows_at])
    fitted = monotone_table(middle)
    points = tuple(
        CurvePoint(r, t, float(middle[i, j]), min(times[r, t]), max(times[r, t]), float(fitted[i, j]))
        for i, r in enumerate(rows_at)
        for j, t in enumerate(tokens_at)
    )
    whole: tuple[dict[str, Any], ...] = ()
    if engine.runner.speculation is not None:
        whole = tuple(curve_rows(StepTimer(engine.runner).curve()))
    return MeasuredCurve(points, rounds, measured_on(target) | {"context_tokens": CONTEXT}, whole)


class _Steps:
    """Forwards over rows that have a context, on the engine's own cache while nothing else runs."""

    def __init__(self, target: EngineTarget, rows: int, tokens: int):
        engine = target.engine
        if engine.busy:
            raise UsageError("the engine has requests in flight; a curve is measured while it is idle")
        target.overwritten = True
        self._runner, self._limits = engine.runner, engine.scheduler.limits
        self._ngram = engine.config.engram_max_ngram_size
        blocks = -(-(CONTEXT + tokens) // BLOCK_TOKENS)
        need = -(-rows // self._limits.dp) * blocks
        if need > self._limits.blocks:
            raise CapacityError(
                f"{need} blocks of {BLOCK_TOKENS} tokens needed on a rank, it has {self._limits.blocks}",
                hint="raise cache.hbm_tokens_per_rank, or measure fewer rows",
            )
        ids, rng = usable_ids(engine), np.random.default_rng(0)
        self._prompts = [rng.choice(ids, CONTEXT + tokens).tolist() for _ in range(rows)]
        self._blocks = blocks
        per_step = max(1, engine.profile.sched.prefill_chunk_tokens // CONTEXT)
        for first in range(0, rows, per_step):
            self._forward([self._row(i, 0, CONTEXT, "none") for i in range(first, min(rows, first + per_step))])

    def run_ms(self, rows: int, tokens: int) -> float:
        """One step; the same positions are written again every time."""
        inputs = [self._row(i, CONTEXT, tokens, "all") for i in range(rows)]
        began = time.perf_counter()
        self._forward(inputs)
        return (time.perf_counter() - began) * 1e3

    def _row(self, i: int, start: int, count: int, logits: Any) -> RowInput:
        limits, rank, place = self._limits, i % self._limits.dp, i // self._limits.dp
        first = rank * limits.blocks + 1 + place * self._blocks
        slot = rank * limits.rows + 1 + place
        return RowInput(self._prompts[i], start, count, slot, range(first, first + self._blocks), logits=logits)

    def _forward(self, rows: list[RowInput]) -> None:
        runner = self._runner
        batch = build_batch(rows, runner.kv.layout, ngram=self._ngram, device=runner.device)

        def work() -> None:
            runner.model.forward(batch, runner.kv, runner.ops, runner.mesh)
            if runner.device.startswith("cuda"):
                torch.cuda.synchronize()

        runner.lane.launch(work).result()
