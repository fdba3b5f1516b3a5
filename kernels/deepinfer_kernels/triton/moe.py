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
from triton.language.extra import libdevice

from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import INTERPRETED, bf16
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.linear import FIXED as LINEAR_FIXED
from deepinfer_kernels.triton.linear import FP4, Tile, bytes_of, parts, product, stored_as, weight_dot
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
    """a[m] = silu(min(w1 · x, limit)) · clamp(w3 · x, ±limit) · weight[m]; without COUNTS all rows are slot 0's."""
    if COUNTS is not None:
        slot, first, end = _tile_of(COUNTS, tl.program_id(1), S, SLOTS, BT)
        if slot == S:
            return
    else:
        slot, first, end = 0, tl.program_id(1) * BT, rows
    m = first + tl.arange(0, BT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    stored: tl.constexpr = H // 2 if STORED == 2 else H
    scales: tl.constexpr = (WIDTH if STORED == 2 else (WIDTH + 31) // 32) * (H // 32)
    at = tl.cast(slot, tl.int64)
    W1 += at * WIDTH * stored
    W3 += at * WIDTH * stored
    if STORED != 0:
        S1 += at * scales
        S3 += at * scales
    each: tl.constexpr = (H + PARTS * BK - 1) // (PARTS * BK) * BK
    part = tl.program_id(2)
    gate = tl.zeros((BN, BT), dtype=tl.float32)
    up = tl.zeros((BN, BT), dtype=tl.float32)
    row = m.to(tl.int64)
    for k0 in range(0, each, BK):
        k = part * each + k0
        gate = weight_dot(gate, X, row, m < end, W1, S1, n, WIDTH, k, H, STORED, BN, BK)
        up = weight_dot(up, X, row, m < end, W3, S3, n, WIDTH, k, H, STORED, BN, BK)
    at, mask = row[None, :] * WIDTH + n[:, None], (m < end)[None, :] & (n < WIDTH)[:, None]
    if PARTS > 1:
        to = A + (2 * part) * rows.to(tl.int64) * WIDTH + at
        tl.store(to, gate, mask=mask)
        tl.store(to + rows.to(tl.int64) * WIDTH, up, mask=mask)
    else:
        a = _swiglu(gate, up, limit)
        if WEIGHT is not None:
            a = a * tl.load(WEIGHT + m, mask=m < end, other=0.0)[None, :]
        tl.store(A + at, bf16(a), mask=mask)


@triton.jit
def _swiglu(gate, up, limit):
    keep: tl.constexpr = tl.PropagateNan.ALL
    g = tl.minimum(bf16(gate).to(tl.float32), limit, propagate_nan=keep)
    u = tl.minimum(tl.maximum(bf16(up).to(tl.float32), -limit, propagate_nan=keep), limit, propagate_nan=keep)
    return _silu(g) * u


@triton.jit(do_not_specialize=["size"])
def _activate(PART, A, size, limit, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """a = swiglu of the summed parts [part, gate and up, size], always in the same order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        gate += tl.load(PART + 2 * part * size + i, mask=i < size, other=0.0)
        up += tl.load(PART + (2 * part + 1) * size + i, mask=i < size, other=0.0)
    tl.store(A + i, bf16(_swiglu(gate, up, limit)), mask=i < size)


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
    stored: tl.constexpr = WIDTH // 2 if STORED == 2 else WIDTH
    scales: tl.constexpr = (H if STORED == 2 else (H + 31) // 32) * (WIDTH // 32)
    W2 += slot.to(tl.int64) * H * stored
    if STORED != 0:
        S2 += slot.to(tl.int64) * scales
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    row = m.to(tl.int64)
    for k0 in range(0, WIDTH, BK):
        acc = weight_dot(acc, A, row, m < end, W2, S2, n, H, k0, WIDTH, STORED, BN, BK)
    tl.store(Y + row[None, :] * H + n[:, None], bf16(acc), mask=(m < end)[None, :] & (n < H)[:, None])


def tiles(rows: int, slots: int) -> tuple[Tile, Tile]:
    """Tiles of the two kernels by the mean number of rows of a slot."""
    mean = rows / slots
    if mean <= 12:
        return Tile(64, 16, 256, 4, 3), Tile(64, 16, 256, 4, 3)
    if mean <= 48:
        return Tile(64, 32, 128, 4, 3), Tile(64, 32, 128, 4, 3)
    return Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3)


#: the tiles of every call whose result must not depend on the batch
FIXED = (Tile(64, 16, 128, 4, 3), Tile(64, 16, 128, 4, 3))


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
    (M, H), (I, wide) = x.shape, w1.data.shape[-2:]  # noqa: E741 — I is the expert width
    stored = stored_as(w1)
    if x.dtype is not bfloat16 or stored_as(w3) != stored or w3.data.shape != w1.data.shape:
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype}, weights {[tuple(w.data.shape) for w in (w1, w3)]}")
    if wide * (2 if stored == FP4 else 1) != H:
        raise ValueError(f"rows of width {H}, weights of {wide} per row")
    slots = 1 if counts is None else counts.shape[0]
    a = empty((M, I), dtype=bfloat16, device=x.device)
    to = a if pieces == 1 else empty((pieces, 2, M, I), dtype=float32, device=x.device)
    grid = (blocks(I, chosen.BN), blocks(M, chosen.BT) if counts is None else _most_tiles(M, slots, chosen.BT), pieces)
    d1, d3 = bytes_of(w1), bytes_of(w3)
    launch(
        _gate_up, grid, x, counts, d1, w1.scale, d3, w3.scale, weight, to, M, float(limit),
        warps=chosen.warps, stages=chosen.stages, S=slots, SLOTS=power_of_two(slots), H=H, WIDTH=I, STORED=stored,
        BN=chosen.BN, BT=chosen.BT, BK=chosen.BK, PARTS=pieces,
    )  # fmt: skip
    if pieces > 1:
        launch(_activate, (blocks(a.numel(), 1024),), to, a, a.numel(), float(limit), PARTS=pieces, BLOCK=1024)
    return a


def _most_tiles(rows: int, slots: int, size: int) -> int:
    """No distribution of the rows over the slots needs more tiles: every slot may have one that is not full."""
    return min(rows, rows // size + slots)


def _experts(
    x: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float, chosen: tuple[Tile, Tile]
) -> Tensor:
    x, counts, weight = contiguous(x), contiguous(counts), contiguous(weight)
    (M, H), S = x.shape, bank.w1.data.shape[0]
    if counts.shape != (S,) or counts.dtype is not int64 or weight.shape != (M,) or weight.dtype is not float32:
        shapes = [tuple(t.shape) for t in (counts, weight)]
        raise ValueError(f"{M} rows for {S} slots, counts and routing weights {shapes} {counts.dtype} {weight.dtype}")
    a = _gate_up_of(x, counts, bank.w1, bank.w3, weight, limit, chosen[0])
    I, stored, down = a.shape[1], stored_as(bank.w2), chosen[1]  # noqa: E741
    if bank.w2.data.shape[:2] != (S, H) or bank.w2.data.shape[2] * (2 if stored == FP4 else 1) != I:
        raise ValueError(f"rows of width {H}, experts of width {I}, down projection {tuple(bank.w2.data.shape)}")
    y = empty((M, H), dtype=bfloat16, device=x.device)
    launch(
        _down, (blocks(H, down.BN), _most_tiles(M, S, down.BT)), a, counts, bytes_of(bank.w2), bank.w2.scale, y,
        warps=down.warps, stages=down.stages, S=S, SLOTS=power_of_two(S), H=H, WIDTH=I, STORED=stored,
        BN=down.BN, BT=down.BT, BK=down.BK,
    )  # fmt: skip
    return y


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] of ``rows`` [M, H] sorted by slot; ``counts`` [S] int64 rows per slot; weight [M]."""
    return _experts(rows, counts, bank, weight, limit, tiles(rows.shape[0], bank.w1.data.shape[0]))


def moe_experts_invariant(
    num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float
) -> Tensor:
    """``moe_experts`` on tiles of one size, whatever the number of rows."""
    return _experts(rows, counts, bank, weight, limit, FIXED)


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert. [T, H] → [T, H]."""
    (T, H), I = x.shape, w1.data.shape[-2]  # noqa: E741
    chosen = linear_tile(T, I)
    chosen = chosen if chosen.BT < 128 else tiles(T, 1)[0]  # two sums per output must fit the registers
    a = _gate_up_of(contiguous(x), None, w1, w3, None, limit, chosen, parts(T, I, H, chosen))
    return product(a, w2, 1, linear_tile(T, w2.data.shape[-2]))


def shared_expert_invariant(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """``shared_expert`` on tiles of one size, whatever the number of rows."""
    return product(_gate_up_of(contiguous(x), None, w1, w3, None, limit, FIXED[0]), w2, 1, LINEAR_FIXED, False)


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))), accurate where exp(x) is far below 1; torch's form: the identity above 20."""
    if INTERPRETED:
        y = tl.exp(x)
        u = 1.0 + y
        soft = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:
        soft = libdevice.log1p(libdevice.exp(x))
    return tl.sqrt_rn(tl.where(x > 20.0, x, soft))


@triton.jit(do_not_specialize=["T", "bias_stride"])
def _choose(
    LOGIT, BIAS, IDS, OUT, T, bias_stride, temperature, factor, E: tl.constexpr, K: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """K times the best expert left, of ``ROWS`` tokens; ids come out ascending."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    e = tl.arange(0, EXPERTS)[None, :]
    known = (t < T) & (e < E)
    score = _sqrt_softplus(tl.load(LOGIT + t * E + e, mask=known, other=0.0) / temperature)
    left = tl.where(e < E, score + tl.load(BIAS + t * bias_stride + e, mask=known, other=0.0), float("-inf"))
    left = tl.where(left == left, left, float("inf"))  # NaN is the best, as in a sort: a wrong row gets ids too
    taken = tl.zeros((ROWS, EXPERTS), dtype=tl.int32)
    for _ in tl.static_range(K):
        # an expert without a finite score is still better than one taken before
        best = tl.max(tl.where(taken == 1, float("-inf"), left), 1)[:, None]
        first = tl.min(tl.where((left == best) & (taken == 0) & (e < E), e, EXPERTS), 1)[:, None]
        taken = tl.where(e == first, 1, taken)
    if NORMALISE and K > 1:
        weight = score / (tl.sum(tl.where(taken == 1, score, 0.0), 1) + 1e-20)[:, None] * factor
    else:
        weight = score * factor
    at = t * K + tl.cumsum(taken, 1) - 1
    tl.store(IDS + at, tl.broadcast_to(e, (ROWS, EXPERTS)).to(tl.int64), mask=(taken == 1) & known)
    tl.store(OUT + at, weight, mask=(taken == 1) & known)


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(expert ids [T, k] ascending int64, weights [T, k] f32). ``bias`` [E], or one row per token."""
    T, E = x.shape[0], weight.shape[0]
    if bias.shape not in ((E,), (T, E)) or not 0 < k <= E:
        raise ValueError(f"{T} tokens, router {tuple(weight.shape)}, bias {tuple(bias.shape)}, {k} choices")
    logits, bias = x.to(float32) @ weight.to(float32).mT, contiguous(bias.to(float32))
    ids = empty((T, k), dtype=int64, device=x.device)
    w = empty((T, k), dtype=float32, device=x.device)
    stride, wide = E if bias.dim() == 2 else 0, power_of_two(E)
    rows = max(1, 512 // wide)
    sizes = dict(E=E, K=k, NORMALISE=normalise, ROWS=rows, EXPERTS=wide)
    launch(_choose, (blocks(T, rows),), logits, bias, ids, w, T, stride, float(temperature), float(scale), **sizes)
    return ids, w


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
