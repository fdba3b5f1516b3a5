"""Writing behind: blocks go to the store off the critical path. A full queue drops writes, never delays a step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.store.interface import BlockStore, TrafficClass
from deepinfer_engine.cache.tiers import Payload

#: blocks waiting to be written; 1024 of the release are 111 MiB, the prompt of 131072 tokens that arrives at once
DEPTH = 1024
#: threads that write: while one waits for the disk the other prepares its records
_LANES = 2
#: blocks of one write
_GROUP = 8
#: puts between two collections: the capacity is kept to within this many blocks
_COLLECT_EVERY = 1024
#: seconds that ``close`` waits for the store; a mount that hangs is left to its thread
_CLOSE_S = 60.0


#: number of the put, key, payload; without a key it only wakes a thread
_Item = tuple[int, Key, Payload]


class WriteBehind:
    """Threads that put blocks, and collect what expired or is above the capacity.

    ``dropped`` counts writes given up because the queue was full or the store had failed. ``failed`` is the complaint
    that ended writing (a full disk, a locked index); what is read stays available.
    """

    def __init__(self, store: BlockStore, traffic: TrafficClass = "chat"):
        self.dropped = 0
        self.failed: Exception | None = None
        self._store = store
        self._traffic: TrafficClass = traffic
        self._lock = threading.Lock()
        self._puts = 0
        self._queued = 0  # blocks handed to ``put`` so far
        self._deletions: deque[Sequence[Key]] = deque()
        self._wrong_before: dict[Key, int] = {}  # key: ``_queued`` when it proved wrong
        self._queue: queue.Queue[_Item | None] = queue.Queue(DEPTH)
        self._threads = [threading.Thread(target=self._run, name="kv-write", daemon=True) for _ in range(_LANES)]
        for thread in self._threads:
            thread.start()

    def put(self, key: Key, payload: Payload) -> None:
        """Queue a block, or drop it."""
        try:
            self._queue.put_nowait((self._queued, key, payload))
        except queue.Full:
            self._drop(1)
        self._queued += 1

    def remove(self, keys: Sequence[Key]) -> None:
        """Have blocks deleted that proved wrong, and nothing stored that is queued or being written of them.

        A block that is put again soon afterwards may go with them; it is stored when it is computed the next time.
        """
        self._wrong_before.update(dict.fromkeys(keys, self._queued))  # first: a write under way looks here when it ends
        self._deletions.append(keys)
        with contextlib.suppress(queue.Full):  # then they are awake
            self._queue.put_nowait((0, b"", Payload(b"")))

    def _is_wrong(self, item: _Item) -> bool:
        return item[0] < self._wrong_before.get(item[1], 0)

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count

    def _run(self) -> None:
        ended = False
        while not ended:
            items: list[_Item] = []
            item = self._queue.get()
            while item is not None:
                if item[1]:
                    items.append(item)
                if len(items) == _GROUP or self._queue.empty():
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:  # the other thread was quicker
                    break
            ended = item is None
            self._serve(items)

    def _serve(self, items: list[_Item]) -> None:
        with self._lock:
            due, self._puts = self._puts % _COLLECT_EVERY, self._puts + len(items)
        try:
            while self._deletions:
                with contextlib.suppress(IndexError):  # the other thread was quicker
                    self._store.remove(self._deletions.popleft())
            if self.failed is not None:
                self._drop(len(items))
                return
            if items and (due == 0 or due + len(items) > _COLLECT_EVERY):
                self._store.collect(time.time())
            sound = [item for item in items if not self._is_wrong(item)]
            if sound:
                self._store.put_many([(key, payload) for _, key, payload in sound], self._traffic)
            if late := [item[1] for item in sound if self._is_wrong(item)]:
                self._store.remove(late)
            if self._queue.empty():
                self._store.flush()
        except Exception as exc:  # the boundary of a thread: nobody else hears of it, and the queue must drain
            with self._lock:
                self.failed = self.failed or exc
            self._drop(len(items))

    def close(self, wait_s: float = _CLOSE_S) -> bool:
        """Write what is queued and end; False when the store did not come back within ``wait_s``."""
        until = time.monotonic() + wait_s
        try:
            for _ in self._threads:
                self._queue.put(None, timeout=max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        else:
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._drop(self._queue.qsize())
            self.failed = self.failed or TimeoutError(f"the store did not answer within {wait_s:.0f} s")
            return False
        return True
