"""``Stopwatch``: what a step itself took, without what it waited for.

A step is launched in parts, between which the host goes on with other things (masks, the results of the step before),
and inside a part it may wait for blocks that are still being read. Neither says anything about the next step.

On a device the marks are events in its queue: what it still had to do of the step before is not counted, and a wait
counts as one only as far as the device had nothing left to do meanwhile. With several processes the exchanges are part
of the step, for whichever of them is the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Spans between marks: ``mark()`` sets one, ``between_ms(a, b)`` is the time from one to another."""

    def __init__(self, mark: Callable[[], Any], between_ms: Callable[[Any, Any], float]):
        self._mark = mark
        self._between_ms = between_ms
        self._parts: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around a part of the step."""
        with self._span(self._parts):
            yield

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around a wait inside a part."""
        with self._span(self._waits):
            yield

    def ms(self) -> float:
        """The parts without the waits in them; on a device once it has passed the last mark."""
        return sum(self._between_ms(*span) for span in self._parts) - sum(self._between_ms(*s) for s in self._waits)

    @contextmanager
    def _span(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        begin = self._mark()
        yield
        spans.append((begin, self._mark()))


def stopwatch_of(device: str) -> Stopwatch:
    """The stopwatch of a torch device."""
    if device.startswith("cuda"):
        return Stopwatch(_event, lambda begin, end: begin.elapsed_time(end))
    return Stopwatch(time.perf_counter, lambda begin, end: (end - begin) * 1000)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
