"""Cache rows: quantise and store, load and dequantise. Slots are flat row numbers; a slot of −1 is not written."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.numerics import Numerics

#: record kind → (pack, unpack)
_RECORDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "window": (q.pack_window, q.unpack_window),
    "global": (q.pack_global, q.unpack_global),
    "index": (q.pack_index, q.unpack_index),
}


def pack_rows(num: Numerics, rows: Tensor, kind: str) -> Tensor:
    """Rows [..., D] as stored: an official record (uint8) or f32."""
    return _RECORDS[kind][0](rows) if num.records else rows.float()


def unpack_rows(num: Numerics, stored: Tensor, kind: str) -> Tensor:
    """Stored rows back to values [..., D], in the activation dtype (records are exact in bf16)."""
    return num.round(_RECORDS[kind][1](stored)) if num.records else stored


def store_rows(num: Numerics, store: Tensor, slots: Tensor, packed: Tensor) -> None:
    """store[slots[i]] = packed[i] for slots >= 0, in place. store [R, bytes], slots [T] int64, packed [T, bytes].

    Slots are distinct. Row 0 of ``store`` is never addressed by a real slot, so PAD rows are sent there: one masked
    scatter without a data-dependent shape.
    """
    store.index_copy_(0, slots.clamp(min=0), packed)


def load_rows(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> Tensor:
    """Values [..., D] of the rows ``slots`` [...] (−1 reads row 0; the caller masks it)."""
    flat = store.index_select(0, slots.clamp(min=0).flatten())
    return unpack_rows(num, flat, kind).unflatten(0, slots.shape)


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised, or unchanged in ``float``."""
    if not num.records:
        return iq
    return num.round(q.dequantise_q4m(*q.quantise_q4m(iq)))
