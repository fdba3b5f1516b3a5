"""Sparse latent attention: one softmax over window rows, selected global rows and a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64, u8
from deepinfer_kernels.cpu.cache import record
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("attention", attend_cached="ppippippippiiiiif")


def attend_cached(
    num: Numerics,
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attention of q [T, N, D] over rows of this step and records, read where they are (see the reference)."""
    q, local, window, sink = bf16(q), bf16(local), i64(window), f32(sink)
    (T, N, D), W = q.shape, window.shape[1]
    slots = torch.empty(T, 0, dtype=torch.int64) if slots is None else i64(slots)
    if window.shape[0] != T or slots.shape[0] != T or local.shape[1] != D or sink.shape != (N,):
        shapes = [tuple(t.shape) for t in (local, window, slots, sink)]
        raise ValueError(f"queries {(T, N, D)}, local rows, window, slots and sink {shapes}")
    stores = []
    for store, kind in ((ring, "window"), (entries, "global")):
        if store is not None and record(kind, store.shape[1], stored=True)[1] != D:
            raise ValueError(f"queries of width {D}, {kind} records of {store.shape[1]} bytes")
        stores += [0, 0] if store is None else [u8(store).data_ptr(), store.shape[0]]
    o = torch.empty_like(q)
    at = (q.data_ptr(), local.data_ptr(), local.shape[0], window.data_ptr(), *stores[:2], slots.data_ptr(), *stores[2:])
    bad = LIBRARY.attend_cached(*at, sink.data_ptr(), o.data_ptr(), T, N, W, slots.shape[1], D, scale)
    if bad >= 0:
        raise IndexError(f"query {bad} reads beyond {local.shape[0]} rows or stores of {stores[1]} and {stores[3]}")
    return o


OPERATIONS = (attend_cached,)
