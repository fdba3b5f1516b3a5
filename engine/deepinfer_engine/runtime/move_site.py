"""``MoveSite``: one process's part in a rebalance: its own plan of the moves, its slots, its table.

Every process works the moves out by itself from its own table and the new slots, and answers with a digest of all of
it. Equal digests mean that sends and receives will meet; only then are steps carried out, by number.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.eplb.moving import MovePlan, plan_moves
from deepinfer_engine.runtime.expert_mover import Exchange, ExpertMover


@dataclass(frozen=True, eq=False)
class MoveOrder:
    """Slots to come to, int64 [L, R, S]; layers by urgency; most bytes a rank may receive per step."""

    slot_LRS: np.ndarray
    layers: tuple[int, ...]
    limit: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """The moves of an order from the slots that were there, and the table after each step that completes a layer."""

    moves: MovePlan
    tables: tuple[SlotTable | None, ...]
    digest: str


class MoveSite:
    """Fills this process's slots and switches its table. ``prepare`` may run beside steps, ``run`` between two."""

    def __init__(self, banks: Sequence[Any], mesh: Any, device: str, ops: Any, exchange: Exchange | None = None):
        self._mesh = mesh
        self._device = device
        self._mover = ExpertMover(banks, mesh.local_slots, ops, exchange)
        self.ready: Prepared | None = None
        self._timed: list[tuple[Any, Any]] = []

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as it lies in its slot."""
        return self._mover.expert_bytes

    def work_out(self, order: MoveOrder) -> Prepared:
        """The moves from the slots of the current table."""
        table: SlotTable = self._mesh.table
        old_LRS, epoch = table.placement.slots_LRS, table.epoch
        moves = plan_moves(
            old_LRS, order.slot_LRS, expert_bytes=self.expert_bytes, limit=order.limit, order=order.layers
        )
        digest = hashlib.sha256(f"{epoch} {self.expert_bytes} {order.limit} {order.layers}".encode())
        for slots in (old_LRS, order.slot_LRS):
            digest.update(np.ascontiguousarray(slots, "<i8").data)
        digest.update(repr(moves.steps).encode())
        tables: list[SlotTable | None] = []
        for step, slot_LRS in zip(moves.steps, moves.after, strict=True):
            if any(part.last for part in step):
                epoch += 1
                tables.append(SlotTable.build(Placement.of(slot_LRS), table.experts, self._device, epoch=epoch))
            else:
                tables.append(None)
        return Prepared(moves, tuple(tables), digest.hexdigest())

    def prepare(self, order: MoveOrder) -> Prepared:
        """Work an order out and keep it for ``run``."""
        self.ready = self.work_out(order)
        self._timed = []
        return self.ready

    def run(self, index: int) -> None:
        """Carry out a step of what was prepared: its pieces, and the switch of the layers that are complete."""
        assert self.ready is not None
        began = self._clock()
        self._mover.run(self.ready.moves.steps[index])
        table = self.ready.tables[index]
        if table is not None:
            self._mesh.switch(table)
        self._timed.append((began, self._clock()))

    def spent_ms(self) -> float:
        """Time that the steps run so far took on this process's device."""
        if not self._timed:
            return 0.0
        if self._device.startswith("cuda"):
            self._timed[-1][1].synchronize()
            return sum(began.elapsed_time(ended) for began, ended in self._timed)
        return sum(ended - began for began, ended in self._timed) * 1000

    def _clock(self) -> Any:
        if not self._device.startswith("cuda"):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
