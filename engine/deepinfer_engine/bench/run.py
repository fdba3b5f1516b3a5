"""``run_bench``: sends a workload to a target, watches every token arrive, and sums up.

The schedule decides what may start and is the same for every target; a target only starts, reports and ends requests.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from deepinfer_engine.bench.metrics import RequestRow, RunFacts, Value, summarise
from deepinfer_engine.bench.result import BenchResult, TargetFacts, meta_of, now_utc
from deepinfer_engine.bench.schedule import Schedule
from deepinfer_engine.bench.workload import PlannedRequest, Workload
from deepinfer_engine.errors import UsageError

#: longest wait for events in seconds: an interrupt is noticed within it
_LONGEST_POLL_S = 0.2


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: when it came (``time.perf_counter``) and its tokens (None: not known)."""

    index: int
    at_s: float
    tokens: int | None


@dataclass(frozen=True)
class Ended:
    """A request's end. Counts the target does not know are None."""

    index: int
    at_s: float
    status: Literal["completed", "failed", "cancelled"]
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replayed_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    preemptions: int | None = None
    queued_s: float | None = None
    finish_reason: str | None = None
    error_group: str | None = None
    error: str | None = None


class Target(Protocol):
    """Something that answers. One caller; times are ``time.perf_counter``."""

    def facts(self) -> TargetFacts:
        """What it is; known before anything is sent."""
        ...

    def plan(self, workload: Workload) -> Workload:
        """The workload with what only this target can know, such as how many tokens its texts have."""
        ...

    def check(self, workload: Workload) -> None:
        """Refuse (``DeepInferError``) a workload that cannot run here, before anything is sent."""
        ...

    def prepare(self, workload: Workload, request: PlannedRequest, salt: int) -> Any:
        """What ``start`` sends for a request; made before the clock runs."""
        ...

    def start(self, index: int, prepared: Any) -> float:
        """Submit one request; the time of submission."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Chunk | Ended]:
        """What happened since, waiting up to a time for something to happen."""
        ...

    def abort(self) -> Sequence[Chunk | Ended]:
        """End everything in flight; the last events, an ``Ended`` for each."""
        ...

    def counters(self) -> tuple[dict[str, Value], dict[str, str]]:
        """Values of the run that requests do not carry, counted from ``begin``, and why some of them are None."""
        ...

    def begin(self) -> None:
        """The measured part starts now."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


Phase = Literal["warmup", "fill", "measure"]


@dataclass(frozen=True)
class Progress:
    """How a run stands. ``phase``: warm-up, filling the cache, or measuring."""

    phase: Phase
    done: int
    total: int
    failed: int
    in_flight: int
    output_tokens: int
    elapsed_s: float


def run_bench(
    workload: Workload,
    target: Target,
    *,
    progress: Callable[[Progress], None] | None = None,
    salt: int | None = None,
) -> BenchResult:
    """Run a workload on a target and sum up what happened.

    ``salt`` None: a fresh one where a cache could know the prompts from before, else the count of runs on this target.
    Ctrl-C ends the run early, between steps: the result is then marked interrupted and holds what had ended. A second
    one raises ``KeyboardInterrupt`` at once.
    Raises ``DeepInferError`` when the workload cannot run on the target at all.
    """
    if salt is not None and any(r.text is not None for r in workload.requests):
        raise UsageError(f"workload {workload.name} sends the texts of a file, a salt cannot change them")
    workload = target.plan(workload)
    target.check(workload)
    facts = target.facts()
    report = progress or (lambda _: None)
    if salt is None:
        salt = secrets.randbits(63) if facts.persistent_cache else _next_run(target)
    started = now_utc()
    counters: dict[str, Value] = {}
    reasons: dict[str, str] = {}
    rows = [_unsent(r) for r in workload.requests]
    with Interrupts() as stop:

        def play(requests: Sequence[PlannedRequest], phase: Phase) -> _Pass:
            one = _Pass(target, requests, workload.concurrency, phase, report, stop)
            one.run(workload, salt)
            return one

        if workload.warmup:
            play(workload.warmup, "warmup")
        if workload.cache == "warm" and not stop.is_set():
            play(_fill(workload), "fill")
        if not stop.is_set():
            target.begin()
            rows = play(workload.requests, "measure").rows()
            counters, reasons = target.counters()
        interrupted = stop.is_set()
    run = RunFacts(
        concurrency=workload.concurrency,
        limits=workload.limits,
        gpus=facts.gpus,
        gpus_reason=facts.gpus_reason,
        closed=workload.arrivals.mode == "closed",
        extra={"prompt_seen_share": workload.seen_rate, **counters},
        reasons={"prompt_seen_share": "how many tokens the texts have is not known here", **reasons},
    )
    summary = summarise(rows, run)
    meta = meta_of(workload, facts, salt=salt, started=started)
    status = "interrupted" if interrupted else "complete"
    return BenchResult(summary.values, rows, meta, summary.undefined, status)


class Interrupts:
    """While it lasts, the first SIGINT of the main thread sets the event; the next one is a ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._before: Any = None

    def __enter__(self) -> threading.Event:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._first)
        return self._stop

    def _first(self, *args: object) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._stop.set()

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _next_run(target: Target) -> int:
    """0, 1, 2 … for the runs of one target: contents differ, so nothing is found from the run before."""
    count = getattr(target, "_bench_runs", 0)
    target._bench_runs = count + 1  # pyright: ignore[reportAttributeAccessIssue]
    return count


def _fill(workload: Workload) -> tuple[PlannedRequest, ...]:
    """Every prompt once, with one token to generate, at once or as places allow."""
    return tuple(replace(r, output_tokens=1, arrival_s=None, after=None, pause_s=0.0) for r in workload.requests)


def _unsent(request: PlannedRequest) -> RequestRow:
    return RequestRow(request.index, "unsent", request.input_tokens, request.output_tokens, due_s=request.arrival_s)


class _Pass:
    """One pass over requests: starts what is due, collects what comes."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[PlannedRequest],
        concurrency: int | None,
        phase: Phase,
        report: Callable[[Progress], None],
        stop: threading.Event,
    ):
        self._target, self._requests = target, requests
        self._phase: Phase = phase
        self._report, self._stop = report, stop
        self._schedule = Schedule(requests, concurrency)
        self._submitted: dict[int, float] = {}
        self._chunks: dict[int, list[tuple[float, int | None]]] = {}
        self._ends: dict[int, Ended] = {}
        self._tokens = self._failed = 0
        self._zero = 0.0

    def run(self, workload: Workload, salt: int) -> None:
        """Until everything has ended, or the stop is set: what is in flight is then aborted."""
        prepared = {r.index: self._target.prepare(workload, r, salt) for r in self._requests}
        self._zero = time.perf_counter()
        while not self._schedule.over:
            if self._stop.is_set():
                self._take(self._target.abort())
                return
            self._advance(prepared)

    def _advance(self, prepared: dict[int, Any]) -> None:
        now = time.perf_counter() - self._zero
        for request in self._schedule.due(now):
            at = self._target.start(request.index, prepared.pop(request.index))
            self._submitted[request.index] = at - self._zero
            self._chunks[request.index] = []
        wait = self._schedule.wait_s(time.perf_counter() - self._zero)
        if self._take(self._target.poll(_LONGEST_POLL_S if wait is None else min(wait, _LONGEST_POLL_S))):
            self._tell()

    def _take(self, events: Sequence[Chunk | Ended]) -> bool:
        for event in events:
            if isinstance(event, Chunk):
                self._chunks[event.index].append((event.at_s - self._zero, event.tokens))
                self._tokens += 1 if event.tokens is None else event.tokens
            elif event.index in self._schedule.flying:
                self._ends[event.index] = event
                self._failed += event.status == "failed"
                self._schedule.ended(event.index, event.at_s - self._zero)
        return bool(events)

    def _tell(self) -> None:
        self._report(
            Progress(
                self._phase,
                len(self._ends),
                len(self._requests),
                self._failed,
                len(self._schedule.flying),
                self._tokens,
                time.perf_counter() - self._zero,
            )
        )

    def rows(self) -> list[RequestRow]:
        """A row for every request, whatever became of it."""
        return [self._row(r) for r in self._requests]

    def _row(self, request: PlannedRequest) -> RequestRow:
        index = request.index
        base = replace(_unsent(request), due_s=self._schedule.due_s(index))
        if index not in self._submitted:
            return base
        chunks = tuple(self._chunks[index])
        end = self._ends.get(index)
        if end is None:  # a target that could not tell how it ended
            return replace(base, status="cancelled", submitted_s=self._submitted[index], chunks=chunks)
        if end.output_tokens == len(chunks) and all(n is None for _, n in chunks):
            chunks = tuple((at, 1) for at, _ in chunks)  # as many chunks as tokens: one in each
        kept = {name: getattr(end, name) for name in _CARRIED}
        return replace(
            base,
            status=end.status,
            submitted_s=self._submitted[index],
            ended_s=end.at_s - self._zero,
            chunks=chunks,
            **kept,
        )


#: fields of an end that a row takes as they are
_CARRIED = (
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "replayed_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "preemptions",
    "queued_s",
    "finish_reason",
    "error_group",
    "error",
)
