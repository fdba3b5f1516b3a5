"""Routed experts over physical slots, shared expert, router, and the permutation around them.

Two kernels per expert layer: gate and up projections with the clamped SwiGLU and the routing weight, then the down
projection. Rows lie sorted by slot; a program finds its slot from the counts, so nothing waits for the host.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64

from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16, widened
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.linear import FIXED as LINEAR_FIXED
from deepinfer_kernels.triton.linear import (
    Tile,
    linear,
    matrix,
    parts,
    pays_dense,
    product,
    rows_of,
    sizes_of,
    stored_as,
    stores_of,
    weight_sum,
    write_dense,
)
from deepinfer_kernels.triton.linear import tile as linear_tile


@triton.jit
def _tile_of(COUNTS, place, S: tl.constexpr, SLOTS: tl.constexpr, BT: tl.constexpr):
    """(slot, first row, one beyond its last row) of tile ``place``; slot S where there are fewer tiles."""
    i = tl.arange(0, SLOTS)
    count = tl.load(COUNTS + i, mask=i < S, other=0).to(tl.int32)
    tiles = (count + BT - 1) // BT
    ends = tl.cumsum(tiles, 0)
    slot = tl.sum((ends <= place).to(tl.int32), 0)
    before = i < slot
    start = tl.sum(tl.where(before, count, 0), 0)
    first = start + (place - tl.sum(tl.where(before, tiles, 0), 0)) * BT
    return tl.minimum(slot, S), first, start + tl.sum(tl.where(i == slot, count, 0), 0)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    X, COUNTS, W1, S1, W3, S3, WEIGHT, A, rows, limit,
    S: tl.constexpr, SLOTS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """a[m] = silu(min(w1 · x, limit)) · clamp(w3 · x, ±limit) · weight[m]; without COUNTS all rows are slot 0's.

    A program's BN rows of weights are as many of w1 as of w3. With PARTS > 1 the sums of a part of H go to
    A [part, w1 and w3, m, WIDTH] in f32.
    """
    if COUNTS is not None:
        slot, first, end = _tile_of(COUNTS, tl.program_id(1), S, SLOTS, BT)
        if slot == S:
            return
    else:
        slot, first, end = 0, tl.program_id(1) * BT, rows
    half: tl.constexpr = BN // 2
    m = first + tl.arange(0, BT)
    n = tl.program_id(0) * half + tl.arange(0, half)
    part = tl.program_id(2)
    steps: tl.constexpr = (H + PARTS * BK - 1) // (PARTS * BK)
    whole: tl.constexpr = steps * PARTS * BK == H and WIDTH % half == 0
    w, s = matrix(tl.cast(slot, tl.int64), WIDTH, H, STORED)
    if STORED != 0:
        S1 += s
        S3 += s
    w1, s1, known = rows_of(W1 + w, S1, tl.program_id(0) * half, BN, half, WIDTH, H, STORED)
    second = tl.arange(0, w1.shape[0]) // (w1.shape[0] // 2)
    w1 += second * _between(W1, W3)
    if STORED != 0:
        s1 += second * _between(S1, S3)
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    acc = weight_sum(acc, X, m, m < end, w1, s1, known, part * steps, steps, H, STORED, BK, whole)
    at, mask = m.to(tl.int64)[None, :] * WIDTH + n[:, None], (m < end)[None, :] & (n < WIDTH)[:, None]
    if PARTS > 1:
        gate, up = _apart(acc, half, BT)
        to = A + (2 * part) * rows.to(tl.int64) * WIDTH + at
        tl.store(to, gate, mask=mask)
        tl.store(to + rows.to(tl.int64) * WIDTH, up, mask=mask)
    else:
        gate, up = _apart(bf16(acc), half, BT)
        a = _swiglu(gate, up, limit)
        if WEIGHT is not None:
            a = a * tl.load(WEIGHT + m, mask=m < end, other=0.0)[None, :]
        tl.store(A + at, bf16(a), mask=mask)


@triton.jit
def _between(a, b):
    """Elements from a to b, both on 16 bytes; a select of pointers hides from Triton 3.8 that their rows are, too."""
    size: tl.constexpr = a.dtype.element_ty.primitive_bitwidth // 8
    return tl.multiple_of((b.to(tl.int64) - a.to(tl.int64)) // size, 16 // size)


@triton.jit
def _apart(both, HALF: tl.constexpr, BT: tl.constexpr):
    """The first and the second half of rows."""
    return tl.split(both.reshape(2, HALF, BT).permute(1, 2, 0))


@triton.jit
def _swiglu(gate, up, limit):
    """silu(min(gate, limit)) · clamp(up, ±limit) of bf16."""
    keep: tl.constexpr = tl.PropagateNan.ALL
    g = tl.minimum(widened(gate), limit, propagate_nan=keep)
    u = tl.minimum(tl.maximum(widened(up), -limit, propagate_nan=keep), limit, propagate_nan=keep)
    return _silu(g) * u


@triton.jit(do_not_specialize=["size"])
def _activate(PART, WEIGHT, A, size, limit, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """a = swiglu of the summed parts [part, gate and up, size], always in the same order, times the row's weight."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        gate += tl.load(PART + 2 * part * size + i, mask=i < size, other=0.0)
        up += tl.load(PART + (2 * part + 1) * size + i, mask=i < size, other=0.0)
    a = _swiglu(bf16(gate), bf16(up), limit)
    if WEIGHT is not None:
        a = a * tl.load(WEIGHT + i // WIDTH, mask=i < size, other=0.0)
    tl.store(A + i, bf16(a), mask=i < size)


@triton.jit
def _activate_rows(SUMS, A, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """a = swiglu of rows [gate, up]."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(SUMS + 2 * t * WIDTH + n, mask=n < WIDTH, other=0.0)
    up = tl.load(SUMS + (2 * t + 1) * WIDTH + n, mask=n < WIDTH, other=0.0)
    tl.store(A + t * WIDTH + n, bf16(_swiglu(gate, up, limit)), mask=n < WIDTH)


@triton.jit
def _down(
    A, COUNTS, W2, S2, Y, S: tl.constexpr, SLOTS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    STORED: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m] = w2 · a[m]."""
    slot, first, end = _tile_of(COUNTS, tl.program_id(1), S, SLOTS, BT)
    if slot == S:
        return
    m = first + tl.arange(0, BT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    steps: tl.constexpr = (WIDTH + BK - 1) // BK
    whole: tl.constexpr = WIDTH % BK == 0 and H % BN == 0
    w, s = matrix(slot, H, WIDTH, STORED)
    if STORED != 0:
        S2 += s
    w, s, known = rows_of(W2 + w, S2, tl.program_id(0) * BN, BN, BN, H, WIDTH, STORED)
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    acc = weight_sum(acc, A, m, m < end, w, s, known, 0, steps, WIDTH, STORED, BK, whole)
    at = m.to(tl.int64)[None, :] * H + n[:, None]
    tl.store(Y + at, bf16(acc), mask=(m < end)[None, :] & (n < H)[:, None])


def tiles(rows: int, slots: int) -> tuple[Tile, Tile]:
    """Tiles of the two kernels by the mean number of rows of a slot."""
    mean = rows / slots
    if mean <= 16:
        return Tile(128, 16, 128, 4, 4), Tile(128, 16, 128, 4, 4)
    if mean <= 32:
        return Tile(128, 32, 128, 4, 3), Tile(128, 32, 128, 4, 4)
    if mean <= 96:
        return Tile(128, 64, 64, 4, 4), Tile(128, 64, 64, 4, 4)
    if mean <= 192:
        return Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4)


#: the tiles of every call whose result must not depend on the batch
FIXED = (Tile(128, 16, 128, 4, 3), Tile(64, 16, 128, 4, 3))


def _gate_up_of(
    x: Tensor,
    counts: Tensor | None,
    w1: Weight,
    w3: Weight,
    weight: Tensor | None,
    limit: float,
    chosen: Tile,
    pieces: int = 1,
) -> Tensor:
    (M, H), (slots, I, wide) = x.shape, sizes_of(w1)  # noqa: E741 — I is the expert width
    stored = stored_as(w1)
    if x.dtype is not bfloat16 or stored_as(w3) != stored or sizes_of(w3) != (slots, I, wide):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype}, weights {sizes_of(w1)} {w1.kind}, {sizes_of(w3)} {w3.kind}")
    if wide != H:
        raise ValueError(f"rows of width {H}, weights of {wide} per row")
    a = empty((M, I), dtype=bfloat16, device=x.device)
    to = a if pieces == 1 else empty((pieces, 2, M, I), dtype=float32, device=x.device)
    grid = (
        blocks(I, chosen.BN // 2),
        blocks(M, chosen.BT) if counts is None else _most_tiles(M, slots, chosen.BT),
        pieces,
    )
    (d1, s1), (d3, s3) = stores_of(w1), stores_of(w3)
    launch(
        _gate_up, grid, x, counts, d1, s1, d3, s3, weight if pieces == 1 else None, to, M, float(limit),
        warps=chosen.warps, stages=chosen.stages, S=slots, SLOTS=power_of_two(slots), H=H, WIDTH=I, STORED=stored,
        BN=chosen.BN, BT=chosen.BT, BK=chosen.BK, PARTS=pieces,
    )  # fmt: skip
    if pieces > 1:
        sizes = dict(WIDTH=I, PARTS=pieces, BLOCK=1024)
        launch(_activate, (blocks(a.numel(), 1024),), to, weight, a, a.numel(), float(limit), **sizes)
    return a


def _most_tiles(rows: int, slots: int, size: int) -> int:
    """No distribution of the rows over the slots needs more tiles: every slot may have one that is not full."""
    return min(rows, rows // size + slots)


def _experts(
    x: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float, chosen: tuple[Tile, Tile]
) -> Tensor:
    x, counts, weight = contiguous(x), contiguous(counts), contiguous(weight)
    (M, H), S = x.shape, sizes_of(bank.w1)[0]
    if counts.shape != (S,) or counts.dtype is not int64 or weight.shape != (M,) or weight.dtype is not float32:
        shapes = [tuple(t.shape) for t in (counts, weight)]
        raise ValueError(f"{M} rows for {S} slots, counts and routing weights {shapes} {counts.dtype} {weight.dtype}")
    a = _gate_up_of(x, counts, bank.w1, bank.w3, weight, limit, chosen[0])
    if sizes_of(bank.w2) != (S, H, a.shape[1]):
        raise ValueError(f"{S} slots of {(H, a.shape[1])}, down projection {sizes_of(bank.w2)}")
    return _down_of(a, counts, bank.w2, chosen[1])


def _down_of(a: Tensor, counts: Tensor, w2: Weight, chosen: Tile) -> Tensor:
    (M, I), (S, H, _) = a.shape, sizes_of(w2)  # noqa: E741
    y = empty((M, H), dtype=bfloat16, device=a.device)
    data, scale = stores_of(w2)
    launch(
        _down, (blocks(H, chosen.BN), _most_tiles(M, S, chosen.BT)), a, counts, data, scale, y,
        warps=chosen.warps, stages=chosen.stages, S=S, SLOTS=power_of_two(S), H=H, WIDTH=I, STORED=stored_as(w2),
        BN=chosen.BN, BT=chosen.BT, BK=chosen.BK,
    )  # fmt: skip
    return y


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] of ``rows`` [M, H] sorted by slot; ``counts`` [S] int64 rows per slot; weight [M]."""
    return _experts(rows, counts, bank, weight, limit, tiles(rows.shape[0], sizes_of(bank.w1)[0]))


def moe_experts_invariant(
    num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float
) -> Tensor:
    """``moe_experts`` on tiles of one size, whatever the number of rows."""
    return _experts(rows, counts, bank, weight, limit, FIXED)


def _gate_up_dense(x: Tensor, w1: Weight, w3: Weight, limit: float) -> Tensor:
    """The activations by one product with both matrices."""
    (T, H), I = x.shape, sizes_of(w1)[1]  # noqa: E741
    both = empty((2, I, H), dtype=bfloat16, device=x.device)
    for to, w in zip(both, (w1, w3), strict=True):
        if w.scale is None:
            to.copy_(w.data)
        else:
            write_dense(w, to)
    sums = x @ both.view(2 * I, H).mT
    a = empty((T, I), dtype=bfloat16, device=x.device)
    launch(_activate_rows, (T, blocks(I, 1024)), sums, a, float(limit), WIDTH=I, BLOCK=1024)
    return a


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert. [T, H] → [T, H]."""
    (T, H), I = x.shape, sizes_of(w1)[1]  # noqa: E741
    if x.dtype is bfloat16 and pays_dense(T, w1, w3):
        return linear(num, _gate_up_dense(x, w1, w3, limit), w2)
    chosen = linear_tile(T, 2 * I)
    chosen = chosen._replace(BN=max(128, chosen.BN))  # a block of 64 rows of either matrix
    a = _gate_up_of(contiguous(x), None, w1, w3, None, limit, chosen, parts(T, 2 * I, H, chosen))
    return product(a, w2, 1, linear_tile(T, w2.data.shape[-2]))


def shared_expert_invariant(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """``shared_expert`` on tiles of one size, whatever the number of rows."""
    return product(_gate_up_of(contiguous(x), None, w1, w3, None, limit, FIXED[0]), w2, 1, LINEAR_FIXED, False)


@triton.jit
def _combine(Y, ORDER, SHARED, OUT, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(ORDER + t * K + choice)
        total += tl.load(Y + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    total += tl.load(SHARED + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(OUT + t * H + h, bf16(total), mask=h < H)


def moe_combine(num: Numerics, y: Tensor, order: Tensor, shared: Tensor, k: int) -> Tensor:
    """[T, H]: Σ over the k expert rows of each token in order, plus the shared expert, rounded once."""
    y, order, shared = contiguous(y), contiguous(order), contiguous(shared)
    T, H = shared.shape
    if y.shape != (T * k, H) or order.shape != (T * k,):
        raise ValueError(f"{T} tokens of {k} choices, rows {tuple(y.shape)}, order {tuple(order.shape)}")
    out = empty(shared.shape, dtype=bfloat16, device=shared.device)
    block = min(2048, power_of_two(H))
    launch(_combine, (T, blocks(H, block)), y, order, shared, out, K=k, H=H, BLOCK=block)
    return out
