"""Hyper-connections of up to eight streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32
from deepinfer_kernels.cpu.norm import norm_weight
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "hyper",
    mhc_mixes="pppppppiiiffi",
    mhc_collapse="pppiii",
    mhc_collapse_norm="pppipiiif",
    mhc_expand="pppppiii",
)

#: streams the source has room for
_MOST = 8


def _streams(X: Tensor, *coefficients: Tensor) -> tuple[int, int, int]:
    T, C, H = X.shape
    if C > _MOST:
        raise ValueError(f"{C} streams, at most {_MOST} are supported")
    for c in coefficients:
        if c.shape[:2] != (T, C):
            raise ValueError(f"streams {tuple(X.shape)}, coefficients {tuple(c.shape)}")
    return T, C, H


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, C], post [T, C], comb [T, C, C]) f32 of one sublayer."""
    X, fn, base, scale = bf16(X), f32(fn), f32(base), f32(scale)
    T, C, H = _streams(X)
    if fn.shape != (C * (C + 2), C * H) or base.shape != fn.shape[:1] or scale.shape != (3,):
        raise ValueError(f"streams {tuple(X.shape)}, weights {[tuple(w.shape) for w in (fn, base, scale)]}")
    pre, post, comb = torch.empty(T, C), torch.empty(T, C), torch.empty(T, C, C)
    at = [t.data_ptr() for t in (X, fn, base, scale, pre, post, comb)]
    LIBRARY.mhc_mixes(*at, T, C, H, rms_eps, hc_eps, iters)
    return pre, post, comb


def mhc_collapse(num: Numerics, X: Tensor, pre: Tensor) -> Tensor:
    """Σ_c pre_c · X_c → [T, H]."""
    X, pre = bf16(X), f32(pre)
    T, C, H = _streams(X, pre)
    y = torch.empty(T, H, dtype=X.dtype)
    LIBRARY.mhc_collapse(X.data_ptr(), pre.data_ptr(), y.data_ptr(), T, C, H)
    return y


def mhc_collapse_norm(num: Numerics, X: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``mhc_collapse``, then RMSNorm by weight [H] → [T, H]."""
    X, pre = bf16(X), f32(pre)
    T, C, H = _streams(X, pre)
    y = torch.empty(T, H, dtype=X.dtype)
    at = (X.data_ptr(), pre.data_ptr(), *norm_weight(weight, H), y.data_ptr())
    LIBRARY.mhc_collapse_norm(*at, T, C, H, eps)
    return y


def mhc_expand(num: Numerics, X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb_ij · X_i → [T, C, H]."""
    X, y, post, comb = bf16(X), bf16(y), f32(post), f32(comb)
    T, C, H = _streams(X, post, comb)
    if y.shape != (T, H):
        raise ValueError(f"streams {tuple(X.shape)}, sublayer output {tuple(y.shape)}")
    out = torch.empty_like(X)
    LIBRARY.mhc_expand(X.data_ptr(), y.data_ptr(), post.data_ptr(), comb.data_ptr(), out.data_ptr(), T, C, H)
    return out


OPERATIONS = (mhc_mixes, mhc_collapse, mhc_collapse_norm, mhc_expand)
