"""Logits before and after drawing: penalties, biases and token masks; log-probabilities that are reported."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.filters import GROUP, group_part, list_groups
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.precise import exp, log, times
from deepinfer_kernels.triton.select import kth_best, number
from deepinfer_kernels.triton.vocabulary import part_of, part_size


@triton.jit
def _penalised(x, count, presence, frequency, repetition):
    x = tl.where(x > 0, tl.div_rn(x, repetition), times(x, repetition))
    x = x - times(frequency, count)
    return x - tl.where(count > 0, presence, 0.0)


@triton.jit(do_not_specialize=["P", "V"])
def _penalise(OUT, ROW, TOKEN, COUNT, PRESENCE, FREQUENCY, REPETITION, P, V, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < P
    at = OUT + tl.load(ROW + i, mask=mask, other=0) * V + tl.load(TOKEN + i, mask=mask, other=0)
    x, repetition = tl.load(at, mask=mask, other=0.0), tl.load(REPETITION + i, mask=mask, other=1.0)
    count = tl.load(COUNT + i, mask=mask, other=0.0)
    presence, frequency = tl.load(PRESENCE + i, mask=mask, other=0.0), tl.load(FREQUENCY + i, mask=mask, other=0.0)
    tl.store(at, _penalised(x, count, presence, frequency, repetition), mask=mask)


@triton.jit(do_not_specialize=["Q", "V"])
def _add_bias(OUT, ROW, TOKEN, BIAS, Q, V, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < Q
    at = OUT + tl.load(ROW + i, mask=mask, other=0) * V + tl.load(TOKEN + i, mask=mask, other=0)
    tl.store(at, tl.load(at, mask=mask, other=0.0) + tl.load(BIAS + i, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["G"], do_not_specialize_on_alignment=["FIRST", "LENGTH"])
def _copy_allowed(
    LOGITS, OUT, ROW, MASK, FIRST, LENGTH, G, V: tl.constexpr, EACH: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """A part of a row, with −inf for the tokens whose bit is clear in the mask of the row, if it has one."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    found = tl.full((), -1, tl.int64)
    for start in range(0, G, 128):
        g = start + tl.arange(0, 128)
        begin = tl.load(ROW + g, mask=g < G, other=-1)
        end = begin
        if FIRST is not None:
            end = tl.load(LENGTH + begin, mask=g < G, other=0)
            begin = tl.load(FIRST + begin, mask=g < G, other=-1)
            end += begin
        mine = (g < G) & (begin <= row) & (row <= end)
        found = tl.maximum(found, tl.max(tl.where(mine, g * PLACES + (row - begin), -1), 0))
    j, x, _ = part_of(LOGITS, row, part, V, EACH)
    if found >= 0:
        word = tl.load(MASK + found * ((V + 31) // 32) + j // 32, mask=j < V, other=-1)
        x = tl.where(((word >> (j % 32)) & 1) == 0, float("-inf"), x)
    tl.store(OUT + row * V + j, x, mask=j < V)


def _allowed(logits: Tensor, mask_row: Tensor, mask: Tensor, first: Tensor | None, length: Tensor | None) -> Tensor:
    """Copy of the logits with −inf where masks forbid, which penalties and finite biases leave −inf."""
    logits = contiguous(logits)
    (B, V), G = logits.shape, mask_row.numel()
    if not G:
        return logits.clone()
    out, places = empty((B, V), dtype=float32, device=logits.device), 1 if first is None else mask.shape[1]
    given = (logits, out, contiguous(mask_row), contiguous(mask), first, length, G)
    sizes = dict(V=V, EACH=part_size(V), PLACES=places)
    launch(_copy_allowed, (B, blocks(V, part_size(V))), *given, warps=8, **sizes)
    return out


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
    out = _allowed(logits, mask_row, mask, None, None)
    if P := row.numel():
        pairs = [contiguous(t) for t in (row, token, count, presence, frequency, repetition)]
        launch(_penalise, (blocks(P, 128),), out, *pairs, P, V, BLOCK=128)
    if Q := bias_row.numel():
        launch(
            _add_bias, (blocks(Q, 128),), out, *(contiguous(t) for t in (bias_row, bias_token, bias)), Q, V, BLOCK=128
        )
    return out


@triton.jit(do_not_specialize=["P", "V"], do_not_specialize_on_alignment=["DRAFTS", "FIRST", "LENGTH"])
def _penalise_known(
    OUT, DRAFTS, FIRST, LENGTH, ROW, TOKEN, COUNT, PRESENCE, FREQUENCY, REPETITION, P, V, J: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens that a sequence has already, at every place of its block: drafts before the place count too."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < P
    b, token = tl.load(ROW + i, mask=mask, other=0), tl.load(TOKEN + i, mask=mask, other=0)
    count = tl.load(COUNT + i, mask=mask, other=0.0)
    presence, frequency = tl.load(PRESENCE + b, mask=mask, other=0.0), tl.load(FREQUENCY + b, mask=mask, other=0.0)
    repetition = tl.load(REPETITION + b, mask=mask, other=1.0)
    first, length = tl.load(FIRST + b, mask=mask, other=0), tl.load(LENGTH + b, mask=mask, other=-1)
    for place in tl.static_range(J + 1):
        there = mask & (place <= length)
        at = OUT + (first + place) * V + token
        x = tl.load(at, mask=there, other=0.0)
        tl.store(at, _penalised(x, count, presence, frequency, repetition), mask=there)
        if place < J:
            count += (tl.load(DRAFTS + b * J + place, mask=mask, other=-1) == token).to(tl.float32)


@triton.jit(do_not_specialize=["P", "V"], do_not_specialize_on_alignment=["DRAFTS", "FIRST", "LENGTH"])
def _penalise_drafts(
    OUT, DRAFTS, FIRST, LENGTH, ROW, TOKEN, PRESENCE, FREQUENCY, REPETITION, P, V, J: tl.constexpr, JP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Drafts that are new to their sequence, at the places behind them; each at its first occurrence in the block."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, JP)
    draft = tl.load(DRAFTS + b * J + j, mask=j < J, other=-1)
    known = tl.zeros((JP,), dtype=tl.int32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        own = tl.load(ROW + i, mask=i < P, other=-1) == b
        token = tl.load(TOKEN + i, mask=i < P, other=-1)
        found = (token[None, :] == draft[:, None]) & own[None, :]
        known = tl.maximum(known, tl.max(found.to(tl.int32), 1))
    earlier = (draft[None, :] == draft[:, None]) & (j[None, :] < j[:, None])
    fresh = (known == 0) & (tl.max(earlier.to(tl.int32), 1) == 0) & (draft >= 0)
    first, length = tl.load(FIRST + b), tl.load(LENGTH + b)
    presence, frequency, repetition = tl.load(PRESENCE + b), tl.load(FREQUENCY + b), tl.load(REPETITION + b)
    count = tl.zeros((JP,), dtype=tl.float32)
    for place in tl.static_range(1, J + 1):
        count += (draft == tl.load(DRAFTS + b * J + place - 1)).to(tl.float32)
        there = fresh & (j < place) & (place <= length)
        at = OUT + (first + place) * V + draft
        x = tl.load(at, mask=there, other=0.0)
        tl.store(at, _penalised(x, count, presence, frequency, repetition), mask=there)


@triton.jit(do_not_specialize=["Q", "V"], do_not_specialize_on_alignment=["FIRST", "LENGTH"])
def _add_biases(OUT, FIRST, LENGTH, ROW, TOKEN, BIAS, Q, V, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, token = tl.load(ROW + i, mask=i < Q, other=0), tl.load(TOKEN + i, mask=i < Q, other=0)
    first, length = tl.load(FIRST + b, mask=i < Q, other=0), tl.load(LENGTH + b, mask=i < Q, other=-1)
    bias = tl.load(BIAS + i, mask=i < Q, other=0.0)
    for place in tl.static_range(PLACES):
        there = (i < Q) & (place <= length)
        at = OUT + (first + place) * V + token
        tl.store(at, tl.load(at, mask=there, other=0.0) + bias, mask=there)


def adjust_verify_logits(
    num: Numerics,
    logits: Tensor,
    *,
    drafts: Tensor,
    first: Tensor,
    length: Tensor,
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
    """Copy of verify logits f32 [T, V], adjusted as after the drafts before each row; arguments as in the reference."""
    V, (B, J), words = logits.shape[1], drafts.shape, mask.shape[2]
    if logits.dtype is not float32 or mask.dtype is not int32 or (mask_row.numel() and words != blocks(V, 32)):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, masks {tuple(mask.shape)} {mask.dtype}")
    where = [contiguous(t) for t in (drafts, first, length)]
    out = _allowed(logits, mask_row, mask, *where[1:])
    pairs = [contiguous(t) for t in (row, token)]
    penalties = [contiguous(t) for t in (presence, frequency, repetition)]
    P = row.numel()
    if P:
        arguments = (out, *where, *pairs, contiguous(count), *penalties, P, V)
        launch(_penalise_known, (blocks(P, 128),), *arguments, J=J, BLOCK=128)
    if J:
        sizes = dict(J=J, JP=power_of_two(J), BLOCK=128)
        launch(_penalise_drafts, (B,), out, *where, *pairs, *penalties, P, V, **sizes)
    if Q := bias_row.numel():
        biases = [contiguous(t) for t in (bias_row, bias_token, bias)]
        launch(_add_biases, (blocks(Q, 128),), out, *where[1:], *biases, Q, V, PLACES=J + 1, BLOCK=128)
    return out


@triton.jit
def _weigh(LOGITS, PEAKS, GROUPS, V: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr):
    """PEAKS [row, part, 2]: the largest logit of a part, and its mass when that has 1."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, x, key = part_of(LOGITS, row, part, V, EACH)
    peak = tl.max(tl.max(x, 1), 0)
    mass = tl.sum(tl.sum(tl.where(x == float("-inf"), 0.0, exp(x - peak)), 1), 0)
    tl.store(PEAKS + (row * PARTS + part) * 2, peak)
    tl.store(PEAKS + (row * PARTS + part) * 2 + 1, mass)
    if GROUPS is not None:
        group_part(GROUPS, row, part, PARTS, EACH, key)


@triton.jit(do_not_specialize=["top"])
def _logprobs(
    LOGITS, IDS, PEAKS, GROUPS, CHOSEN, KEYS, LISTED, ORDER, LOGP, BEST, BEST_LOGP, top, V: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log-probability of one id of a row; the ``top`` best ids, found in the best groups, then ordered."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, triton.next_power_of_2(PARTS))
    at = PEAKS + (row * PARTS + p) * 2
    peaks = tl.load(at, mask=p < PARTS, other=float("-inf"))
    peak = tl.max(peaks, 0)
    masses = tl.load(at + 1, mask=p < PARTS, other=0.0)
    shift = log(tl.sum(tl.where(peaks == float("-inf"), 0.0, masses * exp(peaks - peak)), 0))
    tl.store(LOGP + row, (tl.load(LOGITS + row * V + tl.load(IDS + row)) - peak) - shift)
    if MOST > 0:
        ROOM: tl.constexpr = MOST * GROUP
        groups: tl.constexpr = PARTS * (EACH // GROUP)
        count = list_groups(LOGITS, GROUPS, CHOSEN, KEYS, LISTED, row, V, groups, top, -0x80000000, ROOM, BLOCK)
        lowest, room = tl.full((), -0x80000000, tl.int32), tl.full((), 0, tl.int32)
        if count > top:
            lowest, room = kth_best(KEYS + row * (ROOM - count), row, count, top, True, ROOM)
        i = tl.arange(0, ROOM)
        key = tl.load(KEYS + row * ROOM + i, mask=i < count, other=-0x80000000)
        equal = (key == lowest) & (i < count)
        chosen = ((key > lowest) & (i < count)) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        id = tl.load(LISTED + row * ROOM + i, mask=chosen, other=0)
        tl.store(ORDER + row * MOST + place, id, mask=chosen)
        tl.debug_barrier()
        i = tl.arange(0, MOST)
        there = i < tl.sum(chosen.to(tl.int32), 0)
        id = tl.load(ORDER + row * MOST + i, mask=there, other=0)
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
    each, most = part_size(V), power_of_two(top) if top else 0
    parts, groups, room = blocks(V, each), blocks(V, each) * each // GROUP.value, most * GROUP.value
    peaks = empty((B, parts, 2), dtype=float32, device=device)
    # maxima of groups, the best groups, keys and ids of their tokens, ids of the best
    spaces = [empty((B, size), dtype=int32, device=device) for size in (groups, groups, room, room, most)]
    sizes = dict(V=V, PARTS=parts, EACH=each)
    launch(_weigh, (B, parts), logits, peaks, spaces[0] if top else None, warps=8, **sizes)
    given = (logits, ids, peaks, *spaces, logp, *best, top)
    launch(_logprobs, (B,), *given, warps=8, **sizes, MOST=most, BLOCK=2048)
    return logp, *best
