"""Cache rows: quantise and store, load and dequantise; the bytes of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, i64, u8
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "cache",
    pack_rows="ppiiw",
    unpack_rows="ppiiw",
    load_rows="pippiiw>i",
    store_rows="pippii>i",
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
    out = torch.empty((*x.shape[:-1], size), dtype=torch.uint8)
    LIBRARY.pack_rows(x.data_ptr(), out.data_ptr(), x.numel() // values, values, code)
    return out


def unpack_rows(num: Numerics, stored: Tensor, kind: str) -> Tensor:
    """Stored rows back to values [..., D] in bf16, exact."""
    stored = u8(stored)
    code, values, size = record(kind, stored.shape[-1], stored=True)
    out = torch.empty((*stored.shape[:-1], values), dtype=torch.bfloat16)
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
    bad = LIBRARY.store_rows(*at, slots.numel(), size)
    if bad >= 0:
        raise IndexError(f"slot {int(slots[bad])} is beyond a store of {store.shape[0]} rows")


def load_rows(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> Tensor:
    """Values [..., D] of the rows ``slots`` [...] (−1 reads row 0; the caller masks it)."""
    store, slots = u8(store), i64(slots)
    code, values, _ = record(kind, store.shape[-1], stored=True)
    out = torch.empty((*slots.shape, values), dtype=torch.bfloat16)
    at = (store.data_ptr(), store.shape[0], slots.data_ptr(), out.data_ptr())
    bad = LIBRARY.load_rows(*at, slots.numel(), values, code)
    if bad >= 0:
        raise IndexError(f"slot {int(slots.flatten()[bad])} is beyond a store of {store.shape[0]} rows")
    return out


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised."""
    x = bf16(iq)
    _, values, _ = record("index", x.shape[-1], stored=False)
    out = torch.empty_like(x)
    LIBRARY.quantise_index_query(x.data_ptr(), out.data_ptr(), x.numel() // values, values)
    return out


OPERATIONS = (pack_rows, unpack_rows, store_rows, load_rows, quantise_index_query)
