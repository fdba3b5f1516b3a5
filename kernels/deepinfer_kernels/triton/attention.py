"""Sparse latent attention: one softmax over window rows, selected global rows and a sink, records read in place.

A program answers one query for up to 64 heads, which share every key, in tiles of keys with a running softmax. Few
queries are divided over programs by key tiles, whose parts a second kernel joins.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int16, int32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.cache import record
from deepinfer_kernels.triton.formats import (
    bf16,
    dot,
    e2m1_times,
    e4m3_pair_times,
    e4m3_value,
    e8m0_bf16,
    spread,
)
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _halves(word):
    """(bf16 in the low 16 bits, bf16 in the high ones) of 32-bit words."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _window_keys(LOCAL, RING, PAIRS, at, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """(even, odd) bf16 columns [BK, BD/2] of window places: row ``at`` of this step or record −2 − at of the ring.

    Hidden places are 0. LOCAL holds words of two values, PAIRS the bytes of RING two by two.
    """
    d = tl.arange(0, BD // 2)[None, :]
    word = tl.load(LOCAL + at[:, None] * (D // 2) + d, mask=(at >= 0)[:, None] & (d < D // 2), other=0)
    even, odd = _halves(word)
    if RING is not None:
        older = (at < -1)[:, None]
        record = (-2 - at)[:, None] * (D + D // 32)
        pair = tl.load(PAIRS + record // 2 + d, mask=older & (d < D // 2), other=0)
        g = tl.arange(0, BD // 32)[None, :]
        scale = e8m0_bf16(tl.load(RING + record + D + g, mask=older & (g < D // 32), other=0))
        ring_even, ring_odd = e4m3_pair_times(pair, spread(scale, BK, BD // 32, 16))
        even, odd = tl.where(older, ring_even, even), tl.where(older, ring_odd, odd)
    return even, odd


@triton.jit
def _global_keys(ENTRIES, slot, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """(even, odd) bf16 columns [BK, BD/2] of global records; hidden ones are 0."""
    start = ENTRIES + slot[:, None] * (D // 2 + D // 16)
    seen = (slot >= 0)[:, None]
    b = tl.arange(0, BD // 2)[None, :]
    code = tl.load(start + b, mask=seen & (b < D // 2), other=0)
    g = tl.arange(0, BD // 16)[None, :]
    scale = bf16(e4m3_value(tl.load(start + D // 2 + g, mask=seen & (g < D // 16), other=0)))
    return e2m1_times(code, spread(scale, BK, BD // 16, 8))


@triton.jit
def _fold(q_even, q_odd, even, odd, seen, top, total, acc_even, acc_odd, scale, HEADS: tl.constexpr, BK: tl.constexpr):
    """One tile of keys into the running softmax, in powers of two."""
    logit = dot(q_even, tl.trans(even), tl.zeros((HEADS, BK), dtype=tl.float32))
    logit = tl.where(seen[None, :], dot(q_odd, tl.trans(odd), logit) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1))
    keep = tl.exp2(top - new)
    p = tl.exp2(logit - new[:, None])
    total = total * keep + tl.sum(p, 1)
    p = bf16(p)
    acc_even = dot(p, even, acc_even * keep[:, None])
    return new, total, acc_even, dot(p, odd, acc_odd * keep[:, None])


@triton.jit(do_not_specialize=["T", "W", "G"])
def _attend(
    Q, LOCAL, WINDOW, RING, PAIRS, SLOTS, ENTRIES, SINK, OUT, STATE, T, W, G, scale,
    N: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[t] over its W window places and G global slots; with PARTS > 1 a part of the tiles, not yet normalised.

    Columns are taken in two halves, the even and the odd ones, because that is how packed codes come apart.
    """
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, BD // 2)[None, :]
    q = tl.load(Q + (t * N + n)[:, None] * (D // 2) + half, mask=(n < N)[:, None] & (half < D // 2), other=0)
    q_even, q_odd = _halves(q)
    # the sink is a key without a value: it starts the softmax, and counts in the first part only
    top = tl.load(SINK + n, mask=n < N, other=0.0) * _LOG2E
    total = tl.full((HEADS,), 1.0, tl.float32) * (part == 0).to(tl.float32)
    even_sum = tl.zeros((HEADS, BD // 2), dtype=tl.float32)
    odd_sum = tl.zeros((HEADS, BD // 2), dtype=tl.float32)
    windows = (W + BK - 1) // BK
    tiles = windows + (G + BK - 1) // BK
    each = (tiles + PARTS - 1) // PARTS
    begin = part * each
    stop = tl.minimum(begin + each, tiles)
    i = tl.arange(0, BK)
    for tile in range(begin, tl.minimum(stop, windows)):
        at = tl.load(WINDOW + t * W + tile * BK + i, mask=tile * BK + i < W, other=-1)
        even, odd = _window_keys(LOCAL, RING, PAIRS, at, D, BD, BK)
        top, total, even_sum, odd_sum = _fold(
            q_even, q_odd, even, odd, at != -1, top, total, even_sum, odd_sum, scale * _LOG2E, HEADS, BK
        )
    if SLOTS is not None:
        for tile in range(tl.maximum(begin, windows), stop):
            at = (tile - windows) * BK + i
            slot = tl.load(SLOTS + t * G + at, mask=at < G, other=-1)
            even, odd = _global_keys(ENTRIES, slot, D, BD, BK)
            top, total, even_sum, odd_sum = _fold(
                q_even, q_odd, even, odd, slot >= 0, top, total, even_sum, odd_sum, scale * _LOG2E, HEADS, BK
            )
    acc = tl.interleave(even_sum, odd_sum)
    d = tl.arange(0, BD)[None, :]
    real = (n < N)[:, None] & (d < D)
    if PARTS == 1:
        tl.store(OUT + (t * N + n)[:, None] * D + d, bf16(acc / total[:, None]), mask=real)
    else:
        row = (part * T + t) * N + n
        tl.store(OUT + row[:, None] * D + d, acc, mask=real)
        tl.store(STATE + row * 2, top, mask=n < N)
        tl.store(STATE + row * 2 + 1, total, mask=n < N)


@triton.jit(do_not_specialize=["rows"])
def _join(PART, STATE, OUT, rows, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """o[row] of ``PARTS`` parts [PARTS, rows, D], always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    p = tl.arange(0, PARTS)
    top = tl.load(STATE + (p * rows + row) * 2)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(STATE + (p * rows + row) * 2 + 1), 0)
    part = tl.load(PART + (p * rows + row)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    tl.store(OUT + row * D + d, bf16(tl.sum(part * weight[:, None], 0) / total), mask=d < D)


#: keys of a tile, warps and loads in flight for wide heads
TILE = (32, 8, 2)


def _parts(T: int) -> int:
    """Parts per query that fill a device of about 130 processors."""
    return 1 if T > 64 else 2 if T > 32 else 4 if T > 16 else 8


def attend_cached(
    num: Numerics,
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """``attend`` of bf16 q [T, N, D] over rows of this step and records, read where they are (see the reference)."""
    return _attended(q, local, window, ring, slots, entries, sink, scale, _parts(q.shape[0]))


def attend_cached_invariant(
    num: Numerics,
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """``attend_cached`` with every query in one part, however few there are."""
    return _attended(q, local, window, ring, slots, entries, sink, scale, 1)


def _attended(
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
    parts: int,
) -> Tensor:
    q, local, window, sink = contiguous(q), contiguous(local), contiguous(window), contiguous(sink)
    (T, N, D), W = q.shape, window.shape[1]
    if slots is None or entries is None or not slots.shape[1]:
        slots = entries = None
    shapes = [tuple(t.shape) for t in (local, window, sink)]
    if window.shape != (T, W) or local.shape[1] != D or sink.shape != (N,) or sink.dtype is not float32:
        raise ValueError(f"queries {(T, N, D)}, local rows, window and sink {shapes} {sink.dtype}")
    if q.dtype is not bfloat16 or local.dtype is not bfloat16 or window.dtype is not int64:
        raise TypeError(f"queries and rows are bfloat16, places int64; got {q.dtype}, {local.dtype}, {window.dtype}")
    if slots is not None and (slots.shape[0] != T or slots.dtype is not int64):
        raise ValueError(f"{T} queries, slots {tuple(slots.shape)} {slots.dtype}")
    for store, kind in ((ring, "window"), (entries, "global")):
        if store is not None and record(kind, store.shape[1], stored=True)[2] != D:
            raise ValueError(f"queries of width {D}, {kind} records of {store.shape[1]} bytes")
    slots = None if slots is None else contiguous(slots)
    if D % 64:
        raise ValueError(f"queries of width {D}, which is not a multiple of 64")
    ring, entries = (None if s is None else contiguous(s.view(uint8)) for s in (ring, entries))
    pairs = None if ring is None else ring.view(int16)
    o = empty(q.shape, dtype=bfloat16, device=q.device)
    heads, wide = min(64, max(16, power_of_two(N))), power_of_two(D)
    keys, warps, stages = TILE if wide > 256 else (64, 4, 2)
    sizes = dict(N=N, D=D, HEADS=heads, BD=wide, BK=keys, PARTS=parts)
    grid = (T, parts, blocks(N, heads))
    G = 0 if slots is None else slots.shape[1]
    to, state = o, None
    if parts > 1:
        to = empty((parts, *q.shape), dtype=float32, device=q.device)
        state = empty((parts, T, N, 2), dtype=float32, device=q.device)
    stores = (window, ring, pairs, slots, entries)
    arguments = (q.view(int32), local.view(int32), *stores, sink, to, state, T, W, G, float(scale))
    launch(_attend, grid, *arguments, warps=warps, stages=stages, **sizes)
    if parts > 1:
        launch(_join, (T * N,), to, state, o, T * N, D=D, BD=wide, PARTS=parts)
    return o
