"""Execute a read plan: scatter-read shards into fused destinations, prove completeness, report the rate. No torch here.

``preadv`` puts every piece straight into its place; only bytes between pieces pass through a scratch buffer. A filled
bitmap has one bit per piece of every destination; a load that leaves one unset raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.read_plan import Destination, Piece, ReadPlan, Span

#: Bytes of one preadv: large enough for full disk rate, small enough to keep progress and short reads cheap.
BATCH_BYTES = 32 * 1024 * 1024
_IOV_MAX = 1024  # POSIX limit of buffers per call on Linux

Allocate = Callable[[Destination], memoryview]
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ShardReport:
    """What was read from one shard. ``useful_bytes`` reached a destination, ``read_bytes`` includes bridged gaps."""

    file: str
    useful_bytes: int
    read_bytes: int
    seconds: float

    @property
    def mb_s(self) -> float:
        """Useful megabytes (10^6 bytes) per second."""
        return self.useful_bytes / 1e6 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Loaded:
    """Filled destinations as raw bytes, and how fast each shard came."""

    buffers: dict[str, memoryview]
    shards: tuple[ShardReport, ...]

    @property
    def mb_s(self) -> float:
        return sum(s.useful_bytes for s in self.shards) / 1e6 / max(sum(s.seconds for s in self.shards), 1e-9)


def execute(
    checkpoint: Checkpoint, plan: ReadPlan, *, allocate: Allocate | None = None, progress: Progress | None = None
) -> Loaded:
    """Read everything in ``plan``.

    ``allocate`` gives a writable buffer of ``destination.nbytes`` (default: fresh memory); empty expert slots are
    zeroed. ``progress(file, bytes)`` is called after each batch. Raises ``CheckpointError`` for a shard that ends
    early, a scale byte 255, or a destination that is not completely filled.
    """
    buffers = {name: (allocate or _fresh)(d) for name, d in plan.destinations.items()}
    for name, buffer in buffers.items():
        need = plan.destinations[name].nbytes
        assert buffer.nbytes == need and not buffer.readonly, f"{name}: allocate() gave {buffer.nbytes} of {need} bytes"
    filled = FilledBitmap(plan)
    problems: list[str] = []
    reports = []
    for file, spans in _by_file(plan.spans):
        start = time.perf_counter()
        with (checkpoint.directory / file).open("rb", buffering=0) as handle:
            for span in spans:
                _read_span(handle.fileno(), span, buffers, filled, problems, progress)
        seconds = time.perf_counter() - start
        useful = sum(p.nbytes for s in spans for p in s.pieces)
        reports.append(ShardReport(file, useful, sum(s.nbytes for s in spans), seconds))
    for source, target in plan.copies:
        _place(buffers, target)[:] = _place(buffers, source)
        if filled.has(source):
            filled.mark(target)
    for name, at, nbytes in plan.empty:
        buffers[name][at : at + nbytes] = bytes(nbytes)
    problems += _nan_scales(checkpoint, plan, buffers)
    problems += filled.missing()
    if problems:
        raise CheckpointError(str(checkpoint.directory), problems)
    return Loaded(buffers, tuple(reports))


def measure_disk(checkpoint: Checkpoint, plan: ReadPlan, file: str, *, limit: int = 256 * 1024 * 1024) -> float:
    """MB/s at which the disk itself gives up to ``limit`` bytes of ``file`` that this rank owns.

    Plain sequential reads of the planned spans after dropping them from the page cache; comparing a load with it
    tells a slow disk from a slow loader.
    """
    scratch = memoryview(bytearray(8 * 1024 * 1024))
    done = 0
    seconds = 0.0
    with (checkpoint.directory / file).open("rb", buffering=0) as handle:
        for span in plan.spans:
            if span.file != file or done >= limit:
                continue
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.fileno(), span.offset, span.nbytes, os.POSIX_FADV_DONTNEED)
            at, end = span.offset, span.offset + min(span.nbytes, limit - done)
            start = time.perf_counter()
            while at < end:
                got = os.preadv(handle.fileno(), [scratch[: end - at]], at)
                if got == 0:
                    raise CheckpointError(str(checkpoint.directory), [f"shard {file} truncated at byte {at}"])
                at += got
            seconds += time.perf_counter() - start
            done += end - span.offset
    return done / 1e6 / max(seconds, 1e-9)


class FilledBitmap:
    """One bit per piece: set when all its bytes are in place."""

    def __init__(self, plan: ReadPlan):
        self._pieces = plan.pieces
        self._index = {(p.destination, p.at): i for i, p in enumerate(self._pieces)}
        self._bits = bytearray(-(-len(self._pieces) // 8))

    def mark(self, piece: Piece) -> None:
        i = self._index[piece.destination, piece.at]
        self._bits[i >> 3] |= 1 << (i & 7)

    def has(self, piece: Piece) -> bool:
        i = self._index[piece.destination, piece.at]
        return bool(self._bits[i >> 3] >> (i & 7) & 1)

    def missing(self) -> list[str]:
        """One sentence per piece that was never filled."""
        return [
            f"parameter {p.destination} incomplete: missing source {p.tensor}" for p in self._pieces if not self.has(p)
        ]


# ------------------------------------------------------------------------ parts


def _fresh(destination: Destination) -> memoryview:
    return np.empty(destination.nbytes, dtype=np.uint8).data


def _by_file(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    files: dict[str, list[Span]] = {}
    for span in spans:
        files.setdefault(span.file, []).append(span)
    yield from files.items()


def _place(buffers: dict[str, memoryview], piece: Piece) -> memoryview:
    return buffers[piece.destination].cast("B")[piece.at : piece.at + piece.nbytes]


def _read_span(
    fd: int, span: Span, buffers: dict[str, memoryview], filled: FilledBitmap, problems: list[str],
    progress: Progress | None,
) -> None:  # fmt: skip
    end = span.offset
    for batch in _batches(span, buffers):
        wanted = sum(len(view) for view, _ in batch)
        got = _read_fully(fd, [view for view, _ in batch], end)
        end += got
        if progress is not None:
            progress(span.file, got)
        if got < wanted:
            problems.append(f"shard {span.file} truncated: it ends at byte {end}, the load wanted more")
            break
    for piece in span.pieces:
        if piece.offset + piece.nbytes <= end:
            filled.mark(piece)


def _batches(span: Span, buffers: dict[str, memoryview]) -> Iterator[list[tuple[memoryview, int]]]:
    """The buffers of a span in file order, at most ``BATCH_BYTES`` and ``_IOV_MAX`` at a time."""
    batch: list[tuple[memoryview, int]] = []
    size = 0
    for view in _views(span, buffers):
        at = 0
        while at < len(view):
            part = view[at : at + BATCH_BYTES - size]
            batch.append((part, len(part)))
            at += len(part)
            size += len(part)
            if size == BATCH_BYTES or len(batch) == _IOV_MAX:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _views(span: Span, buffers: dict[str, memoryview]) -> Iterator[memoryview]:
    at = span.offset
    for piece in span.pieces:
        if piece.offset > at:
            yield memoryview(bytearray(piece.offset - at))  # a bridged gap, below 1 MiB
        yield _place(buffers, piece)
        at = piece.offset + piece.nbytes


def _read_fully(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill ``views`` from ``offset``; returns the bytes read, fewer than asked only at the end of the file."""
    done = 0
    while views:
        got = os.preadv(fd, views, offset + done)
        if got == 0:
            break
        done += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if views and got:
            views[0] = views[0][got:]
    return done


def _nan_scales(checkpoint: Checkpoint, plan: ReadPlan, buffers: dict[str, memoryview]) -> list[str]:
    return [
        f"tensor {piece.tensor} in {piece.file}: scale byte 255 is not a number"
        for span in plan.spans
        for piece in span.pieces
        if checkpoint.plan[piece.tensor].is_scale
        and int(np.frombuffer(_place(buffers, piece), dtype=np.uint8).max()) == 255
    ]
