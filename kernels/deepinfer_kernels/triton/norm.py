"""RMSNorm and rotary embedding."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: elements of a program's block: enough rows of a narrow width to fill 4 warps with 16-byte loads
_ELEMENTS = 2048


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(X, W, Y, rows, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * H + col
    mask = (row < rows) & (col < H)
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + col, mask=col < H, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 1) / H
    y = w * (x * (1.0 / tl.sqrt_rn(mean + eps))[:, None])
    tl.store(Y + at, bf16(y), mask=mask)


def rms_norm(num: Numerics, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dim, bf16; x and weight bf16 or f32."""
    x, weight = contiguous(x), contiguous(weight)
    H = x.shape[-1]
    if weight.shape != (H,):
        raise ValueError(f"rows of width {H}, weight {tuple(weight.shape)}")
    y = empty(x.shape, dtype=num.act, device=x.device)
    rows, block = x.numel() // H, power_of_two(H)
    per = max(1, _ELEMENTS // block)
    launch(
        _rms_norm, (blocks(rows, per),), x, weight, y, rows, float(eps), warps=_warps(block), H=H, ROWS=per, BLOCK=block
    )
    return y


def _warps(width: int) -> int:
    return 8 if width > 4096 else 4


@triton.jit(do_not_specialize=["rows", "inner"])
def _rope(
    X, COS, SIN, Y, rows, inner, D: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < D)
    at = row.to(tl.int64) * D + col
    turned = col >= D - 2 * HALF
    x = tl.load(X + at, mask=mask, other=0.0)
    # the other one of the pair: rotated widths are even and end the row, so pairs start at even distance from D
    odd = (D - col) % 2 == 1
    partner = tl.load(X + tl.where(odd, at - 1, at + 1), mask=mask & turned, other=0.0).to(tl.float32)
    angle = (row // inner) * HALF + (col - (D - 2 * HALF)) // 2
    cos = tl.load(COS + angle, mask=mask & turned, other=1.0)
    sin = tl.load(SIN + angle, mask=mask & turned, other=0.0)
    if INVERSE:
        sin = -sin
    v = x.to(tl.float32)
    y = tl.where(odd, partner * sin + v * cos, v * cos - partner * sin)
    tl.store(Y + at, tl.where(turned, bf16(y), x), mask=mask)


def rope(num: Numerics, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last dims of bf16 x [T, ..., D]; cos/sin [T, Dr/2] f32."""
    x, cos, sin = contiguous(x), contiguous(cos), contiguous(sin)
    T, half, D = x.shape[0], cos.shape[-1], x.shape[-1]
    if x.dtype is not num.act or cos.shape != (T, half) or sin.shape != cos.shape or 2 * half > D:
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype}, angles {tuple(cos.shape)} and {tuple(sin.shape)}")
    y = empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block = x.numel() // D, power_of_two(D)
    per = max(1, _ELEMENTS // block)
    sizes = dict(D=D, HALF=half, INVERSE=inverse, ROWS=per, BLOCK=block)
    launch(_rope, (blocks(rows, per),), x, cos, sin, y, rows, rows // T if T else 1, **sizes)
    return y
