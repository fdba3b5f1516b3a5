"""Which rows a step runs, and who gives way when blocks run out. Pure: reads integers, changes nothing.

Every decode row runs in every step. A decode row whose next position starts a block needs a free one on its rank;
when there is none, the sequence of that rank that arrived last is preempted (its blocks freed, its tokens computed
again later), until the rest fit. The one that arrived first is therefore never preempted while others hold blocks, and
since every request fits a rank by itself, it always finishes. Prompt chunks follow in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.sched.prefill_budget import StepCost
from deepinfer_engine.types import PlannedRow
from deepinfer_engine.types import Sequence as Seq


@dataclass(frozen=True)
class DecodePlan:
    """Decode rows; sequences that take one more block; victims; sequences with prompt tokens left."""

    rows: list[PlannedRow]
    grow: list[Seq]
    preempt: list[Seq]
    prefilling: list[Seq]


def plan_decode(
    running: Iterable[Seq],
    free_blocks: Sequence[int],
    users: Callable[[int], int] = lambda block: 1,
    *,
    draft_tokens: int = 0,
) -> DecodePlan:
    """Rows of every sequence that has one token to compute. ``free_blocks``: per rank; ``users``: of a block.

    With ``draft_tokens`` a row also verifies that many drafts, as far as its answer may still grow; it holds blocks for
    the furthest position it may reach.

    A sequence whose tokens in flight already reach its limit has no row. Worked example: a rank without free blocks
    runs sequences 1, 2, 3 (by arrival) and 1 needs a block: 3 is preempted, whatever it holds.
    """
    rows: list[PlannedRow] = []
    grow: list[Seq] = []
    prefilling: list[Seq] = []
    for seq in running:
        computed = seq.num_computed
        total = len(seq.token_ids) + seq.pending
        if total - computed > 1 or computed < seq.num_prompt:
            prefilling.append(seq)
            continue
        if total >= seq.max_len:
            continue  # the token in flight is the last one it may draw
        if not draft_tokens:
            if computed // BLOCK_TOKENS >= len(seq.block_ids):
                grow.append(seq)
            rows.append(PlannedRow(seq.uid, seq.dp_rank, computed, 1, "decode", True, seq.generation))
            continue
        drafts = min(draft_tokens, seq.max_len - total - 1) if seq.drafts_ready else 0
        furthest = min(computed + seq.ahead + drafts, seq.max_len - 1)
        if furthest // BLOCK_TOKENS >= len(seq.block_ids):
            grow.append(seq)
        row = PlannedRow(seq.uid, seq.dp_rank, computed, 1 + drafts, "decode", True, seq.generation, drafts, seq.ahead)
        rows.append(row)
    if not grow:
        return DecodePlan(rows, grow, [], prefilling)
    victims = _victims(running, grow, free_blocks, users)
    if victims:
        gone = {s.uid for s in victims}
        rows = [r for r in rows if r.seq_id not in gone]
        grow = [s for s in grow if s.uid not in gone]
        prefilling = [s for s in prefilling if s.uid not in gone]
    return DecodePlan(rows, grow, victims, prefilling)


def _victims(
    running: Iterable[Seq], grow: list[Seq], free_blocks: Sequence[int], users: Callable[[int], int]
) -> list[Seq]:
    """Who gives way; a shared block is free only when its last user went."""
    need: dict[int, int] = {}
    for seq in grow:
        need[seq.dp_rank] = need.get(seq.dp_rank, 0) + 1
    short = {rank: n - free_blocks[rank] for rank, n in need.items() if n > free_blocks[rank]}
    if not short:
        return []
    growing = {s.uid for s in grow}
    victims = []
    gone: dict[int, int] = {}
    for seq in sorted((s for s in running if s.dp_rank in short), key=lambda s: -s.uid):
        missing = short[seq.dp_rank]
        if missing > 0:
            for block in seq.block_ids:
                gone[block] = gone.get(block, 0) + 1
            freed = sum(gone[block] == users(block) for block in seq.block_ids)
            short[seq.dp_rank] = missing - freed - (seq.uid in growing)
            victims.append(seq)
    return victims


def plan_prefill(
    prefilling: Iterable[Seq],
    decode: Sequence[PlannedRow],
    *,
    chunk_tokens: int,
    budget_ms: float,
    cost: StepCost | None,
    stop: Callable[[Seq], int] = lambda seq: 0,
) -> list[PlannedRow]:
    """Prompt chunks in order of arrival, at most ``chunk_tokens`` per rank, cut as their ``span`` wants it.

    A chunk does not cross ``stop(seq)``. A sequence whose chunk does not fit what is left of the step waits.

    With ``budget_ms`` > 0 the whole step, decode rows included, is kept within it by ``cost`` (virtual ranks share one
    device, so their times add up). The oldest prompt moves by a block per step in any case: a budget that is too small
    slows prompts down but starves none. Without a cost yet, that block is all that runs.
    """
    left: dict[int, int] = {}
    left_ms = 0.0
    if budget_ms > 0 and cost is not None:
        left_ms = budget_ms - cost.ms((r.start, r.count) for r in decode)
    rows = []
    for seq in sorted(prefilling, key=lambda s: s.uid):
        start = seq.num_computed
        remaining = len(seq.token_ids) + seq.pending - start
        room = left.get(seq.dp_rank, chunk_tokens)
        count = min(remaining, room)
        if budget_ms > 0 and count:
            fits = cost.longest(start, left_ms) if cost is not None else 0
            count = min(count, max(fits, 0 if rows else BLOCK_TOKENS))
        if count > 0 and seq.span is not None and start < seq.span.length:
            if not rows:
                count = max(count, min(room, seq.span.shape.min_chunk_tokens))
            chunk = seq.span.next_chunk(start, count, stop=stop(seq))
            count = 0 if chunk is None else chunk.count
        if count <= 0:
            continue
        if cost is not None:
            left_ms -= cost.part_ms(start, count)
        left[seq.dp_rank] = room - count
        rows.append(PlannedRow(seq.uid, seq.dp_rank, start, count, "prefill", count == remaining, seq.generation))
    return rows
