"""Pooling of token pairs into one global latent (ratio-2 sources)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference.numerics import Numerics


def pool_pairs(num: Numerics, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Pooled latent [T, D] of (value, gate) pairs, each f32 [T, D]: a softmax over the two gates per channel."""
    (u0, g0), (u1, g1) = first, second
    w = torch.softmax(torch.stack((g0, g1)), 0)
    return num.round(w[0] * u0 + w[1] * u1)


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
    """``pool_pairs`` [n, D] of rows ``second`` [n] of this step (value, gate f32 [T, D]) with the tokens before them.

    Those are rows ``partner`` [n] of the step or, where ``from_ring`` [n], rows ``slot`` [n] of the pairs f32
    [R, 2, D] kept from earlier steps (None: no partner is there).
    """
    return pool_pairs(num, *paired(value, gate, ring, second, partner, slot, from_ring))


def paired(
    value: Tensor,
    gate: Tensor,
    ring: Tensor | None,
    second: Tensor,
    partner: Tensor,
    slot: Tensor,
    from_ring: Tensor,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The arguments of ``pool_pairs`` that ``pool_cached`` stands for."""
    first = (value[partner], gate[partner])
    if ring is not None:
        old, there = ring.index_select(0, slot.clamp(min=0)), from_ring.unsqueeze(1)
        first = (torch.where(there, old[:, 0], first[0]), torch.where(there, old[:, 1], first[1]))
    return first, (value[second], gate[second])
