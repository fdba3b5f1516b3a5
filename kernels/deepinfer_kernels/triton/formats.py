"""Device functions of the number formats: E4M3, E8M0 and E2M1 codes to values and back, exact to the bit.

Encoding rounds on the bits of the f32 value, to nearest even, so it is the same in the interpreter (whose conversions
to 8-bit floats truncate) and on any device. Decoding uses the device's conversion, which is one instruction for two
values. The interpreter's dot multiplies the bits of bf16 operands as integers, its conversion to bf16 truncates and
the one from bf16 is wrong below 2^-126; ``dot``, ``bf16`` and ``widened`` go round these.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.triton import launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)


@triton.jit
def bf16(x):
    """f32 to bf16, to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(x != x, 0x7FC0, near)
        return near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def widened(x):
    """f32 of bf16 or f32 values."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a · b with f32 sums, a and b bf16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def exp2i(k):
    """2^k in f32 for integer k in -126..127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_pow2_exponent(amax, reciprocal: tl.constexpr):
    """k with 2^k the smallest power of two >= amax · reciprocal."""
    bits = (amax * reciprocal).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def e8m0_value(byte):
    """f32 value of E8M0 bytes: 2^(b-127); 0 is 2^-127, 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _signed(size, sign, shift: tl.constexpr):
    """A size with the sign bit found ``shift`` places below an f32's; negating a zero would lose it."""
    return (size.to(tl.int32, bitcast=True) | (sign << shift)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """f32 value of E4M3 bytes."""
    if INTERPRETED:
        b = byte.to(tl.int32)
        # the 7 bits below the sign moved to an f32's exponent and mantissa are the value times 2^-120
        value = ((b & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return _signed(tl.where((b & 0x7F) == 0x7F, float("nan"), value), b & 0x80, 24)
    else:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_code(x):
    """E4M3 bytes of f32 values, clamped to ±448."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    near = size.to(tl.int32, bitcast=True)
    # normal: keep 3 bits of mantissa, rebias from 127 to 7; below 2^-6: a multiple of 2^-9 through the bits of 2^23
    normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - 960
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """f32 value of E2M1 codes 0..15, given as int32."""
    # bits 0..2 as exponent and mantissa of an f32 are the value times 2^-126; the product restores it exactly
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return _signed(size, code & 8, 28)


@triton.jit
def e2m1_code(x):
    """E2M1 codes (int32 0..15) of f32 values, clamped to ±6, ties to the even code."""
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    inverse = tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    # adding 2^23 leaves the integer nearest to a small number, ties to even, in the low bits
    steps = ((size * inverse + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000).to(tl.float32)
    rounded = steps * step
    # 0 0.5 1 1.5 2 3 4 6 are codes 0..7: twice the value below 2, then one code per step
    code = tl.where(rounded < 2, rounded * 2, tl.where(rounded < 4, rounded + 2, rounded * 0.5 + 4)).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return code | sign
