"""Speed of a store on a disk beside plain unbuffered I/O of the same size and depth, in interleaved rounds.

A round is: plain writes, puts, plain random reads, random gets, with the same number of blocks in flight: one per
thread, but puts two by two through half as many threads, since a writer has more than one to hand over. Plain writes
go to a preallocated file that was never written, as a log's do (``fresh``), and over a written one (``rewrite``), which
is the best the file system can do and what no store of new blocks does.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.cache.store.direct import Buffers, open_direct, write_all
from deepinfer_engine.cache.store.interface import StoreOptions, open_store
from deepinfer_engine.cache.store.scratch import scratch_folder
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import NotReadyError, UsageError

#: 112 KiB, the published size of a block
BLOCK_BYTES = 112 * 1024


@dataclass(frozen=True)
class Speeds:
    """MiB/s of 112 KiB blocks, one value per round; ``direct``: the page cache was bypassed."""

    fresh: tuple[float, ...]
    rewrite: tuple[float, ...]
    put: tuple[float, ...]
    read: tuple[float, ...]
    get: tuple[float, ...]
    direct: bool

    def ratios(self) -> dict[str, float]:
        """Ratios of the medians."""
        mid = {name: statistics.median(getattr(self, name)) for name in ("fresh", "rewrite", "put", "read", "get")}
        return {
            "put / fresh": mid["put"] / mid["fresh"],
            "put / rewrite": mid["put"] / mid["rewrite"],
            "get / read": mid["get"] / mid["read"],
        }


def measure_store(
    folder: Path,
    backend: str,
    *,
    depth: int = 8,
    rounds: int = 7,
    blocks: int = 512,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Speeds:
    """Speeds in a temporary folder inside ``folder``, which is removed again; so are those that killed runs left.

    Raises ``UsageError`` when ``folder`` is none, ``NotReadyError`` when it cannot be written or a block does not come
    back.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder", hint="give a folder on the disk to measure")
    try:
        with scratch_folder(folder, ".deepinfer-kv-") as base:
            return _measure(base, backend, depth, rounds, blocks, progress)
    except OSError as exc:
        raise NotReadyError(f"{folder}: cannot measure: {exc.strerror}") from None


def _measure(
    base: Path, backend: str, depth: int, rounds: int, blocks: int, progress: Callable[[int, int], None]
) -> Speeds:
    rng = random.Random(0)
    data = [rng.randbytes(BLOCK_BYTES) for _ in range(16)]
    buffers = Buffers()
    store = open_store(StoreOptions(base / "kv", namespace=bytes(32)), backend)

    def key_of(i: int) -> bytes:
        return i.to_bytes(32, "little")

    def writer(fd: int) -> Callable[[int], None]:
        def write(i: int) -> None:
            buffer = buffers.get(BLOCK_BYTES)
            buffer[:] = data[i % 16]
            write_all(fd, buffer, i % blocks * BLOCK_BYTES)

        return write

    def put(batch: range) -> None:
        store.put_many([(key_of(i), Payload(data[i % 16])) for i in batch])

    def get(i: int) -> None:
        payload = store.get([key_of(i)])[0]
        if payload is None or payload.data != data[i % 16]:
            raise NotReadyError(f"{base}: block {i} did not come back")

    seconds: dict[str, list[float]] = {name: [] for name in ("fresh", "rewrite", "put", "read", "get")}
    direct = False
    try:
        with ThreadPoolExecutor(depth) as pool:
            for turn in range(rounds):
                items = list(range(turn * blocks, (turn + 1) * blocks))
                order = rng.sample(items, blocks)
                fd, direct = open_direct(base / f"plain-{turn}", os.O_RDWR | os.O_CREAT)

                def read(i: int, fd: int = fd) -> None:
                    os.preadv(fd, [buffers.get(BLOCK_BYTES)], i % blocks * BLOCK_BYTES)

                write = writer(fd)
                lanes = max(1, depth // 2)
                batch = depth // lanes
                batches = [range(i, min(i + batch, items[-1] + 1)) for i in items[::batch]]
                try:
                    os.posix_fallocate(fd, 0, blocks * BLOCK_BYTES)
                    seconds["fresh"].append(_timed(pool, depth, write, items))
                    seconds["put"].append(_timed(pool, lanes, put, batches))
                    seconds["read"].append(_timed(pool, depth, read, order))
                    seconds["get"].append(_timed(pool, depth, get, order))
                    seconds["rewrite"].append(_timed(pool, depth, write, items))
                finally:
                    os.close(fd)
                (base / f"plain-{turn}").unlink()
                progress(turn + 1, rounds)
    finally:
        store.close()
    mib = blocks * BLOCK_BYTES / 2**20
    speeds = {name: tuple(mib / s for s in values) for name, values in seconds.items()}
    return Speeds(direct=direct, **speeds)


def _timed(pool: ThreadPoolExecutor, depth: int, act: Callable[[Any], None], items: Sequence[Any]) -> float:
    stop = threading.Event()

    def lane(first: int) -> None:
        for i in items[first::depth]:
            if stop.is_set():
                return
            act(i)

    begin = time.perf_counter()
    lanes = [pool.submit(lane, first) for first in range(depth)]
    try:
        for done in as_completed(lanes):
            done.result()
    finally:
        stop.set()  # after a failure or an interrupt nothing is begun
        wait(lanes)
    return time.perf_counter() - begin
