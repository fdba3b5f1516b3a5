"""(token, choice) pairs sorted by physical slot."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("permute", dispatch_permute="ppppiii", dispatch_rows="pppppppiiii")


def dispatch_permute(num: Numerics, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs [T, k] by slot: (source token, place of each pair, rows per slot), stable."""
    slots = i64(slots)
    pairs, k = slots.numel(), slots.shape[1]
    token, order = torch.empty(pairs, dtype=torch.int64), torch.empty(pairs, dtype=torch.int64)
    counts = torch.empty(num_slots, dtype=torch.int64)
    at = (slots.data_ptr(), token.data_ptr(), order.data_ptr(), counts.data_ptr())
    _sorted(LIBRARY.dispatch_permute(*at, pairs, k, num_slots), slots, num_slots)
    return token, order, counts


def dispatch_rows(
    num: Numerics, x: Tensor, slots: Tensor, weights: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [T·k, H] and weights [T·k] of the pairs by slot, place of each pair in them, rows per slot; stable."""
    x, slots, weights = bf16(x), i64(slots), f32(weights)
    (T, H), k = x.shape, slots.shape[1]
    if slots.shape != (T, k) or weights.shape != (T, k):
        raise ValueError(f"tokens {(T, H)}, slots {tuple(slots.shape)}, weights {tuple(weights.shape)}")
    rows, weight = torch.empty(T * k, H, dtype=torch.bfloat16), torch.empty(T * k)
    order, counts = torch.empty(T * k, dtype=torch.int64), torch.empty(num_slots, dtype=torch.int64)
    at = [t.data_ptr() for t in (x, slots, weights, rows, weight, order, counts)]
    _sorted(LIBRARY.dispatch_rows(*at, T, k, num_slots, H), slots, num_slots)
    return rows, weight, order, counts


def _sorted(bad: int, slots: Tensor, num_slots: int) -> None:
    if bad >= 0:
        raise IndexError(f"slot {int(slots.flatten()[bad])} is not in 0..{num_slots - 1}")


OPERATIONS = (dispatch_permute, dispatch_rows)
