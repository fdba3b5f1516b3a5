"""Lightning indexer: scores and exact selection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("index", index_scores="pppppiiiii", select_topk="ppiii")


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] of iq [B, C, ih, Di], iw [B, C, ih], keys [B, n, Di]; −inf from visible [B, C] on."""
    iq, iw, keys, visible = bf16(iq), bf16(iw), bf16(keys), i64(visible)
    (B, C, N, Di), n = iq.shape, keys.shape[1]
    if iw.shape != (B, C, N) or keys.shape != (B, n, Di) or visible.shape != (B, C):
        shapes = [tuple(t.shape) for t in (iw, keys, visible)]
        raise ValueError(f"index queries {tuple(iq.shape)}, weights, keys and visible {shapes}")
    scores = torch.empty(B, C, n)
    at = [t.data_ptr() for t in (iq, iw, keys, visible, scores)]
    LIBRARY.index_scores(*at, B, C, N, n, Di)
    return scores


def select_topk(num: Numerics, scores: Tensor, *, k: int) -> Tensor:
    """Ascending indices [..., min(k, n)] int64 of the k best scores, padded with −1 at the end."""
    scores = f32(scores)
    n = scores.shape[-1]
    ids = torch.empty(*scores.shape[:-1], min(k, n), dtype=torch.int64)
    if ids.numel():
        LIBRARY.select_topk(scores.data_ptr(), ids.data_ptr(), scores.numel() // n, n, k)
    return ids


OPERATIONS = (index_scores, select_topk)
