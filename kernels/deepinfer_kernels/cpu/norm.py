"""RMSNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("norm", rms_norm="ppipiif", rope="ppppiiiif")


def norm_weight(weight: Tensor, width: int) -> tuple[int, bool]:
    """(address, whether it is f32) of the weight of a norm over rows of ``width``."""
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"rows of width {width}, weight {tuple(weight.shape)} {weight.dtype}")
    return weight.data_ptr(), weight.dtype is torch.float32


def rms_norm(num: Numerics, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dim; weight bf16 or f32."""
    x = bf16(x)
    H = x.shape[-1]
    y = torch.empty_like(x)
    LIBRARY.rms_norm(x.data_ptr(), *norm_weight(weight, H), y.data_ptr(), x.numel() // H, H, eps)
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
