"""Writing behind: blocks go to the store off the critical path. A full queue drops writes, never delays a step."""

from __future__ import annotations

import queue
import threading
import time

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.store.interface import BlockStore, TrafficClass
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import CapacityError

#: blocks waiting to be written; 64 of the release are 7 MiB
_DEPTH = 64
#: puts between two collections: the capacity is kept to within this many blocks
_COLLECT_EVERY = 1024


class WriteBehind:
    """One thread that puts blocks, and collects what expired or is above the capacity.

    ``dropped`` counts writes given up because the queue was full. ``failed`` is the store's complaint that ended
    writing (a full disk); what is read stays available.
    """

    def __init__(self, store: BlockStore, traffic: TrafficClass = "chat"):
        self.dropped = 0
        self.failed: CapacityError | None = None
        self._store = store
        self._traffic: TrafficClass = traffic
        self._queue: queue.Queue[tuple[Key, Payload] | None] = queue.Queue(_DEPTH)
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
            except CapacityError as exc:
                self.failed = exc

    def close(self) -> None:
        """Write what is queued and end."""
        self._queue.put(None)
        self._thread.join()
