"""Straight-through versions of the official formats: the forward pass sees stored values, the gradient passes through.

Written for the training machine (plain elementwise tensor code, no host synchronisation); the test compares every
function with the engine's own quantisers. The functions on groups take f32 [G, width] and return stored values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def _exponent(amax: Tensor, limit: float) -> Tensor:
    """int32 k with 2^k = smallest power of two >= amax / limit; amax > 0, f32."""
    bits = (amax * (1.0 / limit)).view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _power(k: Tensor) -> Tensor:
    return ((k + 127) << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with either sign, ties to the even code."""
    mag = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(mag < 2, 0.5, torch.where(mag < 4, 1.0, 2.0))
    return torch.copysign(torch.round(mag / step) * step, x)


def fp8_values(groups: Tensor, floor: float = 1e-4) -> Tensor:
    """E4M3 with one power-of-two scale per group: activations, window rows, n-gram rows, weight tiles."""
    scale = _power(_exponent(groups.abs().amax(-1, keepdim=True).clamp(min=floor), E4M3_MAX))
    return _e4m3(groups / scale) * scale


def fp4_values(groups: Tensor) -> Tensor:
    """MXFP4: E2M1 with one power-of-two scale per group (expert weights, index queries and keys)."""
    scale = _power(_exponent(groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-126), E2M1_MAX))
    return _e2m1(groups / scale) * scale


def fp4_global_values(groups: Tensor) -> Tensor:
    """E2M1 with one E4M3 scale per group: the global KV rows."""
    scale = _e4m3(groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-9) / E2M1_MAX)
    return _e2m1(groups / scale) * scale


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, values: Callable[[Tensor], Tensor], width: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values(x.float().reshape(-1, width)).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None, None


def through(x: Tensor, values: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """``values`` on groups of ``width`` channels of the last dim; identity for the gradient."""
    return _Through.apply(x, values, width)


def tile_floor_values(groups: Tensor) -> Tensor:
    """``fp8_values`` for weights, whose scales have no practical floor."""
    return fp8_values(groups, 1e-4 * 2.0**-60)


def fp8_tiles(weights: list[Tensor]) -> list[Tensor]:
    """E4M3 per 32x32 tile of [out, in] weights whose sides are multiples of 32; one pass over all of them."""
    tiled = [w.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).transpose(1, 2).reshape(-1, 1024) for w in weights]
    stored = through(torch.cat(tiled), tile_floor_values, 1024).split([len(t) for t in tiled])
    return [
        s.view(w.shape[0] // 32, w.shape[1] // 32, 32, 32).transpose(1, 2).reshape(w.shape)
        for s, w in zip(stored, weights, strict=True)
    ]


def grouped_weights(weights: list[Tensor], values: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """``values`` per 32 channels of the last dim of all ``weights`` in one pass."""
    stored = through(torch.cat([w.flatten() for w in weights]), values, 32).split([w.numel() for w in weights])
    return [s.view(w.shape) for s, w in zip(stored, weights, strict=True)]
