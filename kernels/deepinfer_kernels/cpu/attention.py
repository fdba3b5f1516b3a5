"""Sparse latent attention: one softmax over window rows, selected global rows and a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, u8
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("attention", attend="pppppiiiif")


def attend(num: Numerics, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """[T, N, D] attention output of q [T, N, D] over keys [T, K, D] (key = value), mask [T, K] bool, sink [N]."""
    q, keys, seen, sink = bf16(q), bf16(keys), u8(mask), f32(sink)
    (T, N, D), K = q.shape, keys.shape[1]
    if keys.shape != (T, K, D) or seen.shape != (T, K) or sink.shape != (N,):
        shapes = [tuple(t.shape) for t in (keys, seen, sink)]
        raise ValueError(f"queries {(T, N, D)}, keys, mask and sink {shapes}")
    o = torch.empty_like(q)
    at = (q.data_ptr(), keys.data_ptr(), seen.data_ptr(), sink.data_ptr(), o.data_ptr())
    LIBRARY.attend(*at, T, N, K, D, scale)
    return o


OPERATIONS = (attend,)
