"""``Schedule``: which requests may start now. Arrival times, a bound on what is in flight, turns after turns."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from deepinfer_engine.bench.workload import PlannedRequest


class Schedule:
    """Hands out each request exactly once, never more than ``concurrency`` at a time.

    Without arrival times (closed loop) the ready request with the lowest index goes first, so sessions are finished
    before new ones begin; with them the one that has been ready longest. A turn becomes ready ``pause_s`` after the
    turn before it ended, however it ended.
    """

    def __init__(self, requests: Sequence[PlannedRequest], concurrency: int | None):
        self._requests = {r.index: r for r in requests}
        self._limit = concurrency
        self._by_index = all(r.arrival_s is None for r in requests)
        self._coming: list[tuple[float, int]] = []
        self._ready: list[tuple[float, int]] = []
        self._follows: dict[int, int] = {}
        self._due: dict[int, float | None] = {}
        self.flying: set[int] = set()
        self.unsent = set(self._requests)
        for r in requests:
            if r.after is not None and r.after in self._requests:
                self._follows[r.after] = r.index
            else:
                self._due[r.index] = r.arrival_s
                heapq.heappush(self._coming, (r.arrival_s or 0.0, r.index))

    @property
    def over(self) -> bool:
        """Everything was sent and has ended."""
        return not self.unsent and not self.flying

    def due(self, now_s: float) -> list[PlannedRequest]:
        """Requests to start now, in order; they count as in flight from here on."""
        while self._coming and self._coming[0][0] <= now_s:
            ready_s, index = heapq.heappop(self._coming)
            heapq.heappush(self._ready, (0.0 if self._by_index else ready_s, index))
        out = []
        while self._ready and (self._limit is None or len(self.flying) < self._limit):
            _, index = heapq.heappop(self._ready)
            self.flying.add(index)
            self.unsent.discard(index)
            out.append(self._requests[index])
        return out

    def due_s(self, index: int) -> float | None:
        """When a request should have started; None when only a free place decides."""
        return self._due.get(index)

    def ended(self, index: int, now_s: float) -> None:
        """A request is no longer in flight; the turn after it becomes ready after its pause."""
        self.flying.remove(index)
        if (following := self._follows.pop(index, None)) is not None:
            ready_s = now_s + self._requests[following].pause_s
            self._due[following] = ready_s
            heapq.heappush(self._coming, (ready_s, following))

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a request can start by time alone; None when an end must come first."""
        if self._limit is not None and len(self.flying) >= self._limit:
            return None
        return max(0.0, self._coming[0][0] - now_s) if self._coming else None
