"""Which data-parallel rank takes a waiting sequence. Pure: integers in, ranks out.

Requests are taken from the head of the queue in order and nobody overtakes. A round looks at the heads that fit the
free blocks and rows of all ranks together and computes a ceiling of tokens per rank,

    Z = 1.05 · (Σ length of those heads + Σ tokens of all ranks) / ranks.

Each head goes to the rank with the fewest sequences (then fewest tokens, then lowest number) among those that have
room and stay at or below Z; if none does, to the one with the fewest tokens; if none has room, the round ends. Short
requests thereby go to ranks with few but long sequences, long ones to ranks with many short ones.

Worked example, 2 empty ranks, lengths 900, 100, 100, 100: Z = 630. 900 exceeds it everywhere, so the rank with the
fewest tokens takes it (rank 0); rank 1 takes all three short ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class RankLoad(NamedTuple):
    """One rank: sequences and expected tokens on it, free ring slots and free blocks."""

    seqs: int
    tokens: int
    free_slots: int
    free_blocks: int


class Head(NamedTuple):
    """One waiting sequence: expected final length in tokens, and blocks it takes at once."""

    length: int
    blocks: int


def route(heads: Sequence[Head], ranks: Sequence[RankLoad]) -> list[int]:
    """Rank of each head, in order; shorter than ``heads`` when one fits nowhere.

    A rank that runs sequences keeps one free block for each of them and for the newcomer, so that a newcomer does
    not push a running sequence out at once; an empty rank needs none to spare.
    """
    seqs = [r.seqs for r in ranks]
    tokens = [r.tokens for r in ranks]
    slots = [r.free_slots for r in ranks]
    blocks = [r.free_blocks for r in ranks]
    ceiling = _ceiling(heads, ranks)

    def room(rank: int, need: int) -> bool:
        spare = seqs[rank] + 1 if seqs[rank] else 0
        return slots[rank] > 0 and blocks[rank] >= need + spare

    by_seqs = [(seqs[r], tokens[r], r) for r in range(len(ranks)) if slots[r] > 0]
    by_tokens = [(tokens[r], r) for r in range(len(ranks)) if slots[r] > 0]
    heapq.heapify(by_seqs)
    heapq.heapify(by_tokens)
    out: list[int] = []
    for head in heads:
        rank = _pop_first(
            by_seqs,
            lambda e: e == (seqs[e[2]], tokens[e[2]], e[2]),
            lambda e, h=head: tokens[e[2]] + h.length <= ceiling and room(e[2], h.blocks),
        )
        if rank < 0:
            rank = _pop_first(by_tokens, lambda e: e[0] == tokens[e[1]], lambda e, h=head: room(e[1], h.blocks))
        if rank < 0:
            break
        out.append(rank)
        seqs[rank] += 1
        tokens[rank] += head.length
        slots[rank] -= 1
        blocks[rank] -= head.blocks
        if slots[rank]:
            heapq.heappush(by_seqs, (seqs[rank], tokens[rank], rank))
            heapq.heappush(by_tokens, (tokens[rank], rank))
    return out


def _ceiling(heads: Sequence[Head], ranks: Sequence[RankLoad]) -> float:
    slots = sum(r.free_slots for r in ranks)
    blocks = sum(r.free_blocks for r in ranks)
    total = sum(r.tokens for r in ranks)
    for head in heads:
        slots -= 1
        blocks -= head.blocks
        if slots < 0 or blocks < 0:
            break
        total += head.length
    return 1.05 * total / len(ranks)


def _pop_first(heap: list, current, fits) -> int:
    """Rank of the smallest entry that fits; entries out of date are dropped, current ones that do not fit stay."""
    kept = []
    rank = -1
    while heap:
        entry = heapq.heappop(heap)
        if not current(entry):
            continue
        kept.append(entry)
        if fits(entry):
            rank = entry[-1]
            break
    for entry in kept:
        heapq.heappush(heap, entry)
    return rank
