"""Verification of drafts: confidences, shares of a budget, rows of a verify step, what stands and what is emitted."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.reference.speculate import NO_TOKEN
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.precise import sigmoid

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["REGIME"])
def _confidence(LOGITS, TEMPERATURE, REGIME, OUT, size, J: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    regime = tl.load(REGIME + i // J, mask=i < size, other=0)
    temperature = tl.load(TEMPERATURE + regime * J + i % J, mask=i < size, other=1.0)
    x = tl.div_rn(tl.load(LOGITS + i, mask=i < size, other=0.0), temperature)
    tl.store(OUT + i, sigmoid(x), mask=i < size)


def dspark_confidence(num: Numerics, logits: Tensor, temperature: Tensor, regime: Tensor) -> Tensor:
    """Calibrated confidences f32 [B, J] = sigmoid(logits / temperature[regime]); temperature f32 [G, J]."""
    logits, temperature, regime = contiguous(logits), contiguous(temperature), contiguous(regime)
    B, J = logits.shape
    if logits.dtype is not float32 or temperature.dtype is not float32 or temperature.shape[1:] != (J,):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, temperatures {tuple(temperature.shape)}")
    out = empty((B, J), dtype=float32, device=logits.device)
    launch(_confidence, (blocks(B * J, 128),), logits, temperature, regime, out, B * J, J=J, BLOCK=128)
    return out


@triton.jit
def _survival(CONFIDENCE, CAP, ADMISSION, lead, i, B, J: tl.constexpr, JP: tl.constexpr):
    """(survival, position, admission, whether it may be verified) of items i = row · JP + position of one split."""
    row, k = i // JP, i % JP
    there = (row < B) & (k < J)
    at = lead * B + row
    survival = tl.full(i.shape, 1.0, tl.float32)
    for place in tl.static_range(J):
        c = tl.load(CONFIDENCE + at * J + place, mask=there, other=0.0)
        c = tl.where((c == c) & (tl.abs(c) < float("inf")), tl.minimum(tl.maximum(c, 0.0), 1.0), 0.0)
        survival = tl.where(place <= k, survival * c, survival)
    cap = tl.load(CAP + at, mask=there, other=0)
    return survival, k, tl.load(ADMISSION + at, mask=there, other=0), there & (k < cap)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["CAP", "ADMISSION", "BUDGET"])
def _split(
    CONFIDENCE, CAP, ADMISSION, BUDGET, LENGTH, B, J: tl.constexpr, JP: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    s, k, a, mine = _survival(CONFIDENCE, CAP, ADMISSION, lead, first * JP + tl.arange(0, ROWS * JP), B, J, JP)
    rank = tl.zeros((ROWS * JP,), dtype=tl.int32)
    for start in range(0, B * JP, OTHERS):
        s2, k2, a2, theirs = _survival(CONFIDENCE, CAP, ADMISSION, lead, start + tl.arange(0, OTHERS), B, J, JP)
        same = (s2[None, :] == s[:, None]) & (k2[None, :] == k[:, None]) & (a2[None, :] < a[:, None])
        earlier = (s2[None, :] == s[:, None]) & (k2[None, :] < k[:, None])
        before = (s2[None, :] > s[:, None]) | earlier | same
        rank += tl.sum((before & theirs[None, :]).to(tl.int32), 1)
    within = mine & (rank < tl.load(BUDGET + lead))
    length = tl.sum(within.to(tl.int32).reshape(ROWS, JP), 1)
    row = first + tl.arange(0, ROWS)
    tl.store(LENGTH + lead * B + row, length.to(tl.int64), mask=row < B)


def dspark_split(num: Numerics, confidence: Tensor, cap: Tensor, admission: Tensor, budget: Tensor) -> Tensor:
    """Drafts int64 [..., B] of each row: the ``budget`` [...] largest survivals of confidence [..., B, J]."""
    B, J = confidence.shape[-2:]
    lead = confidence.shape[:-2]
    if cap.shape != (*lead, B) or admission.shape != (*lead, B) or budget.shape != lead:
        shapes = [tuple(t.shape) for t in (confidence, cap, admission, budget)]
        raise ValueError(f"confidences, caps, admissions and budget {shapes}")
    length = empty((*lead, B), dtype=int64, device=confidence.device)
    if not J:
        return length.zero_()
    given = (contiguous(confidence.to(float32)), contiguous(cap), contiguous(admission), contiguous(budget))
    wide = power_of_two(J)
    rows = max(1, 64 // wide)
    launch(_split, (blocks(B, rows), budget.numel()), *given, length, B, J=J, JP=wide, ROWS=rows, OTHERS=64)
    return length


@triton.jit(do_not_specialize=["B", "T"], do_not_specialize_on_alignment=["DRAWN", "DRAFTS", "FIRST", "LENGTH"])
def _accept(
    DRAWN, DRAFTS, FIRST, LENGTH, TOKENS, ACCEPTED, B, T, J: tl.constexpr, JP: tl.constexpr, ROWS: tl.constexpr
):
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, JP)[None, :]
    there = (b < B)[:, None]
    first, length = tl.load(FIRST + b, mask=b < B, other=0), tl.load(LENGTH + b, mask=b < B, other=0)
    at = tl.minimum(first[:, None] + k, T - 1)
    token = tl.load(DRAWN + at, mask=there & (k <= J), other=0)
    draft = tl.load(DRAFTS + b[:, None] * J + k, mask=there & (k < J), other=-1)
    stands = (token == draft) & (k < length[:, None]) & (draft >= 0) & (k < J)
    wrong = tl.cumsum((~stands).to(tl.int32), 1)
    accepted = tl.sum((wrong == 0).to(tl.int64), 1)
    tl.store(
        TOKENS + b[:, None] * (J + 1) + k, tl.where(k <= accepted[:, None], token, _NO_TOKEN), mask=there & (k <= J)
    )
    tl.store(ACCEPTED + b, accepted, mask=b < B)


def accept_drawn(num: Numerics, drawn: Tensor, drafts: Tensor, first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, J+1], num_accepted int64 [B]) of coupled verification: drafts that equal what was drawn."""
    B, J = drafts.shape
    device = drafts.device
    tokens, accepted = empty((B, J + 1), dtype=int64, device=device), empty(B, dtype=int64, device=device)
    if not drawn.shape[0] and B:
        raise ValueError(f"{B} rows, no token was drawn")
    given = [contiguous(t) for t in (drawn, drafts, first, length)]
    if any(t.dtype is not int64 for t in given):
        raise TypeError(f"tokens, drafts, rows and lengths are int64, got {[t.dtype for t in given]}")
    sizes = dict(J=J, JP=power_of_two(J + 1), ROWS=16)
    launch(_accept, (blocks(B, 16),), *given, tokens, accepted, B, drawn.shape[0], **sizes)
    return tokens, accepted


@triton.jit(do_not_specialize=["B", "S"], do_not_specialize_on_alignment=["TOKENS", "ACCEPTED", "STOP", "ROOM"])
def _truncate(
    TOKENS, ACCEPTED, STOP, ROOM, COUNT, KEPT, ENDED, B, S, W: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr
):
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WP)[None, :]
    there = (b < B)[:, None] & (k < W)
    token = tl.load(TOKENS + b[:, None] * W + k, mask=there, other=_NO_TOKEN)
    accepted, room = tl.load(ACCEPTED + b, mask=b < B, other=0), tl.load(ROOM + b, mask=b < B, other=0)
    stop = tl.zeros((ROWS, WP), dtype=tl.int1)
    for s in range(0, S):
        stop = stop | (token == tl.load(STOP + b * S + s, mask=b < B, other=_NO_TOKEN)[:, None])
    inside = (k <= accepted[:, None]) & (k < W)
    stop = stop & inside & (token >= 0)
    failed = (token < 0) & inside
    until = tl.min(tl.where(stop | failed, k, W), 1) + 1
    count = tl.minimum(tl.minimum(until.to(tl.int64), accepted + 1), room)
    last = k == tl.maximum(count - 1, 0)[:, None]
    fails = tl.max((failed & last).to(tl.int32), 1) > 0
    stops = tl.max((stop & last).to(tl.int32), 1) > 0
    ended = tl.where(fails & (count > 0), 3, tl.where(stops & (count > 0), 1, tl.where(count >= room, 2, 0)))
    tl.store(COUNT + b, count, mask=b < B)
    tl.store(KEPT + b, tl.minimum(accepted, count), mask=b < B)
    tl.store(ENDED + b, ended.to(tl.int64), mask=b < B)


def truncate_emitted(
    num: Numerics, tokens: Tensor, accepted: Tensor, *, stop: Tensor, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(count of emitted tokens, num_accepted, ended), int64 [B] each, after stop ids [B, S] and room [B]."""
    B, W = tokens.shape
    count, kept, ended = (empty(B, dtype=int64, device=tokens.device) for _ in range(3))
    given = [contiguous(t) for t in (tokens, accepted, stop, room)]
    if any(t.dtype is not int64 for t in given):
        raise TypeError(f"tokens, counts, stops and room are int64, got {[t.dtype for t in given]}")
    sizes = dict(W=W, WP=power_of_two(W), ROWS=16)
    launch(_truncate, (blocks(B, 16),), *given, count, kept, ended, B, stop.shape[1], **sizes)
    return count, kept, ended
