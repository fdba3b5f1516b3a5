"""Single forward passes without the scheduler: what the model costs, before any policy.

prefill  every request is run alone, its prompt in chunks of ``sched.prefill_chunk_tokens``; a forward is a chunk
decode   requests are taken in groups of the concurrency; prompts are computed first and not counted, then every row of
         the group advances by one token a forward, as many times as the longest answer needs

The clock is the sum of the counted forwards, so rates are those of the passes alone: tensors built, launched, drawn,
and waited for. Prefix reuse and replay belong to the scheduler and do not happen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deepinfer_engine.bench.engine_target import EngineTarget, check_context
from deepinfer_engine.bench.metrics import RequestRow, RunFacts, Summary, summarise
from deepinfer_engine.bench.result import BenchResult, meta_of, now_utc
from deepinfer_engine.bench.run import Interrupts, Progress
from deepinfer_engine.bench.workload import PlannedRequest, Workload
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.types import PlannedRow, Request, SamplingParams, StepPlan
from deepinfer_engine.types import Sequence as Row

ForwardPhase = Literal["prefill", "decode"]


def run_forward(
    workload: Workload,
    target: EngineTarget,
    phase: ForwardPhase,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> BenchResult:
    """Run a workload's lengths through single forwards. Arrival times do not apply; the concurrency is the row count.

    Raises ``UsageError`` for a workload without concurrency in decode, ``CapacityError`` when its rows do not fit.
    """
    workload = target.plan(workload)
    if phase == "decode" and any(r.text is not None for r in workload.requests):
        raise UsageError("--forward decode gives every answer its planned length, texts have none")
    check_context(workload, target.engine.profile, target.engine.config)
    lane = _Lane(target, workload)
    target.overwritten = True
    rows_at_once = 1 if phase == "prefill" else workload.concurrency
    if rows_at_once is None:
        raise UsageError("--forward decode needs a number of rows", hint="--concurrency N")
    lane.check_room(rows_at_once, workload)
    started = now_utc()
    clock = _Clock()
    rows: list[RequestRow] = []
    requests = workload.requests
    tell = progress or (lambda _: None)
    began = time.perf_counter()
    with Interrupts() as stop:
        for request in workload.warmup:
            if not stop.is_set():
                lane.prefill([request], None)
        if workload.warmup and phase == "decode" and not stop.is_set():
            lane.decode(requests[:rows_at_once], _Clock(), stop)
        target.begin()
        for first in range(0, len(requests), rows_at_once):
            if stop.is_set():
                break
            group = requests[first : first + rows_at_once]
            rows += lane.prefill(group, clock) if phase == "prefill" else lane.decode(group, clock, stop)
            tokens = sum(r.output_tokens or 0 for r in rows)
            tell(Progress("measure", len(rows), len(requests), 0, len(group), tokens, time.perf_counter() - began))
        interrupted = stop.is_set()
    missing = requests[len(rows) :]
    rows += [RequestRow(r.index, "unsent", r.input_tokens, r.output_tokens) for r in missing]
    summary = _summary(phase, rows, clock, target, rows_at_once, workload)
    meta = meta_of(workload, target.facts(), salt=0, started=started)
    meta.target["forward"] = phase
    return BenchResult(summary.values, rows, meta, summary.undefined, "interrupted" if interrupted else "complete")


@dataclass
class _Clock:
    """Time that counts: the sum of forwards."""

    now_s: float = 0.0
    forward_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, seconds: float, tokens: int) -> None:
        self.now_s += seconds
        self.forward_ms.append(seconds * 1e3)
        self.tokens.append(tokens)


class _Lane:
    """Runs hand-made step plans on the engine's runner while its scheduler is idle."""

    def __init__(self, target: EngineTarget, workload: Workload):
        engine = target.engine
        assert not engine.busy
        self._runner = engine.runner
        self._limits = engine.scheduler.limits
        self._chunk = engine.profile.sched.prefill_chunk_tokens
        self._target = target
        self._workload = workload
        self._step = 0

    def check_room(self, rows: int, workload: Workload) -> None:
        """Refuse more rows or blocks than the profile has."""
        limits = self._limits
        if rows > limits.dp * limits.rows:
            raise CapacityError(
                f"{rows} rows at once, the profile has {limits.dp * limits.rows}",
                hint="lower the concurrency, or raise sched.max_rows_per_rank",
            )
        need = -(-rows // limits.dp) * -(-workload.longest() // BLOCK_TOKENS)
        if need > limits.blocks:
            raise CapacityError(
                f"{need} blocks of {BLOCK_TOKENS} tokens needed on a rank, it has {limits.blocks}",
                hint="raise cache.hbm_tokens_per_rank, or lower the concurrency",
            )

    def prefill(self, group: Sequence[PlannedRequest], clock: _Clock | None) -> list[RequestRow]:
        """Each prompt alone, chunk by chunk; rows when it counts."""
        out = []
        for request in group:
            (seq,) = self._sequences([request])
            start_s = clock.now_s if clock else 0.0
            for start in range(0, seq.num_prompt, self._chunk):
                self._forward([(seq, start, min(self._chunk, seq.num_prompt - start))], "prefill", clock)
            if clock is not None:
                out.append(_row(request, start_s, [clock.now_s]))
        return out

    def _prompts(self, seqs: Sequence[Row]) -> None:
        """Compute all prompts, as many in a forward as a chunk holds; nothing counts."""
        parts: list[tuple[Row, int, int]] = []
        room = self._chunk
        for seq in seqs:
            start = 0
            while start < seq.num_prompt:
                count = min(room, seq.num_prompt - start)
                parts.append((seq, start, count))
                start, room = start + count, room - count
                if not room:
                    self._forward(parts, "prefill", None)
                    parts, room = [], self._chunk
        if parts:
            self._forward(parts, "prefill", None)

    def decode(self, group: Sequence[PlannedRequest], clock: _Clock, stop: threading.Event) -> list[RequestRow]:
        """Prompts first, then one token a row and forward; [] when it was stopped before its end."""
        seqs = self._sequences(group)
        self._prompts(seqs)
        start_s = clock.now_s
        times: list[list[float]] = [[] for _ in group]
        for step in range(max(r.output_tokens for r in group)):
            live = [i for i, r in enumerate(group) if step < r.output_tokens]
            if stop.is_set():
                return []
            self._forward([(seqs[i], len(seqs[i].token_ids) - 1, 1) for i in live], "decode", clock)
            for i in live:
                times[i].append(clock.now_s)
        return [_row(r, start_s, t) for r, t in zip(group, times, strict=True)]

    def _sequences(self, group: Sequence[PlannedRequest]) -> list[Row]:
        """Sequences dealt to the ranks in turn, each with slots and blocks of its own."""
        limits, out, next_block = self._limits, [], [1] * self._limits.dp
        for i, request in enumerate(group):
            rank = i % limits.dp
            ids = self._target.prompt(self._workload, request, 0)
            sampling = SamplingParams(max_tokens=request.output_tokens + 1, ignore_eos=True)
            blocks = -(-(len(ids) + request.output_tokens + 1) // BLOCK_TOKENS)
            first = rank * limits.blocks + next_block[rank]
            next_block[rank] += blocks
            seq = Row(Request(str(request.index), ids, sampling), list(ids), len(ids), seed=0, uid=-2 - i)
            seq.dp_rank, seq.slot = rank, rank * limits.rows + 1 + i // limits.dp
            seq.block_ids = list(range(first, first + blocks))
            seq.state = "running"
            out.append(seq)
        return out

    def _forward(
        self, parts: Sequence[tuple[Row, int, int]], kind: Literal["prefill", "decode"], clock: _Clock | None
    ) -> None:
        """One forward over (sequence, start, count) parts; drawn tokens are appended."""
        sequences = {seq.uid: seq for seq, _, _ in parts}
        rows = tuple(
            PlannedRow(seq.uid, seq.dp_rank, start, count, kind, start + count == len(seq.token_ids), seq.generation)
            for seq, start, count in parts
        )
        self._step += 1
        began = time.perf_counter()
        flight = self._runner.forward(StepPlan(self._step, rows), sequences, None)
        self._runner.sample(flight, sequences, {})
        out = self._runner.collect(flight)
        if clock is not None:
            clock.add(time.perf_counter() - began, sum(count for _, _, count in parts))
        for uid, drawn in out.tokens.items():
            sequences[uid].token_ids += [max(token, 0) for token in drawn]
            self._runner.sampler.forget(uid)


def _row(request: PlannedRequest, start_s: float, times: Sequence[float]) -> RequestRow:
    return RequestRow(
        request.index,
        "completed",
        request.input_tokens,
        request.output_tokens,
        submitted_s=start_s,
        ended_s=times[-1],
        chunks=tuple((t, 1) for t in times),
        input_tokens=request.input_tokens,
        output_tokens=len(times),
        finish_reason="length",
    )


#: what a forward without scheduler does not have
_NOT_HERE = {
    "prefill": (
        "tpot",
        "output_tok_s",
        "total_tok_s",
        "itl",
        "steady",
        "queued",
        "goodput",
        "tokens_per_chunk",
        "shorter",
    ),
    "decode": ("ttft", "e2e", "input_tok_s", "total_tok_s", "steady", "queued", "goodput"),
}


def _summary(
    phase: ForwardPhase, rows: Sequence[RequestRow], clock: _Clock, target: EngineTarget, at_once: int, w: Workload
) -> Summary:
    facts = target.facts()
    run = RunFacts(at_once, w.limits, facts.gpus, facts.gpus_reason, closed=True)
    s = summarise(rows, run)
    for key in [k for k in s.values if k.startswith(_NOT_HERE[phase])]:
        s.put(key, None, f"single {phase} forwards have none")
    s.put("forwards", len(clock.forward_ms))
    s.put("rows_per_forward", at_once)
    s.spread("forward", "ms", clock.forward_ms, "no forward ran")
    tokens = float(np.sum(clock.tokens)) if clock.tokens else None
    s.put("forward_tokens_mean", None if tokens is None else tokens / len(clock.tokens), "no forward ran")
    s.ratio("forward_tok_s", tokens, clock.now_s, "no forward ran")
    return s
