"""What is judged: the functions production uses, and the known faults that can be put in their place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.pivots import due_pivot
from deepinfer_engine.cache.prefix import extend_keys
from deepinfer_engine.cache.replay import Chunk, ReplayShape, ReplaySpan, RowLimits, plan_prefill
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.errors import UsageError


@dataclass(frozen=True)
class Subject:
    """Every decision the check looks at; the defaults are the ones the engine makes."""

    layout: Callable[[ModelConfig, bool], KVLayout] = lambda config, records: KVLayout.of(config, records=records)
    plan: Callable[..., ReplaySpan] = plan_prefill
    chunk: Callable[[ReplaySpan, int, int], Chunk | None] = ReplaySpan.next_chunk
    limits: Callable[[ReplaySpan, int, int], RowLimits] = ReplaySpan.limits
    pivot: Callable[[int, int], int | None] = due_pivot
    keys: Callable[[bytes, list[bytes], Sequence[int]], list[bytes]] = extend_keys
    snapshot_layers: Callable[[ReplayShape], range] = lambda shape: shape.snapshot_layers
    lineage: Callable[[ReplaySpan], str] = lambda span: span.lineage


@dataclass(frozen=True)
class Mutation:
    """A fault: what it does, how, and the levels that must notice it."""

    what: str
    apply: Callable[[Subject], Subject]
    levels: tuple[int, ...] = (1, 2)


def _ring(spare: int) -> Callable[[Subject], Subject]:
    """Window rings of W + γ + ``spare`` rows. W + γ − 1 is what verify steps read, W + γ what a pivot copy reads."""

    def apply(s: Subject) -> Subject:
        def layout(config: ModelConfig, records: bool) -> KVLayout:
            whole = s.layout(config, records)
            return replace(whole, ring=config.sliding_window + config.dspark_block_size + spare)

        return replace(s, layout=layout)

    return apply


def _pair_ring_short(s: Subject) -> Subject:
    def layout(config: ModelConfig, records: bool) -> KVLayout:
        whole = s.layout(config, records)
        return replace(whole, pair_ring=config.dspark_block_size)

    return replace(s, layout=layout)


def _trim_per_chunk(s: Subject) -> Subject:
    return _limits(_pivot_of_chunk)(_any_final_chunk(s))


def _limits(change: Callable[[ReplaySpan, int, int, RowLimits], RowLimits]) -> Callable[[Subject], Subject]:
    def apply(s: Subject) -> Subject:
        return replace(s, limits=lambda span, start, count: change(span, start, count, s.limits(span, start, count)))

    return apply


def _plan(change: Callable[[ReplaySpan], ReplaySpan]) -> Callable[[Subject], Subject]:
    def apply(s: Subject) -> Subject:
        return replace(s, plan=lambda shape, length, **facts: change(s.plan(shape, length, **facts)))

    return apply


def _pivot_of_chunk(span: ReplaySpan, start: int, count: int, limits: RowLimits) -> RowLimits:
    if span.shape.decoder == "off" or start >= span.length:
        return limits
    reach = span.shape.reach
    return replace(limits, tail=min(count, reach), floor_decoder=max(0, start + count - reach))


def _no_slack(s: Subject) -> Subject:
    def plan(shape: ReplayShape, length: int, **facts) -> ReplaySpan:
        span = s.plan(replace(shape, slack=0), length, **facts)
        return replace(span, shape=shape)

    return replace(s, plan=plan)


def _older_windows(s: Subject) -> Subject:
    def plan(shape: ReplayShape, length: int, *, windows_at: frozenset[int] = frozenset(), **facts) -> ReplaySpan:
        near = windows_at | {end + BLOCK_TOKENS for end in windows_at}
        return s.plan(shape, length, windows_at=near, **facts)

    return replace(s, plan=plan)


def _no_replay(span: ReplaySpan) -> ReplaySpan:
    if span.mode != "replay":
        return span
    return replace(span, start=span.reused, pivot=max(span.pivot, span.reused))


def _any_final_chunk(s: Subject) -> Subject:
    def chunk(span: ReplaySpan, start: int, budget: int) -> Chunk | None:
        count = min(budget, span.length - start)
        return Chunk(start, count, span.tail(start, count), start + count == span.length)

    return replace(s, chunk=chunk)


def _late_pivot(s: Subject) -> Subject:
    def pivot(before: int, after: int) -> int | None:
        return s.pivot(before - BLOCK_TOKENS // 4, after - BLOCK_TOKENS // 4)

    return replace(s, pivot=pivot)


def _key_without_parent(s: Subject) -> Subject:
    def keys(root: bytes, known: list[bytes], token_ids: Sequence[int]) -> list[bytes]:
        for at in range(len(known) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            known.append(hashlib.sha256(root + repr(list(token_ids[at : at + BLOCK_TOKENS])).encode()).digest())
        return known

    return replace(s, keys=keys)


MUTATIONS: dict[str, Mutation] = {
    "ring-short": Mutation("window rings one row too small for a rollback", _ring(-2)),
    "ring-short-copy": Mutation("window rings one row too small for a whole pivot copy", _ring(-1), (1,)),
    "pair-ring-short": Mutation("pending-pair rings forget the accepted half of a rolled-back pair", _pair_ring_short),
    "cap-without-slack": Mutation("a hit may leave no rollback rows", _no_slack, (1,)),
    "floor-encoder-low": Mutation(
        "replayed rows see one row below the replay",
        _limits(lambda sp, a, n, x: replace(x, floor_encoder=max(0, x.floor_encoder - 1))),
    ),
    "floor-encoder-high": Mutation(
        "replayed rows miss the first replayed row",
        _limits(lambda sp, a, n, x: replace(x, floor_encoder=x.floor_encoder + 1)),
    ),
    "floor-decoder-low": Mutation(
        "decoder rows see one row below the pivot",
        _limits(lambda sp, a, n, x: replace(x, floor_decoder=max(0, x.floor_decoder - 1))),
    ),
    "floor-decoder-high": Mutation(
        "decoder rows miss the pivot's row",
        _limits(lambda sp, a, n, x: replace(x, floor_decoder=x.floor_decoder + 1)),
    ),
    "blocks-overwritten": Mutation(
        "replayed rows write block KV", _limits(lambda sp, a, n, x: replace(x, keep_blocks_below=0))
    ),
    "blocks-unwritten": Mutation(
        "the first new row leaves its block KV unwritten",
        _limits(lambda sp, a, n, x: replace(x, keep_blocks_below=sp.reused + 1)),
    ),
    "pivot-of-chunk": Mutation(
        "every chunk is trimmed by itself: the pivot follows it, not the prompt", _trim_per_chunk
    ),
    "tail-short": Mutation(
        "one row too few goes past the cut",
        _limits(lambda sp, a, n, x: replace(x, tail=max(1, x.tail - 1) if x.tail else 0)),
    ),
    "older-windows": Mutation("window KV that ends a block earlier is loaded", _older_windows),
    "replay-skipped": Mutation("a hit without window KV starts at once", _plan(_no_replay)),
    "final-chunk-short": Mutation("the last chunk may be shorter than window and rollback", _any_final_chunk, (1,)),
    "pivot-copy-late": Mutation("windows are copied after the ring has moved on", _late_pivot),
    "replay-cached": Mutation(
        "KV of replayed rows counts as exact", lambda s: replace(s, lineage=lambda span: "exact")
    ),
    "decoder-cached": Mutation(
        "decoder windows of trimmed prompts are kept",
        lambda s: replace(s, snapshot_layers=lambda shape: range(shape.layers)),
        (1,),
    ),
    "key-without-parent": Mutation("a block's key forgets what comes before it", _key_without_parent),
}


def mutate(name: str) -> Subject:
    """The engine's functions with one fault. Raises ``UsageError`` for a name that is none."""
    if name not in MUTATIONS:
        raise UsageError(f"there is no mutation {name!r}", hint=f"one of {', '.join(MUTATIONS)}, or all")
    return MUTATIONS[name].apply(Subject())
