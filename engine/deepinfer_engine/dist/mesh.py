"""Mesh: dispatch token rows to physical expert slots and combine them again.

A physical slot belongs to one rank and holds one logical expert; a ``SlotTable`` says which. The model speaks of
logical experts only, so moving an expert never touches it. ``LocalMesh`` holds any number of virtual ranks in one
process; a transport between processes implements the same calls.

Worked example, 2 ranks × 2 slots, 3 experts: slots [0, 1 | 2, 0] give expert 0 two replicas (slots 0 and 3); a token
with an even hash goes to slot 0, one with an odd hash to slot 3, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.dist.replica import Choice, choose


@dataclass(frozen=True)
class Dispatched:
    """Rows for the slots of this process, sorted by slot: rows [M, H], rows per local slot [P], routing weight [M].

    ``order`` and ``choices`` bring results back to their tokens; ``back`` is what a transport needs for it.
    """

    rows: Tensor
    counts: Tensor
    weight: Tensor
    order: Tensor
    choices: int
    back: Any = None


class Mesh(Protocol):
    """What the model needs of a mesh.

    ``table`` is read once per layer of a step; ``switch`` replaces it and must be called between two steps, on every
    rank between the same two. ``local_slots`` are the physical slots whose weights this process holds: physical slot p
    is entry p − local_slots.start of its expert stacks. ``total`` sums an integer tensor over all processes.
    """

    @property
    def table(self) -> SlotTable: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def local_slots(self) -> range: ...

    def switch(self, table: SlotTable) -> None: ...

    def dispatch(
        self, ops: Any, layer: int, x: Tensor, experts: Tensor, weights: Tensor, key: Tensor
    ) -> Dispatched: ...

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor: ...

    def total(self, value: Tensor) -> Tensor: ...


class LocalMesh:
    """All ranks in this process, as many as the table has: no loop over them anywhere."""

    def __init__(self, placement: Placement, experts: int, device: str = "cpu", *, choice: Choice = "hash"):
        self._table = SlotTable.build(placement, experts, device)
        self._choice: Choice = choice

    @property
    def table(self) -> SlotTable:
        return self._table

    @property
    def placement(self) -> Placement:
        return self._table.placement

    @property
    def local_slots(self) -> range:
        return range(self._table.placement.slots)

    def switch(self, table: SlotTable) -> None:
        """Dispatch by ``table`` from the next step on. Its slots must hold the experts it names by then."""
        check_same_storage(self._table, table)
        self._table = table

    def dispatch(self, ops: Any, layer: int, x: Tensor, experts: Tensor, weights: Tensor, key: Tensor) -> Dispatched:
        """x [T, H], experts [T, K] logical ids, weights [T, K], key [T] → rows sorted by physical slot."""
        slots = choose(self._table, layer, experts, key, self._choice)
        rows, weight, order, counts = ops.dispatch_rows(x, slots, weights, self._table.placement.slots)
        return Dispatched(rows, counts, weight, order, experts.shape[1])

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor:
        """Expert rows y [M, H] back to their tokens, plus the shared expert's [T, H]."""
        return ops.moe_combine(y, sent.order, shared, sent.choices)

    def total(self, value: Tensor) -> Tensor:
        """The value itself: there is no other process."""
        return value


def check_same_storage(old: SlotTable, new: SlotTable) -> None:
    """Slots are fixed storage: a new table may fill them differently, it cannot have others."""
    was, now = old.placement, new.placement
    assert (was.layers, was.ranks, was.slots_per_rank) == (now.layers, now.ranks, now.slots_per_rank)
    assert old.experts == new.experts
