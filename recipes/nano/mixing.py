"""Hyper-connections of the residual streams: mixing coefficients with Sinkhorn balancing, collapse, expand.

Shapes: streams X [N, C, H]; coefficients f32, pre and post [N, C], comb [N, C, C] (applied over its first index).
A sublayer is fed through the ``pre`` of the sublayer before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in f32, rounded once to the dtype of ``x``."""
    y = x.float()
    return (weight.float() * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb after its first row softmax and column division)."""
    streams = x.shape[1]
    v = x.flatten(1).float()
    m = (v @ fn.t()) * torch.rsqrt(v.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(m[:, :streams] * scale[0] + base[:streams]) + hc_eps
    post = 2 * torch.sigmoid(m[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (m[:, 2 * streams :] * scale[2] + base[2 * streams :]).unflatten(-1, (streams, streams))
    comb = torch.softmax(comb, -1) + hc_eps
    return pre, post, comb / (comb.sum(-2, keepdim=True) + hc_eps)


def balance(comb: Tensor, rounds: int, hc_eps: float) -> Tensor:
    """``rounds`` further Sinkhorn rounds: rows, then columns."""
    for _ in range(rounds):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return comb


def collapse(x: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """[N, H]: the normed weighted sum of the streams."""
    return rms((pre.unsqueeze(-1) * x.float()).sum(1).to(x.dtype), norm, eps)


def expand(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[N, C, H]: the sublayer output ``y`` added to the mixed streams."""
    out = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for i in range(x.shape[1]):  # a loop keeps the [N, C, C, H] product out of memory
        out = out + comb[:, i].unsqueeze(-1) * x[:, i].float().unsqueeze(1)
    return out.to(x.dtype)
