"""Manifold-constrained hyper-connections: the C parallel residual streams of a token.

Streams X are [T, C, H]; the projection flattens them stream-major. Everything is f32 except the streams themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference.norm import rms_norm
from deepinfer_kernels.reference.numerics import Numerics


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, C], post [T, C], comb [T, C, C]) of one sublayer.

    fn [C(C+2), C·H], base [C(C+2)], scale [3]. ``comb`` is made doubly stochastic by ``iters`` Sinkhorn rounds that
    start with a row softmax and end on a column normalisation; it is applied transposed by ``mhc_expand``.
    """
    C = X.shape[1]
    v = X.flatten(1).float()
    m = (v @ fn.mT) * torch.rsqrt(v.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(m[:, :C] * scale[0] + base[:C]) + hc_eps
    post = 2 * torch.sigmoid(m[:, C : 2 * C] * scale[1] + base[C : 2 * C])
    comb = (m[:, 2 * C :] * scale[2] + base[2 * C :]).unflatten(-1, (C, C))
    return pre, post, sinkhorn(comb, hc_eps, iters)


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    """Balance [..., C, C] logits: softmax over the last dim + eps, columns, then iters − 1 × (rows, columns)."""
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def mhc_collapse(num: Numerics, X: Tensor, pre: Tensor) -> Tensor:
    """Σ_c pre_c · X_c → [T, H] in the activation dtype."""
    return num.round((pre.unsqueeze(-1) * X.float()).sum(1))


def mhc_collapse_norm(num: Numerics, X: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``mhc_collapse``, then RMSNorm by weight [H] → [T, H]."""
    return rms_norm(num, mhc_collapse(num, X, pre), weight, eps)


def mhc_expand(num: Numerics, X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb_ij · X_i → [T, C, H] in the activation dtype."""
    mixed = torch.einsum("tij,tih->tjh", comb, X.float())
    return num.round(post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed)
