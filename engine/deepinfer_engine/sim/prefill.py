"""Event simulation of a prefill pool: engines of data-parallel ranks that step together.

A request arrives, is sent to a rank, waits until its cached blocks are fetched, and is computed in chunks, first come
first served under the step's time and token budget. A step of an engine lasts as long as its slowest rank's chunks.
Events at one time are handled in the order arrival, fetched, step end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer_engine.cost.steptime import PrefillTime
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.route import PrefillPolicy, PrefillRouter

#: Smaller pieces than this are not cut off a prompt that does not end with them.
_CRUMB_TOKENS = 256


@dataclass(frozen=True)
class PrefillPool:
    """``engines`` instances of ``ranks`` data-parallel ranks under one router.

    ``step_budget_s`` bounds a step's predicted time (base included), ``chunk_tokens`` its tokens per rank; a final
    chunk has at least ``tail_tokens`` rows. ``fetch_bytes_s`` is the storage bandwidth of one engine.
    """

    engines: int
    ranks: int
    time: PrefillTime
    chunk_tokens: int
    step_budget_s: float
    tail_tokens: int = 134
    fetch_bytes_s: float = float("inf")
    policy: PrefillPolicy = "least_work"
    snapshot_s: float = 0.0
    cost_sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engines < 1 or self.ranks < 1:
            raise UsageError("a prefill pool needs at least one engine of one rank")
        if self.time.largest_chunk(self.step_budget_s - self.time.base_s) < self.tail_tokens:
            raise UsageError(
                f"a step of {self.step_budget_s * 1e3:.0f} ms computes fewer than {self.tail_tokens} tokens"
            )


@dataclass(frozen=True)
class PrefillJob:
    """A prompt to compute: arrival, tokens in all, tokens found in the cache, bytes to fetch for them."""

    arrival_s: float
    tokens: int
    cached: int
    fetch_bytes: float = 0.0


@dataclass(frozen=True)
class PrefillResult:
    """Completion time of every job; busy and useful rank seconds of the pool; steps run."""

    done_s: np.ndarray
    useful_s: float
    stepping_s: float
    steps: int
    computed_tokens: int
    makespan_s: float

    def balance(self, pool: PrefillPool) -> float:
        """Useful rank seconds over those of perfectly packed steps in the same time: η of prefill."""
        best = 1 - pool.time.base_s / pool.step_budget_s
        return self.useful_s / (pool.engines * pool.ranks * self.makespan_s * best)


@dataclass
class _Work:
    index: int
    left: int
    context: int


@dataclass
class _Engine:
    queues: list[deque[_Work]] = field(default_factory=list)
    running: list[tuple[int, list[tuple[_Work, int]]]] = field(default_factory=list)
    link_free_s: float = 0.0
    stepping: bool = False


_ARRIVAL, _FETCHED, _STEP_END = 0, 1, 2


def simulate_prefill(pool: PrefillPool, jobs: Sequence[PrefillJob]) -> PrefillResult:
    """Run every job to its end."""
    return _Simulation(pool, jobs).run()


class _Simulation:
    def __init__(self, pool: PrefillPool, jobs: Sequence[PrefillJob]):
        self.pool, self.jobs = pool, jobs
        self.engines = [_Engine([deque() for _ in range(pool.ranks)]) for _ in range(pool.engines)]
        self.router = PrefillRouter(pool.policy, pool.engines * pool.ranks, pool.seed, pool.snapshot_s, pool.cost_sigma)
        self.queued_s = np.zeros(pool.engines * pool.ranks)
        self.done = np.full(len(jobs), np.nan)
        self.useful = self.stepping = 0.0
        self.steps = self.computed = 0
        self.idle: set[int] = set()
        self.events: list[tuple[float, int, int, int]] = [(j.arrival_s, _ARRIVAL, i, 0) for i, j in enumerate(jobs)]
        heapq.heapify(self.events)

    def run(self) -> PrefillResult:
        now = 0.0
        while self.events:
            now, kind, a, b = heapq.heappop(self.events)
            if kind == _ARRIVAL:
                self._arrive(now, a)
            elif kind == _FETCHED:
                self._fetched(now, a, b)
            else:
                self._end_step(now, a)
            if not self.events or self.events[0][0] > now:  # whatever happens at one time shares the next step
                for number in sorted(self.idle):
                    self._start_step(now, number)
                self.idle.clear()
        start = self.jobs[0].arrival_s if self.jobs else 0.0
        return PrefillResult(self.done, self.useful, self.stepping, self.steps, self.computed, max(now - start, 1e-12))

    def _work_s(self, job: PrefillJob) -> float:
        return self.pool.time.chunk_s(job.tokens - job.cached, job.cached)

    def _arrive(self, now: float, index: int) -> None:
        job = self.jobs[index]
        work = self._work_s(job)
        rank = self.router.choose(now, job.tokens, work, self.queued_s)
        self.queued_s[rank] += work
        engine = self.engines[rank // self.pool.ranks]
        ready = now
        if job.fetch_bytes:
            ready = max(now, engine.link_free_s) + job.fetch_bytes / self.pool.fetch_bytes_s
            engine.link_free_s = ready
        heapq.heappush(self.events, (ready, _FETCHED, index, rank))

    def _fetched(self, now: float, index: int, rank: int) -> None:
        job = self.jobs[index]
        number, local = divmod(rank, self.pool.ranks)
        self.engines[number].queues[local].append(_Work(index, job.tokens - job.cached, job.cached))
        if not self.engines[number].stepping:
            self.idle.add(number)

    def _start_step(self, now: float, number: int) -> None:
        engine, pool = self.engines[number], self.pool
        slowest, engine.running = 0.0, []
        for local, queue in enumerate(engine.queues):
            parts, seconds = self._pack(queue)
            if parts:
                engine.running.append((local, parts))
                slowest = max(slowest, seconds)
        engine.stepping = bool(engine.running)
        if engine.stepping:
            length = pool.time.base_s + slowest
            self.steps += 1
            self.stepping += length * pool.ranks
            heapq.heappush(self.events, (now + length, _STEP_END, number, 0))

    def _pack(self, queue: deque[_Work]) -> tuple[list[tuple[_Work, int]], float]:
        """Chunks of one rank's step, first come first served, and their seconds without base."""
        pool, time = self.pool, self.pool.time
        tokens, seconds = pool.chunk_tokens, pool.step_budget_s - pool.time.base_s
        parts, spent = [], 0.0
        for work in queue:
            take = min(work.left, tokens, time.largest_chunk(seconds - spent, work.context))
            rest = work.left - take
            if 0 < rest < pool.tail_tokens:
                take = work.left - pool.tail_tokens  # the decoder half needs its window in the final chunk
            if take <= 0 or (take < work.left and take < _CRUMB_TOKENS and parts):
                break
            parts.append((work, take))
            tokens -= take
            spent += time.chunk_s(take, work.context)
            if take < work.left:
                break
        return parts, spent

    def _end_step(self, now: float, number: int) -> None:
        engine, time = self.engines[number], self.pool.time
        for local, parts in engine.running:
            queue = engine.queues[local]
            for work, take in parts:
                seconds = time.chunk_s(take, work.context)
                self.useful += seconds
                self.computed += take
                self.queued_s[number * self.pool.ranks + local] -= seconds
                work.left -= take
                work.context += take
                if work.left == 0:
                    self.done[work.index] = now
                    queue.popleft()
        engine.stepping = False
        self.idle.add(number)
