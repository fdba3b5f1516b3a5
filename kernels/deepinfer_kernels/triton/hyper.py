"""Manifold-constrained hyper-connections: mixing coefficients, collapse and expansion of a token's streams."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: inputs of one partial sum: enough parts to fill a device with a few tokens, few enough to add up quickly
_PART = 1024
#: tokens of a program of the projection, the smallest side of a product
_TOKENS = 16


@triton.jit(do_not_specialize=["T"])
def _project(X, FN, PART, T, M: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr,
             BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Partial sums [part, t, M + 1] over EACH of K inputs: x · fnᵀ, and x² in the last column."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part = tl.program_id(1)
    m = tl.arange(0, WIDE)
    acc = tl.zeros((BT, WIDE), dtype=tl.float32)
    square = tl.zeros((BT,), dtype=tl.float32)
    for k0 in range(0, EACH, BK):
        k = part * EACH + k0 + tl.arange(0, BK)
        x = tl.load(X + t.to(tl.int64)[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        x = x.to(tl.float32)
        fn = tl.load(FN + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, fn, acc, input_precision="ieee")
        square += tl.sum(x * x, 1)
    to = PART + (part * T + t) * (M + 1)
    tl.store(to[:, None] + m[None, :], acc, mask=(t < T)[:, None] & (m < M)[None, :])
    tl.store(to + M, square, mask=t < T)


@triton.jit
def _sum_parts(PART, T, column, mask, M: tl.constexpr, PARTS: tl.constexpr):
    """Columns of all partial sums added in order of the parts."""
    total = tl.load(PART + column, mask=mask, other=0.0)
    for part in range(1, PARTS):
        total += tl.load(PART + part * T * (M + 1) + column, mask=mask, other=0.0)
    return total


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["T"])
def _mixes(
    PART, BASE, SCALE, PRE, POST, COMB, T, rms_eps, hc_eps, K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    PARTS: tl.constexpr, ITERS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Coefficients of ``BT`` tokens from the partial sums; comb is balanced to unit row and column sums."""
    M: tl.constexpr = C * (C + 2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < T
    at = t * (M + 1)
    c = tl.arange(0, BC)
    rms = 1.0 / tl.sqrt_rn(_sum_parts(PART, T, at + M, here, M, PARTS) / K + rms_eps)
    known = here[:, None] & (c < C)[None, :]
    m = _sum_parts(PART, T, at[:, None] + c[None, :], known, M, PARTS) * rms[:, None]
    base = tl.load(BASE + c, mask=c < C, other=0.0)
    tl.store(PRE + t[:, None] * C + c[None, :], _sigmoid(m * tl.load(SCALE) + base[None, :]) + hc_eps, mask=known)
    m = _sum_parts(PART, T, at[:, None] + C + c[None, :], known, M, PARTS) * rms[:, None]
    base = tl.load(BASE + C + c, mask=c < C, other=0.0)
    tl.store(POST + t[:, None] * C + c[None, :], 2.0 * _sigmoid(m * tl.load(SCALE + 1) + base[None, :]), mask=known)
    i, j = c[None, :, None], c[None, None, :]
    cell = (i < C) & (j < C)
    known = here[:, None, None] & cell
    m = _sum_parts(PART, T, at[:, None, None] + 2 * C + i * C + j, known, M, PARTS) * rms[:, None, None]
    m = m * tl.load(SCALE + 2) + tl.load(BASE + 2 * C + i * C + j, mask=cell, other=0.0)
    m = tl.where(cell, m, float("-inf"))
    e = tl.where(cell, tl.exp(m - tl.maximum(tl.max(m, 2), -1e30)[:, :, None]), 0.0)
    m = tl.where(cell, e / tl.where(i < C, tl.sum(e, 2)[:, :, None], 1.0) + hc_eps, 0.0)
    m = m / (tl.sum(m, 1)[:, None, :] + hc_eps)
    for _ in range(ITERS - 1):
        m = m / (tl.sum(m, 2)[:, :, None] + hc_eps)
        m = m / (tl.sum(m, 1)[:, None, :] + hc_eps)
    tl.store(COMB + (t[:, None, None] * C + i) * C + j, m, mask=known)


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, C], post [T, C], comb [T, C, C]) f32 of one sublayer."""
    X, fn, base, scale = contiguous(X), contiguous(fn), contiguous(base), contiguous(scale)
    T, C, H = X.shape
    M, K = C * (C + 2), C * H
    if fn.shape != (M, K) or base.shape != (M,) or scale.shape != (3,) or fn.dtype is not float32:
        shapes = [tuple(w.shape) for w in (fn, base, scale)]
        raise ValueError(f"streams {tuple(X.shape)}, weights {shapes} {fn.dtype}")
    parts = blocks(K, _PART)
    partial = empty((parts, T, M + 1), dtype=float32, device=X.device)
    sizes = dict(M=M, K=K, WIDE=max(16, power_of_two(M)), EACH=_PART, BT=_TOKENS, BK=64)
    launch(_project, (blocks(T, _TOKENS), parts), X, fn, partial, T, **sizes)
    pre, post = (empty((T, C), dtype=float32, device=X.device) for _ in range(2))
    comb = empty((T, C, C), dtype=float32, device=X.device)
    sizes = dict(K=K, C=C, BC=power_of_two(C), PARTS=parts, ITERS=iters, BT=8)
    arguments = (partial, base, scale, pre, post, comb, T, float(rms_eps), float(hc_eps))
    launch(_mixes, (blocks(T, 8),), *arguments, warps=1, **sizes)
    return pre, post, comb


@triton.jit
def _collapse(X, PRE, Y, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for c in tl.static_range(C):
        x = tl.load(X + (t * C + c) * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += tl.load(PRE + t * C + c) * x
    tl.store(Y + t * H + h, bf16(total), mask=h < H)


def mhc_collapse(num: Numerics, X: Tensor, pre: Tensor) -> Tensor:
    """Σ_c pre_c · X_c → [T, H], bf16."""
    X, pre = contiguous(X), contiguous(pre)
    T, C, H = X.shape
    if pre.shape != (T, C) or pre.dtype is not float32:
        raise ValueError(f"streams {tuple(X.shape)}, coefficients {tuple(pre.shape)} {pre.dtype}")
    y = empty((T, H), dtype=bfloat16, device=X.device)
    block = min(1024, power_of_two(H))
    launch(_collapse, (T, blocks(H, block)), X, pre, y, C=C, H=H, BLOCK=block)
    return y


@triton.jit
def _expand(X, Y, POST, COMB, OUT, C: tl.constexpr, BC: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    j = tl.arange(0, BC)
    y = tl.load(Y + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    out = tl.load(POST + t * C + j, mask=j < C, other=0.0)[:, None] * y
    for i in tl.static_range(C):
        x = tl.load(X + (t * C + i) * H + h, mask=h < H, other=0.0).to(tl.float32)
        out += tl.load(COMB + (t * C + i) * C + j, mask=j < C, other=0.0)[:, None] * x
    tl.store(OUT + (t * C + j)[:, None] * H + h, bf16(out), mask=(j < C)[:, None] & (h < H))


def mhc_expand(num: Numerics, X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb_ij · X_i → [T, C, H], bf16."""
    X, y, post, comb = contiguous(X), contiguous(y), contiguous(post), contiguous(comb)
    T, C, H = X.shape
    if y.shape != (T, H) or post.shape != (T, C) or comb.shape != (T, C, C):
        raise ValueError(f"streams {tuple(X.shape)}, {[tuple(t.shape) for t in (y, post, comb)]}")
    out = empty(X.shape, dtype=bfloat16, device=X.device)
    block = min(1024, power_of_two(H))
    launch(_expand, (T, blocks(H, block)), X, y, post, comb, out, C=C, BC=power_of_two(C), H=H, BLOCK=block)
    return out
