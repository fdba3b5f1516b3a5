"""Expert choices sorted by slot, rows taken along, choices counted: a stable sort by counting, without a sort.

A program serves a few slots. It reads every choice twice: first to count how many lie before its slots, then to give
each of its own a place. Nothing waits for another program, so one launch does it for any number of choices.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: slots of a program and choices of its step: 2048 comparisons at a time
_SLOTS, _CHOICES = 4, 512


@triton.jit(do_not_specialize=["M"])
def _permute(
    SLOTS, WEIGHTS, TOKEN, ORDER, COUNTS, WEIGHT, M, S: tl.constexpr, K: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
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
        tl.store(TOKEN + to, (which // K).to(tl.int64), mask=mine)
        if WEIGHTS is not None:
            tl.store(WEIGHT + to, tl.load(WEIGHTS + which, mask=mine, other=0.0), mask=mine)
        place += tl.sum(mine.to(tl.int32), 1)


def _permuted(slots: Tensor, num_slots: int, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    slots = contiguous(slots)
    if slots.dtype is not int64 or slots.dim() != 2:
        raise TypeError(f"slots are int64 [T, K], got {tuple(slots.shape)} {slots.dtype}")
    M, device = slots.numel(), slots.device
    token, order = empty(M, dtype=int64, device=device), empty(M, dtype=int64, device=device)
    counts = empty(num_slots, dtype=int64, device=device)
    sorted_weights = None if weights is None else empty(M, dtype=float32, device=device)
    sizes = dict(S=num_slots, K=slots.shape[1], BS=_SLOTS, BM=_CHOICES)
    grid = (blocks(num_slots, _SLOTS),)
    launch(_permute, grid, slots, weights, token, order, counts, sorted_weights, M, **sizes)
    return token, order, counts, sorted_weights


def dispatch_permute(num: Numerics, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by slot; slots int64 [T, k], all below ``num_slots``. Shapes as in the reference."""
    return _permuted(slots, num_slots, None)[:3]


@triton.jit
def _rows(X, SOURCE, Y, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(SOURCE + row)
    tl.store(Y + row * H + h, tl.load(X + source * H + h, mask=h < H), mask=h < H)


def taken(x: Tensor, source: Tensor) -> Tensor:
    """Rows x[source] [M, H] of x [T, H]; source int64 [M]."""
    x, source = contiguous(x), contiguous(source)
    H, M = x.shape[-1], source.numel()
    y = empty((M, H), dtype=x.dtype, device=x.device)
    block = min(2048, power_of_two(H))
    launch(_rows, (M, blocks(H, block)), x, source, y, H=H, BLOCK=block)
    return y


def dispatch_rows(
    num: Numerics, x: Tensor, slots: Tensor, weights: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows [T·k, H] and weights [T·k] sorted by slot, place of each pair [T·k], rows per slot) of x [T, H]."""
    if weights.dtype is not float32 or weights.shape != slots.shape or x.shape[0] != slots.shape[0]:
        shapes = [tuple(t.shape) for t in (x, slots, weights)]
        raise ValueError(f"rows, slots and float32 weights {shapes} {weights.dtype}")
    token, order, counts, weight = _permuted(slots, num_slots, contiguous(weights))
    assert weight is not None
    return taken(x, token), weight, order, counts


@triton.jit(do_not_specialize=["M"])
def _count(IDS, COUNTS, M, E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr):
    layer = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, M, BM):
        i = start + tl.arange(0, BM)
        found = tl.load(IDS + layer * M + i, mask=i < M, other=0).to(tl.int32)
        count += tl.histogram(found, BINS, mask=i < M)
    e = tl.arange(0, BINS)
    tl.store(COUNTS + layer * E + e, count.to(tl.int64), mask=e < E)


def count_choices(num: Numerics, ids: Tensor, total: int) -> Tensor:
    """int64 [L, total]: how often each expert is among ids int64 [L, T, K]."""
    ids = contiguous(ids)
    if ids.dtype is not int64 or ids.dim() != 3:
        raise TypeError(f"chosen experts are int64 [L, T, K], got {tuple(ids.shape)} {ids.dtype}")
    L = ids.shape[0]
    counts = empty((L, total), dtype=int64, device=ids.device)
    M = ids.shape[1] * ids.shape[2]
    launch(_count, (L,), ids, counts, M, E=total, BINS=power_of_two(total), BM=1024)
    return counts
