"""From one placement to the next under a running engine: which slots are filled from where, and in which step.

Statement. A layer is moved through a staging area: the experts its changed slots will hold are copied there, piece by
piece, while steps go on with the old slots; when all of a layer's pieces are there, they are copied into the slots and
the layer's row of the table changes, between two steps. Slots never hold anything that the table does not say, cycles
need no order, and the staging area is as large as one layer's changed slots.

* A slot whose expert its rank already held is filled from that slot (a local copy). Any other expert is *received*:
  receivers are dealt to the old holders in rank order, so that no holder sends everything.
* In a step no rank receives more than ``limit`` bytes. An expert larger than what is left is cut into byte ranges.
* Layers go in the given order (most gain first); a step goes on with the next layer when the one before is complete.

Worked example: 2 ranks × 2 slots hold [0 1 | 2 3], the plan is [2 1 | 0 3]; experts of 10 bytes, limit 6. Step 0: bytes
0..6 of expert 2 to rank 0 and of expert 0 to rank 1; step 1: bytes 6..10 of both, then both slots are filled and the
table changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class SlotCopy(NamedTuple):
    """Physical slot ``dst`` is to hold ``expert``, which ``src`` holds now; ``received``: from another rank."""

    expert: int
    src: int
    dst: int
    received: bool


class Piece(NamedTuple):
    """Bytes ``lo`` … ``hi`` − 1 of the expert in slot ``src`` go to the staging place of slot ``dst``."""

    src: int
    dst: int
    lo: int
    hi: int
    received: bool


class LayerPart(NamedTuple):
    """Pieces of one layer in one step; ``last``: the layer is complete with them, fill its ``slots`` and switch."""

    layer: int
    slots: tuple[int, ...]
    pieces: tuple[Piece, ...]
    last: bool


MoveStep = tuple[LayerPart, ...]


@dataclass(frozen=True, eq=False)
class MovePlan:
    """Everything a rebalance does: parts by step, the slots [L, R, S] after each step, and what it adds up to.

    ``received_R``: bytes each rank receives in all; ``most``: by step, the most that one rank receives in it.
    """

    steps: tuple[MoveStep, ...]
    after: tuple[np.ndarray, ...]
    experts: int
    received_R: np.ndarray
    most: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(self.received_R.sum())


def slot_copies(old_RS: np.ndarray, new_RS: np.ndarray) -> tuple[SlotCopy, ...]:
    """Every slot of one layer whose expert changes, by slot; -1 slots stay as they are."""
    slots = old_RS.shape[1]
    holders: dict[int, list[int]] = {}
    for at, expert in enumerate(old_RS.reshape(-1).tolist()):
        if expert >= 0:
            holders.setdefault(expert, []).append(at)
    served: dict[int, int] = {}
    out = []
    for dst, (was, expert) in enumerate(zip(old_RS.reshape(-1).tolist(), new_RS.reshape(-1).tolist(), strict=True)):
        if expert in (was, -1):
            continue
        have = holders[expert]
        own = [src for src in have if src // slots == dst // slots]
        if own:
            out.append(SlotCopy(expert, own[0], dst, False))
            continue
        turn = served.get(expert, 0)
        served[expert] = turn + 1
        out.append(SlotCopy(expert, have[turn % len(have)], dst, True))
    return tuple(out)


def plan_moves(
    old_LRS: np.ndarray, new_LRS: np.ndarray, *, expert_bytes: int, limit: int, order: Sequence[int] | None = None
) -> MovePlan:
    """Steps from the slots ``old_LRS`` to ``new_LRS`` (same shape); ``order``: layers, most urgent first."""
    layers, ranks, slots = old_LRS.shape
    assert old_LRS.shape == new_LRS.shape and expert_bytes > 0 and limit > 0
    steps: list[MoveStep] = []
    after: list[np.ndarray] = []
    now_LRS = old_LRS.copy()
    parts: list[LayerPart] = []
    left_R = np.full(ranks, limit, np.int64)
    received_R = np.zeros(ranks, np.int64)
    most: list[int] = []
    experts = 0

    def close() -> None:
        steps.append(tuple(parts))
        after.append(now_LRS.copy())
        most.append(limit - int(left_R.min()))
        parts.clear()
        left_R[:] = limit

    for layer in range(layers) if order is None else order:
        todo = [(copy, 0) for copy in slot_copies(old_LRS[layer], new_LRS[layer])]
        filled = tuple(copy.dst for copy, _ in todo)
        experts += sum(copy.received for copy, _ in todo)
        while todo:
            pieces, rest = [], []
            for copy, done in todo:
                rank = copy.dst // slots
                size = min(expert_bytes - done, int(left_R[rank])) if copy.received else expert_bytes
                if size:
                    pieces.append(Piece(copy.src, copy.dst, done, done + size, copy.received))
                if copy.received:
                    left_R[rank] -= size
                    received_R[rank] += size
                if done + size < expert_bytes:
                    rest.append((copy, done + size))
            todo = rest
            if pieces:
                parts.append(LayerPart(layer, filled, tuple(pieces), not todo))
            if todo:
                close()
            else:
                now_LRS[layer] = new_LRS[layer]
    if parts:
        close()
    return MovePlan(tuple(steps), tuple(after), experts, received_R, tuple(most))
