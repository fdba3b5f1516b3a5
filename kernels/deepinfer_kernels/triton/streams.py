"""What a sublayer reads of the residual streams, in one launch: their weighted sum, normed."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16, widened
from deepinfer_kernels.triton.launch import contiguous, launch, power_of_two


@triton.jit
def _collapse_norm(X, PRE, W, Y, eps, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for c in tl.static_range(C):
        x = widened(tl.load(X + (t * C + c) * H + h, mask=h < H, other=0.0))
        total += tl.load(PRE + t * C + c) * x
    x = widened(bf16(total))
    w = widened(tl.load(W + h, mask=h < H, other=0.0))
    y = w * (x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / H + eps)))
    tl.store(Y + t * H + h, bf16(y), mask=h < H)


def mhc_collapse_norm(num: Numerics, X: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm bf16 [T, H], by weight [H], of the sum of streams X bf16 [T, C, H] weighted by pre f32 [T, C]."""
    X, pre, weight = contiguous(X), contiguous(pre), contiguous(weight)
    T, C, H = X.shape
    if X.dtype is not bfloat16 or pre.dtype is not float32 or pre.shape != (T, C) or weight.shape != (H,):
        shapes = [tuple(t.shape) for t in (X, pre, weight)]
        raise ValueError(f"streams, weights and norm {shapes} {X.dtype} {pre.dtype}")
    y = empty((T, H), dtype=bfloat16, device=X.device)
    block = power_of_two(H)
    launch(_collapse_norm, (T,), X, pre, weight, y, float(eps), warps=8 if block > 2048 else 4, C=C, H=H, BLOCK=block)
    return y
