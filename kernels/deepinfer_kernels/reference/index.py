"""Lightning indexer: scores, the two-level candidate filter, exact top-k selection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference.cache import entry_slots, load_rows
from deepinfer_kernels.reference.numerics import Numerics

NEG_INF = float("-inf")
#: products per pass (queries × heads × entries); bounds the memory of a long prefill chunk
_TILE = 1 << 24


def index_weights(num: Numerics, projected: Tensor, head_dim: int) -> Tensor:
    """Head weights [T, ih] of the projection: times head_dim^-½ · ih^-½, in the activation dtype."""
    return num.round(projected.float() * (head_dim**-0.5 * projected.shape[-1] ** -0.5))


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n]: Σ_h iw_h · relu(iq_h · key_j), −inf where j >= visible.

    iq [B, C, ih, Di], iw [B, C, ih], keys [B, n, Di], visible [B, C]. Under ``reference`` the dot product and each
    head's product are rounded to bf16 and the head sum once, as the release computes them.
    """
    dot = torch.einsum("bchd,bnd->bchn", iq.float(), keys.float())
    if num.index_bf16:
        dot = dot.bfloat16().relu()
        score = (dot * iw.bfloat16().unsqueeze(-1)).float().sum(2).bfloat16().float()
    else:
        score = torch.einsum("bchn,bch->bcn", dot.relu(), iw.float())
    entry = torch.arange(keys.shape[1], device=keys.device)
    return score.masked_fill(entry >= visible.unsqueeze(-1), NEG_INF)


def index_scores_cached(
    num: Numerics,
    iq: Tensor,
    iw: Tensor,
    store: Tensor,
    rows: Tensor,
    table: Tensor,
    visible: Tensor,
    *,
    per_block: int,
    count: int,
) -> Tensor:
    """``index_scores`` of the first ``count`` entries of batch rows [B], whose index keys are records of ``store``.

    table [R, P]: blocks of each batch row, of ``per_block`` entries, as for ``entry_slots``.
    """
    slots = entry_slots(num, None, rows, table, per_block=per_block, count=count)
    return index_scores(num, iq, iw, load_rows(num, store, slots, "index"), visible)


def candidate_blocks(num: Numerics, scores: Tensor, visible: Tensor, *, block: int, keep: int) -> Tensor:
    """Bool [..., ceil(n/block)]: the ``keep`` best blocks of each query row by their maximum score.

    The newest visible block is pinned; blocks without a visible entry are dropped. Ties: lowest block.
    """
    n = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -n % block), value=NEG_INF)
    best = padded.unflatten(-1, (-1, block)).amax(-1)
    newest = ((visible - 1) // block).clamp(min=0).unsqueeze(-1)
    pin = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, newest, (visible > 0).unsqueeze(-1))
    best = best.masked_fill(pin, float("inf"))
    return topk_mask(best, keep)


def restrict_to_candidates(num: Numerics, scores: Tensor, blocks: Tensor, *, block: int) -> Tensor:
    """Scores with −inf outside the published blocks of the same query row."""
    allowed = blocks.repeat_interleave(block, -1)[..., : scores.shape[-1]]
    return scores.masked_fill(~allowed, NEG_INF)


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """Bool mask of the k best finite-or-+inf scores per row; among equals the lowest indices win; −inf never."""
    n = scores.shape[-1]
    real = scores > NEG_INF
    if n <= k:
        return real
    kth = scores.topk(k, -1).values[..., -1:]
    above = scores > kth
    equal = (scores == kth) & real
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def select_topk(num: Numerics, scores: Tensor, *, k: int) -> Tensor:
    """Ascending indices [..., min(k, n)] int64 of the k best scores, padded with −1 at the end."""
    n = scores.shape[-1]
    mask = topk_mask(scores, k)
    entry = torch.arange(n, device=scores.device).expand(scores.shape)
    ids = torch.where(mask, entry, n).topk(min(k, n), -1, largest=False, sorted=True).values
    return torch.where(ids == n, -1, ids)
