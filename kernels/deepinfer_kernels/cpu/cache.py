"""Cache rows: quantise and store, load and dequantise; the bytes of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64, u8
from deepinfer_kernels.cpu.norm import norm_weight
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "cache",
    pack_rows="ppiii",
    unpack_rows="ppiii",
    load_rows="pippiii",
    store_rows="pippii",
    store_pairs="pipppii",
    window_rows="ppippppiiif",
    store_entries="ppipppippiiifi",
    quantise_index_query="ppii",
)

#: record kind → (code in the source, stored bytes of 32 values)
_KINDS = {"window": (0, 33), "global": (1, 18), "index": (2, 17)}


def record(kind: str, width: int, *, stored: bool) -> tuple[int, int, int]:
    """(code, values, bytes) of a record whose values (or bytes, where ``stored``) are ``width``."""
    code, per_32 = _KINDS[kind]
    unit = per_32 if stored else 32
    if width % unit:
        raise ValueError(f"a {kind} row of {width} is not a multiple of {unit}")
    return code, width // unit * 32, width // unit * per_32


def pack_rows(num: Numerics, rows: Tensor, kind: str) -> Tensor:
    """Rows [..., D] as stored: official records, uint8."""
    x = bf16(rows)
    code, values, size = record(kind, x.shape[-1], stored=False)
    out = torch.empty(*x.shape[:-1], size, dtype=torch.uint8)
    LIBRARY.pack_rows(x.data_ptr(), out.data_ptr(), x.numel() // values, values, code)
    return out


def unpack_rows(num: Numerics, stored: Tensor, kind: str) -> Tensor:
    """Stored rows back to values [..., D] in bf16, exact."""
    stored = u8(stored)
    code, values, size = record(kind, stored.shape[-1], stored=True)
    out = torch.empty(*stored.shape[:-1], values, dtype=torch.bfloat16)
    LIBRARY.unpack_rows(stored.data_ptr(), out.data_ptr(), stored.numel() // size, values, code)
    return out


def store_rows(num: Numerics, store: Tensor, slots: Tensor, packed: Tensor) -> None:
    """store[slots[i]] = packed[i] for slots >= 0, in place; others go to row 0."""
    slots = i64(slots)
    if packed.dtype is not store.dtype or packed.shape != (*slots.shape, *store.shape[1:]):
        raise ValueError(f"rows {tuple(packed.shape)} {packed.dtype} into {tuple(store.shape)} {store.dtype}")
    if not store.is_contiguous():
        raise ValueError("the store must be contiguous")
    packed = packed.contiguous()
    size = packed.nbytes // max(1, len(packed))
    at = (store.data_ptr(), store.shape[0], slots.data_ptr(), packed.data_ptr())
    _stored(LIBRARY.store_rows(*at, slots.numel(), size), slots, store.shape[0])


def load_rows(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> Tensor:
    """Values [..., D] of the rows ``slots`` [...] (−1 reads row 0; the caller masks it)."""
    store, slots = u8(store), i64(slots)
    code, values, _ = record(kind, store.shape[-1], stored=True)
    out = torch.empty(*slots.shape, values, dtype=torch.bfloat16)
    at = (store.data_ptr(), store.shape[0], slots.data_ptr(), out.data_ptr())
    _stored(LIBRARY.load_rows(*at, slots.numel(), values, code), slots, store.shape[0])
    return out


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised."""
    x = bf16(iq)
    _, values, _ = record("index", x.shape[-1], stored=False)
    out = torch.empty_like(x)
    LIBRARY.quantise_index_query(x.data_ptr(), out.data_ptr(), x.numel() // values, values)
    return out


def store_pairs(num: Numerics, store: Tensor, slots: Tensor, value: Tensor, gate: Tensor) -> None:
    """store[slots[i]] = (value[i], gate[i]), f32 [R, 2, D], as ``store_rows`` does it."""
    slots, value, gate = i64(slots), f32(value), f32(gate)
    (T, D), R = value.shape, store.shape[0]
    if store.shape != (R, 2, D) or gate.shape != (T, D) or slots.shape != (T,):
        shapes = [tuple(t.shape) for t in (store, slots, gate)]
        raise ValueError(f"values {(T, D)}, store, slots and gates {shapes}")
    if store.dtype is not torch.float32 or not store.is_contiguous():
        raise ValueError(f"the store must be contiguous float32, got {store.dtype}")
    at = (store.data_ptr(), R, slots.data_ptr(), value.data_ptr(), gate.data_ptr())
    _stored(LIBRARY.store_pairs(*at, T, D), slots, R)


def window_rows(
    num: Numerics, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """(window rows as every reader sees them [T, D], as stored) of x [T, D]: normed, rotated, quantised."""
    x, cos, sin = bf16(x), f32(cos), f32(sin)
    T, D, half = _turned(x, cos, sin)
    _, _, size = record("window", D, stored=False)
    rows, packed = torch.empty_like(x), torch.empty(T, size, dtype=torch.uint8)
    at = (x.data_ptr(), *norm_weight(weight, D), cos.data_ptr(), sin.data_ptr(), rows.data_ptr(), packed.data_ptr())
    LIBRARY.window_rows(*at, T, D, half, eps)
    return rows, packed


def store_entries(
    num: Numerics,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: Tensor,
    slots: Tensor,
    kind: str,
) -> Tensor:
    """Normed x [T, D]; their rotated rows go, packed, to ``slots`` [T] of ``store`` as ``store_rows`` does it."""
    x, cos, sin, slots = bf16(x), f32(cos), f32(sin), i64(slots)
    T, D, half = _turned(x, cos, sin)
    code, _, size = record(kind, D, stored=False)
    if store.dtype is not torch.uint8 or store.shape[1:] != (size,) or not store.is_contiguous():
        raise ValueError(f"{kind} records of {size} bytes into {tuple(store.shape)} {store.dtype}")
    if slots.shape != (T,):
        raise ValueError(f"{T} rows, slots {tuple(slots.shape)}")
    normed = torch.empty_like(x)
    at = (x.data_ptr(), *norm_weight(weight, D), cos.data_ptr(), sin.data_ptr(), store.data_ptr(), store.shape[0])
    _stored(LIBRARY.store_entries(*at, slots.data_ptr(), normed.data_ptr(), T, D, half, eps, code), slots, len(store))
    return normed


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    """Rows, their width and the angles of each."""
    (T, D), half = x.shape, cos.shape[-1]
    if cos.shape != (T, half) or sin.shape != cos.shape or 2 * half > D:
        raise ValueError(f"rows {(T, D)}, angles {tuple(cos.shape)} and {tuple(sin.shape)}")
    return T, D, half


def _stored(bad: int, slots: Tensor, rows: int) -> None:
    if bad >= 0:
        raise IndexError(f"slot {int(slots.flatten()[bad])} is beyond a store of {rows} rows")


OPERATIONS = (
    pack_rows,
    unpack_rows,
    store_rows,
    load_rows,
    quantise_index_query,
    store_pairs,
    window_rows,
    store_entries,
)
