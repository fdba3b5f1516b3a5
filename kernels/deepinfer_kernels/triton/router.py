"""Router: scores of all experts, exact selection.

Scores are f32 sums of bf16 inputs times f32 weights on the tensor cores, over parts of the inputs that are the same
for every number of tokens; the kernel that chooses adds the parts up, so a token's choice does not depend on others.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64
from triton.language.extra import libdevice

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import INTERPRETED, dot, in_parts, opaque
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: inputs of a partial sum
_PART = 512
#: tokens, experts, inputs of a step, warps: of few tokens and of many; they move no sum
_FEW, _MANY = (64, 32, 64, 4), (128, 64, 64, 8)


@triton.jit(do_not_specialize=["T"])
def _score(
    X, W, OUT, T, E: tl.constexpr, H: tl.constexpr, PART: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Sums [part, t, e] over PART of H inputs."""
    e = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    part = tl.program_id(2)
    at_x = X + t.to(tl.int64)[:, None] * H + tl.arange(0, BK)[None, :]
    at_w = W + e[None, :] * H + tl.arange(0, BK)[:, None]
    zero = tl.zeros((BT, BN), dtype=tl.float32)
    large, small = zero, zero
    for k0 in range(part * PART, (part + 1) * PART, BK):
        if H % PART == 0:
            x = tl.load(at_x + k0, mask=(t < T)[:, None], other=0.0)
            w = tl.load(at_w + k0, mask=(e < E)[None, :], other=0.0)
        else:
            k = k0 + tl.arange(0, BK)
            x = tl.load(at_x + k0, mask=(t < T)[:, None] & (k < H)[None, :], other=0.0)
            w = tl.load(at_w + k0, mask=(e < E)[None, :] & (k < H)[:, None], other=0.0)
        high, middle, low = in_parts(w)
        small += opaque(dot(x, middle, dot(x, low, zero)))
        large += opaque(dot(x, high, zero))
    # infinity times parts of either sign is no number, but times the first it has the sign of the whole
    total = tl.where(tl.abs(large) < float("inf"), large + small, large)
    to = OUT + (part * T + t).to(tl.int64)[:, None] * E + e[None, :]
    tl.store(to, total, mask=(t < T)[:, None] & (e < E)[None, :])


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


@triton.jit
def _rank(score, e):
    """A key that orders by score, then by the lower expert; NaN is the best, as in a sort."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score == score, bits, 0x7FFFFFFF)
    bits = tl.where(score == 0.0, 0, bits)  # -0 equals 0
    return (bits.to(tl.int64) << 16) - e


@triton.jit(do_not_specialize=["T", "bias_stride"])
def _choose(
    LOGIT, BIAS, IDS, OUT, T, bias_stride, temperature, factor, E: tl.constexpr, K: tl.constexpr,
    NORMALISE: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """K times the best expert left, of one token; ids come out ascending."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    known = e < E
    logit = tl.zeros((EXPERTS,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        logit += tl.load(LOGIT + (part * T + t) * E + e, mask=known, other=0.0)
    score = _sqrt_softplus(tl.div_rn(logit, temperature))
    key = _rank(score + tl.load(BIAS + t * bias_stride + e, mask=known, other=0.0), e)
    key = tl.where(known, key, -(1 << 62))
    left = key
    for _ in tl.static_range(K):
        least = tl.max(left, 0)
        left = tl.where(left == least, -(1 << 62), left)
    taken = known & (key >= least)
    if NORMALISE and K > 1:
        weight = score / (tl.sum(tl.where(taken, score, 0.0), 0) + 1e-20) * factor
    else:
        weight = score * factor
    at = t * K + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(IDS + at, e.to(tl.int64), mask=taken)
    tl.store(OUT + at, weight, mask=taken)


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(expert ids [T, k] ascending int64, weights [T, k] f32). ``bias`` [E], or one row per token.

    Scores are f32 sums: 1e-7 of their size off exact ones, so ids differ from the reference's only between two experts
    whose scores are nearer than the errors of both (none of 2,048 random tokens chose otherwise than f64 does).
    """
    (T, H), E = x.shape, weight.shape[0]
    if weight.shape != (E, H) or bias.shape not in ((E,), (T, E)) or not 0 < k <= E:
        raise ValueError(f"{T} tokens of {H}, router {tuple(weight.shape)}, bias {tuple(bias.shape)}, {k} choices")
    if x.dtype is not bfloat16:
        raise TypeError(f"routed tokens are bfloat16, got {x.dtype}")
    x, weight, bias = contiguous(x), contiguous(weight.to(float32)), contiguous(bias.to(float32))
    rows, experts, inner, warps = _FEW if T <= 128 else _MANY
    parts = blocks(H, _PART)
    partial = empty((parts, T, E), dtype=float32, device=x.device)
    sizes = dict(E=E, H=H, PART=_PART, BT=rows, BN=experts, BK=inner)
    grid = (blocks(E, experts), blocks(T, rows), parts)
    launch(_score, grid, x, weight, partial, T, warps=warps, **sizes)
    ids = empty((T, k), dtype=int64, device=x.device)
    w = empty((T, k), dtype=float32, device=x.device)
    stride = E if bias.dim() == 2 else 0
    sizes = dict(E=E, K=k, NORMALISE=normalise, PARTS=parts, EXPERTS=power_of_two(E))
    arguments = (partial, bias, ids, w, T, stride, float(temperature), float(scale))
    launch(_choose, (T,), *arguments, **sizes)
    return ids, w
