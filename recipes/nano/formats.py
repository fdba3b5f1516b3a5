"""Straight-through versions of the official formats: the forward pass sees stored values, the gradient passes through.

Written for the training machine (plain elementwise tensor code, no host synchronisation); the test compares every
function with the engine's own quantisers.
"""

from __future__ import annotations

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


def _through(x: Tensor, stored: Tensor) -> Tensor:
    return x + (stored.to(x.dtype) - x).detach()


def _stored_fp8(groups: Tensor, dims: tuple[int, ...], floor: float) -> Tensor:
    scale = _power(_exponent(groups.abs().amax(dims, keepdim=True).clamp(min=floor), E4M3_MAX))
    return _e4m3(groups / scale) * scale


def fp8_groups(x: Tensor) -> Tensor:
    """E4M3 per 32 channels with a power-of-two scale: activations, window rows."""
    return _through(x, _stored_fp8(x.detach().float().unflatten(-1, (-1, 32)), (-1,), 1e-4).flatten(-2))


def fp8_rows(x: Tensor) -> Tensor:
    """As ``fp8_groups`` for stored rows (n-gram tables)."""
    return fp8_groups(x)


def fp4_groups(x: Tensor) -> Tensor:
    """MXFP4: E2M1 per 32 channels with a power-of-two scale (expert weights, index queries and keys)."""
    groups = x.detach().float().unflatten(-1, (-1, 32))
    scale = _power(_exponent(groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-126), E2M1_MAX))
    return _through(x, (_e2m1(groups / scale) * scale).flatten(-2))


def fp4_global(x: Tensor) -> Tensor:
    """E2M1 per 16 channels with an E4M3 scale: the global KV rows."""
    groups = x.detach().float().unflatten(-1, (-1, 16))
    scale = _e4m3(groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-9) / E2M1_MAX)
    return _through(x, (_e2m1(groups / scale) * scale).flatten(-2))


def fp8_tiles(weight: Tensor) -> Tensor:
    """E4M3 per 32x32 tile of a [out, in] weight whose sides are multiples of 32."""
    tiles = weight.detach().float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    stored = _stored_fp8(tiles, (1, 3), 1e-4 * 2.0**-60)
    return _through(weight, stored.flatten(2, 3).flatten(0, 1))
