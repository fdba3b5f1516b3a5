"""Cache rows: quantise and store, load and dequantise; the bytes of the reference."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, int32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import (
    bf16,
    ceil_pow2_exponent,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    exp2i,
    greatest,
    widened,
)
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: record kind → (code in the kernels, values of a scale group, stored bytes of 32 values)
_KINDS = {"window": (0, 32, 33), "global": (1, 16, 18), "index": (2, 32, 17)}
#: scale groups of a program: 2048 or 1024 values
_GROUPS = tl.constexpr(64)


def record(kind: str, width: int, *, stored: bool) -> tuple[int, int, int, int]:
    """(code, group, values, bytes) of a record whose values (or bytes, where ``stored``) are ``width``."""
    code, group, per_32 = _KINDS[kind]
    unit = per_32 if stored else 32
    if width % unit:
        raise ValueError(f"a {kind} row of {width} is not a multiple of {unit}")
    return code, group, width // unit * 32, width // unit * per_32


#: the least magnitude a scale of E2M1 codes is made from, so that the scale of zeros is finite: E8M0, E4M3
_LEAST, _LEAST_E4M3 = tl.constexpr(6.0 * 2.0**-126), tl.constexpr(6.0 * 2.0**-9)


@triton.jit
def _fp4_scale(amax, KIND: tl.constexpr):
    """(scale byte, its value) of groups of E2M1 codes."""
    if KIND == 1:
        byte = e4m3_code(tl.div_rn(amax, 6.0))
        return byte, e4m3_value(byte)
    else:
        k = ceil_pow2_exponent(amax, 1.0 / 6.0)
        return (k + 127).to(tl.uint8), exp2i(k)


@triton.jit(do_not_specialize=["groups"])
def _pack(X, OUT, groups, D: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr):
    g = (tl.program_id(0) * _GROUPS + tl.arange(0, _GROUPS)).to(tl.int64)
    mask = g < groups
    row, part = g // (D // GROUP), g % (D // GROUP)
    if KIND == 0:
        i = tl.arange(0, GROUP)
        x = widened(tl.load(X + g[:, None] * GROUP + i[None, :], mask=mask[:, None], other=0.0))
        k = ceil_pow2_exponent(greatest(x, 1e-4), 1.0 / 448.0)
        inverse = exp2i(tl.where(k == 128, -127, -k))  # 0 where the scale is NaN
        code = e4m3_code(x * inverse[:, None])
        tl.store(OUT + (row * BYTES + part * GROUP)[:, None] + i[None, :], code, mask=mask[:, None])
        tl.store(OUT + row * BYTES + D + part, (k + 127).to(tl.uint8), mask=mask)
    else:
        i = tl.arange(0, GROUP // 2)
        at = X + g[:, None] * GROUP + 2 * i[None, :]
        low = widened(tl.load(at, mask=mask[:, None], other=0.0))
        high = widened(tl.load(at + 1, mask=mask[:, None], other=0.0))
        least: tl.constexpr = _LEAST_E4M3 if KIND == 1 else _LEAST
        top = tl.maximum(greatest(low, least), greatest(high, least), propagate_nan=tl.PropagateNan.ALL)
        byte, scale = _fp4_scale(top, KIND)
        code = e2m1_code(tl.div_rn(low, scale[:, None])) | (e2m1_code(tl.div_rn(high, scale[:, None])) << 4)
        to = (row * BYTES + part * (GROUP // 2))[:, None] + i[None, :]
        tl.store(OUT + to, code.to(tl.uint8), mask=mask[:, None])
        tl.store(OUT + row * BYTES + D // 2 + part, byte, mask=mask)


def pack_rows(num: Numerics, rows: Tensor, kind: str) -> Tensor:
    """Rows [..., D] (bf16) as stored: official records, uint8."""
    rows = contiguous(rows)
    code, group, values, size = record(kind, rows.shape[-1], stored=False)
    out = empty((*rows.shape[:-1], size), dtype=uint8, device=rows.device)
    groups = rows.numel() // group
    launch(_pack, (blocks(groups, 64),), rows, out, groups, D=values, BYTES=size, GROUP=group, KIND=code)
    return out


@triton.jit(do_not_specialize=["groups"])
def _unpack(
    STORE, SLOTS, OUT, groups, D: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    g = (tl.program_id(0) * _GROUPS + tl.arange(0, _GROUPS)).to(tl.int64)
    mask = g < groups
    row, part = g // (D // GROUP), g % (D // GROUP)
    if INDEXED:
        row = tl.maximum(tl.load(SLOTS + row, mask=mask, other=0), 0)
    start = STORE + row * BYTES
    if KIND == 0:
        i = tl.arange(0, GROUP)
        scale = e8m0_value(tl.load(start + D + part, mask=mask, other=127))
        code = tl.load(start[:, None] + part[:, None] * GROUP + i[None, :], mask=mask[:, None], other=0)
        value = e4m3_value(code) * scale[:, None]
        tl.store(OUT + g[:, None] * GROUP + i[None, :], bf16(value), mask=mask[:, None])
    else:
        i = tl.arange(0, GROUP // 2)
        byte = tl.load(start + D // 2 + part, mask=mask, other=0)
        scale = e4m3_value(byte) if KIND == 1 else e8m0_value(byte)
        code = tl.load(start[:, None] + part[:, None] * (GROUP // 2) + i[None, :], mask=mask[:, None], other=0)
        code = code.to(tl.int32)
        low, high = e2m1_value(code & 15) * scale[:, None], e2m1_value(code >> 4) * scale[:, None]
        both = tl.interleave(bf16(low), bf16(high))
        tl.store(OUT + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :], both, mask=mask[:, None])


def unpack_rows(num: Numerics, stored: Tensor, kind: str) -> Tensor:
    """Stored rows back to values [..., D] in bf16, exact."""
    stored = contiguous(stored.view(uint8))
    code, group, values, size = record(kind, stored.shape[-1], stored=True)
    out = empty((*stored.shape[:-1], values), dtype=bfloat16, device=stored.device)
    groups = out.numel() // group
    sizes = dict(D=values, BYTES=size, GROUP=group, KIND=code, INDEXED=False)
    launch(_unpack, (blocks(groups, 64),), stored, None, out, groups, **sizes)
    return out


def load_rows(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> Tensor:
    """Values [..., D] of the rows ``slots`` [...] (−1 reads row 0; the caller masks it)."""
    store, slots = contiguous(store.view(uint8)), contiguous(slots)
    code, group, values, size = record(kind, store.shape[-1], stored=True)
    if slots.dtype is not int64:
        raise TypeError(f"slots are int64, got {slots.dtype}")
    out = empty((*slots.shape, values), dtype=bfloat16, device=store.device)
    groups = out.numel() // group
    sizes = dict(D=values, BYTES=size, GROUP=group, KIND=code, INDEXED=True)
    launch(_unpack, (blocks(groups, 64),), store, slots, out, groups, **sizes)
    return out


@triton.jit
def _store(STORE, SLOTS, PACKED, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    to = tl.maximum(tl.load(SLOTS + row), 0)
    tl.store(STORE + to * SIZE + i, tl.load(PACKED + row * SIZE + i, mask=i < SIZE), mask=i < SIZE)


def store_rows(num: Numerics, store: Tensor, slots: Tensor, packed: Tensor) -> None:
    """store[slots[i]] = packed[i] for slots >= 0, in place; others go to row 0."""
    if packed.dtype is not store.dtype or packed.shape != (*slots.shape, *store.shape[1:]):
        raise ValueError(f"rows {tuple(packed.shape)} {packed.dtype} into {tuple(store.shape)} {store.dtype}")
    if not store.is_contiguous():
        raise ValueError("the store must be contiguous")
    size = store[0].nbytes
    unit = int32 if size % 4 == 0 and store.data_ptr() % 4 == 0 and packed.data_ptr() % 4 == 0 else uint8
    to = store.view(store.shape[0], -1).view(unit)
    packed = contiguous(packed).view(len(packed), -1).view(unit)
    width = to.shape[1]
    launch(_store, (slots.numel(),), to, contiguous(slots), packed, SIZE=width, BLOCK=power_of_two(width))


@triton.jit(do_not_specialize=["groups"])
def _mxfp4_round(X, Y, groups):
    g = (tl.program_id(0) * _GROUPS + tl.arange(0, _GROUPS)).to(tl.int64)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (g < groups)[:, None]
    x = widened(tl.load(X + at, mask=mask, other=0.0))
    _, scale = _fp4_scale(greatest(x, _LEAST), 2)
    value = e2m1_value(e2m1_code(tl.div_rn(x, scale[:, None]))) * scale[:, None]
    tl.store(Y + at, bf16(value), mask=mask)


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised, bf16."""
    iq = contiguous(iq)
    record("index", iq.shape[-1], stored=False)
    y = empty(iq.shape, dtype=bfloat16, device=iq.device)
    groups = iq.numel() // 32
    launch(_mxfp4_round, (blocks(groups, 64),), iq, y, groups)
    return y
