"""Layouts that do not come from loads: identity, what survives of an old plan, slots kept in place, groups packed on
nodes.

``held`` is an old plan as lists: for every rank the experts in its slots, in slot order, -1 for an empty slot.
"""

from __future__ import annotations

import numpy as np

from deepinfer_engine.eplb.placement import LCM, replica_load, separated

Held = list[list[int]]

#: A replica moves from a cold to a hot expert only if the hot one's load per copy exceeds what the cold one's would
#: become
#: by more than a quarter: smaller differences are within a window's drift and not worth a transfer.
RETUNE = (5, 4)


def identity(experts: int, ranks: int, slots: int) -> np.ndarray:
    """Experts in order over the ranks as evenly as possible; spare slots take other experts in turn, half the range
    away."""
    slot_RS = np.full((ranks, slots), -1, np.int64)
    bounds = [r * experts // ranks for r in range(ranks + 1)]
    copies = [1] * experts
    turn = experts // 2
    for r in range(ranks):
        slot_RS[r, : bounds[r + 1] - bounds[r]] = range(bounds[r], bounds[r + 1])
    for r in range(ranks):
        for s in range(bounds[r + 1] - bounds[r], slots):
            row = set(slot_RS[r].tolist())
            order = [(turn + k) % experts for k in range(experts)]
            fresh = [e for e in order if e not in row and copies[e] < 16] or [e for e in order if copies[e] < 16]
            slot_RS[r, s] = fresh[0]
            copies[fresh[0]] += 1
            turn = fresh[0] + 1
    return slot_RS


def on_ranks(old_RS: np.ndarray, ranks: int) -> Held:
    """The old rows of ranks 0 … ranks − 1; ranks the old plan did not have hold nothing."""
    rows = [list(map(int, row)) for row in old_RS[:ranks]]
    return rows + [[] for _ in range(ranks - len(rows))]


def renumbered(row: list[int], ids: np.ndarray) -> list[int]:
    """Experts of one rank as positions in ``ids``; -1 for empty slots and experts that are not among them."""
    where = {int(e): k for k, e in enumerate(ids)}
    return [where.get(e, -1) for e in row]


def complete(held: Held, experts: int, slots: int) -> bool:
    """Whether the rows fill exactly ``slots`` each and hold every expert, none more than 16 times."""
    if any(len(row) != slots or -1 in row for row in held):
        return False
    copies_E = np.bincount([e for row in held for e in row], minlength=experts)
    return bool((copies_E > 0).all()) and int(copies_E.max()) <= 16


def inherited(held: Held, total_E: np.ndarray, slots: int, replicas: int, cap: int | None) -> np.ndarray:
    """A full assignment [R, S] that keeps as much of ``held`` as possible.

    In order: duplicates within a rank and overfull rows are dropped (coldest first); experts nobody holds are placed,
    taking the slots of the replicas that matter least if none is free; free slots get the copies that help most;
    replicas move from cold to hot experts while that is worth it and ``cap`` received experts allow. All decisions on
    exact int64 loads, ties to the lowest id.
    """
    work = _Rows(held, total_E, slots, replicas)
    work.shrink()
    work.place_missing()
    work.fill()
    work.retune(cap)
    copies_E = np.array(work.copies, np.int64)
    return separated(np.array(work.rows, np.int64), replica_load(total_E, copies_E), copies_E)


class _Rows:
    """Rows under construction: experts per rank, copies per expert."""

    def __init__(self, held: Held, total_E: np.ndarray, slots: int, replicas: int):
        self.weight = [int(w) for w in total_E]
        self.slots, self.replicas = slots, replicas
        self.before = [set(row) for row in held]
        self.rows = [list(dict.fromkeys(e for e in row if e >= 0)) for row in held]
        self.copies = [0] * len(self.weight)
        for row in self.rows:
            for e in row:
                self.copies[e] += 1

    def load(self, e: int, copies: int) -> int:
        return self.weight[e] * LCM // copies

    def rank_load(self, r: int) -> int:
        return sum(self.load(e, self.copies[e]) for e in self.rows[r])

    def received(self) -> int:
        return sum(e not in self.before[r] for r, row in enumerate(self.rows) for e in row)

    def _drop(self, r: int, e: int) -> None:
        self.rows[r].remove(e)
        self.copies[e] -= 1

    def _add(self, r: int, e: int) -> None:
        self.rows[r].append(e)
        self.copies[e] += 1

    def shrink(self) -> None:
        """Cut rows to ``slots`` and copies to the cap: replicated experts first, the coldest of them first."""
        for r, row in enumerate(self.rows):
            while len(row) > self.slots:
                self._drop(r, min(row, key=lambda e: (self.copies[e] == 1, self.weight[e], e)))
        for e, n in enumerate(list(self.copies)):
            for r in sorted((r for r, row in enumerate(self.rows) if e in row), key=lambda r: (-self.rank_load(r), r))[
                : max(n - self.replicas, 0)
            ]:
                self._drop(r, e)

    def _free(self) -> int:
        return sum(self.slots - len(row) for row in self.rows)

    def _room(self, e: int) -> int | None:
        """The lightest rank with a free slot that does not hold ``e``."""
        open_ranks = [r for r, row in enumerate(self.rows) if len(row) < self.slots and e not in row]
        return min(open_ranks, key=lambda r: (self.rank_load(r), r)) if open_ranks else None

    def place_missing(self) -> None:
        missing = sorted((e for e, n in enumerate(self.copies) if n == 0), key=lambda e: (-self.weight[e], e))
        while self._free() < len(missing):
            spare = min(
                (e for e, n in enumerate(self.copies) if n > 1), key=lambda e: (self.load(e, self.copies[e] - 1), e)
            )
            holder = max((r for r, row in enumerate(self.rows) if spare in row), key=lambda r: (self.rank_load(r), -r))
            self._drop(holder, spare)
        for e in missing:
            r = self._room(e)
            assert r is not None
            self._add(r, e)

    def fill(self) -> None:
        """Give free slots to the experts with the largest load per copy."""
        while self._free():
            ranked = sorted(
                (e for e, n in enumerate(self.copies) if n < self.replicas),
                key=lambda e: (-self.load(e, self.copies[e]), e),
            )
            placed = next(((r, e) for e in ranked if (r := self._room(e)) is not None), None)
            if (
                placed is None
            ):  # every open rank holds everything that may still be copied: sharing a rank is unavoidable
                r = next(r for r, row in enumerate(self.rows) if len(row) < self.slots)
                placed = (
                    r,
                    min(
                        range(len(self.copies)), key=lambda e: (self.copies[e] >= 16, -self.load(e, self.copies[e]), e)
                    ),
                )
            self._add(*placed)

    def retune(self, cap: int | None) -> None:
        """Move replicas from experts that no longer need them to those that do."""
        for _ in range(len(self.rows) * self.slots):
            if cap is not None and self.received() + 1 > cap:
                return
            hot = min(
                (e for e, n in enumerate(self.copies) if n < self.replicas),
                default=None,
                key=lambda e: (-self.load(e, self.copies[e]), e),
            )
            cold = min(
                (e for e, n in enumerate(self.copies) if n > 1 and e != hot),
                default=None,
                key=lambda e: (self.load(e, self.copies[e] - 1), e),
            )
            if hot is None or cold is None:
                return
            if self.load(hot, self.copies[hot]) * RETUNE[1] <= self.load(cold, self.copies[cold] - 1) * RETUNE[0]:
                return
            ranks = [r for r, row in enumerate(self.rows) if cold in row and hot not in row]
            if not ranks:
                return
            r = min(ranks, key=lambda r: (self.rank_load(r), r))
            self._drop(r, cold)
            self._add(r, hot)


def aligned(slot_RS: np.ndarray, held: Held) -> np.ndarray:
    """The same experts per rank with every expert that stays in the slot it has; newcomers fill the gaps by
    ascending id."""
    out = slot_RS.copy()
    for r, row in enumerate(slot_RS.tolist()):
        if row[0] < 0:
            continue
        left = sorted(row)
        new_row = [-1] * len(row)
        for s, e in enumerate(held[r][: len(row)]):
            if e in left:
                new_row[s] = e
                left.remove(e)
        for s, e in enumerate(new_row):
            if e < 0:
                new_row[s] = left.pop(0)
        out[r] = new_row
    return out


def groups_on_nodes(total_E: np.ndarray, groups: int, nodes: int) -> list[np.ndarray]:
    """Expert ids per node: groups by load descending onto the lightest node with room (ties to the lowest id)."""
    size = len(total_E) // groups
    load_G = total_E.reshape(groups, size).sum(axis=1).tolist()
    packed: list[list[int]] = [[] for _ in range(nodes)]
    weight = [0] * nodes
    for g in sorted(range(groups), key=lambda g: (-load_G[g], g)):
        n = min((n for n in range(nodes) if len(packed[n]) < groups // nodes), key=lambda n: (weight[n], n))
        packed[n].append(g)
        weight[n] += load_G[g]
    return [np.concatenate([np.arange(g * size, (g + 1) * size) for g in sorted(gs)]) for gs in packed]
