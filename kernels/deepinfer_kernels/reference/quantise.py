"""Element formats, scales and records: E4M3, E8M0, E2M1, the three activation quantisers, weight (de)quantisers.

Scale rule "ceil-pow2": k = ceil(log2(amax · f32(1/M))), read from the IEEE bits, so exact at powers of two.
Packing: two E2M1 codes per byte along the last dim, even index in the low nibble.
NaN: a group of a row with a NaN reads back as NaN throughout, because its scale is NaN; an infinity does the same where
scales are E8M0 and is clamped like any large number where they are E4M3.
Source: DeepSeek-V4.1-Flash inference kernels (number formats), tables of the OCP MX specification.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: value of E2M1 codes 0..15 (bit 3 = sign)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: code of a magnitude, indexed by twice the magnitude (0..12)
_CODE_OF_DOUBLE = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)

_Q8_FLOOR = 1e-4  # smallest amax of an activation group, so that zeros get a finite scale
_Q4M_FLOOR = 6.0 * 2.0**-126
_Q4N_FLOOR = 6.0 * 2.0**-9  # scale 2^-9, the smallest E4M3 subnormal

Q8_GROUP = 32
Q4M_GROUP = 32
Q4N_GROUP = 16


def _groups(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"last dim {x.shape[-1]} is not a multiple of the group size {size}")
    return x.float().unflatten(-1, (-1, size))


def ceil_pow2_exponent(amax: Tensor, limit: float) -> Tensor:
    """k with 2^k = the smallest power of two >= amax · f32(1/limit); int32, same shape. ``amax`` > 0.

    128 of infinity and NaN: as a scale that is byte 255, NaN.
    """
    q = amax.float() * _f32(1.0 / limit)
    bits = q.contiguous().view(torch.int32)
    return (((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)).clamp(max=128)


def _f32(x: float) -> float:
    """``x`` rounded to f32, as a Python number."""
    return struct.unpack("f", struct.pack("f", x))[0]


def exp2i(k: Tensor) -> Tensor:
    """2^k as f32 for integer k in -126..127, exact; infinity for 128."""
    return ((k.to(torch.int32) + 127) << 23).view(torch.float32)


def e8m0_value(byte: Tensor) -> Tensor:
    """f32 value of E8M0 bytes: 2^(b-127); 0 is 2^-127, 255 is NaN."""
    b = byte.view(torch.uint8).to(torch.int32)
    value = (b << 23).view(torch.float32)
    value = torch.where(b == 0, torch.full_like(value, 2.0**-127), value)
    return torch.where(b == 255, torch.full_like(value, float("nan")), value)


def e4m3_encode(x: Tensor) -> Tensor:
    """E4M3 bytes of f32 values, clamped to ±448, round to nearest even; 0x7F of any NaN."""
    x = x.float()
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill(x.isnan(), 0x7F)


def e4m3_value(byte: Tensor) -> Tensor:
    """f32 value of E4M3 bytes (0x7F and 0xFF are NaN)."""
    return byte.view(torch.float8_e4m3fn).float()


def e2m1_encode(x: Tensor) -> Tensor:
    """E2M1 codes (uint8 0..15) of f32 values, clamped to ±6, ties to the even code; -0 keeps its sign bit.

    0 of NaN, which the format does not have: the scale of its group is NaN.
    """
    x = x.float().masked_fill(x.isnan(), 0.0)
    mag = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(mag < 2, 0.5, torch.where(mag < 4, 1.0, 2.0))
    doubled = (torch.round(mag / step) * step * 2).to(torch.int64)  # torch.round ties to even
    code = _table(_CODE_OF_DOUBLE, torch.uint8, x.device)[doubled]
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_value(code: Tensor) -> Tensor:
    """f32 value of E2M1 codes 0..15."""
    return _table(E2M1_VALUES, torch.float32, code.device)[code.long()]


@functools.cache
def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A lookup table on its device, made once: making it again would wait for the device each time."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def pack_nibbles(code: Tensor) -> Tensor:
    """[..., n] codes to [..., n/2] bytes, even index low."""
    pairs = code.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n/2] bytes to [..., n] codes."""
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 15, byte >> 4), -1).flatten(-2)


# ------------------------------------------------------------------ activations


def quantise_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 per 32: (E4M3 bytes [..., n], E8M0 bytes [..., n/32])."""
    g = _groups(x, Q8_GROUP)
    k = ceil_pow2_exponent(g.abs().amax(-1).clamp(min=_Q8_FLOOR), E4M3_MAX)
    codes = e4m3_encode(g / exp2i(k).unsqueeze(-1)).flatten(-2)
    return codes, (k + 127).to(torch.uint8)


def dequantise_q8(codes: Tensor, scale: Tensor) -> Tensor:
    """f32 values of ``quantise_q8`` output."""
    return (e4m3_value(codes).unflatten(-1, (-1, Q8_GROUP)) * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


def quantise_q4m(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 per 32: (packed E2M1 [..., n/2], E8M0 bytes [..., n/32])."""
    g = _groups(x, Q4M_GROUP)
    k = ceil_pow2_exponent(g.abs().amax(-1).clamp(min=_Q4M_FLOOR), E2M1_MAX)
    codes = e2m1_encode(g / exp2i(k).unsqueeze(-1)).flatten(-2)
    return pack_nibbles(codes), (k + 127).to(torch.uint8)


def dequantise_q4m(packed: Tensor, scale: Tensor) -> Tensor:
    """f32 values of ``quantise_q4m`` output."""
    g = e2m1_value(unpack_nibbles(packed)).unflatten(-1, (-1, Q4M_GROUP))
    return (g * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


def quantise_q4n(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 per 16 with E4M3 scale = amax/6, clamped at 448: (packed E2M1 [..., n/2], E4M3 bytes [..., n/16])."""
    g = _groups(x, Q4N_GROUP)
    scale = e4m3_encode(g.abs().amax(-1).clamp(min=_Q4N_FLOOR) / E2M1_MAX)
    codes = e2m1_encode(g / e4m3_value(scale).unsqueeze(-1)).flatten(-2)
    return pack_nibbles(codes), scale


def dequantise_q4n(packed: Tensor, scale: Tensor) -> Tensor:
    """f32 values of ``quantise_q4n`` output."""
    g = e2m1_value(unpack_nibbles(packed)).unflatten(-1, (-1, Q4N_GROUP))
    return (g * e4m3_value(scale).unsqueeze(-1)).flatten(-2)


# ---------------------------------------------------------------------- weights


def _expand_tiles(scale: Tensor, shape: torch.Size, block: int) -> Tensor:
    full = e8m0_value(scale).repeat_interleave(block, -2).repeat_interleave(block, -1)
    return full[..., : shape[-2], : shape[-1]]


def dequantise_fp8_tiles(weight: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """f32 [..., out, in] of an E4M3 weight, one E8M0 scale per block × block tile (ragged edges allowed)."""
    return e4m3_value(weight) * _expand_tiles(scale, weight.shape, block)


def quantise_fp8_tiles(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """(E4M3 bytes [out, in], E8M0 bytes [ceil(out/block), ceil(in/block)]) of an f32 weight."""
    rows, cols = weight.shape
    pad = torch.nn.functional.pad(weight.float(), (0, -cols % block, 0, -rows % block))
    tiles = pad.unflatten(0, (-1, block)).unflatten(2, (-1, block))  # [ro, block, co, block]
    k = ceil_pow2_exponent(tiles.abs().amax((1, 3)).clamp(min=_Q8_FLOOR * 2.0**-60), E4M3_MAX)
    scale = (k + 127).to(torch.uint8)
    return e4m3_encode(weight.float() / _expand_tiles(scale, weight.shape, block)), scale


def dequantise_mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """f32 [..., out, in] of a packed MXFP4 weight ([..., out, in/2] bytes) with scales [..., out, in/32]."""
    return dequantise_q4m(weight.view(torch.uint8), scale)


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed E2M1 bytes [..., out, in/2], E8M0 bytes [..., out, in/32]) of an f32 weight."""
    return quantise_q4m(weight)


def dequantise_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """f32 [..., n] of E4M3 rows with one E8M0 scale per 32 channels (Engram tables)."""
    return dequantise_q8(weight.view(torch.uint8), scale)


# ---------------------------------------------------------------------- records


def pack_window(rows: Tensor) -> Tensor:
    """Window KV record, uint8 [..., D + D/32]: E4M3 values then E8M0 scales (528 B at D = 512)."""
    return torch.cat(quantise_q8(rows), -1)


def unpack_window(record: Tensor) -> Tensor:
    """f32 [..., D] of window records."""
    d = record.shape[-1] * Q8_GROUP // (Q8_GROUP + 1)
    return dequantise_q8(record[..., :d].contiguous(), record[..., d:].contiguous())


def pack_global(rows: Tensor) -> Tensor:
    """Global KV record, uint8 [..., D/2 + D/16]: packed E2M1 then E4M3 scales (288 B at D = 512)."""
    return torch.cat(quantise_q4n(rows), -1)


def unpack_global(record: Tensor) -> Tensor:
    """f32 [..., D] of global records."""
    d = record.shape[-1] * Q4N_GROUP // (Q4N_GROUP // 2 + 1)
    return dequantise_q4n(record[..., : d // 2].contiguous(), record[..., d // 2 :].contiguous())


def pack_index(rows: Tensor) -> Tensor:
    """Index-key record, uint8 [..., Di/2 + Di/32]: packed E2M1 then E8M0 scales (68 B at Di = 128)."""
    return torch.cat(quantise_q4m(rows), -1)


def unpack_index(record: Tensor) -> Tensor:
    """f32 [..., Di] of index-key records."""
    d = record.shape[-1] * Q4M_GROUP // (Q4M_GROUP // 2 + 1)
    return dequantise_q4m(record[..., : d // 2].contiguous(), record[..., d // 2 :].contiguous())
