"""Rows of sequences whose length only the device knows: where a verify step puts them, and what it leaves of them."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.reference.speculate import StepRows
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two


@triton.jit(
    do_not_specialize=["F", "T", "P", "ring", "pair_ring", "block_tokens"],
    do_not_specialize_on_alignment=[
        "SHARES", "SLOT", "LIMIT", "START", "FIRST", "COUNT", "IDS", "POS", "ROW", "LAGS", "RING", "PAIR", "BLOCK",
        "TABLE",
    ],
)  # fmt: skip
def _settle(
    RECENT, DRAFTS, LENGTH, SHARES, SLOT, LIMIT, START, FIRST, COUNT, TABLE, IDS, POS, ROW, LAGS, RING, PAIR, BLOCK,
    F, T, P, ring, pair_ring, block_tokens, N: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    known = t < T
    row = tl.zeros((BT,), dtype=tl.int64) - 1
    first = tl.zeros((BT,), dtype=tl.int64)
    before = tl.full((), 0, tl.int64)
    for chunk in range(0, F, BF):
        f = chunk + tl.arange(0, BF)
        if SHARES is not None:
            size = tl.load(SHARES + f, mask=f < F, other=-1) + 1
            begin = before + tl.cumsum(size, 0) - size
            before += tl.sum(size, 0)
            if tl.program_id(0) == 0:
                tl.store(COUNT + f, size, mask=f < F)
                tl.store(FIRST + f, begin, mask=f < F)
        else:
            begin = tl.load(FIRST + f, mask=f < F, other=0)
        if tl.program_id(0) == 0:
            slot = tl.load(SLOT + f, mask=f < F, other=0)
            tl.store(START + f, tl.load(LENGTH + slot, mask=f < F, other=1) - 1, mask=f < F)
        passed = (begin[None, :] <= t[:, None]) & (f < F)[None, :]
        row += tl.sum(passed.to(tl.int64), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, begin[None, :], 0), 1))
    slot = tl.load(SLOT + row, mask=known, other=0)
    off = t - first
    pos = tl.load(LENGTH + slot, mask=known, other=1) - 1 + off
    lag = tl.arange(0, BN)[None, :]
    back = off[:, None] - lag  # above 0: a draft, else the newest token and those before it
    there = known[:, None] & (lag < N)
    old = tl.load(RECENT + slot[:, None] * N - back, mask=there & (back <= 0), other=0)
    new = tl.load(DRAFTS + slot[:, None] * J + back - 1, mask=there & (back > 0), other=0)
    token = tl.where(back > 0, new, old)
    place = tl.minimum(pos // block_tokens, P - 1)
    block = tl.load(TABLE + row * P + place, mask=known, other=0) * block_tokens + pos % block_tokens
    kept = pos < tl.load(LIMIT + row, mask=known, other=0)
    tl.store(ROW + t, row, mask=known)
    tl.store(POS + t, pos, mask=known)
    tl.store(LAGS + t[:, None] * N + lag, token, mask=there)
    tl.store(IDS + t, tl.sum(tl.where(lag == 0, token, 0), 1), mask=known)
    tl.store(RING + t, slot * ring + pos % ring, mask=known)
    tl.store(PAIR + t, slot * pair_ring + pos % pair_ring, mask=known)
    tl.store(BLOCK + t, tl.where(kept, block, -1), mask=known)


def settle_rows(
    num: Numerics,
    rows: StepRows,
    recent: Tensor,
    drafts: Tensor,
    length: Tensor,
    shares: Tensor | None,
    *,
    tokens: int,
    ring: int,
    pair_ring: int,
    block_tokens: int,
) -> None:
    """Put the device's truth into the floating rows of a step, in place; arguments as in the reference."""
    tables = [recent, drafts, length]
    if any(t.dtype is not int64 or not t.is_contiguous() for t in (*rows, *tables)):
        raise ValueError("rows of a step and what is known of sequences are contiguous int64")
    F, N, J = rows.slot.shape[0], recent.shape[1], drafts.shape[1]
    places = (rows.slot, rows.limit, rows.start, rows.first, rows.count, rows.table)
    tensors = (*places, rows.ids, rows.pos, rows.row, rows.lags, rows.ring_slot, rows.pair_slot, rows.block_slot)
    counts = (F, tokens, rows.table.shape[1], ring, pair_ring, block_tokens)
    shares = None if shares is None else contiguous(shares)
    sizes = dict(N=N, J=J, BN=power_of_two(N), BT=32, BF=64)
    launch(_settle, (max(1, blocks(tokens, 32)),), *tables, shares, *tensors, *counts, **sizes)


@triton.jit(
    do_not_specialize=["B"],
    do_not_specialize_on_alignment=["FLOATING", "LOGITS_ROW", "TOKEN", "FIRST", "COUNT"],
)
def _sampled(
    FLOATING, LOGITS_ROW, TOKEN, FIRST, COUNT, OUT_FIRST, OUT_LENGTH, OUT_TOKEN, B, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(FLOATING + b, mask=b < B, other=-1)
    floats = at >= 0
    first = tl.load(FIRST + at, mask=floats, other=0)
    row, token = tl.load(LOGITS_ROW + b, mask=b < B, other=0), tl.load(TOKEN + b, mask=b < B, other=0)
    tl.store(OUT_FIRST + b, tl.where(floats, first, row), mask=b < B)
    tl.store(OUT_LENGTH + b, tl.load(COUNT + at, mask=floats, other=1) - 1, mask=b < B)
    tl.store(OUT_TOKEN + b, tl.where(floats, first, token), mask=b < B)


def sampled_rows(
    num: Numerics, floating: Tensor, logits_row: Tensor, token: Tensor, first: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(first row of the logits, drafts under test, first token in the step), int64 [B] each."""
    given = [contiguous(t) for t in (floating, logits_row, token, first, count)]
    if any(t.dtype is not int64 for t in given):
        raise TypeError(f"rows are int64, got {[t.dtype for t in given]}")
    B = floating.shape[0]
    at, length, where = (empty(B, dtype=int64, device=floating.device) for _ in range(3))
    launch(_sampled, (blocks(B, 64),), *given, at, length, where, B, BLOCK=64)
    return at, length, where


@triton.jit(
    do_not_specialize=["B"],
    do_not_specialize_on_alignment=["EMITTED", "EMITTED_COUNT", "TOKEN", "SLOT", "REGIME", "POS", "LAGS"],
)
def _commit(
    EMITTED, EMITTED_COUNT, TOKEN, SLOT, REGIME, POS, LAGS, LENGTH, RECENT, REGIMES, B, J: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = b < B
    count = tl.load(EMITTED_COUNT + b, mask=known, other=1)
    newest = tl.maximum(tl.load(EMITTED + b * (J + 1) + count - 1, mask=known, other=0), 0)
    last = tl.load(TOKEN + b, mask=known, other=0) + count - 1
    slot = tl.load(SLOT + b, mask=known, other=0)
    tl.store(LENGTH + slot, tl.load(POS + last, mask=known, other=0) + 2, mask=known)
    tl.store(REGIMES + slot, tl.load(REGIME + b, mask=known, other=0), mask=known)
    lag = tl.arange(0, BN)[None, :]
    there = known[:, None] & (lag < N)
    older = tl.load(LAGS + last[:, None] * N + lag - 1, mask=there & (lag > 0), other=0)
    tl.store(RECENT + slot[:, None] * N + lag, tl.where(lag == 0, newest[:, None], older), mask=there)


def commit_rows(
    num: Numerics,
    tokens: Tensor,
    count: Tensor,
    token: Tensor,
    slot: Tensor,
    regime: Tensor,
    position: Tensor,
    lags: Tensor,
    length: Tensor,
    recent: Tensor,
    regimes: Tensor,
) -> None:
    """Keep what a verify step emitted: length, newest tokens and regime of the slots, in place."""
    tables = (length, recent, regimes)
    given = [contiguous(t) for t in (tokens, count, token, slot, regime, position, lags)]
    if any(t.dtype is not int64 for t in (*given, *tables)) or not all(t.is_contiguous() for t in tables):
        raise ValueError("tokens, rows and what is kept of sequences are int64, and the latter contiguous")
    B, N = slot.shape[0], recent.shape[1]
    sizes = dict(J=tokens.shape[1] - 1, N=N, BN=power_of_two(N), BLOCK=32)
    launch(_commit, (blocks(B, 32),), *given, *tables, B, **sizes)
