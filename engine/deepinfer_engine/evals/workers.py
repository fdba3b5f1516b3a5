"""A few threads that wait for the network on behalf of one caller.

They are daemon threads: a request may hang for as long as an endpoint likes, and an interrupted run must end now. The
executors of the standard library join their threads when the interpreter exits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Workers(Generic[T]):
    """Runs calls on ``count`` threads and hands results back in the order in which they finish. One caller only."""

    def __init__(self, count: int, name: str):
        self._calls: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._threads = 0
        self.in_flight = 0

    def put(self, call: Callable[[], T]) -> None:
        """Queue a call; a thread is added while there are fewer than calls in flight."""
        self.in_flight += 1
        if self._threads < min(self.in_flight, self._count):
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._threads += 1
        self._calls.put(call)

    def ready(self) -> bool:
        """Whether ``get`` returns at once."""
        return not self._results.empty()

    def get(self) -> T:
        """The next result; raises what the call raised."""
        result, error = self._results.get()
        self.in_flight -= 1
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Let idle threads end; calls under way are left behind."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((call(), None))
            except BaseException as exc:  # the thread's boundary: the caller raises it
                self._results.put((None, exc))
