"""Rows on their way into the caches, in one launch: normed, rotated, quantised, stored, as their readers see them."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.cache import _LEAST, _LEAST_E4M3, _fp4_scale, record
from deepinfer_kernels.triton.formats import (
    bf16,
    ceil_pow2_exponent,
    e2m1_code,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    exp2i,
    greatest,
    widened,
)
from deepinfer_kernels.triton.launch import contiguous, launch, power_of_two


@triton.jit
def _kept(X, W, COS, SIN, STORE, SLOTS, NORMED, VALUES, eps, D: tl.constexpr, HALF: tl.constexpr,
          BYTES: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """One row, as pairs (a, b) of neighbours; ``NORMED`` is the row before rotation, ``VALUES`` what the record holds.

    Without SLOTS the record is the row's own of STORE, else row SLOTS[row], row 0 where that is below 0.
    """
    row = tl.program_id(0).to(tl.int64)
    part, i = tl.arange(0, BG)[:, None], tl.arange(0, GROUP // 2)[None, :]
    col = part * GROUP + 2 * i
    mask = col < D
    at = X + row * D + col
    a, b = widened(tl.load(at, mask=mask, other=0.0)), widened(tl.load(at + 1, mask=mask, other=0.0))
    scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(a * a + b * b, 1), 0) / D + eps)
    wa, wb = widened(tl.load(W + col, mask=mask, other=0.0)), widened(tl.load(W + col + 1, mask=mask, other=0.0))
    a, b = bf16(wa * (a * scale)), bf16(wb * (b * scale))
    if NORMED is not None:
        tl.store(NORMED + row * D + col, a, mask=mask)
        tl.store(NORMED + row * D + col + 1, b, mask=mask)
    a, b = widened(a), widened(b)
    turned = (col >= D - 2 * HALF) & mask
    angle = row * HALF + (col - (D - 2 * HALF)) // 2
    cos = tl.load(COS + angle, mask=turned, other=1.0)
    sin = tl.load(SIN + angle, mask=turned, other=0.0)
    x, y = widened(bf16(a * cos - b * sin)), widened(bf16(a * sin + b * cos))
    a, b = tl.where(turned, x, a), tl.where(turned, y, b)  # the others as they are: a sum would lose the sign of 0
    least: tl.constexpr = 1e-4 if KIND == 0 else (_LEAST_E4M3 if KIND == 1 else _LEAST)
    amax = tl.maximum(greatest(a, least), greatest(b, least), propagate_nan=tl.PropagateNan.ALL)
    to = row
    if SLOTS is not None:
        to = tl.maximum(tl.load(SLOTS + row), 0)
    group = tl.arange(0, BG)
    start = STORE + to * BYTES
    if KIND == 0:
        k = ceil_pow2_exponent(amax, 1.0 / 448.0)
        down = exp2i(tl.where(k == 128, -127, -k))[:, None]  # 0 where the scale is NaN
        up = e8m0_value(k + 127)[:, None]
        code_a, code_b = e4m3_code(a * down), e4m3_code(b * down)
        tl.store(start + col, code_a, mask=mask)
        tl.store(start + col + 1, code_b, mask=mask)
        tl.store(start + D + group, (k + 127).to(tl.uint8), mask=group * GROUP < D)
        if VALUES is not None:
            tl.store(VALUES + row * D + col, bf16(e4m3_value(code_a) * up), mask=mask)
            tl.store(VALUES + row * D + col + 1, bf16(e4m3_value(code_b) * up), mask=mask)
    else:
        byte, unit = _fp4_scale(amax, KIND)
        code = e2m1_code(tl.div_rn(a, unit[:, None])) | (e2m1_code(tl.div_rn(b, unit[:, None])) << 4)
        tl.store(start + part * (GROUP // 2) + i, code.to(tl.uint8), mask=mask)
        tl.store(start + D // 2 + group, byte, mask=group * GROUP < D)


def _keep(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, kind: str, store: Tensor,
          slots: Tensor | None, normed: Tensor | None, values: Tensor | None) -> None:  # fmt: skip
    x, weight, cos, sin = contiguous(x), contiguous(weight), contiguous(cos), contiguous(sin)
    T, D = x.shape
    code, group, _, size = record(kind, D, stored=False)
    half = cos.shape[-1]
    if weight.shape != (D,) or cos.shape != (T, half) or sin.shape != cos.shape or 2 * half > D or (D - 2 * half) % 2:
        shapes = [tuple(t.shape) for t in (x, weight, cos, sin)]
        raise ValueError(f"rows, norm weight, cos and sin {shapes}")
    if x.dtype not in (bfloat16, float32) or cos.dtype is not float32 or sin.dtype is not float32:
        raise TypeError(f"rows {x.dtype}, angles {cos.dtype} and {sin.dtype}; expected bfloat16, float32 and float32")
    if store.shape[-1] != size or store.dtype is not uint8 or not store.is_contiguous():
        raise ValueError(f"{kind} records of {size} bytes into {tuple(store.shape)} {store.dtype}")
    sizes = dict(D=D, HALF=half, BYTES=size, GROUP=group, BG=power_of_two(D // group), KIND=code)
    warps = 1 if D <= 128 else 2
    launch(_kept, (T,), x, weight, cos, sin, store, slots, normed, values, float(eps), warps=warps, **sizes)


def window_rows(
    num: Numerics, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """(values as read bf16 [T, D], their records uint8 [T, bytes]) of x [T, D], normed and rotated."""
    T, D = x.shape
    packed = empty((T, record("window", D, stored=False)[3]), dtype=uint8, device=x.device)
    values = empty((T, D), dtype=bfloat16, device=x.device)
    _keep(x, weight, eps, cos, sin, "window", packed, None, None, values)
    return values, packed


def store_entries(
    num: Numerics, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, store: Tensor, slots: Tensor,
    kind: str,
) -> Tensor:  # fmt: skip
    """Normed rows bf16 [T, D] of x [T, D]; rotated, their records go to rows ``slots`` int64 [T] of ``store``."""
    if slots.dtype is not int64 or slots.shape != x.shape[:1]:
        raise ValueError(f"{x.shape[0]} rows, slots {tuple(slots.shape)} {slots.dtype}")
    normed = empty(x.shape, dtype=bfloat16, device=x.device)
    _keep(x, weight, eps, cos, sin, kind, store, contiguous(slots), normed, None)
    return normed
