"""Matrix products with official weights, dequantised in registers: bf16 operands, f32 sums.

The weight is the left operand, so that its rows fill the tensor cores' wide side and few tokens are enough.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, uint8

from deepinfer_kernels import invariant
from deepinfer_kernels.reference import linear as reference
from deepinfer_kernels.reference.linear import Kind, Weight, in_halves
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16, dot, e2m1_times, e4m3_times, e8m0_bf16, spread
from deepinfer_kernels.triton.launch import blocks, contiguous, launch

#: storage of a weight in the kernels: bf16, E4M3 in 32 × 32 tiles, MXFP4
BF16, FP8, FP4 = 0, 1, 2


@triton.jit
def weight_dot(
    acc, X, m, there, W, S, n, rows, k0, K: tl.constexpr, STORED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """acc [BN, BT] + W[n, k] · X[m, k] for the K inputs k0 to k0 + BK.

    ``m`` [BT] are the places of the rows of X where ``there``, ``n`` [BN] the rows of the weight, those below
    ``rows`` exist.
    """
    known = (n < rows)[:, None]
    if STORED == 0:
        k = k0 + tl.arange(0, BK)[None, :]
        w = tl.load(W + n[:, None] * K + k, mask=known & (k < K), other=0.0)
        x = tl.load(X + m[:, None] * K + k, mask=there[:, None] & (k < K), other=0.0)
        acc = dot(w, tl.trans(x), acc)
    else:
        group = k0 // 32 + tl.arange(0, BK // 32)[None, :]
        row = n if STORED == 2 else n // 32
        s = tl.load(S + row[:, None] * (K // 32) + group, mask=known & (group < K // 32), other=0)
        if STORED == 1:
            k = k0 + tl.arange(0, BK)[None, :]
            w = tl.load(W + n[:, None] * K + k, mask=known & (k < K), other=0)
            x = tl.load(X + m[:, None] * K + k, mask=there[:, None] & (k < K), other=0.0)
            acc = dot(e4m3_times(w, spread(e8m0_bf16(s), BN, BK // 32, 32)), tl.trans(x), acc)
        else:
            b = k0 // 2 + tl.arange(0, BK // 2)[None, :]
            w = tl.load(W + n[:, None] * (K // 2) + b, mask=known & (b < K // 2), other=0)
            low, high = e2m1_times(w, spread(e8m0_bf16(s), BN, BK // 32, 16))
            k = b // 16 * 32 + b % 16  # the low codes of 16 bytes are 16 inputs, the high codes the next 16
            at = X + m[:, None] * K + k
            x = tl.load(at, mask=there[:, None] & (k < K), other=0.0)
            acc = dot(low, tl.trans(x), acc)
            x = tl.load(at + 16, mask=there[:, None] & (k < K), other=0.0)
            acc = dot(high, tl.trans(x), acc)
    return acc


@triton.jit(do_not_specialize=["T"])
def _linear(
    X, W, S, Y, T, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STORED: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y[t, g] = W[g] · x[t, g]: one program per tile of tokens (fastest), tile of outputs, group and part of K.

    With PARTS > 1 the sums of a part go to Y [part, t, g, n] in f32.
    """
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    g = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    stored: tl.constexpr = K // 2 if STORED == 2 else K
    scales: tl.constexpr = (N if STORED == 2 else (N + 31) // 32) * (K // 32)
    each: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK) * BK
    W += g * N * stored
    if STORED != 0:
        S += g * scales
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    for k0 in range(0, each, BK):
        acc = weight_dot(acc, X, t * G + g, t < T, W, S, n, N, part * each + k0, K, STORED, BN, BK)
    mask = (t < T)[None, :] & (n < N)[:, None]
    at = (t * G + g)[None, :] * N + n[:, None]
    if PARTS == 1:
        tl.store(Y + at, bf16(acc), mask=mask)
    else:
        tl.store(Y + part * T.to(tl.int64) * G * N + at, acc, mask=mask)


@triton.jit(do_not_specialize=["size"])
def _add_parts(PART, Y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """bf16 sums of ``PARTS`` parts of ``size`` elements, always in the same order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(PART + part * size + i, mask=i < size, other=0.0)
    tl.store(Y + i, bf16(total), mask=i < size)


class Tile(NamedTuple):
    """Outputs, tokens and inputs of a program's step, its warps and its loads in flight."""

    BN: int
    BT: int
    BK: int
    warps: int
    stages: int


def tile(T: int, N: int) -> Tile:
    """Tiles for T tokens and N outputs: narrow for few tokens, where reading the weight is all that counts."""
    if T <= 16:
        return Tile(64, 16, 256, 4, 3)
    if T <= 64:
        return Tile(128, 64, 128, 8, 3) if N > 8192 else Tile(64, 64, 128, 4, 3)
    return Tile(128, 256, 64, 8, 3) if T > 1024 and N > 2048 else Tile(128, 128, 64, 8, 3)


def parts(T: int, N: int, K: int, chosen: Tile) -> int:
    """Parts of K that give a device of about 130 processors something to do; a power of two, none below 512 inputs."""
    programs = blocks(T, chosen.BT) * blocks(N, chosen.BN)
    found = 1
    while programs * found <= 80 and 512 * 2 * found <= K and found < 16:
        found *= 2
    return found


#: the tile of every call whose result must not depend on the batch, with K in one part
FIXED = Tile(64, 32, 128, 4, 3)


def stored_as(weight: Weight) -> int:
    """How the kernels read a weight."""
    return BF16 if weight.scale is None else FP4 if weight.kind == "fp4" else FP8


def product(x: Tensor, weight: Weight, groups: int, chosen: Tile, split: bool = True) -> Tensor:
    """bf16 y [T, G, N] of x [T, G, K] and a weight [G, N, K] (G = 1: [N, K]), not of kind f32."""
    x = contiguous(x)
    T, K = x.numel() // (groups * x.shape[-1]), x.shape[-1]
    N, stored = weight.data.shape[-2], stored_as(weight)
    wide = weight.data.shape[-1] * (2 if stored == FP4 else 1)
    if x.dtype is not bfloat16 or wide != K or weight.data.numel() != groups * N * weight.data.shape[-1]:
        raise ValueError(f"input {tuple(x.shape)} {x.dtype}, weight {tuple(weight.data.shape)} {weight.kind}")
    y = empty((*x.shape[:-1], N), dtype=bfloat16, device=x.device)
    pieces = parts(T, N * groups, K, chosen) if split else 1
    grid = (blocks(T, chosen.BT), blocks(N, chosen.BN), groups * pieces)
    sizes = dict(N=N, K=K, G=groups, STORED=stored, BN=chosen.BN, BT=chosen.BT, BK=chosen.BK, PARTS=pieces)
    to = y if pieces == 1 else empty((pieces, *y.shape), dtype=float32, device=x.device)
    launch(_linear, grid, x, bytes_of(weight), weight.scale, to, T, warps=chosen.warps, stages=chosen.stages, **sizes)
    if pieces > 1:
        launch(_add_parts, (blocks(y.numel(), 1024),), to, y, y.numel(), PARTS=pieces, BLOCK=1024)
    return y


def bytes_of(weight: Weight) -> Tensor:
    """What the kernels read of a weight: the matrix, or the bytes of the checkpoint with FP4 in halves."""
    if weight.scale is None:
        return weight.data
    if weight.kind == "fp4" and not weight.halves:
        raise ValueError("packed FP4 weights come from this backend's prepare_weight")
    return weight.data.view(uint8)


def prepare_weight(num: Numerics, data: Tensor, scale: Tensor | None, kind: Kind) -> Weight:
    """The bytes of the checkpoint for fp8 and fp4 (its codes put in halves), the reference's matrix for the rest.

    Also for fp8 whose inputs do not fill their last tile: kernels read whole groups of 32.
    """
    if kind == "f32" or kind == "bf16" or data.shape[-1] % (16 if kind == "fp4" else 32):
        made = reference.prepare_weight(num, data, scale, kind)
        return replace(made, data=contiguous(made.data))
    assert scale is not None
    data, scale = data.contiguous().view(uint8), scale.contiguous().view(uint8)
    return Weight(in_halves(data) if kind == "fp4" else data, kind, scale, kind == "fp4")


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] bf16; kind f32 computes and returns f32."""
    if weight.kind == "f32":
        return x.to(float32) @ weight.data.mT
    return product(x, weight, 1, tile(x.numel() // x.shape[-1], weight.data.shape[-2]))


def linear_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear`` on tiles of one size, whatever the number of rows."""
    if weight.kind == "f32":
        return invariant.linear(num, x, weight)
    return product(x, weight, 1, FIXED, split=False)


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[T, G, in] · [G, out, in] → [T, G, out]."""
    return product(x, weight, x.shape[1], tile(x.shape[0], weight.data.shape[-2]))


def linear_grouped_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear_grouped`` on tiles of one size, whatever the number of rows."""
    return product(x, weight, x.shape[1], FIXED, split=False)
