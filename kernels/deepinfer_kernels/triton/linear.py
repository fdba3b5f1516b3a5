"""Matrix products with official weights, dequantised in registers: bf16 operands, f32 sums.

The weight is the left operand, so that its rows fill the tensor cores' wide side and few tokens are enough.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, uint8

from deepinfer_kernels.reference import linear as reference
from deepinfer_kernels.reference.linear import Kind, Weight
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import INTERPRETED, bf16, dot, e2m1_value, e4m3_value, e8m0_value
from deepinfer_kernels.triton.launch import blocks, contiguous, launch

#: storage of a weight in the kernels: bf16, E4M3 in 32 × 32 tiles, MXFP4
BF16, FP8, FP4 = 0, 1, 2


@triton.jit
def _bf16_dot(acc, W, rows, n, x, k0, K: tl.constexpr, BK: tl.constexpr):
    k = k0 + tl.arange(0, BK)
    w = tl.load(W + n[:, None] * K + k[None, :], mask=(n < rows)[:, None] & (k < K)[None, :], other=0.0)
    return dot(w, x, acc)


@triton.jit
def _fp8_dot(acc, W, S, rows, n, x, k0, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr):
    known = (n < rows)[:, None]
    k, group = k0 + tl.arange(0, BK), k0 // 32 + tl.arange(0, BK // 32)
    w = tl.load(W + n[:, None] * K + k[None, :], mask=known & (k < K)[None, :], other=0)
    at = (n // 32)[:, None] * (K // 32) + group[None, :]
    s = tl.load(S + at, mask=known & (group < K // 32)[None, :], other=0)
    if INTERPRETED:
        acc = dot(bf16(e4m3_value(w) * _spread(e8m0_value(s), BN, BK // 32, 32)), x, acc)
    elif SCALED:
        acc = tl.dot_scaled(w, s, "e4m3", x, None, "bf16", acc=acc, fast_math=True)
    else:
        scale = (s.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        value = w.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        acc = tl.dot(value * _spread(scale, BN, BK // 32, 32), x, acc)
    return acc


@triton.jit
def _fp4_dot(acc, W, S, rows, n, x, k0, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr):
    known = (n < rows)[:, None]
    b, group = k0 // 2 + tl.arange(0, BK // 2), k0 // 32 + tl.arange(0, BK // 32)
    w = tl.load(W + n[:, None] * (K // 2) + b[None, :], mask=known & (b < K // 2)[None, :], other=0)
    s = tl.load(S + n[:, None] * (K // 32) + group[None, :], mask=known & (group < K // 32)[None, :], other=0)
    if INTERPRETED:
        code = w.to(tl.int32)
        value = tl.interleave(e2m1_value(code & 15), e2m1_value(code >> 4))
        acc = dot(bf16(value * _spread(e8m0_value(s), BN, BK // 32, 32)), x, acc)
    elif SCALED:
        acc = tl.dot_scaled(w, s, "e2m1", x, None, "bf16", acc=acc, fast_math=True)
    else:
        scale = _spread((s.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True), BN, BK // 32, 16)
        c = w.to(tl.uint16)
        low = (((c & 7) << 6) | ((c & 8) << 12)).to(tl.bfloat16, bitcast=True)
        high = (((c & 0x70) << 2) | ((c & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
        back = tl.full((BN, BK // 2), 8.507059173023462e37, tl.bfloat16)
        acc = tl.dot(tl.interleave(low * back * scale, high * back * scale), x, acc)
    return acc


@triton.jit
def _spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Scales [ROWS, GROUPS], each for ``GROUP`` neighbours."""
    return tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, GROUP)).reshape(ROWS, GROUPS * GROUP)


@triton.jit
def weight_dot(
    acc, W, S, rows, n, x, k0,
    K: tl.constexpr, STORED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """acc [BN, BT] + W[n, k0 : k0 + BK] · x [BK, BT]; rows ``n`` [BN] below ``rows`` exist, columns below K."""
    if STORED == 0:
        acc = _bf16_dot(acc, W, rows, n, x, k0, K, BK)
    elif STORED == 1:
        acc = _fp8_dot(acc, W, S, rows, n, x, k0, K, BN, BK, SCALED)
    else:
        acc = _fp4_dot(acc, W, S, rows, n, x, k0, K, BN, BK, SCALED)
    return acc


@triton.jit(do_not_specialize=["T"])
def _linear(
    X, W, S, Y, T, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STORED: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[t, g] = W[g] · x[t, g]: one program per tile of tokens (fastest), tile of outputs, group."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.program_id(2).to(tl.int64)
    stored: tl.constexpr = K // 2 if STORED == 2 else K
    scales: tl.constexpr = (N if STORED == 2 else (N + 31) // 32) * (K // 32)
    W += g * N * stored
    if STORED != 0:
        S += g * scales
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(X + (t * G + g)[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        acc = weight_dot(acc, W, S, N, n, tl.trans(x), k0, K, STORED, BN, BK, SCALED)
    y = Y + (t * G + g)[None, :] * N + n[:, None]
    tl.store(y, bf16(acc), mask=(t < T)[None, :] & (n < N)[:, None])


class Tile(NamedTuple):
    """Outputs, tokens and inputs of a program's step, its warps and its loads in flight."""

    BN: int
    BT: int
    BK: int
    warps: int
    stages: int
    scaled: bool = True


def tile(T: int, N: int) -> Tile:
    """Tiles for T tokens and N outputs: narrow for few tokens, where reading the weight is all that counts."""
    if T <= 16:
        return Tile(32 if N <= 8192 else 64, 16, 256, 4, 4)
    if T <= 64:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 64, 8, 3)


#: the tile of every call whose result must not depend on the batch
FIXED = Tile(64, 32, 128, 4, 3)


def stored_as(weight: Weight) -> int:
    """How the kernels read a weight."""
    return BF16 if weight.scale is None else FP4 if weight.kind == "fp4" else FP8


def product(x: Tensor, weight: Weight, groups: int, chosen: Tile) -> Tensor:
    """bf16 y [T, G, N] of x [T, G, K] and a weight [G, N, K] (G = 1: [N, K]), not of kind f32."""
    x = contiguous(x)
    T, K = x.numel() // (groups * x.shape[-1]), x.shape[-1]
    N, stored = weight.data.shape[-2], stored_as(weight)
    wide = weight.data.shape[-1] * (2 if stored == FP4 else 1)
    if x.dtype is not bfloat16 or wide != K or weight.data.numel() != groups * N * weight.data.shape[-1]:
        raise ValueError(f"input {tuple(x.shape)} {x.dtype}, weight {tuple(weight.data.shape)} {weight.kind}")
    y = empty((*x.shape[:-1], N), dtype=bfloat16, device=x.device)
    grid = (blocks(T, chosen.BT), blocks(N, chosen.BN), groups)
    sizes = dict(N=N, K=K, G=groups, STORED=stored, BN=chosen.BN, BT=chosen.BT, BK=chosen.BK, SCALED=chosen.scaled)
    data = weight.data if stored == BF16 else weight.data.view(uint8)
    arguments = (x, data, weight.scale, y, T)
    launch(_linear, grid, *arguments, warps=chosen.warps, stages=chosen.stages, **sizes)
    return y


def prepare_weight(num: Numerics, data: Tensor, scale: Tensor | None, kind: Kind) -> Weight:
    """The bytes of the checkpoint for fp8 and fp4, the reference's matrix for the rest."""
    if kind in ("fp8", "fp4"):
        assert scale is not None
        return Weight(data.contiguous().view(uint8), kind, scale.contiguous().view(uint8))
    return reference.prepare_weight(num, data, scale, kind)


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] bf16; kind f32 computes and returns f32."""
    if weight.kind == "f32":
        return x.to(float32) @ weight.data.mT
    return product(x, weight, 1, tile(x.numel() // x.shape[-1], weight.data.shape[-2]))


def linear_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear`` on tiles of one size, whatever the number of rows."""
    if weight.kind == "f32":
        return x.to(float32) @ weight.data.mT
    return product(x, weight, 1, FIXED)


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[T, G, in] · [G, out, in] → [T, G, out]."""
    return product(x, weight, x.shape[1], tile(x.shape[0], weight.data.shape[-2]))


def linear_grouped_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear_grouped`` on tiles of one size, whatever the number of rows."""
    return product(x, weight, x.shape[1], FIXED)
