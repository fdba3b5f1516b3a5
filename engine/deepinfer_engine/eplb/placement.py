"""How many replicas each expert gets and a first, longest-first assignment of them to ranks. Integers only.

Rules (all exact int64, ``LCM`` = lcm(1..16) makes every load ÷ copies an integer):

* replicas: one at a time to the expert with the largest weight ÷ copies; ties to the lowest id; never more than
  min(ranks, 16) copies while that is avoidable.
* longest-first: replicas by load per copy descending, then expert id; each to the rank with the smallest load that has
  a free slot and does not hold the expert yet; ties to the lowest rank.
* no two replicas of an expert on one rank when copies ≤ ranks: the rare dead end of the greedy rule is repaired by a
  swap.

Worked example: weights 6, 3, 2, 1 on 2 ranks with 3 slots → copies 2, 2, 1, 1 → loads per copy 3, 1.5, 2, 1 → rank 0
holds experts 0, 2, 1 (6.5 of 12) and rank 1 holds 0, 1, 3 (5.5 of 12).
"""

from __future__ import annotations

import heapq

import numpy as np

from deepinfer_engine.errors import UsageError

#: lcm(1..16): with at most 16 replicas, weight · LCM ÷ copies is an exact integer.
LCM = 720_720
MAX_REPLICAS = 16

#: Weights above this would overflow weight · LCM in int64.
MAX_WEIGHT = (2**63 - 1) // LCM


def replica_cap(experts: int, ranks: int, slots: int) -> int:
    """Most copies one expert may get: min(ranks, 16), or 16 when only that can fill the slots (replicas then share a
    rank).

    Raises UsageError when there are fewer slots than experts or more than 16 copies of each would be needed.
    """
    if slots < experts:
        raise UsageError(f"{slots} slots for {experts} experts: every expert needs one")
    if slots > experts * MAX_REPLICAS:
        raise UsageError(
            f"{slots} slots for {experts} experts: more than {MAX_REPLICAS} replicas of one expert are not supported"
        )
    cap = min(ranks, MAX_REPLICAS)
    return cap if experts * cap >= slots else MAX_REPLICAS


def replica_load(weight_E: np.ndarray, copies_E: np.ndarray) -> np.ndarray:
    """Load of one replica of each expert, exact int64 [E], in units of 1/LCM weight."""
    return weight_E.astype(np.int64) * LCM // copies_E


def replica_counts(weight_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Copies per expert [E], summing to ``slots``."""
    experts = len(weight_E)
    cap = replica_cap(experts, ranks, slots)
    copies_E = np.ones(experts, np.int64)
    score_E = weight_E.astype(np.int64) * LCM
    scaled_E = score_E.copy()
    for _ in range(slots - experts):
        e = int(score_E.argmax())
        copies_E[e] += 1
        # A capped expert leaves the race; -1 is below every real score.
        score_E[e] = scaled_E[e] // copies_E[e] if copies_E[e] < cap else -1
    return copies_E


def longest_first(weight_E: np.ndarray, copies_E: np.ndarray, ranks: int) -> np.ndarray:
    """Expert of every slot, int64 [R, S], by the longest-first rule; S = Σ copies ÷ ranks. Σ weights is at most
    ``MAX_WEIGHT``."""
    load_E = replica_load(weight_E, copies_E)
    order_E = np.argsort(-load_E, kind="stable")
    slots = int(copies_E.sum()) // ranks
    rows: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0, r) for r in range(ranks)]  # a heap of the ranks with free slots
    for e, w, copies in zip(order_E.tolist(), load_E[order_E].tolist(), copies_E[order_E].tolist(), strict=True):
        holding: list[tuple[int, int]] = []  # ranks with free slots that hold e by now, out of the heap
        for _ in range(copies):
            source = lightest or holding
            load, r = heapq.heappop(source)
            rows[r].append(e)
            if len(rows[r]) < slots:
                heapq.heappush(holding, (load + w, r))
        for item in holding:
            heapq.heappush(lightest, item)
    return separated(np.array(rows, np.int64), load_E, copies_E)


def colocated(slot_RS: np.ndarray) -> list[tuple[int, int]]:
    """(rank, slot) of every replica that shares its rank with an earlier replica of the same expert."""
    out = []
    for r, row in enumerate(slot_RS.tolist()):
        seen: set[int] = set()
        for s, e in enumerate(row):
            if e >= 0 and e in seen:
                out.append((r, s))
            seen.add(e)
    return out


def separated(slot_RS: np.ndarray, load_E: np.ndarray, copies_E: np.ndarray) -> np.ndarray:
    """The same assignment with shared ranks undone by swaps, where copies ≤ ranks makes that possible.

    Each offending replica is exchanged with the replica of another rank that keeps the larger of the two rank loads
    smallest (ties to the lowest rank, then slot).
    """
    ranks = slot_RS.shape[0]
    pending = [(r, s) for r, s in colocated(slot_RS) if copies_E[slot_RS[r, s]] <= ranks]
    if not pending:
        return slot_RS
    slot_RS = slot_RS.copy()
    for a, s in pending:
        e = int(slot_RS[a, s])
        loads = load_E[slot_RS].sum(axis=1)
        best: tuple[int, int, int] | None = None
        for b in range(ranks):
            if b == a or e in slot_RS[b]:
                continue
            for j, f in enumerate(slot_RS[b].tolist()):
                if f in slot_RS[a]:
                    continue
                d = int(load_E[f] - load_E[e])
                best = (
                    min(best, (max(int(loads[a]) + d, int(loads[b]) - d), b, j))
                    if best
                    else (max(int(loads[a]) + d, int(loads[b]) - d), b, j)
                )
        if best is None:
            return dealt(copies_E, ranks)
        _, b, j = best
        slot_RS[a, s], slot_RS[b, j] = slot_RS[b, j], e
    return slot_RS


def dealt(copies_E: np.ndarray, ranks: int) -> np.ndarray:
    """Replicas dealt to ranks in turn, most copied expert first: consecutive replicas meet different ranks, so copies ≤
    ranks
    never share one. The placement of last resort."""
    order = np.argsort(-copies_E, kind="stable")
    return np.repeat(order, copies_E[order]).reshape(-1, ranks).T.copy()
