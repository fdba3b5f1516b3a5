"""Pooling of token pairs into one latent, wherever the first of a pair is."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, f32, i64, u8
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("compress", pool_pairs="pppppii", pool_cached="ppipipppppii")


def pool_pairs(num: Numerics, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Pooled latent [T, D] of (value, gate) pairs, each f32 [T, D]: a softmax over the two gates per channel."""
    given = [f32(t) for t in (*first, *second)]
    T, D = given[0].shape
    if any(t.shape != (T, D) for t in given):
        raise ValueError(f"values and gates {[tuple(t.shape) for t in given]}")
    z = torch.empty(T, D, dtype=torch.bfloat16)
    LIBRARY.pool_pairs(*[t.data_ptr() for t in given], z.data_ptr(), T, D)
    return z


def pool_cached(
    num: Numerics,
    value: Tensor,
    gate: Tensor,
    ring: Tensor | None,
    second: Tensor,
    partner: Tensor,
    slot: Tensor,
    from_ring: Tensor,
) -> Tensor:
    """``pool_pairs`` [n, D] of rows ``second`` of this step with the tokens before them (see the reference)."""
    value, gate, ringed = f32(value), f32(gate), u8(from_ring)
    ring = None if ring is None else f32(ring)
    where = [i64(t) for t in (second, partner, slot)]
    (T, D), n = value.shape, ringed.shape[0]
    if gate.shape != (T, D) or any(t.shape != (n,) for t in where) or (ring is not None and ring.shape[1:] != (2, D)):
        shapes = [tuple(t.shape) for t in (gate, *where)]
        raise ValueError(f"values {(T, D)}, gates and rows {shapes}, pairs {None if ring is None else ring.shape}")
    z = torch.empty(n, D, dtype=torch.bfloat16)
    kept = (0, 0) if ring is None else (ring.data_ptr(), ring.shape[0])
    at = (value.data_ptr(), gate.data_ptr(), T, *kept, *[t.data_ptr() for t in where], ringed.data_ptr(), z.data_ptr())
    bad = LIBRARY.pool_cached(*at, n, D)
    if bad >= 0:
        raise IndexError(f"pair {bad} reads beyond {T} rows or a store of {kept[1]} pairs")
    return z


OPERATIONS = (pool_pairs, pool_cached)
