"""Logits before and after drawing: penalties, biases and token masks; log-probabilities that are reported."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.precise import exp, log, times
from deepinfer_kernels.triton.select import kth_best, number

_LOWEST, _NAN = tl.constexpr(-0x7F800001), tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["P", "V"])
def _penalise(OUT, ROW, TOKEN, COUNT, PRESENCE, FREQUENCY, REPETITION, P, V, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < P
    at = OUT + tl.load(ROW + i, mask=mask, other=0) * V + tl.load(TOKEN + i, mask=mask, other=0)
    x, repetition = tl.load(at, mask=mask, other=0.0), tl.load(REPETITION + i, mask=mask, other=1.0)
    count = tl.load(COUNT + i, mask=mask, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), times(x, repetition))
    x = x - times(tl.load(FREQUENCY + i, mask=mask, other=0.0), count)
    x = x - tl.where(count > 0, tl.load(PRESENCE + i, mask=mask, other=0.0), 0.0)
    tl.store(at, x, mask=mask)


@triton.jit(do_not_specialize=["Q", "V"])
def _add_bias(OUT, ROW, TOKEN, BIAS, Q, V, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < Q
    at = OUT + tl.load(ROW + i, mask=mask, other=0) * V + tl.load(TOKEN + i, mask=mask, other=0)
    tl.store(at, tl.load(at, mask=mask, other=0.0) + tl.load(BIAS + i, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["V", "words"])
def _hide(OUT, ROW, MASK, V, words, BLOCK: tl.constexpr):
    """−inf for the tokens of a row whose bit is clear."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(MASK + g * words + j // 32, mask=j < V, other=-1)
    tl.store(OUT + tl.load(ROW + g) * V + j, float("-inf"), mask=(j < V) & (((word >> (j % 32)) & 1) == 0))


def adjust_logits(
    num: Numerics,
    logits: Tensor,
    *,
    row: Tensor,
    token: Tensor,
    count: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_row: Tensor,
    bias_token: Tensor,
    bias: Tensor,
    mask_row: Tensor,
    mask: Tensor,
) -> Tensor:
    """Copy of logits f32 [B, V] with penalties, then biases, then masks applied; arguments as in the reference."""
    V = logits.shape[1]
    words = mask.shape[1]
    if logits.dtype is not float32 or mask.dtype is not int32 or (mask_row.numel() and words != blocks(V, 32)):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, masks {tuple(mask.shape)} {mask.dtype}")
    out = contiguous(logits).clone()
    if P := row.numel():
        pairs = [contiguous(t) for t in (row, token, count, presence, frequency, repetition)]
        launch(_penalise, (blocks(P, 128),), out, *pairs, P, V, BLOCK=128)
    if Q := bias_row.numel():
        launch(
            _add_bias, (blocks(Q, 128),), out, *(contiguous(t) for t in (bias_row, bias_token, bias)), Q, V, BLOCK=128
        )
    if G := mask_row.numel():
        launch(_hide, (blocks(V, 1024), G), out, contiguous(mask_row), contiguous(mask), V, words, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["V", "top"])
def _logprobs(
    LOGITS, IDS, LOGP, BEST, BEST_LOGP, ROOM, V, top, MOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """log-probability of one id of a row; the ``top`` best ids, found as for index entries, then ordered."""
    row = tl.program_id(0).to(tl.int64)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf")))
    peak = tl.max(high, 0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        sums += exp(tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf")) - peak)
    shift = log(tl.sum(sums, 0))
    tl.store(LOGP + row, (tl.load(LOGITS + row * V + tl.load(IDS + row)) - peak) - shift)
    if MOST > 0:
        lowest, room = kth_best(LOGITS, row, V, -1, V, top, 1, 1, BLOCK)
        taken, equals = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for start in range(0, V, BLOCK):
            j = start + tl.arange(0, BLOCK)
            key = number(tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf")))
            equal = (key == lowest) & (j < V)
            nth = equals + tl.cumsum(equal.to(tl.int32), 0)
            chosen = ((key > lowest) & (key < _NAN) & (j < V)) | (equal & (nth <= room))
            place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(ROOM + row * MOST + place, j, mask=chosen & (place < top))
            taken += tl.sum(chosen.to(tl.int32), 0)
            equals += tl.sum(equal.to(tl.int32), 0)
        tl.debug_barrier()
        i = tl.arange(0, MOST)
        there = i < tl.minimum(taken, top)
        id = tl.load(ROOM + row * MOST + i, mask=there, other=0)
        value = (tl.load(LOGITS + row * V + id, mask=there, other=float("-inf")) - peak) - shift
        key = tl.where(there, number(value), -0x80000000)
        before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (i[None, :] < i[:, None]))
        rank = tl.sum(before.to(tl.int32), 1)
        tl.store(BEST + row * top + rank, id.to(tl.int64), mask=there)
        tl.store(BEST_LOGP + row * top + rank, value, mask=there)


def token_logprobs(num: Numerics, logits: Tensor, ids: Tensor, *, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability f32 [B] of ids [B], best ids int64 [B, top], theirs f32 [B, top]) of the logits f32 [B, V]."""
    logits, ids = contiguous(logits), contiguous(ids)
    (B, V), device = logits.shape, logits.device
    if logits.dtype is not float32 or ids.dtype is not int64 or ids.shape != (B,):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, ids {tuple(ids.shape)} {ids.dtype}")
    top = min(top, V)
    logp = empty(B, dtype=float32, device=device)
    best = empty((B, top), dtype=int64, device=device), empty((B, top), dtype=float32, device=device)
    most = power_of_two(top) if top else 0
    room = empty((B, most), dtype=int32, device=device)
    launch(_logprobs, (B,), logits, ids, logp, *best, room, V, top, warps=8, MOST=most, BLOCK=2048)
    return logp, *best
