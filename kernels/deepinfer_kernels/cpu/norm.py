"""RMSNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("norm", rms_norm="ppwpiif", rope="ppppiiiif")


def rms_norm(num: Numerics, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dim; weight bf16 or f32."""
    x = bf16(x)
    wide = weight.dtype is not torch.bfloat16
    w = f32(weight) if wide else bf16(weight)
    H = x.shape[-1]
    if w.shape != (H,):
        raise ValueError(f"rows of width {H}, weight {tuple(w.shape)}")
    y = torch.empty_like(x)
    LIBRARY.rms_norm(x.data_ptr(), w.data_ptr(), wide, y.data_ptr(), x.numel() // H, H, eps)
    return y


def rope(num: Numerics, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last dims of x [T, ..., D]; cos/sin [T, Dr/2]."""
    x, cos, sin = bf16(x), f32(cos), f32(sin)
    T, half, D = x.shape[0], cos.shape[-1], x.shape[-1]
    if cos.shape != (T, half) or sin.shape != cos.shape or 2 * half > D:
        raise ValueError(f"rows {tuple(x.shape)}, angles {tuple(cos.shape)} and {tuple(sin.shape)}")
    y = torch.empty_like(x)
    inner = x.numel() // (T * D) if T else 0
    at = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr())
    LIBRARY.rope(*at, T, inner, D, half, -1.0 if inverse else 1.0)
    return y


OPERATIONS = (rms_norm, rope)
