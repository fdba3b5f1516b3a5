"""Functions as accurate as torch's on the same device: not the fast ones of the language."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer_kernels.triton.formats import INTERPRETED


@triton.jit
def exp(x):
    """e^x in f32 or f64."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log(x):
    """Natural logarithm in f32 or f64."""
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x) in f32."""
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def times(x, y):
    """An f32 product that is rounded before anything is added to it."""
    if INTERPRETED:
        return x * y
    else:
        return libdevice.mul_rn(x, y)


@triton.jit
def quotient(x, y, inverse):
    """x / y in f64, rounded once, of numbers that came from f32; ``inverse`` is 1 / y."""
    if INTERPRETED:
        return x / y
    else:
        near = x * inverse
        return tl.fma(tl.fma(-near, y, x), inverse, near)
