"""Event simulation of decode groups: ranks that step together, rows that join and leave at step ends.

Between two events every step of a group takes the same time, so whole runs of steps are skipped at once. All rows of
a group commit the same mean number of tokens per step (speculation is an expectation here). A row holds KV for its
prompt and its whole answer from the moment it joins. Rows join in order of arrival; nobody overtakes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.cost.steptime import DecodeTime, Speculation
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.sim.route import DecodePolicy, place_row


@dataclass(frozen=True)
class DecodePool:
    """``groups`` instances of ``ranks`` ranks; limits are per rank."""

    groups: int
    ranks: int
    time: DecodeTime
    speculation: Speculation
    max_rows: int
    max_tokens: int
    policy: DecodePolicy = "two_level"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.ranks < 1:
            raise UsageError("a decode pool needs at least one group of one rank")


@dataclass(frozen=True)
class DecodeJob:
    """A row to decode: when its KV is there, prompt tokens, tokens still to generate (0: the prompt gave the only
    one)."""

    ready_s: float
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class DecodeResult:
    """Per job: when it joined and ended. Over all groups: step seconds by mean rank and by slowest rank, row seconds,
    and seconds with any row."""

    joined_s: np.ndarray
    done_s: np.ndarray
    mean_rank_s: float
    slowest_rank_s: float
    row_s: float
    busy_s: float

    @property
    def step_balance(self) -> float:
        """Mean rank's step time over the slowest rank's, 1 with perfectly even ranks."""
        return self.mean_rank_s / self.slowest_rank_s if self.slowest_rank_s else 1.0

    def rows_held(self, pool: DecodePool) -> float:
        """Mean rows per rank while a group had any."""
        return self.row_s / (self.busy_s * pool.ranks) if self.busy_s else 0.0


def simulate_decode(pool: DecodePool, jobs: Sequence[DecodeJob]) -> DecodeResult:
    """Run every job; a job goes to the group with the fewest tokens placed or waiting, then the lowest number.

    Raises ``CapacityError`` for a job that no rank could ever hold.
    """
    for job in jobs:
        need = job.prompt_tokens + job.tokens
        if need > pool.max_tokens:
            raise CapacityError(
                f"a row of {need:,} tokens needs more KV than a decode rank has ({pool.max_tokens:,} tokens)",
                hint="raise cache.hbm_tokens_per_rank of the decode profile",
            )
    groups = [_Group(pool) for _ in range(pool.groups)]
    joined, done = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
    order = sorted(range(len(jobs)), key=lambda i: (jobs[i].ready_s, i))
    for i in order:
        job = jobs[i]
        if job.tokens == 0:
            joined[i] = done[i] = job.ready_s
            continue
        for group in groups:
            group.advance(job.ready_s, joined, done)
        target = min(range(len(groups)), key=lambda g: (groups[g].load, g))
        groups[target].submit(i, job)
    for group in groups:
        group.advance(float("inf"), joined, done)
    totals = [sum(getattr(g, name) for g in groups) for name in ("mean_s", "slowest_s", "row_s", "busy_s")]
    return DecodeResult(joined, done, *totals)


class _Group:
    """One synchronous group. ``progress`` counts tokens committed by a row that was there from the start."""

    def __init__(self, pool: DecodePool):
        self.pool = pool
        self.rows = np.zeros(pool.ranks, dtype=np.int64)
        self.kv = np.zeros(pool.ranks, dtype=np.int64)
        self.now = 0.0
        self.progress = 0.0
        self.ends: list[tuple[float, int, int, int]] = []  # (progress at the end, job, rank, tokens held)
        self.queue: deque[tuple[int, DecodeJob]] = deque()
        self.queue_tokens = 0
        self.turn = 0
        self.mean_s = self.slowest_s = self.row_s = self.busy_s = 0.0

    @property
    def load(self) -> int:
        """Tokens placed and waiting."""
        return int(self.kv.sum()) + self.queue_tokens

    def submit(self, index: int, job: DecodeJob) -> None:
        """Queue a row; ``advance`` has brought the group to its time."""
        self.queue.append((index, job))
        self.queue_tokens += job.prompt_tokens + job.tokens
        self.now = max(self.now, job.ready_s)

    def advance(self, until: float, joined: np.ndarray, done: np.ndarray) -> None:
        """Run steps that start before ``until``, admitting and finishing rows at step ends."""
        while True:
            self._admit(joined)
            if not self.ends:
                return
            step, mean, committed = self._step()
            left = (self.ends[0][0] - self.progress) / committed
            steps = max(1, int(np.ceil(left - 1e-9)))
            if self.now + steps * step > until:
                # only the steps that start before the next arrival; it joins after the one under way
                steps = min(steps, int(np.ceil((until - self.now) / step - 1e-12)))
                if steps <= 0:
                    return
            self._run(steps, step, mean, committed)
            while self.ends and self.ends[0][0] <= self.progress + 1e-6:
                _, index, rank, held = heapq.heappop(self.ends)
                done[index] = self.now
                self.rows[rank] -= 1
                self.kv[rank] -= held

    def _step(self) -> tuple[float, float, float]:
        """Seconds of the slowest and of the mean rank, and tokens a row commits."""
        pool = self.pool
        verify, committed = pool.speculation.at(float(self.rows.mean()))
        t = pool.time
        per_row = t.token_s * (1 + verify) + t.row_s
        seconds = t.base_s + self.rows * per_row + t.context_s * self.kv
        return float(seconds.max()), float(seconds.mean()), committed

    def _run(self, steps: int, step: float, mean: float, committed: float) -> None:
        self.now += steps * step
        self.progress += steps * committed
        self.mean_s += steps * mean
        self.slowest_s += steps * step
        self.row_s += steps * step * int(self.rows.sum())
        self.busy_s += steps * step

    def _admit(self, joined: np.ndarray) -> None:
        while self.queue:
            index, job = self.queue[0]
            need = job.prompt_tokens + job.tokens
            rank = place_row(
                self.pool.policy,
                self.rows,
                self.kv,
                need,
                max_rows=self.pool.max_rows,
                max_tokens=self.pool.max_tokens,
                waiting_tokens=self.queue_tokens,
                turn=self.turn,
            )
            if rank is None:
                return
            self.queue.popleft()
            self.queue_tokens -= need
            self.turn += 1
            self.rows[rank] += 1
            self.kv[rank] += need
            joined[index] = self.now
            heapq.heappush(self.ends, (self.progress + job.tokens, index, rank, need))
