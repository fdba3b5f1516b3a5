"""Lightning indexer: scores.

The keys are the left operand, the queries with all their heads the right one: the heads of a score lie in the
registers of four neighbouring threads, which add them up in the same order whatever the number of queries.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import dot
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: columns of a product (queries times heads) → warps, stages
TILES = {32: (4, 3), 64: (4, 3), 128: (4, 3), 256: (8, 2)}
#: entries of a product
_ENTRIES = 64
#: programs times columns that keep a device busy; fewer, with more entries each, read their queries less often
_BUSY = 1 << 16


@triton.jit(do_not_specialize=["C", "n", "each"])
def _scores(
    Q, WEIGHT, KEYS, VISIBLE, OUT, C, n, each, N: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Σ_h w_h · relu(key_j · q_h) of ``BC`` queries with all their heads and ``each`` entries of one row."""
    row = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, n)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    visible = tl.load(VISIBLE + row * C + c, mask=c < C, other=0)
    d = tl.arange(0, BD)
    m = tl.arange(0, BC * HEADS)
    mc = tl.program_id(0) * BC + m // HEADS
    real = (mc < C) & (m % HEADS < N)
    at = (row * C + mc) * N + m % HEADS
    q = tl.load(Q + at[None, :] * D + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
    w = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    out = OUT + (row * C + c)[None, :] * n
    seen = tl.minimum(tl.max(visible, 0), last).to(tl.int32)
    for j0 in range(first, seen, BE):
        j = j0 + tl.arange(0, BE)
        place = KEYS + (row * n + j)[:, None] * D + d[None, :]
        keys = tl.load(place, mask=(j < n)[:, None] & (d < D)[None, :], other=0.0)
        product = dot(keys, q, tl.zeros((BE, BC * HEADS), tl.float32))
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        if N != HEADS:  # a key of infinity times a head that is not there is no number
            product = tl.where(real[None, :], product, 0.0)
        score = tl.sum(product.reshape(BE, BC, HEADS), 2)
        score = tl.where(j[:, None] < visible[None, :], score, float("-inf"))
        tl.store(out + j[:, None], score, mask=(c < C)[None, :] & (j < last)[:, None])
    for j0 in range(first + tl.cdiv(tl.maximum(seen - first, 0), BE) * BE, last, BE):
        j = j0 + tl.arange(0, BE)
        nothing = tl.full((BE, BC), float("-inf"), tl.float32)
        tl.store(out + j[:, None], nothing, mask=(c < C)[None, :] & (j < last)[:, None])


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] of iq [B, C, ih, Di], iw [B, C, ih], keys [B, n, Di]; −inf from visible [B, C] on."""
    iq, iw, keys, visible = contiguous(iq), contiguous(iw), contiguous(keys), contiguous(visible)
    (B, C, N, D), n = iq.shape, keys.shape[1]
    if iw.shape != (B, C, N) or keys.shape != (B, n, D) or visible.shape != (B, C) or visible.dtype is not int64:
        shapes = [tuple(t.shape) for t in (iw, keys, visible)]
        raise ValueError(f"index queries {tuple(iq.shape)}, weights, keys and visible {shapes} {visible.dtype}")
    if iq.dtype is not bfloat16 or keys.dtype is not bfloat16:
        raise TypeError(f"index queries and keys are bfloat16, got {iq.dtype} and {keys.dtype}")
    scores = empty((B, C, n), dtype=float32, device=iq.device)
    heads = power_of_two(N)
    few, many = max(1, 16 // heads), max(1, 256 // heads)
    queries = min(max(few, power_of_two(C)), many)
    columns = queries * heads
    warps, stages = TILES[min(max(32, columns), 256)]
    products = B * blocks(C, queries) * blocks(n, _ENTRIES)
    each = _ENTRIES * min(64, max(1, blocks(products * columns, _BUSY)))
    sizes = dict(N=N, D=D, HEADS=heads, BD=max(16, power_of_two(D)), BC=queries, BE=_ENTRIES)
    grid = (blocks(C, queries), blocks(n, each), B)
    launch(_scores, grid, iq, iw, keys, visible, scores, C, n, each, warps=warps, stages=stages, **sizes)
    return scores
