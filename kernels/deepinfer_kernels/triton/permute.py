"""Expert choices sorted by slot, rows taken along, choices counted: a stable sort by counting, without a sort.

Few choices take one launch: a program serves a few slots and reads every choice twice, first to count how many lie
before its slots, then to give each of its own a place. Many choices take two: a program counts the slots of one part
of the choices; then it adds up the counts of all parts (those of lower slots, those of its own slots in earlier parts)
and ranks its choices among themselves. Both give the same places, which are integers. A row is then read once, by the
programs of its token, and written to the places of all its choices.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32, int64, zeros

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: slots of a program and choices of its step: 2048 comparisons at a time
_SLOTS, _CHOICES = 4, 512
#: the most choices of one launch, choices of a part where there are more, and those which all of a part are compared
#: with at a time: 64 comparisons of a thread, which its registers hold
_FEW, _PART, _COMPARED = 1024, 256, 64
#: channels of a program that writes rows
_WIDTH = 1024
#: choices of a step of counting; where a layer has more, programs share it
_COUNTED = 1024
#: counts of parts that are added up at a time
_COUNTS = 8192


@triton.jit(do_not_specialize=["M", "S", "K"])
def _permute(SLOTS, WEIGHTS, TOKEN, ORDER, COUNTS, WEIGHT, M, S, K, BS: tl.constexpr, BM: tl.constexpr):
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    place = tl.zeros((BS,), dtype=tl.int32)
    count = tl.zeros((BS,), dtype=tl.int32)
    for start in range(0, M, BM):
        i = start + tl.arange(0, BM)
        slot = tl.load(SLOTS + i, mask=i < M, other=0x7FFFFFFF).to(tl.int32)
        place += tl.sum((slot[None, :] < s[:, None]).to(tl.int32), 1)
        count += tl.sum((slot[None, :] == s[:, None]).to(tl.int32), 1)
    tl.store(COUNTS + s, count.to(tl.int64), mask=s < S)
    for start in range(0, M, BM):
        i = start + tl.arange(0, BM)
        slot = tl.load(SLOTS + i, mask=i < M, other=0x7FFFFFFF).to(tl.int32)
        mine = (slot[None, :] == s[:, None]) & (s < S)[:, None]
        to = place[:, None] + tl.cumsum(mine.to(tl.int32), 1) - 1
        which = tl.broadcast_to(i[None, :], (BS, BM))
        tl.store(ORDER + which, to.to(tl.int64), mask=mine)
        if TOKEN is not None:
            tl.store(TOKEN + to, tl.broadcast_to((i // K).to(tl.int64)[None, :], (BS, BM)), mask=mine)
        if WEIGHTS is not None:
            tl.store(WEIGHT + to, tl.load(WEIGHTS + which, mask=mine, other=0.0), mask=mine)
        place += tl.sum(mine.to(tl.int32), 1)


@triton.jit(do_not_specialize=["M"])
def _count_part(SLOTS, FOUND, M, BINS: tl.constexpr, BM: tl.constexpr):
    """FOUND [part, slot]: choices of each slot among those of a part."""
    part = tl.program_id(0)
    i = part * BM + tl.arange(0, BM)
    slot = tl.load(SLOTS + i, mask=i < M, other=0).to(tl.int32)
    tl.store(FOUND + part * BINS + tl.arange(0, BINS), tl.histogram(slot, BINS, mask=i < M))


@triton.jit(do_not_specialize=["M", "S", "K"])
def _place_part(
    SLOTS, WEIGHTS, FOUND, TOKEN, ORDER, COUNTS, WEIGHT, M, S, K, BINS: tl.constexpr, BM: tl.constexpr,
    BJ: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Places of the choices of a part: after lower slots, equals of earlier parts and earlier equals of its own."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    s = tl.arange(0, BINS)
    found = tl.zeros((BP, BINS), dtype=tl.int32)
    earlier = tl.zeros((BP, BINS), dtype=tl.int32)
    for start in range(0, parts, BP):
        p = (start + tl.arange(0, BP))[:, None]
        more = tl.load(FOUND + p * BINS + s[None, :], mask=p < parts, other=0)
        found += more
        earlier += tl.where(p < part, more, 0)
    total = tl.sum(found, 0)
    if part == 0:
        tl.store(COUNTS + s, total.to(tl.int64), mask=s < S)
    first = tl.cumsum(total, 0) - total + tl.sum(earlier, 0)
    i = part * BM + tl.arange(0, BM)
    mine = tl.load(SLOTS + i, mask=i < M, other=0).to(tl.int32)
    rank = tl.zeros((BM,), dtype=tl.int32)
    for start in range(0, BM, BJ):
        j = part * BM + start + tl.arange(0, BJ)
        other = tl.load(SLOTS + j, mask=j < M, other=-1).to(tl.int32)
        rank += tl.sum(((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    to = tl.gather(first, mine, 0) + rank
    tl.store(ORDER + i, to.to(tl.int64), mask=i < M)
    if TOKEN is not None:
        tl.store(TOKEN + to, (i // K).to(tl.int64), mask=i < M)
    if WEIGHTS is not None:
        tl.store(WEIGHT + to, tl.load(WEIGHTS + i, mask=i < M, other=0.0), mask=i < M)


def _permuted(
    slots: Tensor, num_slots: int, token: Tensor | None, weights: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(place of each choice, choices per slot); fills tokens and weights by place where they are wanted."""
    M, device = slots.numel(), slots.device
    order, counts = empty(M, dtype=int64, device=device), empty(num_slots, dtype=int64, device=device)
    made = (token, order, counts, weight, M, num_slots, slots.shape[1])
    if M <= _FEW:
        launch(_permute, (blocks(num_slots, _SLOTS),), slots, weights, *made, BS=_SLOTS, BM=_CHOICES)
        return order, counts
    parts, bins = blocks(M, _PART), max(16, power_of_two(num_slots))
    found = empty((parts, bins), dtype=int32, device=device)
    launch(_count_part, (parts,), slots, found, M, BINS=bins, BM=_PART)
    sizes = dict(BINS=bins, BM=_PART, BJ=_COMPARED, BP=max(1, _COUNTS // bins))
    launch(_place_part, (parts,), slots, weights, found, *made, warps=8, **sizes)
    return order, counts


def _of_slots(slots: Tensor) -> Tensor:
    if slots.dtype is not int64 or slots.dim() != 2:
        raise TypeError(f"slots are int64 [T, K], got {tuple(slots.shape)} {slots.dtype}")
    return contiguous(slots)


def dispatch_permute(num: Numerics, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by slot; slots int64 [T, k], all below ``num_slots``. Shapes as in the reference."""
    slots = _of_slots(slots)
    token = empty(slots.numel(), dtype=int64, device=slots.device)
    return token, *_permuted(slots, num_slots, token, None, None)


@triton.jit
def _rows(X, ORDER, Y, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the row of a token, read once and written to the places of all its choices."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + token * H + h, mask=h < H)
    for k in tl.static_range(K):
        to = tl.load(ORDER + token * K + k)
        tl.store(Y + to * H + h, x, mask=h < H)


def dispatch_rows(
    num: Numerics, x: Tensor, slots: Tensor, weights: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows [T·k, H] and weights [T·k] sorted by slot, place of each pair [T·k], rows per slot) of x [T, H]."""
    if weights.dtype is not float32 or weights.shape != slots.shape or x.shape[0] != slots.shape[0]:
        shapes = [tuple(t.shape) for t in (x, slots, weights)]
        raise ValueError(f"rows, slots and float32 weights {shapes} {weights.dtype}")
    slots = _of_slots(slots)
    weight = empty(slots.numel(), dtype=float32, device=slots.device)
    order, counts = _permuted(slots, num_slots, None, contiguous(weights), weight)
    x, (T, K), H = contiguous(x), slots.shape, x.shape[-1]
    rows = empty((T * K, H), dtype=x.dtype, device=x.device)
    block = min(_WIDTH, power_of_two(H))
    launch(_rows, (T, blocks(H, block)), x, order, rows, H=H, K=K, BLOCK=block)
    return rows, weight, order, counts


@triton.jit(do_not_specialize=["M"])
def _count(IDS, COUNTS, M, E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, SHARED: tl.constexpr):
    """Of one layer; where several programs share it they add to counts that are 0, in any order: integers."""
    layer = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(tl.program_id(1) * BM, M, tl.num_programs(1) * BM):
        i = start + tl.arange(0, BM)
        found = tl.load(IDS + layer * M + i, mask=i < M, other=0).to(tl.int32)
        count += tl.histogram(found, BINS, mask=i < M)
    e = tl.arange(0, BINS)
    if SHARED:
        tl.atomic_add(COUNTS + layer * E + e, count.to(tl.int64), mask=(e < E) & (count > 0), sem="relaxed")
    else:
        tl.store(COUNTS + layer * E + e, count.to(tl.int64), mask=e < E)


def count_choices(num: Numerics, ids: Tensor, total: int) -> Tensor:
    """int64 [L, total]: how often each expert is among ids int64 [L, T, K]."""
    ids = contiguous(ids)
    if ids.dtype is not int64 or ids.dim() != 3:
        raise TypeError(f"chosen experts are int64 [L, T, K], got {tuple(ids.shape)} {ids.dtype}")
    L = ids.shape[0]
    M = ids.shape[1] * ids.shape[2]
    shared = _COUNTED < M
    counts = (zeros if shared else empty)((L, total), dtype=int64, device=ids.device)
    grid = (L, blocks(M, _COUNTED) if shared else 1)
    launch(_count, grid, ids, counts, M, E=total, BINS=power_of_two(total), BM=_COUNTED, SHARED=shared)
    return counts
