"""RMSNorm and rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_kernels.reference.numerics import Numerics


def rms_norm(num: Numerics, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dim, statistic in f32, rounded once at the end.

    eps 1e-20 must survive: the statistic is f32, where 1e-20 is representable and an all-zero row gives 0.
    """
    v = x.float()
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return num.round(weight.float() * y)


def rope_frequencies(
    dim: int, theta: float, yarn: tuple[float, float, float, int] | None = None, device: torch.device | None = None
) -> Tensor:
    """f32 [dim/2] inverse frequencies θ^(-2i/dim); ``yarn`` = (factor, beta_fast, beta_slow, original length).

    YaRN divides low frequencies by ``factor`` with a linear ramp between the two correction dims; no mscale.
    """
    freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is not None:
        factor, fast, slow, original = yarn

        def correction(rotations: float) -> float:
            return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(correction(fast)), 0)
        high = min(math.ceil(correction(slow)), dim - 1)
        # 1e-3: the release's guard against a ramp of zero width
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq / factor * ramp + freq * (1 - ramp)
    return freq.to(device) if device is not None else freq


def rope_angles(num: Numerics, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) f32 [T, dim/2] of the f32 products position · frequency."""
    angle = positions.float().unsqueeze(-1) * frequencies
    return angle.cos(), angle.sin()


def rope(num: Numerics, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last dims of x [T, ..., D]; cos/sin [T, Dr/2]; ``inverse`` negates the angle."""
    half = cos.shape[-1]
    keep, turn = x[..., : -2 * half], x[..., -2 * half :].float().unflatten(-1, (half, 2))
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    c, s = cos.view(shape), sin.view(shape)
    if inverse:
        s = -s
    a, b = turn[..., 0], turn[..., 1]
    turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    return torch.cat((keep, num.round(turned).to(x.dtype)), -1)
