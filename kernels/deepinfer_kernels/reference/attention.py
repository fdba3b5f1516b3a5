"""Sparse latent attention: one softmax over window rows, selected global rows and a sink."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_kernels.reference.cache import load_rows
from deepinfer_kernels.reference.numerics import Numerics

#: gathered key elements per pass (queries × keys × width); bounds the memory of a long prefill chunk
_TILE = 1 << 24


def attend(num: Numerics, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """[T, N, D] attention output of q [T, N, D] over per-token rows keys [T, K, D] (key = value), mask [T, K] bool.

    ``sink`` [N] is an extra logit without a value, not scaled. A row without any key gives 0. Under ``reference``
    keys go through an online softmax in tiles of ``prob_tile`` with probabilities rounded to bf16 before the value
    product; the denominator sums the unrounded ones.
    """
    q32, k32 = q.float(), keys.float()
    logits = torch.einsum("tnd,tkd->tnk", q32, k32) * scale
    logits = logits.masked_fill(~mask.unsqueeze(1), float("-inf"))
    top = torch.maximum(logits.amax(-1), sink) if keys.shape[1] else sink.expand(q.shape[:2])
    if num.prob_tile == 0:
        p = torch.exp(logits - top.unsqueeze(-1))
        den = p.sum(-1) + torch.exp(sink - top)
        return num.round(torch.einsum("tnk,tkd->tnd", p, k32) / den.unsqueeze(-1))
    return num.round(_online(logits, k32, sink, num))


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
    """``attend`` of q [T, N, D] over window rows, then over global rows, wherever they are.

    ``window`` [T, W] int64: r >= 0 is row r of ``local`` [rows, D] (values of this step), −1 is hidden, r <= −2 is
    row −2 − r of the window records ``ring`` (None where no query reads it). ``slots`` [T, K] int64: rows of the
    global records ``entries``, −1 hidden; None where the layer has none.
    """
    return gathered(num, attend, q, local, window, ring, slots, entries, sink, scale)


def gathered(
    num: Numerics,
    over_keys: Callable[..., Tensor],
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """``attend_cached`` by gathering every query's keys for ``over_keys``, a bounded number of queries at a time."""
    width = window.shape[1] + (0 if slots is None else slots.shape[1])
    per_pass = max(1, _TILE // (width * q.shape[2]))
    out = []
    for start in range(0, max(1, q.shape[0]), per_pass):
        part = slice(start, start + per_pass)
        at = window[part]
        keys, mask = local[at.clamp(min=0)], at != -1
        if ring is not None:
            older = load_rows(num, ring, (-2 - at).clamp(min=0), "window")
            keys = torch.where((at < -1).unsqueeze(-1), older, keys)
        if slots is not None and entries is not None:
            keys = torch.cat((keys, load_rows(num, entries, slots[part], "global")), 1)
            mask = torch.cat((mask, slots[part] >= 0), 1)
        out.append(over_keys(num, q[part], keys, mask, sink, scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def _online(logits: Tensor, keys: Tensor, sink: Tensor, num: Numerics) -> Tensor:
    T, N, K = logits.shape
    best = logits.new_full((T, N), float("-inf"))
    den = logits.new_zeros((T, N))
    acc = logits.new_zeros((T, N, keys.shape[-1]))
    for start in range(0, K, num.prob_tile):
        tile = slice(start, start + num.prob_tile)
        new = torch.maximum(best, logits[..., tile].amax(-1))
        safe = new.masked_fill(new == float("-inf"), 0.0)  # no key seen yet: every exp below is exp(-inf) = 0
        keep = torch.exp(best - safe)
        p = torch.exp(logits[..., tile] - safe.unsqueeze(-1))
        den = den * keep + p.sum(-1)
        acc = acc * keep.unsqueeze(-1) + torch.einsum("tnk,tkd->tnd", num.round(p).float(), keys[:, tile])
        best = new
    empty = best == float("-inf")
    den = den + torch.exp(sink - best.masked_fill(empty, 0.0))
    return torch.where(empty.unsqueeze(-1), torch.zeros_like(acc), acc / den.unsqueeze(-1))
