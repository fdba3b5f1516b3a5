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

#: inputs of one partial sum
_UNIT = 512
#: tokens, inputs of a step and warps of a program of the projection
_TOKENS, _STEP, _WARPS = 64, 64, 4
#: tokens from which a program of the projection makes two partial sums, and adds them up: enough to fill a device
_MANY = 512


@triton.jit(do_not_specialize=["T"])
def _project(
    X, FN, PART, T, M: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums [part, t, WIDE] of UNITS partial sums, each over UNIT of K inputs: x · fnᵀ, and x² in column M.

    fn is cut into three parts of bf16 that add up to it. A step begins its own sum on the tensor cores, which cut what
    they add; loads of the next one go to registers, because shared memory is what this waits for.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part = tl.program_id(1)
    m = tl.arange(0, WIDE)
    begin = part * UNITS * UNIT
    end = tl.minimum(begin + UNITS * UNIT, K)
    k = tl.arange(0, BK)
    rows = X + t.to(tl.int64)[:, None] * K + k[None, :]
    weights = FN + m[None, :] * K + k[:, None]
    x = tl.load(rows + begin, mask=(t < T)[:, None] & (begin + k < end)[None, :], other=0.0)
    fn = tl.load(weights + begin, mask=(m < M)[None, :] & (begin + k < end)[:, None], other=0.0)
    zero = tl.zeros((BT, WIDE), dtype=tl.float32)
    acc, total = zero, zero
    square = tl.zeros((BT,), dtype=tl.float32)
    squares = square
    for k0 in range(begin, begin + UNITS * UNIT, BK):
        following = k0 + BK
        if K % BK == 0:
            x_next = tl.load(rows + following, mask=(t < T)[:, None] & (following < end), other=0.0)
            fn_next = tl.load(weights + following, mask=(m < M)[None, :] & (following < end), other=0.0)
        else:
            known = following + k < end
            x_next = tl.load(rows + following, mask=(t < T)[:, None] & known[None, :], other=0.0)
            fn_next = tl.load(weights + following, mask=(m < M)[None, :] & known[:, None], other=0.0)
        wide = widened(x)
        square += tl.sum(wide * wide, 1)
        high, middle, low = in_parts(fn)
        acc += dot(x, high, dot(x, middle, dot(x, low, zero)))
        if UNITS > 1:  # noqa: SIM102 — this is decided while compiling, the next at run time
            if following % UNIT == 0:  # a partial sum is complete
                total += acc
                squares += square
                acc = zero
                square = tl.zeros((BT,), dtype=tl.float32)
        x, fn = x_next, fn_next
    if UNITS == 1:
        total, squares = acc, square
    total = tl.where((m == M)[None, :], squares[:, None], total)
    tl.store(PART + (part * T + t)[:, None] * WIDE + m[None, :], total, mask=(t < T)[:, None] & (m <= M)[None, :])


@triton.jit
def _sum_parts(
    PART, T, t, column, mask, WIDE: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, WAYS: tl.constexpr
):
    """[BT, columns] of all partial sums: two and two, where the projection did not, then all pairs at once."""
    i = tl.arange(0, WAYS)[None, :, None]
    at = PART + t[:, None, None] * WIDE + column[None, None, :]
    if PAIRS:
        sums = tl.load(at + 2 * i * T * WIDE, mask=mask[:, None, :] & (2 * i < PARTS), other=0.0)
        sums += tl.load(at + (2 * i + 1) * T * WIDE, mask=mask[:, None, :] & (2 * i + 1 < PARTS), other=0.0)
    else:
        sums = tl.load(at + i * T * WIDE, mask=mask[:, None, :] & (i < PARTS), other=0.0)
    return tl.sum(sums, 1)


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
    WIDE: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, WAYS: tl.constexpr, ITERS: tl.constexpr,
    BT: tl.constexpr,
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
    square = tl.sum(_sum_parts(PART, T, t, M + tl.arange(0, 1), here[:, None], WIDE, PARTS, PAIRS, WAYS), 1)
    pre = _sum_parts(PART, T, t, c, known, WIDE, PARTS, PAIRS, WAYS)
    post = _sum_parts(PART, T, t, C + c, known, WIDE, PARTS, PAIRS, WAYS)
    m = _sum_parts(PART, T, t, 2 * C + column, here[:, None] & real[None, :], WIDE, PARTS, PAIRS, WAYS)
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
    X, fn, base, scale = contiguous(X), contiguous(fn), contiguous(base), contiguous(scale)
    T, C, H = X.shape
    M, K = C * (C + 2), C * H
    if fn.shape != (M, K) or base.shape != (M,) or scale.shape != (3,) or fn.dtype is not float32:
        shapes = [tuple(w.shape) for w in (fn, base, scale)]
        raise ValueError(f"streams {tuple(X.shape)}, weights {shapes} {fn.dtype}")
    if X.dtype is not bfloat16:
        raise TypeError(f"streams are bfloat16, got {X.dtype}")
    units, each, wide = blocks(K, _UNIT), 2 if T > _MANY else 1, max(16, power_of_two(M + 1))
    parts = blocks(units, each)
    partial = empty((parts, T, wide), dtype=float32, device=X.device)
    sizes = dict(M=M, K=K, WIDE=wide, UNIT=_UNIT, UNITS=each, BT=_TOKENS, BK=_STEP)
    launch(_project, (blocks(T, _TOKENS), parts), X, fn, partial, T, warps=_WARPS, stages=1, **sizes)
    pre, post = (empty((T, C), dtype=float32, device=X.device) for _ in range(2))
    comb = empty((T, C, C), dtype=float32, device=X.device)
    sizes = dict(K=K, C=C, BC=power_of_two(C), WIDE=wide, PARTS=parts, PAIRS=each == 1)
    sizes |= dict(WAYS=power_of_two(blocks(units, 2)), ITERS=iters, BT=2)
    arguments = (partial, base, scale, pre, post, comb, T, float(rms_eps), float(hc_eps))
    launch(_mixes, (blocks(T, 2),), *arguments, warps=1, **sizes)
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
