"""``ExpertMover``: fills expert slots with other experts' weights, in place, through a staging area.

It executes the parts of a move plan and decides nothing. An expert is the bytes of its row in every tensor of the
layer's expert stacks, one after the other, whatever their format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_engine.eplb.moving import LayerPart, MoveStep, Piece

#: experts up to this size are copied many at a time; larger ones one by one, where a temporary of many would not do
_BATCHED_BYTES = 1 << 20


class Exchange(Protocol):
    """Carries bytes between the processes that host slots."""

    def process_of(self, slot: int) -> int:
        """Process that hosts a physical slot."""
        ...

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive (process, uint8 bytes) in order; every process calls it in the same order of steps."""
        ...


class ExpertMover:
    """Slots ``local_slots`` of every layer, whose expert stacks are ``banks``; others are reached through
    ``exchange``."""

    def __init__(self, banks: Sequence[Any], local_slots: range, ops: Any, exchange: Exchange | None = None):
        self._ops = ops
        self._local = local_slots
        self._exchange = exchange
        self._rows = [[_byte_rows(t, len(local_slots)) for t in _tensors(bank)] for bank in banks]
        widths = {tuple(rows.shape[1] for rows in layer) for layer in self._rows}
        assert len(widths) == 1, "expert stacks differ between layers"
        self._widths = widths.pop()
        self._staging: list[Tensor] = []

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as it lies in its slot."""
        return sum(self._widths)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging area: the changed slots of one layer."""
        return sum(t.numel() for t in self._staging)

    @torch.inference_mode()
    def run(self, step: MoveStep) -> None:
        """Copy a step's pieces to the staging area and fill the slots of the layers that are complete."""
        for part in step:
            self._run_part(part)

    def _run_part(self, part: LayerPart) -> None:
        mine = [slot for slot in part.slots if slot in self._local]
        place = {slot: i for i, slot in enumerate(mine)}
        self._reserve(len(mine))
        rows = self._rows[part.layer]
        whole: list[Piece] = []
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for piece in part.pieces:
            here, there = piece.src in self._local, piece.dst in self._local
            if here and there:
                if piece.hi - piece.lo == self.expert_bytes <= _BATCHED_BYTES:
                    whole.append(piece)
                else:
                    source = self._slices(rows, piece.src - self._local.start, piece)
                    for out, data in zip(self._slices(self._staging, place[piece.dst], piece), source, strict=True):
                        out.copy_(data, non_blocking=True)
            elif here or there:
                assert self._exchange is not None, "a slot of another process, and nothing to reach it by"
                if here:
                    to = self._exchange.process_of(piece.dst)
                    sends += [(to, t) for t in self._slices(rows, piece.src - self._local.start, piece)]
                else:
                    source = self._exchange.process_of(piece.src)
                    receives += [(source, t) for t in self._slices(self._staging, place[piece.dst], piece)]
        if whole:
            self._copy_whole(rows, whole, place)
        if self._exchange is not None and (sends or receives):
            self._exchange.exchange(sends, receives)
        if part.last and mine:
            at = self._index([slot - self._local.start for slot in mine])
            for out, staged in zip(rows, self._staging, strict=True):
                out.index_copy_(0, at, staged[: len(mine)])

    def _copy_whole(self, rows: list[Tensor], pieces: list[Piece], place: dict[int, int]) -> None:
        source = self._index([p.src - self._local.start for p in pieces])
        at = self._index([place[p.dst] for p in pieces])
        for out, data in zip(self._staging, rows, strict=True):
            self._ops.copy_rows(out, at, data, source)

    def _slices(self, rows: Sequence[Tensor], row: int, piece: Piece) -> Iterator[Tensor]:
        """The parts of an expert's bytes lo … hi − 1, one per tensor that has any of them."""
        start = 0
        for tensor, width in zip(rows, self._widths, strict=True):
            lo, hi = max(piece.lo - start, 0), min(piece.hi - start, width)
            if lo < hi:
                yield tensor[row, lo:hi]
            start += width

    def _reserve(self, places: int) -> None:
        """Make the staging area hold that many experts; it never shrinks."""
        if self._staging and self._staging[0].shape[0] >= places:
            return
        kept = self._staging
        like = self._rows[0]
        self._staging = [torch.empty((places, w), dtype=torch.uint8, device=like[0].device) for w in self._widths]
        for new, old in zip(self._staging, kept, strict=False):
            new[: old.shape[0]].copy_(old)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._rows[0][0].device, non_blocking=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a record of records, in order of fields."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _byte_rows(stack: Tensor, slots: int) -> Tensor:
    """A stack [S, …] as its own bytes, uint8 [S, n]: writing to it writes the weights."""
    assert stack.shape[0] == slots and stack.is_contiguous(), "expert weights are stacked by slot"
    return stack.view(slots, -1).view(torch.uint8)
