"""Writing behind: blocks go to the store off the critical path. A full queue drops writes, never delays a step."""

from __future__ import annotations

import queue
import threading
import time

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.store.interface import BlockStore, TrafficClass
from deepinfer_engine.cache.tiers import Payload

#: blocks waiting to be written; 1024 of the release are 111 MiB, the prompt of 131072 tokens that arrives at once
DEPTH = 1024
#: puts between two collections: the capacity is kept to within this many blocks
_COLLECT_EVERY = 1024
#: seconds that ``close`` waits for the store; a mount that hangs is left to its thread
_CLOSE_S = 60.0


class WriteBehind:
    """One thread that puts blocks, and collects what expired or is above the capacity.

    ``dropped`` counts writes given up because the queue was full or the store had failed. ``failed`` is the complaint
    that ended writing (a full disk, a locked index); what is read stays available.
    """

    def __init__(self, store: BlockStore, traffic: TrafficClass = "chat"):
        self.dropped = 0
        self.failed: Exception | None = None
        self._store = store
        self._traffic: TrafficClass = traffic
        self._queue: queue.Queue[tuple[Key, Payload] | None] = queue.Queue(DEPTH)
        self._thread = threading.Thread(target=self._run, name="kv-write", daemon=True)
        self._thread.start()

    def put(self, key: Key, payload: Payload) -> None:
        """Queue a block, or drop it."""
        try:
            self._queue.put_nowait((key, payload))
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        puts = 0
        while (item := self._queue.get()) is not None:
            if self.failed is not None:
                self.dropped += 1
                continue
            try:
                if puts % _COLLECT_EVERY == 0:
                    self._store.collect(time.time())
                puts += 1
                self._store.put(*item, self._traffic)
                if self._queue.empty():
                    self._store.flush()
            except Exception as exc:  # the boundary of a thread: nobody else hears of it, and the queue must drain
                self.failed = exc
                self.dropped += 1

    def close(self, wait_s: float = _CLOSE_S) -> bool:
        """Write what is queued and end; False when the store did not come back within ``wait_s``."""
        until = time.monotonic() + wait_s
        try:
            self._queue.put(None, timeout=wait_s)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._queue.qsize()
            self.failed = self.failed or TimeoutError(f"the store did not answer within {wait_s:.0f} s")
            return False
        return True
