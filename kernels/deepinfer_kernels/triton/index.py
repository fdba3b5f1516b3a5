"""Lightning indexer: scores."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import dot
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two


@triton.jit(do_not_specialize=["C", "n"])
def _scores(
    Q, WEIGHT, KEYS, VISIBLE, OUT, C, n, N: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Σ_h w_h · relu(q_h · key_j) of ``BC`` queries with all their heads and ``BE`` entries of one row."""
    row = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BE + tl.arange(0, BE)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    visible = tl.load(VISIBLE + row * C + c, mask=c < C, other=0)
    seen = j[None, :] < visible[:, None]
    score = tl.full((BC, BE), 0.0, tl.float32)
    if tl.program_id(0) * BE < tl.max(visible, 0):
        d = tl.arange(0, BD)[None, :]
        keys = tl.load(KEYS + (row * n + j)[:, None] * D + d, mask=(j < n)[:, None] & (d < D), other=0.0)
        m = tl.arange(0, BC * HEADS)
        mc = tl.program_id(1) * BC + m // HEADS
        real = (mc < C) & (m % HEADS < N)
        at = (row * C + mc) * N + m % HEADS
        q = tl.load(Q + at[:, None] * D + d, mask=real[:, None] & (d < D), other=0.0)
        w = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
        product = dot(q, tl.trans(keys), tl.zeros((BC * HEADS, BE), tl.float32))
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum((product * w[:, None]).reshape(BC, HEADS, BE), 1)
    score = tl.where(seen, score, float("-inf"))
    tl.store(OUT + (row * C + c)[:, None] * n + j[None, :], score, mask=(c < C)[:, None] & (j < n)[None, :])


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
    # 64 rows of the product whatever the number of queries, so that a score does not depend on it
    sizes = dict(N=N, D=D, HEADS=heads, BD=max(16, power_of_two(D)), BC=max(1, 64 // heads), BE=128)
    grid = (blocks(n, 128), blocks(C, sizes["BC"]), B)
    launch(_scores, grid, iq, iw, keys, visible, scores, C, n, warps=4, **sizes)
    return scores
