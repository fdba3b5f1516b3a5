"""Pooling of token pairs into one global latent (ratio-2 sources)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference.numerics import Numerics


def pool_pairs(num: Numerics, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Pooled latent [T, D] of (value, gate) pairs, each f32 [T, D]: a softmax over the two gates per channel."""
    (u0, g0), (u1, g1) = first, second
    w = torch.softmax(torch.stack((g0, g1)), 0)
    return num.round(w[0] * u0 + w[1] * u1)
