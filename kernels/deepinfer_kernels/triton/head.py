"""Output head: f32 logits of normed hidden states, the weight read once as it is stored."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32

from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import dot, opaque
from deepinfer_kernels.triton.launch import blocks, contiguous, launch


@triton.jit(do_not_specialize=["T"])
def _head(X, W, Y, T, V: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """y[t, v] = W[v] · x[t]. Sums of BK inputs leave the tensor cores, whose own sums keep fewer bits."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    v = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)[None, :]
        w = tl.load(W + v[:, None] * K + k, mask=(v < V)[:, None] & (k < K), other=0.0)
        x = tl.load(X + t[:, None] * K + k, mask=(t < T)[:, None] & (k < K), other=0.0)
        acc += opaque(dot(w, tl.trans(x), tl.zeros((BN, BT), dtype=tl.float32)))
    tl.store(Y + t[None, :] * V + v[:, None], acc, mask=(t < T)[None, :] & (v < V)[:, None])


def head_logits(num: Numerics, h: Tensor, weight: Weight) -> Tensor:
    """f32 logits [T, V] of normed hidden states bf16 [T, H]: exact products, f32 sums."""
    h, w = contiguous(h), contiguous(weight.data)
    (T, K), V = h.shape, w.shape[0]
    if h.dtype is not bfloat16 or w.dtype is not bfloat16 or w.shape != (V, K):
        raise ValueError(f"hidden states {tuple(h.shape)} {h.dtype}, head {tuple(w.shape)} {w.dtype}")
    y = empty((T, V), dtype=float32, device=h.device)
    # the width of a tile of tokens moves no sum: every element adds its inputs in the same order
    BT = 16 if T <= 16 else 64
    BN = 128 if V > 64 else 64
    grid = (blocks(T, BT), blocks(V, BN))
    launch(_head, grid, h, w, y, T, warps=4, stages=4, V=V, K=K, BN=BN, BT=BT, BK=64)
    return y
