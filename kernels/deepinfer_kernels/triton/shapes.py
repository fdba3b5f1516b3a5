"""Every kernel a model needs: operations are called with tensors without memory, and their launches recorded."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.reference.linear import TILE, Kind, Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.reference.speculate import StepRows
from deepinfer_kernels.shapes import Shapes
from deepinfer_kernels.triton import (
    adjust,
    attention,
    cache,
    commit,
    compress,
    engram,
    head,
    hyper,
    index,
    linear,
    moe,
    move,
    norm,
    permute,
    places,
    reject,
    router,
    rows,
    sample,
    select,
    speculate,
    streams,
)
from deepinfer_kernels.triton.launch import Call, recording

_MODULES = (
    adjust,
    attention,
    cache,
    commit,
    compress,
    engram,
    head,
    hyper,
    index,
    linear,
    moe,
    move,
    norm,
    permute,
    places,
    reject,
    router,
    rows,
    sample,
    select,
    speculate,
    streams,
)
_NUM = NUMERICS["fast"]
#: numbers of tokens of every tile and number of parts: parts halve when tiles of tokens double, up to 8192 of a step
_TOKENS = (1, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097, 8192)
#: mean rows of an expert slot, likewise
_ROWS = (1, 17, 33, 97, 193)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _f32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _i64(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def _bytes(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.uint8)


def _weight(*shape: int, kind: Kind) -> Weight:
    *stack, outs, inner = shape
    if kind in ("fp8", "fp4"):
        tiles = (*stack, -(-outs // TILE), -(-inner // TILE))
        code, scale = (TILE * TILE, 8) if kind == "fp8" else (TILE * TILE // 2, 2 * TILE)
        return Weight(_bytes(*tiles, code), kind, _bytes(*tiles, scale), shape=(outs, inner))
    return Weight(_empty(*shape), kind)


def launches(shapes: Shapes, *, invariant: bool) -> Iterator[tuple[str, Call]]:
    """(operation, launch) of every kernel, some of them more than once; ``invariant``: in the batch-invariant form."""
    for name, arguments, options in _calls(shapes):
        module = next(m for m in _MODULES if name in vars(m))
        form = getattr(module, f"{name}_invariant", None) if invariant else None
        found: list[Call] = []
        with recording(found.append):
            (form or getattr(module, name))(_NUM, *arguments, **options)
        yield from ((name, call) for call in found)


def _calls(s: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for T in _TOKENS:
        for outs, inner, kind in s.products:
            yield "linear", (_empty(T, inner), _weight(outs, inner, kind=kind)), {}
        inner = s.N * s.D // s.groups
        fits = s.group_out % TILE == 0
        grouped = _weight(s.groups, s.group_out, inner, kind="fp8" if fits else "bf16")
        yield "linear_grouped", (_empty(T, s.groups, inner), grouped), {}
        yield from _attention(s, T)
        for _, _, _, width in s.routers:
            w = (_weight(width, s.H, kind="fp8"), _weight(width, s.H, kind="fp8"), _weight(s.H, width, kind="fp8"))
            yield "shared_expert", (_empty(T, s.H), *w, 10.0), {}
    T = 1
    for width in s.rows:
        yield "rms_norm", (_empty(T, width), _empty(width), 1e-6), {}
    angles = (_f32(T, s.Dr // 2), _f32(T, s.Dr // 2))
    for shape in ((T, s.N, s.D), (T, s.D), (T, s.index_heads, s.Di), (T, s.Di)):
        for inverse in (False, True):
            yield "rope", (_empty(*shape), *angles, inverse), {}
    yield "quantise_index_query", (_empty(T, s.index_heads, s.Di),), {}
    for kind, width in (("window", s.D), ("global", s.D), ("index", s.Di)):
        size = cache.record(kind, width, stored=False)[3]
        yield "pack_rows", (_empty(T, width), kind), {}
        yield "unpack_rows", (_bytes(T, size), kind), {}
        yield "load_rows", (_bytes(9, size), _i64(T, 4), kind), {}
        yield "store_rows", (_bytes(9, size), _i64(T), _bytes(T, size)), {}
    yield "store_rows", (_f32(9, 2, s.D), _i64(T), _f32(T, 2, s.D)), {}
    for queries in (1, 2, 4, 8, 16, 32, 64, 128, 256):  # of a row: they are taken in groups of powers of two
        iq, iw = _empty(T, queries, s.index_heads, s.Di), _empty(T, queries, s.index_heads)
        yield "index_scores", (iq, iw, _empty(T, 9, s.Di), _i64(T, queries)), {}
    key = cache.record("index", s.Di, stored=False)[3]
    for queries in (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048):  # the last ones decode records into memory
        iq, iw = _empty(T, queries, s.index_heads, s.Di), _empty(T, queries, s.index_heads)
        places = (_bytes(9, key), _i64(T), _i64(T, 3), _i64(T, queries))
        yield "index_scores_cached", (iq, iw, *places), dict(per_block=128, count=9)
    M, wide = s.C * (s.C + 2), s.C * s.H
    eps = dict(rms_eps=1e-6, hc_eps=1e-6, iters=s.sinkhorn)
    for tokens in (T, 2048):
        yield "mhc_mixes", (_empty(tokens, s.C, s.H), _f32(M, wide), _f32(M), _f32(3)), eps
    yield "mhc_collapse", (_empty(T, s.C, s.H), _f32(T, s.C)), {}
    yield "mhc_expand", (_empty(T, s.C, s.H), _empty(T, s.H), _f32(T, s.C), _f32(T, s.C, s.C)), {}
    for experts, choices, slots, width in s.routers:
        choice = dict(k=choices, normalise=s.normalise, scale=1.0, temperature=1.0)
        for tokens in (T, 2048):
            yield "gate_topk", (_empty(tokens, s.H), _f32(experts, s.H), _f32(experts)), choice
        yield "moe_combine", (_empty(T * choices, s.H), _i64(T * choices), _empty(T, s.H), choices), {}
        w = (_weight(slots, width, s.H, kind="fp4"), _weight(slots, width, s.H, kind="fp4"))
        bank = ExpertBank(*w, _weight(slots, s.H, width, kind="fp4"))
        for mean in _ROWS:
            rows = mean * slots
            yield "moe_experts", (_empty(rows, s.H), _i64(slots), bank, _f32(rows), 10.0), {}
    yield from _step(s)


def _step(s: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What a step does beside products and attention; only those that dispatch depend on how many rows there are."""
    T = 1
    angles = (_f32(T, s.Dr // 2), _f32(T, s.Dr // 2))
    for width in s.tables:
        yield "embed", (_i64(T), _empty(s.V, width)), {}
    yield "embed_streams", (_i64(T), _empty(s.V, s.H), s.C), {}
    yield "rope_angles", (_i64(T), _f32(s.Dr // 2)), {}
    for outs, inner in s.heads:
        for tokens in (1, 17):
            yield "head_logits", (_empty(tokens, inner), _weight(outs, inner, kind="bf16")), {}
    for weight in (_empty(s.D), _f32(s.D)):
        yield "window_rows", (_empty(T, s.D), weight, 1e-6, *angles), {}
    for kind, width in (("global", s.D), ("index", s.Di)):
        store = _bytes(9, cache.record(kind, width, stored=False)[3])
        yield "store_entries", (_empty(T, width), _empty(width), 1e-6, *angles, store, _i64(T), kind), {}
    for dtype, width in ((torch.uint8, 33), (torch.int32, 9), (torch.int32, 8192)):
        yield "copy_rows", (_empty(9, width, dtype=dtype), _i64(T), _empty(9, width, dtype=dtype), _i64(T)), {}
    yield "store_pairs", (_f32(9, 2, s.D), _i64(T), _f32(T, s.D), _f32(T, s.D)), {}
    yield "pool_pairs", ((_f32(T, s.D), _f32(T, s.D)), (_f32(T, s.D), _f32(T, s.D))), {}
    places = (_i64(T), _i64(T), _i64(T), _empty(T, dtype=torch.bool))
    for ring in (None, _f32(9, 2, s.D)):
        yield "pool_cached", (_f32(T, s.D), _f32(T, s.D), ring, *places), {}
    for entries in (None, _i64(T, 4)):
        yield "entry_slots", (entries, _i64(T), _i64(T, 3)), dict(per_block=64, count=4)
    given = (_i64(T), _empty(T, dtype=torch.bool), *(_i64(T) for _ in range(4)))
    yield "pair_places", given, {"ring": 7}
    for weight in (_empty(s.H), _f32(s.H)):
        yield "mhc_collapse_norm", (_empty(T, s.C, s.H), _f32(T, s.C), weight, 1e-6), {}
    for rings in (None, _i64(T)):
        yield "window_places", (_i64(T), _i64(T), _i64(T, 3), rings), dict(width=4, ring=8)
    yield from _drawing(s)
    entries, block, keep = s.choice
    for n in select.lengths(entries):
        yield "select_topk", (_f32(T, 1, n),), dict(k=entries)
    scores = _f32(T, 1, 4096)
    for items in select.lengths(keep):
        yield "candidate_blocks", (_f32(T, 1, items * block), _i64(T, 1)), dict(block=block, keep=keep)
    kept = _empty(T, 1, -(-4096 // block), dtype=torch.bool)
    yield "restrict_to_candidates", (scores, kept), dict(block=block)
    yield "index_weights", (_empty(T, s.index_heads), s.Di), {}
    if s.hash is not None:
        orders, heads, width = s.hash
        columns = (orders - 1) * heads
        yield "token_classes", (_i64(T, orders), _i64(s.V), None), {}
        yield "engram_hash", (_i64(T, orders), 0, _i64(orders), _i64(orders - 1, heads), _i64(orders - 1, heads)), {}
        table = (_bytes(9, width), _bytes(9, width // 32))
        yield "engram_lookup", (*table, _i64(T, columns)), {}
        yield "dequantise_table", table, {}
        streams = (_empty(T, s.C, s.H), _empty(T, (s.C + 1) * s.H), _empty(s.C, s.H), _empty(s.C, s.H))
        for dead in (None, _empty(T, dtype=torch.bool)):
            yield "engram_gate", (*streams, dead, 1e-6), {}
    for (experts, choices, slots, _), all_slots in zip(s.routers, s.all_slots, strict=True):
        for tokens in (T, 2048):
            for sorted_by in (all_slots, slots):  # before they are sent to other processes, and where they arrive
                yield "dispatch_permute", (_i64(tokens, choices), sorted_by), {}
            rows = _empty(tokens, s.H), _i64(tokens, choices), _f32(tokens, choices)
            yield "dispatch_rows", (*rows, slots), {}
            yield "count_choices", (_i64(1, tokens, choices), experts), {}


def _drawing(s: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """From logits to emitted tokens, with and without drafts."""
    B, J, logits = 1, s.drafts, _f32(1, s.V)
    filters: dict[str, Tensor] = dict.fromkeys(("top_k", "seed", "position"), _i64(B))
    filters |= dict.fromkeys(("temperature", "top_p", "min_p"), _f32(B))
    for adjusted in (None, logits):
        for given in (None, filters):
            yield "next_tokens", (logits, adjusted, given), {}
    pairs = dict.fromkeys(("row", "token", "bias_row", "bias_token", "mask_row"), _i64(1))
    pairs |= dict.fromkeys(("count", "presence", "frequency", "repetition", "bias"), _f32(1))
    yield "adjust_logits", (logits,), {**pairs, "mask": _empty(1, -(-s.V // 32), dtype=torch.int32)}
    for top in (0, 1, 2, 4, 8, 16, 32):
        yield "token_logprobs", (logits, _i64(B)), {"top": top}
    if J:
        yield "draft_sample", (logits,), {**filters, "coupled": True}
        block = {"drafts": _i64(B, J), "first": _i64(B), "length": _i64(B)}
        masks = _empty(1, J + 1, -(-s.V // 32), dtype=torch.int32)
        yield "adjust_verify_logits", (logits,), {**block, **pairs, "mask": masks}
        yield "dspark_confidence", (_f32(B, J), _f32(2, J), _i64(B)), {}
        yield "dspark_split", (_f32(B, J), _i64(B), _i64(B), _i64()), {}
        N = s.hash[0] if s.hash is not None else 1
        rows = StepRows._make([*(_i64(1) for _ in range(5)), _i64(1, 1), *(_i64(2) for _ in range(7))])
        rows = rows._replace(lags=_i64(2, N))
        kept = (_i64(9, N), _i64(9, J), _i64(9))
        for shares in (None, _i64(B)):
            sizes = dict(tokens=2, ring=9, pair_ring=9, block_tokens=9)
            yield "settle_rows", (rows, *kept, shares), sizes
        yield "sampled_rows", tuple(_i64(B) for _ in range(5)), {}
        emitted = (_i64(B, J + 1), *(_i64(B) for _ in range(4)), _i64(2), _i64(2, N))
        yield "commit_rows", (*emitted, _i64(9), _i64(9, N), _i64(9)), {}
        law = {"draft_logprobs": _f32(B, J, s.V), "failed": _i64(J + 1)}
        yield "accept_rejection", (_f32(J + 1, s.V),), {**block, **law, **filters}
        yield "accept_drawn", (_i64(2), _i64(B, J), _i64(B), _i64(B)), {}
        yield "truncate_emitted", (_i64(B, J + 1), _i64(B)), {"stop": _i64(B, 1), "room": _i64(B)}


def _attention(s: Shapes, T: int) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every combination of stores a step can read."""
    ring, entries = (_bytes(9, cache.record(kind, s.D, stored=False)[3]) for kind in ("window", "global"))
    for r in (None, ring):
        for slots, e in ((None, None), (_i64(T, 4), entries)):
            places = (_empty(T, s.N, s.D), _empty(T, s.D), _i64(T, 4), r, slots, e, _f32(s.N), 1.0)
            yield "attend_cached", places, {}
