"""Engram: hashed n-gram ids and the gate that mixes looked-up rows into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.numerics import Numerics


def token_classes(num: Numerics, ids: Tensor, table: Tensor, image: int | None) -> Tensor:
    """Hash class of each token id, int64 of ids' shape; −1 for ids below 0 (before the start) and for ``image``."""
    classes = torch.where(ids < 0, -1, table[ids.clamp(min=0)])
    return classes if image is None else torch.where(ids == image, -1, classes)


def engram_hash(
    num: Numerics, classes: Tensor, pad_class: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Table row ids [T, columns] int64 of the n-grams ending at each token.

    classes [T, nmax] int64: class of the token at lag 0..nmax-1, −1 = before the start or inside an image span; from
    the first −1 on every older lag counts as ``pad_class``. multipliers [nmax]; primes and offsets [nmax-1, heads].
    Products fit int64 by construction of the multipliers.
    """
    blocked = (classes < 0).cumsum(-1) > 0
    value = torch.where(blocked, pad_class, classes) * multipliers
    roll = value[:, 0]
    columns = []
    for lag in range(1, classes.shape[1]):
        roll = roll ^ value[:, lag]
        columns.append(roll.unsqueeze(-1) % primes[lag - 1] + offsets[lag - 1])
    return torch.cat(columns, -1)


def dequantise_table(num: Numerics, weight: Tensor, scale: Tensor) -> Tensor:
    """Values [M, width] of gathered table rows: E4M3 bytes [M, width], one E8M0 scale per 32 [M, width/32]; exact."""
    return num.round(q.dequantise_rows(weight, scale))


def engram_lookup(num: Numerics, weight: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Values [T, columns · width] of table rows ids [T, columns]: E4M3 bytes [R, width], scales [R, width/32]."""
    flat = ids.flatten()
    rows = dequantise_table(num, weight.index_select(0, flat), scale.index_select(0, flat))
    return rows.view(ids.shape[0], ids.shape[1] * weight.shape[1])


def engram_gate(
    num: Numerics, X: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(streams with the memory mixed in [T, C, H], gate [T, C] f32).

    projected [T, (C+1)·H]: C keys, then the shared value. gate = sigmoid(sign(dot) · sqrt(max(|dot|, 1e-6))) with
    ``dot`` the weighted cosine-like product of stream and key; ``dead`` [T] bool forces it to 0 (image spans).
    """
    T, C, H = X.shape
    key, value = projected[:, : C * H].view(T, C, H).float(), projected[:, C * H :].float()
    h = X.float()
    weight = q_weight.float() * k_weight.float()
    dot = (h * weight * key).sum(-1)
    dot = dot * torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * H**-0.5
    # copysign: a dot of +0 counts as positive
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(-1), 0.0)
    return num.round(h + gate.unsqueeze(-1) * value.unsqueeze(1)), gate
