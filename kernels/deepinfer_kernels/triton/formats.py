"""Device functions of the number formats: E4M3, E8M0 and E2M1 codes to values and back, exact to the bit.

Encoding rounds on the bits of the f32 value, to nearest even, so it is the same in the interpreter (whose conversions
to 8-bit floats truncate) and on any device. Decoding to f32 uses the device's conversion. Decoding to bf16 operands
works on the bits of two values at once, because four instructions per value take longer than the tensor cores.

The interpreter's dot multiplies the bits of bf16 operands as integers, its conversion to bf16 truncates and the one
from bf16 is wrong below 2^-126; ``dot``, ``bf16`` and ``widened`` go round these.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportIndexIssue=false

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
    """2^k in f32 for integer k in -126..127; infinity for 128."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_pow2_exponent(amax, reciprocal: tl.constexpr):
    """k with 2^k the smallest power of two >= amax · reciprocal; 128 of infinity and NaN, whose scale is NaN."""
    bits = (amax * reciprocal).to(tl.int32, bitcast=True)
    return tl.minimum(((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32), 128)


@triton.jit
def greatest(x, floor: tl.constexpr):
    """The greatest magnitude of every row, at least ``floor``; NaN if there is one, above infinity as its bits are."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    return tl.maximum(top, floor, propagate_nan=tl.PropagateNan.ALL)


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
    """E4M3 bytes of f32 values, clamped to ±448; 0x7F of any NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    near = size.to(tl.int32, bitcast=True)
    # normal: keep 3 bits of mantissa, rebias from 127 to 7; below 2^-6: a multiple of 2^-9 through the bits of 2^23
    normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - 960
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """f32 value of E2M1 codes 0..15, given as int32."""
    # bits 0..2 as exponent and mantissa of an f32 are the value times 2^-126; the product restores it exactly
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return _signed(size, code & 8, 28)


@triton.jit
def e2m1_code(x):
    """E2M1 codes (int32 0..15) of f32 values, clamped to ±6, ties to the even code; 0 of NaN."""
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    inverse = tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    # adding 2^23 leaves the integer nearest to a small number, ties to even, in the low bits
    steps = ((size * inverse + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000).to(tl.float32)
    rounded = steps * step
    # 0 0.5 1 1.5 2 3 4 6 are codes 0..7: twice the value below 2, then one code per step
    code = tl.where(rounded < 2, rounded * 2, tl.where(rounded < 4, rounded + 2, rounded * 0.5 + 4)).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 0)


# Two values of a half-precision register at once: the bits of the code moved to the exponent and mantissa of a bf16 are
# its value times 2^-120 (E4M3) or 2^-126 (E2M1); two exact products with a power of two and the scale restore it.
_E4M3_TIMES = tl.constexpr("""
{
.reg .b32 q, s, power, none;
mov.b32 power, 0x7B807B80;
mov.b32 none, 0x80008000;
prmt.b32 q, $2, 0, 0x4140;
shl.b32 s, q, 8;
shl.b32 q, q, 4;
and.b32 s, s, 0x80008000;
lop3.b32 q, q, 0x07F007F0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 $0, q, $3, none;
prmt.b32 q, $2, 0, 0x4342;
shl.b32 s, q, 8;
shl.b32 q, q, 4;
and.b32 s, s, 0x80008000;
lop3.b32 q, q, 0x07F007F0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 $1, q, $4, none;
}
""")
_E2M1_TIMES = tl.constexpr("""
{
.reg .b32 q, v, s, power, none;
mov.b32 power, 0x7E807E80;
mov.b32 none, 0x80008000;
prmt.b32 q, $4, 0, 0x4140;
shl.b32 s, q, 12;
shl.b32 v, q, 6;
and.b32 s, s, 0x80008000;
lop3.b32 v, v, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 v, v, power, none;
fma.rn.bf16x2 $0, v, $5, none;
shl.b32 s, q, 8;
shl.b32 v, q, 2;
and.b32 s, s, 0x80008000;
lop3.b32 v, v, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 v, v, power, none;
fma.rn.bf16x2 $2, v, $5, none;
prmt.b32 q, $4, 0, 0x4342;
shl.b32 s, q, 12;
shl.b32 v, q, 6;
and.b32 s, s, 0x80008000;
lop3.b32 v, v, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 v, v, power, none;
fma.rn.bf16x2 $1, v, $6, none;
shl.b32 s, q, 8;
shl.b32 v, q, 2;
and.b32 s, s, 0x80008000;
lop3.b32 v, v, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 v, v, power, none;
fma.rn.bf16x2 $3, v, $6, none;
}
""")
# In a size of all ones, the NaN, one more unit in the last place reaches bit 11, which becomes 0x7FC0: a NaN of bf16.
_PAIR_TIMES = tl.constexpr("""
{
.reg .b32 q, s, n, m, power, none;
mov.b32 power, 0x7B807B80;
mov.b32 none, 0x80008000;
shl.b32 s, $2, 8;
shl.b32 q, $2, 4;
and.b32 s, s, 0x80008000;
and.b32 q, q, 0x07F007F0;
add.u32 n, q, 0x00100010;
and.b32 n, n, 0x08000800;
shl.b32 m, n, 4;
shr.b32 n, n, 5;
sub.u32 n, m, n;
or.b32 q, q, s;
fma.rn.bf16x2 q, q, power, none;
or.b32 q, q, n;
fma.rn.bf16x2 $0, q, $3, none;
shr.b32 q, $2, 4;
and.b32 s, $2, 0x80008000;
and.b32 q, q, 0x07F007F0;
add.u32 n, q, 0x00100010;
and.b32 n, n, 0x08000800;
shl.b32 m, n, 4;
shr.b32 n, n, 5;
sub.u32 n, m, n;
or.b32 q, q, s;
fma.rn.bf16x2 q, q, power, none;
or.b32 q, q, n;
fma.rn.bf16x2 $1, q, $3, none;
}
""")


@triton.jit
def e8m0_bf16(byte):
    """bf16 value of E8M0 bytes: 2^(b-127), 0 is 2^-127, 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte.to(tl.uint16) << 7))
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_times(byte, scale):
    """bf16 of E4M3 bytes (none of them NaN) times a bf16 scale of the same shape."""
    if INTERPRETED:
        return bf16(e4m3_value(byte) * widened(scale))
    else:
        return tl.inline_asm_elementwise(_E4M3_TIMES, "=r,=r,r,r,r", [byte, scale], tl.bfloat16, True, 4)


@triton.jit
def e4m3_pair_times(pair, scale):
    """(bf16 of the low bytes, of the high bytes) of pairs of E4M3 codes in 16 bits, times a bf16 scale."""
    if INTERPRETED:
        code = pair.to(tl.int32)
        low, high = (code & 0xFF).to(tl.uint8), ((code >> 8) & 0xFF).to(tl.uint8)
        return bf16(e4m3_value(low) * widened(scale)), bf16(e4m3_value(high) * widened(scale))
    else:
        return tl.inline_asm_elementwise(_PAIR_TIMES, "=r,=r,r,r", [pair, scale], (tl.bfloat16, tl.bfloat16), True, 2)


@triton.jit
def e2m1_times(byte, scale):
    """(bf16 of the low codes, of the high codes) of packed E2M1 bytes times a bf16 scale."""
    if INTERPRETED:
        code = byte.to(tl.int32)
        return bf16(e2m1_value(code & 15) * widened(scale)), bf16(e2m1_value(code >> 4) * widened(scale))
    else:
        return tl.inline_asm_elementwise(
            _E2M1_TIMES, "=r,=r,=r,=r,r,r,r", [byte, scale], (tl.bfloat16, tl.bfloat16), True, 4
        )


@triton.jit
def spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Scales [ROWS, GROUPS], each for ``GROUP`` neighbours."""
    return tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, GROUP)).reshape(ROWS, GROUPS * GROUP)
