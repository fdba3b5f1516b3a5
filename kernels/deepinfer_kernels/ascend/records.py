"""TileLang programs of stored records for Ascend 950: rows to bytes and back, bit for bit as the reference.

A thread takes one group of a row. E4M3 bytes come from and go to the target's own conversion, round to nearest even;
E2M1 codes are counted, so that ties go to the even code; scales are read from the bits of f32. A NaN makes the scale of
its group NaN.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

import struct
from typing import Any

import tilelang.ascend.language as T

from deepinfer_kernels.ascend.rows import CORES, THREADS

_BF16, _F32, _U8 = "bfloat16", "float32", "uint8"
#: smallest amax of a group, as the reference has them
_FLOOR = {"window": 1e-4, "index": 6.0 * 2.0**-126, "global": 6.0 * 2.0**-9}
#: record kind → (values of a group, bytes of a group's values)
GROUPS = {"window": (32, 32), "global": (16, 8), "index": (32, 16)}


def record_bytes(kind: str, D: int) -> int:
    """Bytes of a record of D values: the values' bytes, then one byte of scale per group."""
    group, size = GROUPS[kind]
    return D // group * (size + 1)


def magnitude(x):
    """Bits of |x| as int32: they order as the magnitudes do, and a NaN lies above all."""
    return T.bitwise_and(T.reinterpret(x, "int32"), 0x7FFFFFFF)


def is_nan(x):
    """By the bits: the simplifier takes x != x for false."""
    return magnitude(x) > 0x7F800000


def bits_of(x: float) -> int:
    """Bits of an f32 constant."""
    return struct.unpack("i", struct.pack("f", x))[0]


def exponent_byte(amax, limit):
    """E8M0 byte of the smallest power of two that is at least amax / limit; 255 of infinity and NaN."""
    bits = T.reinterpret(amax * T.float32(1.0 / limit), "int32")
    up = T.if_then_else(T.bitwise_and(bits, 0x7FFFFF) != 0, 1, 0)
    return T.min(T.bitwise_and(T.shift_right(bits, 23), 255) + up, 255)


def power_of_two(byte):
    """f32 value of an E8M0 byte from 1 to 254; infinity of 255."""
    return T.reinterpret(T.shift_left(byte, 23), _F32)


def scale_value(byte):
    """f32 value of an E8M0 byte: 0 is 2^-127, 255 is NaN."""
    bits = T.if_then_else(byte == 0, 0x400000, T.if_then_else(byte == 255, 0x7FC00000, T.shift_left(byte, 23)))
    return T.reinterpret(bits, _F32)


def e2m1_code(x):
    """E2M1 code (int32 0..15) of f32, ties to the even code, beyond 6 the largest; −0 keeps its sign bit, NaN is 0."""
    mag = T.abs(x)
    bounds = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    code = T.int32(0)
    for bound, closed in bounds:
        reached = mag >= T.float32(bound) if closed else mag > T.float32(bound)
        code = code + T.if_then_else(reached, 1, 0)
    sign = T.if_then_else(is_nan(x), 0, T.bitwise_and(T.shift_right(T.reinterpret(x, "int32"), 28), 8))
    return T.bitwise_or(code, sign)


def e2m1_value(code):
    """f32 value of an E2M1 code."""
    low = T.bitwise_and(code, 7)
    # from 1.0 on: exponent low >> 1 with bias 1, one bit of mantissa
    bits = T.bitwise_or(T.shift_left(T.shift_right(low, 1) + 126, 23), T.shift_left(T.bitwise_and(low, 1), 22))
    value = T.if_then_else(low < 2, T.cast(low, _F32) * 0.5, T.reinterpret(bits, _F32))
    return T.if_then_else(code > 7, -value, value)


def e4m3_byte(x):
    """E4M3 byte of f32, clamped to ±448; 0x7F of any NaN."""
    byte = T.reinterpret(T.cast(T.min(T.max(x, -448.0), 448.0), "float8_e4m3fn"), _U8)
    return T.if_then_else(is_nan(x), T.uint8(0x7F), byte)


def e4m3_value(byte):
    """f32 value of an E4M3 byte."""
    return T.cast(T.reinterpret(byte, "float8_e4m3fn"), _F32)


def pack_rows(*, D: int, KIND: str) -> Any:
    """Rows [T, D] to records [T, bytes]."""
    n, (group, size) = T.dynamic("T"), GROUPS[KIND]
    groups, width = D // group, record_bytes(KIND, D)

    @T.prim_func
    def pack_rows(X: T.Tensor((n, D), _BF16), RECORDS: T.Tensor((n, width), _U8)):
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((D,), _BF16)
            record = T.alloc_shared((width,), _U8)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(X[row, 0:D], x)
                with T.SimtVF(threads=THREADS):
                    for g in T.Parallel(groups):
                        top = T.alloc_var("int32")
                        amax = T.alloc_var(_F32)
                        scale = T.alloc_var(_F32)
                        byte = T.alloc_var("int32")
                        top = bits_of(_FLOOR[KIND])
                        for i in T.serial(group):
                            top = T.max(top, magnitude(T.cast(x[g * group + i], _F32)))
                        amax = T.reinterpret(top, _F32)
                        if KIND == "window":
                            byte = exponent_byte(amax, 448.0)
                            scale = power_of_two(byte)
                            for i in T.serial(group):
                                value = T.cast(x[g * group + i], _F32) / scale
                                record[g * group + i] = e4m3_byte(value)
                            record[D + g] = T.cast(byte, _U8)
                        elif KIND == "index":
                            byte = exponent_byte(amax, 6.0)
                            scale = power_of_two(byte)
                            for i in T.serial(size):
                                low = e2m1_code(T.cast(x[g * group + 2 * i], _F32) / scale)
                                high = e2m1_code(T.cast(x[g * group + 2 * i + 1], _F32) / scale)
                                record[g * size + i] = T.cast(T.bitwise_or(low, T.shift_left(high, 4)), _U8)
                            record[groups * size + g] = T.cast(byte, _U8)
                        else:
                            small = T.alloc_var(_U8)
                            small = e4m3_byte(amax / 6.0)
                            scale = e4m3_value(small)
                            for i in T.serial(size):
                                low = e2m1_code(T.cast(x[g * group + 2 * i], _F32) / scale)
                                high = e2m1_code(T.cast(x[g * group + 2 * i + 1], _F32) / scale)
                                record[g * size + i] = T.cast(T.bitwise_or(low, T.shift_left(high, 4)), _U8)
                            record[groups * size + g] = small
                T.copy(record, RECORDS[row, 0:width])

    return pack_rows


def load_rows(*, D: int, KIND: str) -> Any:
    """Values [T, D] of the records at ``SLOTS``; a slot below 0 reads record 0."""
    n, m, (group, size) = T.dynamic("T"), T.dynamic("R"), GROUPS[KIND]
    groups, width = D // group, record_bytes(KIND, D)

    @T.prim_func
    def load_rows(RECORDS: T.Tensor((m, width), _U8), SLOTS: T.Tensor((n,), "int64"), Y: T.Tensor((n, D), _BF16)):
        with T.Kernel(CORES) as core:
            record = T.alloc_shared((width,), _U8)
            y = T.alloc_shared((D,), _BF16)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(RECORDS[T.max(SLOTS[row], 0), 0:width], record)
                with T.SimtVF(threads=THREADS):
                    for g in T.Parallel(groups):
                        scale = T.alloc_var(_F32)
                        byte = T.alloc_var("int32")
                        if KIND == "window":
                            scale = scale_value(T.cast(record[D + g], "int32"))
                            for i in T.serial(group):
                                y[g * group + i] = T.cast(e4m3_value(record[g * group + i]) * scale, _BF16)
                        else:
                            if KIND == "index":
                                scale = scale_value(T.cast(record[groups * size + g], "int32"))
                            else:
                                scale = e4m3_value(record[groups * size + g])
                            for i in T.serial(size):
                                byte = T.cast(record[g * size + i], "int32")
                                y[g * group + 2 * i] = T.cast(e2m1_value(T.bitwise_and(byte, 15)) * scale, _BF16)
                                y[g * group + 2 * i + 1] = T.cast(e2m1_value(T.shift_right(byte, 4)) * scale, _BF16)
                T.copy(y, Y[row, 0:D])

    return load_rows
