"""Engram: classes and hashes of n-grams, rows of the table, and the gate that mixes them into the streams."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, bool, empty, float32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16, e4m3_value, e8m0_value, widened
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two
from deepinfer_kernels.triton.precise import sigmoid


@triton.jit(do_not_specialize=["size", "image"])
def _classes(IDS, TABLE, OUT, size, image, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(IDS + i, mask=i < size, other=-1)
    real = (token >= 0) & (token != image)
    tl.store(OUT + i, tl.load(TABLE + tl.maximum(token, 0), mask=real, other=-1), mask=i < size)


def token_classes(num: Numerics, ids: Tensor, table: Tensor, image: int | None) -> Tensor:
    """int64 of ids' shape: the class of each token, table int64 [V]; −1 for ids below 0 and for ``image``."""
    ids, table = contiguous(ids), contiguous(table)
    if ids.dtype is not int64 or table.dtype is not int64:
        raise TypeError(f"token ids and classes are int64, got {ids.dtype} and {table.dtype}")
    out = empty(ids.shape, dtype=int64, device=ids.device)
    size = ids.numel()
    launch(_classes, (blocks(size, 256),), ids, table, out, size, -1 if image is None else image, BLOCK=256)
    return out


@triton.jit(do_not_specialize=["T", "pad"])
def _hash(
    CLASSES, MULTIPLIERS, PRIMES, OFFSETS, IDS, T, pad, N: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.arange(0, BH)
    roll = tl.zeros((BT,), dtype=tl.int64)
    blocked = t < 0
    for lag in tl.static_range(N):
        c = tl.load(CLASSES + t * N + lag, mask=t < T, other=0)
        blocked = blocked | (c < 0)
        roll = roll ^ (tl.where(blocked, tl.cast(pad, tl.int64), c) * tl.load(MULTIPLIERS + lag))
        if lag > 0:
            at = (lag - 1) * HEADS + h
            prime = tl.load(PRIMES + at, mask=h < HEADS, other=1)
            offset = tl.load(OFFSETS + at, mask=h < HEADS, other=0)
            row = roll[:, None] % prime[None, :] + offset[None, :]
            to = (t * ((N - 1) * HEADS))[:, None] + at[None, :]
            tl.store(IDS + to, row, mask=(t < T)[:, None] & (h < HEADS)[None, :])


def engram_hash(
    num: Numerics, classes: Tensor, pad_class: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Table row ids [T, columns] int64 of the n-grams ending at each token; classes int64 [T, nmax], −1 blocks."""
    classes = contiguous(classes)
    T, N = classes.shape
    if classes.dtype is not int64 or multipliers.shape != (N,) or primes.shape[0] != N - 1:
        shapes = [tuple(t.shape) for t in (classes, multipliers, primes)]
        raise ValueError(f"classes, multipliers and primes {shapes} {classes.dtype}")
    heads = primes.shape[1]
    ids = empty((T, (N - 1) * heads), dtype=int64, device=classes.device)
    tables = (contiguous(multipliers), contiguous(primes), contiguous(offsets))
    sizes = dict(N=N, HEADS=heads, BH=power_of_two(heads), BT=64)
    launch(_hash, (blocks(T, 64),), classes, *tables, ids, T, pad_class, **sizes)
    return ids


@triton.jit(do_not_specialize=["groups"])
def _lookup(TABLE, SCALE, IDS, OUT, groups, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """Values of 32 channels per group; row of the table is that of the group's id, or the group's own."""
    g = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    mask = g < groups
    at = g
    if IDS is not None:
        at = tl.load(IDS + g // PARTS, mask=mask, other=0) * PARTS + g % PARTS
    i = tl.arange(0, 32)
    scale = e8m0_value(tl.load(SCALE + at, mask=mask, other=127))
    code = tl.load(TABLE + at[:, None] * 32 + i[None, :], mask=mask[:, None], other=0)
    value = e4m3_value(code) * scale[:, None]
    tl.store(OUT + g[:, None] * 32 + i[None, :], bf16(value), mask=mask[:, None])


def _values(weight: Tensor, scale: Tensor, ids: Tensor | None, rows: int) -> Tensor:
    weight, scale = contiguous(weight.view(uint8)), contiguous(scale.view(uint8))
    width = weight.shape[-1]
    if width % 32 or scale.shape != (*weight.shape[:-1], width // 32):
        raise ValueError(f"table rows {tuple(weight.shape)} and scales {tuple(scale.shape)} of 32 channels each")
    out = empty((rows, width), dtype=bfloat16, device=weight.device)
    groups, parts = rows * (width // 32), width // 32
    launch(_lookup, (blocks(groups, 64),), weight, scale, ids, out, groups, PARTS=parts, GROUPS=64)
    return out


def dequantise_table(num: Numerics, weight: Tensor, scale: Tensor) -> Tensor:
    """Values bf16 [M, width] of gathered table rows: E4M3 bytes [M, width], one E8M0 scale per 32; exact."""
    return _values(weight, scale, None, weight.shape[0])


def engram_lookup(num: Numerics, weight: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Values bf16 [T, columns · width] of table rows ids int64 [T, columns]: bytes [R, width], scales [R, width/32]."""
    ids = contiguous(ids)
    if ids.dtype is not int64:
        raise TypeError(f"table rows are named by int64, got {ids.dtype}")
    return _values(weight, scale, ids, ids.numel()).view(ids.shape[0], ids.shape[1] * weight.shape[-1])


@triton.jit(do_not_specialize=["weight_row"])
def _gate(X, PROJECTED, Q, K, DEAD, OUT, GATE, weight_row, eps, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t, c = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < H
    h = widened(tl.load(X + (t * C + c) * H + i, mask=mask, other=0.0))
    key = widened(tl.load(PROJECTED + (t * (C + 1) + c) * H + i, mask=mask, other=0.0))
    q = widened(tl.load(Q + c * weight_row + i, mask=mask, other=0.0))
    k = widened(tl.load(K + c * weight_row + i, mask=mask, other=0.0))
    dot = tl.sum(h * (q * k) * key, 0)
    dot = dot * (1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / H + eps)) * (1.0 / tl.sqrt_rn(tl.sum(key * key, 0) / H + eps))
    dot = dot * (1.0 / tl.sqrt_rn(tl.cast(H, tl.float32)))
    size = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6, propagate_nan=tl.PropagateNan.ALL))
    negative = dot.to(tl.int32, bitcast=True) < 0  # a dot of +0 counts as positive, one of −0 does not
    gate = sigmoid(tl.where(negative, -size, size))
    if DEAD is not None:
        gate = tl.where(tl.load(DEAD + t) != 0, 0.0, gate)
    value = widened(tl.load(PROJECTED + (t * (C + 1) + C) * H + i, mask=mask, other=0.0))
    tl.store(OUT + (t * C + c) * H + i, bf16(h + gate * value), mask=mask)
    tl.store(GATE + t * C + c, gate)


def engram_gate(
    num: Numerics, X: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(streams with the memory mixed in bf16 [T, C, H], gate f32 [T, C]); projected [T, (C+1)·H], dead bool [T]."""
    X, projected = contiguous(X), contiguous(projected)
    T, C, H = X.shape
    weights = (contiguous(q_weight), contiguous(k_weight))
    row = H if q_weight.dim() == 2 and q_weight.shape[0] > 1 else 0
    if projected.shape != (T, (C + 1) * H) or any(w.shape[-1] != H or w.numel() not in (H, C * H) for w in weights):
        shapes = [tuple(t.shape) for t in (projected, *weights)]
        raise ValueError(f"streams {tuple(X.shape)}, projection and weights {shapes}")
    if dead is not None and (dead.dtype is not bool or dead.shape != (T,)):
        raise ValueError(f"dead {tuple(dead.shape)} {dead.dtype}, expected bool ({T},)")
    out = empty(X.shape, dtype=bfloat16, device=X.device)
    gate = empty((T, C), dtype=float32, device=X.device)
    rows = None if dead is None else contiguous(dead).view(uint8)
    block = power_of_two(H)
    sizes = dict(C=C, H=H, BLOCK=block)
    launch(
        _gate, (C, T), X, projected, *weights, rows, out, gate, row, float(eps), warps=8 if block > 2048 else 4, **sizes
    )
    return out, gate
