"""Manifold-constrained hyper-connections: mixing coefficients, collapse and expansion of a token's streams."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import INTERPRETED, bf16, dot, in_parts, widened
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: inputs of one partial sum, of few tokens and of more than so many: fewer programs are faster where they fill a device
_PARTS = (512, 1024)
_MANY = 512
#: tokens, inputs of a step and warps of a program of the projection
_TOKENS, _STEP, _WARPS = 64, 64, 4


@triton.jit(do_not_specialize=["T"])
def _project(
    X, FN, PART, T, M: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Partial sums [part, t, WIDE] over EACH of K inputs: x · fnᵀ, and x² in column M.

    fn is cut into three parts of bf16 that add up to it. A step begins its own sum on the tensor cores, which cut what
    they add; loads of the next one go to registers, because shared memory is what this waits for.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part = tl.program_id(1)
    m = tl.arange(0, WIDE)
    acc = tl.zeros((BT, WIDE), dtype=tl.float32)
    square = tl.zeros((BT,), dtype=tl.float32)
    end = tl.minimum((part + 1) * EACH, K)
    k = part * EACH + tl.arange(0, BK)
    at_x, at_fn = X + t.to(tl.int64)[:, None] * K + k[None, :], FN + m[None, :] * K + k[:, None]
    x = tl.load(at_x, mask=(t < T)[:, None] & (k < end)[None, :], other=0.0)
    fn = tl.load(at_fn, mask=(m < M)[None, :] & (k < end)[:, None], other=0.0)
    for k0 in range(part * EACH, end, BK):
        k += BK
        at_x += BK
        at_fn += BK
        if K % EACH == 0:  # all or none
            more = k0 + BK < end
            x_next = tl.load(at_x, mask=(t < T)[:, None] & more, other=0.0)
            fn_next = tl.load(at_fn, mask=(m < M)[None, :] & more, other=0.0)
        else:
            x_next = tl.load(at_x, mask=(t < T)[:, None] & (k < end)[None, :], other=0.0)
            fn_next = tl.load(at_fn, mask=(m < M)[None, :] & (k < end)[:, None], other=0.0)
        wide = widened(x)
        square += tl.sum(wide * wide, 1)
        high, middle, low = in_parts(fn)
        acc += dot(x, high, dot(x, middle, dot(x, low, tl.zeros((BT, WIDE), dtype=tl.float32))))
        x, fn = x_next, fn_next
    acc = tl.where((m == M)[None, :], square[:, None], acc)
    tl.store(PART + (part * T + t)[:, None] * WIDE + m[None, :], acc, mask=(t < T)[:, None] & (m <= M)[None, :])


@triton.jit
def _sum_parts(PART, T, t, column, mask, WIDE: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr):
    """[BT, columns] of all partial sums, all parts at once."""
    part = tl.arange(0, WAYS)[None, :, None]
    at = (part * T + t[:, None, None]) * WIDE + column[None, None, :]
    return tl.sum(tl.load(PART + at, mask=mask[:, None, :] & (part < PARTS), other=0.0), 1)


@triton.jit
def _inverse(x):
    """1 / x to one unit in the last place, for x of ordinary size."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["T"])
def _mixes(
    PART, BASE, SCALE, PRE, POST, COMB, T, rms_eps, hc_eps, K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr, ITERS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Coefficients of ``BT`` tokens from the partial sums; comb is balanced to unit row and column sums."""
    M: tl.constexpr = C * (C + 2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < T
    c = tl.arange(0, BC)
    known = here[:, None] & (c < C)[None, :]
    cell = tl.arange(0, BC * BC)
    if BC == C:
        column, real = cell, cell < BC * BC
    else:
        column, real = cell // BC * C + cell % BC, (cell // BC < C) & (cell % BC < C)
    square = tl.sum(_sum_parts(PART, T, t, M + tl.arange(0, 1), here[:, None], WIDE, PARTS, WAYS), 1)
    pre = _sum_parts(PART, T, t, c, known, WIDE, PARTS, WAYS)
    post = _sum_parts(PART, T, t, C + c, known, WIDE, PARTS, WAYS)
    m = _sum_parts(PART, T, t, 2 * C + column, here[:, None] & real[None, :], WIDE, PARTS, WAYS)
    rms = (1.0 / tl.sqrt_rn(square / K + rms_eps))[:, None]
    base = tl.load(BASE + c, mask=c < C, other=0.0)[None, :]
    tl.store(PRE + t[:, None] * C + c[None, :], _sigmoid(pre * rms * tl.load(SCALE) + base) + hc_eps, mask=known)
    base = tl.load(BASE + C + c, mask=c < C, other=0.0)[None, :]
    tl.store(POST + t[:, None] * C + c[None, :], 2.0 * _sigmoid(post * rms * tl.load(SCALE + 1) + base), mask=known)
    m = m * rms * tl.load(SCALE + 2) + tl.load(BASE + 2 * C + column, mask=real, other=0.0)[None, :]
    m = tl.reshape(m, (BT, BC, BC))
    i, j = c[None, :, None], c[None, None, :]
    real = (i < C) & (j < C)
    m = tl.where(real, m, float("-inf"))
    e = tl.where(real, tl.exp(m - tl.maximum(tl.max(m, 2), -1e30)[:, :, None]), 0.0)
    m = tl.where(real, e / tl.where(i < C, tl.sum(e, 2)[:, :, None], 1.0) + hc_eps, 0.0)
    m = m * _inverse(tl.sum(m, 1) + hc_eps)[:, None, :]
    for _ in range(ITERS - 1):
        m = m * _inverse(tl.sum(m, 2) + hc_eps)[:, :, None]
        m = m * _inverse(tl.sum(m, 1) + hc_eps)[:, None, :]
    tl.store(COMB + (t[:, None, None] * C + i) * C + j, m, mask=here[:, None, None] & real)


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, C], post [T, C], comb [T, C, C]) f32 of one sublayer."""
    return _mix(X, fn, base, scale, rms_eps, hc_eps, iters, _PARTS[X.shape[0] > _MANY])


def mhc_mixes_invariant(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``mhc_mixes`` over the same partial sums for any number of tokens."""
    return _mix(X, fn, base, scale, rms_eps, hc_eps, iters, _PARTS[0])


def _mix(
    X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float, iters: int, each: int
) -> tuple[Tensor, Tensor, Tensor]:
    X, fn, base, scale = contiguous(X), contiguous(fn), contiguous(base), contiguous(scale)
    T, C, H = X.shape
    M, K = C * (C + 2), C * H
    if fn.shape != (M, K) or base.shape != (M,) or scale.shape != (3,) or fn.dtype is not float32:
        shapes = [tuple(w.shape) for w in (fn, base, scale)]
        raise ValueError(f"streams {tuple(X.shape)}, weights {shapes} {fn.dtype}")
    if X.dtype is not bfloat16:
        raise TypeError(f"streams are bfloat16, got {X.dtype}")
    parts, wide = blocks(K, each), max(16, power_of_two(M + 1))
    partial = empty((parts, T, wide), dtype=float32, device=X.device)
    sizes = dict(M=M, K=K, WIDE=wide, EACH=each, BT=_TOKENS, BK=_STEP)
    launch(_project, (blocks(T, _TOKENS), parts), X, fn, partial, T, warps=_WARPS, stages=1, **sizes)
    pre, post = (empty((T, C), dtype=float32, device=X.device) for _ in range(2))
    comb = empty((T, C, C), dtype=float32, device=X.device)
    ways = power_of_two(parts)
    sizes = dict(K=K, C=C, BC=power_of_two(C), WIDE=wide, PARTS=parts, WAYS=ways, ITERS=iters, BT=4)
    arguments = (partial, base, scale, pre, post, comb, T, float(rms_eps), float(hc_eps))
    launch(_mixes, (blocks(T, 4),), *arguments, warps=1, **sizes)
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
