"""Lanes: where the work of steps is launched. In order, and nothing else decides.

A device launches asynchronously by itself, so its lane runs the launching code at once. On CPU a lane of one thread
can play the device. In one process that costs more than it hides: a forward pass is some hundred short operations, and
each of them waits for the interpreter lock that the planning thread holds. So there work runs in the caller's thread,
and nothing runs beside it; with several processes a thread waits for the others while rank 0 goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


class Lane(Protocol):
    """Runs launched work in order. ``beside``: whether it goes on after ``launch``, beside the caller."""

    beside: bool

    def launch(self, work: Callable[[], None]) -> Future[None]:
        """Start ``work`` after everything launched before; the future carries its exception, if any."""
        ...

    def close(self) -> None:
        """Finish what was launched."""
        ...


class InlineLane:
    """Work runs when it is launched; ``beside`` where that only fills the queue of a device."""

    def __init__(self, *, beside: bool = False) -> None:
        self.beside = beside

    def launch(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        work()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Nothing is left over."""


class ThreadLane:
    """One thread runs the work; after a failure everything launched behind it fails the same way."""

    beside = True

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "deepinfer-lane")
        self._broken: BaseException | None = None

    def launch(self, work: Callable[[], None]) -> Future[None]:
        return self._pool.submit(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            work()
        except BaseException as exc:
            self._broken = exc
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=True)
