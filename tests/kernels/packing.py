"""How the rows of a verify step lie: those of a sequence side by side, its newest known token before its drafts."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(length: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first int64 [B], row int64 [total], offset int64 [total]) of sequences with length[b] + 1 rows each.

    Row t belongs to sequence row[t], draft place offset[t] (0: the newest known token). Padding has row -1, offset 0.
    """
    first = (length + 1).cumsum(0) - length - 1
    row, offset = torch.full((total,), -1), torch.zeros(total, dtype=torch.int64)
    for b, (start, count) in enumerate(zip(first.tolist(), (length + 1).tolist(), strict=True)):
        row[start : start + count], offset[start : start + count] = b, torch.arange(count)
    return first, row, offset
