"""Keyed Gumbel noise of tokens, in f64 as the reference has it, and cheaply to a few millionths."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer_kernels.triton.formats import INTERPRETED
from deepinfer_kernels.triton.precise import log


@triton.jit
def philox(key, position, stream, block):
    """Four words u32 of Philox4x32-10 at (position, stream << 24, block, 0) by a 64-bit key."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = tl.zeros_like(block).to(tl.uint32) + position.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (stream << 24).to(tl.uint32)
    c2 = block.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        wide0 = c0.to(tl.uint64) * 0xD2511F53
        wide1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0,
            wide1.to(tl.uint32),
            (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1,
            wide0.to(tl.uint32),
        )
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def one_of_four(words, place):
    """The word of four that belongs to a place from 0 to 3."""
    return tl.where(place < 2, tl.where(place == 0, words[0], words[1]), tl.where(place == 2, words[2], words[3]))


@triton.jit
def noise(word):
    """Gumbel noise f64 of a word: 24-bit midpoints, so that neither end of (0, 1) is reached."""
    u = ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
    return -log(-log(u))


@triton.jit
def _fast_log(x):
    """Natural logarithm in f32, off by 2^-22 of it, or by 2^-22 between 1/2 and 2."""
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.fast_logf(x)


@triton.jit
def noise_about(word):
    """``noise`` in f32 by fast logarithms: at most 5e-6 from it, as all 2^24 midpoints show."""
    high = word >> 8
    u = (high.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    rest = ((0xFFFFFF - high).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 1 − u, exact where it is small
    small = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    return -_fast_log(tl.where(rest < 0.0625, small, -_fast_log(u)))


@triton.jit
def score(x, id, scale, top, shift, seed, position, stream, ROUNDED: tl.constexpr):
    """f64 score of tokens with logits x, of which the largest wins: log-probability, in f32 where ``ROUNDED``, and
    noise."""
    value = (x.to(tl.float64) / scale - top) - shift
    if ROUNDED:
        value = value.to(tl.float32).to(tl.float64)
    return value + noise(one_of_four(philox(seed, position, stream, id // 4), id % 4))
