"""Which logical expert each physical slot holds, and the table from experts to slots that dispatch reads.

Rank r owns the physical slots r·S … r·S + S − 1. A slot may be empty (−1: a dead rank), an expert may have several
slots (replicas). ``SlotTable`` is immutable: a new placement is a new table, and a mesh switches to it between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.errors import UsageError
from deepinfer_engine.weights.read_plan import owned_experts


@dataclass(frozen=True, eq=False)
class Placement:
    """Which logical expert each physical slot holds: ``slot_expert`` int32 [L, R·S], −1 for an empty slot."""

    ranks: int
    slots_per_rank: int
    slot_expert: np.ndarray

    @classmethod
    def of(cls, slot_expert_LRS: np.ndarray) -> Placement:
        """From the slots of an expert plan, [L, R, S]."""
        layers, ranks, slots = slot_expert_LRS.shape
        return cls(ranks, slots, np.ascontiguousarray(slot_expert_LRS, dtype=np.int32).reshape(layers, -1))

    @classmethod
    def static(cls, layers: int, experts: int, *, ranks: int, redundant_per_rank: int) -> Placement:
        """Every rank's own experts (the identity placement of the weights reader), then replicas round robin.

        Every rank gets ceil(experts / ranks) + redundant slots; a slot beyond its own experts repeats one that the
        rank does not hold yet.
        """
        own = -(-experts // ranks)
        per_rank = own + redundant_per_rank
        table = np.full((ranks, per_rank), -1, dtype=np.int32)
        for rank in range(ranks):
            mine = owned_experts(experts, ranks, rank)
            table[rank, : len(mine)] = mine
        fill = 0
        for rank in range(ranks):
            held = {int(e) for e in table[rank] if e >= 0}
            for slot in range(per_rank):
                if table[rank, slot] >= 0:
                    continue
                for _ in range(experts):
                    if fill % experts not in held:
                        break
                    fill += 1
                table[rank, slot] = fill % experts
                held.add(fill % experts)
                fill += 1
        return cls(ranks, per_rank, np.tile(table.reshape(1, -1), (layers, 1)))

    @property
    def layers(self) -> int:
        return self.slot_expert.shape[0]

    @property
    def slots(self) -> int:
        """Physical slots of all ranks, R·S."""
        return self.slot_expert.shape[1]

    @cached_property
    def slots_LRS(self) -> np.ndarray:
        """The table by rank: int64 [L, R, S]."""
        return self.slot_expert.astype(np.int64).reshape(self.layers, self.ranks, self.slots_per_rank)

    def of_ranks(self, ranks: range) -> np.ndarray:
        """Slots of consecutive ranks in order, int32 [L, len(ranks)·S]: what the process that hosts them loads."""
        return self.slot_expert[:, ranks.start * self.slots_per_rank : ranks.stop * self.slots_per_rank]

    def check(self, experts: int) -> None:
        """Every logical expert must have a slot in every layer; every slot an expert that exists."""
        if self.slots != self.ranks * self.slots_per_rank:
            raise UsageError(f"{self.slots} slots are not {self.ranks} ranks of {self.slots_per_rank}")
        for layer, row in enumerate(self.slot_expert):
            held = {int(e) for e in row}
            if bad := sorted(held - set(range(-1, experts))):
                raise UsageError(f"layer {layer}: a slot holds expert {bad[0]}, the model has 0..{experts - 1}")
            if missing := sorted(set(range(experts)) - held):
                raise UsageError(f"layer {layer}: experts {missing[:8]} have no slot among {self.slots}")


@dataclass(frozen=True, eq=False)
class SlotTable:
    """What dispatch reads: ``slot_of`` int64 [L, E, X] physical slots of each expert's replicas, the first
    ``copies`` [L, E] of them valid; both on the device. ``epoch`` counts the placements of one run."""

    placement: Placement
    experts: int
    slot_of: Tensor
    copies: Tensor
    epoch: int = 0

    @classmethod
    def build(cls, placement: Placement, experts: int, device: str = "cpu", *, epoch: int = 0) -> SlotTable:
        """Check a placement and turn it into lookup tables; an expert's replicas are in order of slots.

        Raises ``UsageError`` when an expert has no slot.
        """
        placement.check(experts)
        layer, slot = np.nonzero(placement.slot_expert >= 0)
        row = layer * experts + placement.slot_expert[layer, slot]
        order = np.argsort(row, kind="stable")  # by (layer, expert), slots ascending
        row, slot = row[order], slot[order]
        copies = np.bincount(row, minlength=placement.layers * experts)
        nth = np.arange(len(row)) - (np.cumsum(copies) - copies)[row]
        table = np.zeros((placement.layers * experts, int(copies.max())), dtype=np.int64)
        table[row, nth] = slot
        shape = (placement.layers, experts, -1)
        return cls(
            placement,
            experts,
            torch.from_numpy(table.reshape(shape)).to(device),
            torch.from_numpy(copies.reshape(shape[:2])).to(device),
            epoch,
        )

    @property
    def replicated(self) -> bool:
        """Whether some expert has more than one slot."""
        return self.slot_of.shape[2] > 1
