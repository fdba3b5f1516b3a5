"""Matrix products with official weights, dequantised in registers: bf16 operands, f32 sums.

The weight is the left operand, so that its rows fill the tensor cores' wide side and few tokens are enough.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, bfloat16, bmm, empty, float32, int16, int32, uint8

from deepinfer_kernels import invariant
from deepinfer_kernels.reference import linear as reference
from deepinfer_kernels.reference.linear import Kind, Weight, in_tiles
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import E2M1_SCALE, E4M3_SCALE, bf16, dot, e2m1_tiles, e4m3_tiles
from deepinfer_kernels.triton.launch import blocks, contiguous, launch

#: storage of a weight in the kernels: bf16 rows, tiles of E4M3, tiles of MXFP4
BF16, FP8, FP4 = 0, 1, 2


@triton.jit
def rows_of(W, S, first, BN: tl.constexpr, EACH: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr):
    """Where BN rows of a weight [N, K] and their scales begin, in blocks of 64 where it lies in tiles; which exist.

    They are EACH rows from ``first`` on, and the same once more where BN is twice as many.
    """
    if STORED == 0:
        n = first + tl.arange(0, BN) % EACH
        return W + n * K, n, n < N
    else:
        block = first // 64 + tl.arange(0, BN // 64) % (EACH // 64)
        steps: tl.constexpr = (K + 63) // 64
        halves: tl.constexpr = 1024 if STORED == 2 else 2048
        words: tl.constexpr = 32 if STORED == 2 else 2
        return W + block * (steps * halves), S + block * (steps * words), block < (N + 63) // 64


@triton.jit
def matrix(slot, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr):
    """(elements, scales) between matrices of a stack."""
    at = slot.to(tl.int64)
    tiles: tl.constexpr = ((N + 63) // 64) * ((K + 63) // 64)
    if STORED == 0:
        return at * (N * K), 0
    elif STORED == 1:
        return at * (tiles * 2048), at * (tiles * 2)
    else:
        return at * (tiles * 1024), at * (tiles * 32)


@triton.jit
def weight_sum(
    acc, X, m, there, W, S, known, first, STEPS: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr,
    BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """acc [BN, BT] + W[n, k] · X[m, k] over STEPS times BK inputs from step ``first`` on.

    ``m`` [BT] are the places of the rows of X where ``there``; W, S and ``known`` are of ``rows_of``. WHOLE: all rows
    of the weight exist, and all inputs.
    """
    at = X + (m.to(tl.int64) * K)[:, None] + tl.arange(0, BK)[None, :]
    if STORED == 0:
        w_at = W[:, None] + tl.arange(0, BK)[None, :]
    else:
        R: tl.constexpr = W.shape[0]
        C: tl.constexpr = BK // 64
        halves: tl.constexpr = 1024 if STORED == 2 else 2048
        words: tl.constexpr = 32 if STORED == 2 else 2
        step = tl.arange(0, C)[None, :, None]
        w_at = W[:, None, None] + (step * halves + tl.arange(0, halves)[None, None, :])
        s_at = S[:, None, None] + (step * words + tl.arange(0, words)[None, None, :])
    for i in range(STEPS):
        j = first + i
        if WHOLE:
            x = tl.load(at + j * BK, mask=there[:, None], other=0.0)
        else:
            k = j * BK + tl.arange(0, BK)[None, :]
            x = tl.load(at + j * BK, mask=there[:, None] & (k < K), other=0.0)
        if STORED == 0:
            a = tl.load(w_at + j * BK, mask=known[:, None] if WHOLE else known[:, None] & (k < K), other=0.0)
        else:
            if WHOLE:
                w, s = tl.load(w_at + j * (C * halves)), tl.load(s_at + j * (C * words))
            else:
                exist = known[:, None, None] & (j * C + step < (K + 63) // 64)
                w = tl.load(w_at + j * (C * halves), mask=exist, other=0)
                s = tl.load(s_at + j * (C * words), mask=exist, other=0)
            a = e4m3_tiles(w, s, R, C) if STORED == 1 else e2m1_tiles(w, s, R, C)
        acc = dot(a, tl.trans(x), acc)
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
    g = tl.program_id(2) // PARTS
    part = tl.program_id(2) % PARTS
    steps: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK)
    whole: tl.constexpr = steps * PARTS * BK == K and N % BN == 0
    w, s = matrix(g, N, K, STORED)
    if STORED != 0:
        S += s
    w, s, known = rows_of(W + w, S, tl.program_id(1) * BN, BN, BN, N, K, STORED)
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    acc = weight_sum(acc, X, t * G + g, t < T, w, s, known, part * steps, steps, K, STORED, BK, whole)
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


@triton.jit
def _dense(W, S, OUT, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """bf16 values of C tiles of matrices of E4M3."""
    at = tl.program_id(2)
    w, s = matrix(at, N, K, 1)
    w, s, _ = rows_of(W + w, S + s, tl.program_id(1) * 64, 64, 64, N, K, 1)
    step = tl.program_id(0) * C + tl.arange(0, C)[None, :, None]
    exist = step < (K + 63) // 64
    w = tl.load(w[:, None, None] + step * 2048 + tl.arange(0, 2048)[None, None, :], mask=exist, other=0)
    s = tl.load(s[:, None, None] + step * 2 + tl.arange(0, 2)[None, None, :], mask=exist, other=0)
    n = tl.program_id(1) * 64 + tl.arange(0, 64)[:, None]
    k = tl.program_id(0) * (64 * C) + tl.arange(0, 64 * C)[None, :]
    tl.store(OUT + at.to(tl.int64) * (N * K) + n * K + k, e4m3_tiles(w, s, 1, C), mask=(n < N) & (k < K))


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
        return Tile(128, 64, 64, 8, 4) if N > 1024 else Tile(64, 64, 128, 4, 4)
    return Tile(128, 256, 64, 8, 4) if T > 1024 and N > 2048 else Tile(128, 128, 64, 8, 4)


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
    (count, N, wide), stored = sizes_of(weight), stored_as(weight)
    if x.dtype is not bfloat16 or wide != K or count != groups:
        raise ValueError(f"input {tuple(x.shape)} {x.dtype}, weight {(*weight.data.shape[:-2], N, wide)} {weight.kind}")
    y = empty((*x.shape[:-1], N), dtype=bfloat16, device=x.device)
    pieces = parts(T, N * groups, K, chosen) if split else 1
    grid = (blocks(T, chosen.BT), blocks(N, chosen.BN), groups * pieces)
    sizes = dict(N=N, K=K, G=groups, STORED=stored, BN=chosen.BN, BT=chosen.BT, BK=chosen.BK, PARTS=pieces)
    to = y if pieces == 1 else empty((pieces, *y.shape), dtype=float32, device=x.device)
    data, scale = stores_of(weight)
    launch(_linear, grid, x, data, scale, to, T, warps=chosen.warps, stages=chosen.stages, **sizes)
    if pieces > 1:
        launch(_add_parts, (blocks(y.numel(), 1024),), to, y, y.numel(), PARTS=pieces, BLOCK=1024)
    return y


def sizes_of(weight: Weight) -> tuple[int, int, int]:
    """(matrices of the stack, outputs, inputs)."""
    return weight.data.shape[: -2 if weight.shape is None else -3].numel(), *weight.sizes


def stores_of(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """What the kernels read of a weight: the matrix, or tiles as 16-bit halves of words and scales in 32 bits."""
    if weight.scale is None:
        return weight.data, None
    if weight.shape is None:
        raise ValueError(
            f"{weight.kind} weights in the bytes of the checkpoint come from this backend's prepare_weight"
        )
    return weight.data.view(int16), weight.scale.view(int32)


def prepare_weight(num: Numerics, data: Tensor, scale: Tensor | None, kind: Kind) -> Weight:
    """Tiles of the bytes of the checkpoint for fp8 and fp4, the reference's matrix for the rest.

    The rest are also inputs that do not fill groups of 32, and what the kernels would not read as it is: NaN, and
    scales above 2^7 (fp8) or 2 (fp4). Waits for the device.
    """
    per_byte = 2 if kind == "fp4" else 1
    if scale is not None and kind in ("fp8", "fp4") and per_byte * data.shape[-1] % 32 == 0:
        code, byte = data.contiguous().view(uint8), scale.contiguous().view(uint8)
        plain = not byte.numel() or int(byte.max()) <= (E2M1_SCALE if kind == "fp4" else E4M3_SCALE)
        if plain and (kind == "fp4" or not bool(((code & 0x7F) == 0x7F).any())):
            tiles, scales = in_tiles(code, byte, kind)
            return Weight(tiles, kind, scales, shape=(code.shape[-2], per_byte * code.shape[-1]))
    made = reference.prepare_weight(num, data, scale, kind)
    return replace(made, data=contiguous(made.data))


#: a product of more tokens than this, and than a 16th of its outputs, pays for writing out its E4M3 weight as bf16,
#: in no more bytes than these
DENSE_TOKENS, DENSE_BYTES = 256, 256 << 20


def pays_dense(T: int, *weights: Weight) -> bool:
    """Whether the products of T tokens with the weights, at once, are better made by torch with bf16 matrices."""
    sizes = [sizes_of(w) for w in weights]
    outs = sum(count * N for count, N, _ in sizes)
    if max(DENSE_TOKENS, outs // 16) >= T or any(w.kind == "fp4" and w.scale is not None for w in weights):
        return False
    return sum(2 * count * N * K for count, N, K in sizes) <= DENSE_BYTES or all(w.scale is None for w in weights)


def write_dense(weight: Weight, out: Tensor) -> None:
    """The bf16 values of an fp8 weight [..., N, K] to contiguous ``out`` of the same shape."""
    (count, N, K), (data, scale) = sizes_of(weight), stores_of(weight)
    launch(_dense, (blocks(K, 256), blocks(N, 64), count), data, scale, out, N=N, K=K, C=4)


def dense(weight: Weight) -> Tensor:
    """The bf16 matrix of a bf16 or fp8 weight; that of an fp8 weight lives as long as its product."""
    if weight.shape is None:
        return weight.data
    out = empty((*weight.data.shape[:-3], *weight.shape), dtype=bfloat16, device=weight.data.device)
    write_dense(weight, out)
    return out


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] bf16; kind f32 computes and returns f32."""
    if weight.kind == "f32":
        return x.to(float32) @ weight.data.mT
    T = x.numel() // x.shape[-1]
    if x.dtype is bfloat16 and pays_dense(T, weight):
        return x @ dense(weight).mT
    return product(x, weight, 1, tile(T, sizes_of(weight)[1]))


def linear_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear`` on tiles of one size, whatever the number of rows."""
    if weight.kind == "f32":
        return invariant.linear(num, x, weight)
    return product(x, weight, 1, FIXED, split=False)


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[T, G, in] · [G, out, in] → [T, G, out]."""
    T, G, _ = x.shape
    if x.dtype is bfloat16 and pays_dense(T, weight):
        y = empty((T, G, sizes_of(weight)[1]), dtype=bfloat16, device=x.device)
        bmm(x.transpose(0, 1), dense(weight).mT, out=y.transpose(0, 1))
        return y
    return product(x, weight, G, tile(T, sizes_of(weight)[1]))


def linear_grouped_invariant(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear_grouped`` on tiles of one size, whatever the number of rows."""
    return product(x, weight, x.shape[1], FIXED, split=False)
