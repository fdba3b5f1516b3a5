"""Mesh: dispatch token rows to physical expert slots and combine them again.

A physical slot belongs to one rank and holds one logical expert; ``slot_expert`` says which. The model speaks of
logical experts only, so moving an expert never touches it. ``LocalMesh`` holds any number of virtual ranks in one
process; a transport between processes implements the same two calls.

Worked example, 2 ranks × 2 slots, 3 experts: slot_expert [0, 1 | 2, 0] gives expert 0 two replicas (slots 0 and 3);
a token at an even hash goes to slot 0, at an odd one to slot 3, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.errors import UsageError
from deepinfer_engine.weights.read_plan import owned_experts

#: Knuth's multiplicative constant: spreads consecutive positions over replicas
_HASH = 2654435761


@dataclass(frozen=True)
class Placement:
    """Which logical expert each physical slot holds: ``slot_expert`` int32 [L, R·S], rank = slot // S."""

    ranks: int
    slots_per_rank: int
    slot_expert: np.ndarray

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
    def slots_LRS(self) -> np.ndarray:
        """The table by rank: int64 [L, R, S]."""
        return self.slot_expert.astype(np.int64).reshape(-1, self.ranks, self.slots_per_rank)

    def check(self, experts: int) -> None:
        """Every logical expert must have a slot in every layer."""
        for layer, row in enumerate(self.slot_expert):
            missing = sorted(set(range(experts)) - {int(e) for e in row})
            if missing:
                raise UsageError(f"layer {layer}: experts {missing[:8]} have no slot among {self.slot_expert.shape[1]}")


@dataclass(frozen=True)
class Dispatched:
    """Rows sorted by slot: source token [M], rows per slot [P], routing weight [M], place of each pair [T·K]."""

    rows: Tensor
    counts: Tensor
    weight: Tensor
    order: Tensor
    choices: int


class Mesh(Protocol):
    """What the model needs of a mesh."""

    placement: Placement

    def dispatch(
        self, ops: Any, layer: int, x: Tensor, experts: Tensor, weights: Tensor, position: Tensor
    ) -> Dispatched: ...

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor: ...


class LocalMesh:
    """R virtual ranks in this process. Replicas are chosen by a hash of the token's position, never of the batch."""

    def __init__(self, placement: Placement, experts: int, device: str = "cpu"):
        placement.check(experts)
        self.placement = placement
        layers, slots = placement.slot_expert.shape
        copies = np.stack([np.bincount(row, minlength=experts) for row in placement.slot_expert])
        table = np.zeros((layers, experts, int(copies.max())), dtype=np.int64)
        for layer in range(layers):
            seen = np.zeros(experts, dtype=np.int64)
            for slot in range(slots):
                e = placement.slot_expert[layer, slot]
                table[layer, e, seen[e]] = slot
                seen[e] += 1
        self._slot_of = torch.from_numpy(table).to(device)
        self._copies = torch.from_numpy(copies).to(device)

    def dispatch(
        self, ops: Any, layer: int, x: Tensor, experts: Tensor, weights: Tensor, position: Tensor
    ) -> Dispatched:
        """x [T, H], experts [T, K] logical ids, weights [T, K], position [T] → rows sorted by physical slot."""
        if self._slot_of.shape[2] == 1:
            slots = self._slot_of[layer, experts, 0]
        else:
            hashed = ((position.unsqueeze(1) + experts) * _HASH) >> 16
            slots = self._slot_of[layer, experts, hashed % self._copies[layer, experts]]
        token, order, counts = ops.dispatch_permute(slots, self.placement.slot_expert.shape[1])
        weight = torch.empty_like(weights.flatten()).index_copy_(0, order, weights.flatten())
        return Dispatched(x.index_select(0, token), counts, weight, order, experts.shape[1])

    def combine(self, ops: Any, y: Tensor, sent: Dispatched, shared: Tensor) -> Tensor:
        """Expert rows y [M, H] back to their tokens, plus the shared expert's [T, H]."""
        return ops.moe_combine(y, sent.order, shared, sent.choices)
