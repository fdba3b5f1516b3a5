"""Device functions of the number formats: E4M3, E8M0 and E2M1 codes to values and back, exact to the bit.

Encoding rounds on the bits of the f32 value, to nearest even, so it is the same in the interpreter (whose conversions
to 8-bit floats truncate) and on any device. Decoding to f32 uses the device's conversion. Decoding to bf16 operands
works on the bits of two values at once, because four instructions per value take longer than the tensor cores.

The interpreter's dot multiplies the bits of bf16 operands as integers, its conversion to bf16 truncates and the one
from bf16 is wrong below 2^-126; ``dot``, ``bf16`` and ``widened`` go round these.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

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
        return tl.dot(widened(a), widened(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _cut(x):
    """(bf16, the same in f32) of f32 values, towards zero: two instructions, a conversion that rounds is slow."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def in_parts(w):
    """(high, middle, low) bf16 of 8 bits each that add up to f32 values exactly, down to the smallest bf16.

    Three products with them are as exact as one of f32, on tensor cores that take bf16.
    """
    high, value = _cut(w)
    rest = w - value
    middle, value = _cut(rest)
    return high, middle, _cut(rest - value)[0]


@triton.jit
def opaque(x):
    """f32 x, apart from what made it: the sum of a product and something else becomes a product onto it otherwise."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


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
# The same of a word, whose codes are taken two by two where they are 16 bits apart: that spares their spreading.
_E2M1_APART = tl.constexpr("""
{
.reg .b32 q, s, power, none;
mov.b32 power, 0x7E807E80;
mov.b32 none, 0x80008000;
shl.b32 s, $8, 12;
shl.b32 q, $8, 6;
and.b32 s, s, 0x80008000;
lop3.b32 q, q, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 q, q, $9, none;
mov.b32 {$0, $1}, q;
shl.b32 s, $8, 8;
shl.b32 q, $8, 2;
and.b32 s, s, 0x80008000;
lop3.b32 q, q, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 q, q, $9, none;
mov.b32 {$2, $3}, q;
shl.b32 s, $8, 4;
shr.b32 q, $8, 2;
and.b32 s, s, 0x80008000;
lop3.b32 q, q, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 q, q, $9, none;
mov.b32 {$4, $5}, q;
shr.b32 q, $8, 6;
and.b32 s, $8, 0x80008000;
lop3.b32 q, q, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 q, q, power, none;
fma.rn.bf16x2 q, q, $9, none;
mov.b32 {$6, $7}, q;
}
""")
# The same for the words of tiles of weights (``reference.linear.in_tiles``), whose codes are mixed so that less is to
# do, with a scale given times 2^120 or 2^126, which one product restores.
_E4M3_WORD = tl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $2, 0x87F087F0;
mul.rn.bf16x2 $0, a, $3;
shl.b32 a, $2, 4;
shr.b32 b, $2, 4;
and.b32 a, a, 0x80F080F0;
lop3.b32 a, b, 0x07000700, a, 0xEA;
mul.rn.bf16x2 $1, a, $3;
}
""")
_E2M1_WORD = tl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $4, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 4;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $7;
shf.l.wrap.b32 a, $4, $4, 10;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
shl.b32 a, $4, 6;
shr.b32 b, $4, 2;
and.b32 a, a, 0x80C080C0;
lop3.b32 a, b, 0x01000100, a, 0xEA;
mul.rn.bf16x2 $3, a, $7;
}
""")
# the bf16 2^(b - 127 + 126), or 120, twice, of bytes b of a word
_E8M0_FOUR = tl.constexpr("""
{
.reg .b32 a;
prmt.b32 a, $4, 0, 0x4040;
mad.lo.s32 $0, a, 128, 0x3F003F00;
prmt.b32 a, $4, 0, 0x4141;
mad.lo.s32 $1, a, 128, 0x3F003F00;
prmt.b32 a, $4, 0, 0x4242;
mad.lo.s32 $2, a, 128, 0x3F003F00;
prmt.b32 a, $4, 0, 0x4343;
mad.lo.s32 $3, a, 128, 0x3F003F00;
}
""")
_E8M0_TWO = tl.constexpr("""
{
.reg .b32 a;
prmt.b32 a, $2, 0, 0x4040;
mad.lo.s32 $0, a, 128, 0x3C003C00;
prmt.b32 a, $2, 0, 0x4141;
mad.lo.s32 $1, a, 128, 0x3C003C00;
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


#: the largest scales whose products with 2^120 and 2^126 are finite in bf16
E4M3_SCALE, E2M1_SCALE = 254 - 120, 254 - 126


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
def e2m1_column(k, WIDTH: tl.constexpr):
    """Which value of a row of ``WIDTH`` values, a power of two, is column k of ``e2m1_apart``."""
    return (k // 2 % 4 * (WIDTH // 32) + k // 32) * 8 + k % 2 * 4 + k // 8 % 4


@triton.jit
def _place_value(word, scale, PLACE: tl.constexpr):
    """bf16 of one of the eight codes of words, in the interpreter."""
    return bf16(e2m1_value((word >> (4 * PLACE)) & 15) * widened(scale))


@triton.jit
def e2m1_apart(word, scale, R: tl.constexpr, W: tl.constexpr):
    """bf16 [R, 8 W] of words of E2M1 codes, int32 [R, W], each times its bf16 scale [R, W], as ``e2m1_column`` orders.

    In this order a thread that reads a quarter of a row has what it gives to the tensor cores as their left operand.
    """
    if INTERPRETED:
        p0, p1, p2, p3 = (
            tl.join(_place_value(word, scale, 0), _place_value(word, scale, 4)),
            tl.join(_place_value(word, scale, 1), _place_value(word, scale, 5)),
            tl.join(_place_value(word, scale, 2), _place_value(word, scale, 6)),
            tl.join(_place_value(word, scale, 3), _place_value(word, scale, 7)),
        )
    else:
        bits = scale.to(tl.uint16, bitcast=True).to(tl.uint32)
        a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
            _E2M1_APART, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, bits | (bits << 16)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True, 1,
        )  # fmt: skip
        p0, p1, p2, p3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
    # quarter, word, code of a pair, place of the pair
    both = tl.join(tl.join(p0, p2), tl.join(p1, p3)).reshape(R, 4, W // 4, 2, 4)
    return both.permute(0, 2, 4, 1, 3).reshape(R, 8 * W)


@triton.jit
def _of_rows(first, second, R: tl.constexpr, C: tl.constexpr):
    """What belongs to the 32 first and the 32 second inputs of a tile's rows, beside its words' halves."""
    both = tl.join(first, second).reshape(R, C, 4, 8, 1, 2, 1, 1)
    return tl.broadcast_to(both, (R, C, 4, 8, 4, 2, 2, 2)).reshape(R, C, 1024)


@triton.jit
def _word_values(low, high, PLACE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """f32 of the two neighbours of one of the four places of words, in the interpreter."""
    sign: tl.constexpr = 15 if PLACE == 0 else 11 if PLACE == 1 else 5 if PLACE == 2 else 9
    if PLACE == 2:
        first, second = high >> 12, low >> 12
    elif PLACE == 3:
        first, second = ((low >> 8) & 4) | (low & 3), ((high >> 8) & 4) | (high & 3)
    else:
        first, second = low >> (6 - 4 * PLACE), high >> (6 - 4 * PLACE)
    first = e2m1_value((first & 7) | (((low >> sign) & 1) << 3))
    second = e2m1_value((second & 7) | (((high >> sign) & 1) << 3))
    return tl.join(first, second).reshape(R, C, 1024)


@triton.jit
def e2m1_tiles(w, s, R: tl.constexpr, C: tl.constexpr):
    """bf16 [64 R, 64 C] of R · C tiles of E2M1 (``in_tiles``): w int16 [R, C, 1024], s int32 [R, C, 32].

    On a device nothing moves but registers: a thread reads what it gives to the tensor cores.
    """
    if INTERPRETED:
        upper = _of_rows(e8m0_value(s & 0xFF), e8m0_value((s >> 8) & 0xFF), R, C)
        lower = _of_rows(e8m0_value((s >> 16) & 0xFF), e8m0_value((s >> 24) & 0xFF), R, C)
        low, high = tl.split((w.to(tl.int32) & 0xFFFF).reshape(R, C, 512, 2))
        a0 = bf16(_word_values(low, high, 0, R, C) * upper)
        a1 = bf16(_word_values(low, high, 1, R, C) * lower)
        a2 = bf16(_word_values(low, high, 2, R, C) * upper)
        a3 = bf16(_word_values(low, high, 3, R, C) * lower)
    else:
        u0, u1, l0, l1 = tl.inline_asm_elementwise(
            _E8M0_FOUR, "=r,=r,=r,=r,r", [s], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
        scales = [_of_rows(u0, u1, R, C), _of_rows(l0, l1, R, C)]
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            _E2M1_WORD, "=r,=r,=r,=r,r,r,r,r,r", [w, scales[0], scales[1]],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    a = tl.join(tl.join(a0, a1), tl.join(a2, a3)).reshape(R, C, 4, 8, 4, 4, 2, 2, 2)
    # block, step, warp, row, thread, chunk, neighbour, half of rows, half of inputs
    return a.permute(0, 2, 7, 3, 1, 5, 8, 4, 6).reshape(64 * R, 64 * C)


@triton.jit
def e4m3_tiles(w, s, R: tl.constexpr, C: tl.constexpr):
    """bf16 [64 R, 64 C] of R · C tiles of E4M3, none of them NaN: w int16 [R, C, 2048], s int32 [R, C, 2]."""
    if INTERPRETED:
        s0, s1 = e8m0_value(s & 0xFF), e8m0_value((s >> 8) & 0xFF)
    else:
        s0, s1 = tl.inline_asm_elementwise(_E8M0_TWO, "=r,=r,r", [s], (tl.int32, tl.int32), True, 1)
    both = tl.join(s0, s1).reshape(R, C, 2, 1, 1, 1, 2, 1, 1, 1)
    scale = tl.broadcast_to(both, (R, C, 2, 2, 8, 4, 2, 2, 2, 2)).reshape(R, C, 2048)
    if INTERPRETED:
        code = w.to(tl.int32)
        first = ((code >> 8) & 0x80) | ((code >> 4) & 0x7F)
        second = ((code >> 4) & 0x80) | ((code >> 8) & 0x70) | (code & 0xF)
        a0, a1 = bf16(e4m3_value(first) * scale), bf16(e4m3_value(second) * scale)
    else:
        a0, a1 = tl.inline_asm_elementwise(_E4M3_WORD, "=r,=r,r,r,r", [w, scale], (tl.bfloat16, tl.bfloat16), True, 2)
    a = tl.join(a0, a1).reshape(R, C, 4, 8, 4, 4, 2, 2, 2)
    # block, step, warp, row, thread, chunk, half of inputs, neighbour, half of rows
    return a.permute(0, 2, 8, 3, 1, 5, 6, 4, 7).reshape(64 * R, 64 * C)


@triton.jit
def spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Scales [ROWS, GROUPS], each for ``GROUP`` neighbours."""
    return tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, GROUP)).reshape(ROWS, GROUPS * GROUP)
