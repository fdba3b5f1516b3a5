"""Attention of the training model: whole sequences from position 0, dense scores under exact selection masks.

Shapes: B sequences, T tokens, N heads, D head dim, J global entries (J = T at ratio 1, T // 2 at ratio 2). Keys and
values are one vector per entry. A query sees its window rows and the global entries that the index source selected
for it, in one softmax with a sink.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_table(
    dim: int, theta: float, length: int, scaling: tuple[float, float, float, int] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin) f32 [length, dim/2]; ``scaling`` = YaRN (factor, beta_fast, beta_slow, original length)."""
    half = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    freq = theta ** (-half / dim)
    if scaling is not None:
        factor, fast, slow, original = scaling

        def pair_of(turns: float) -> float:
            return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), dim - 1)
        ramp = ((half / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq / factor * ramp + freq * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(1) * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dims of [..., D] in interleaved pairs; cos and sin broadcast against [..., pairs]."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-width], turned), -1)


def pool_pairs(u: Tensor, g: Tensor) -> Tensor:
    """[B, T // 2, D] f32: each pair of tokens merged by a per-channel softmax over its two gates."""
    whole = u.shape[1] // 2 * 2
    u, g = u[:, :whole].unflatten(1, (-1, 2)), g[:, :whole].unflatten(1, (-1, 2))
    return (torch.softmax(g, 2) * u).sum(2)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [T, T]: query t sees rows t - window + 1 .. t."""
    t = torch.arange(length, device=device)
    gap = t.unsqueeze(1) - t
    return (gap >= 0) & (gap < window)


def visible_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """bool [T, J]: entries complete at query t, j < (t + 1) // ratio."""
    t = torch.arange(length, device=device)
    return torch.arange(length // ratio, device=device) < ((t + 1) // ratio).unsqueeze(1)


def index_scores(iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor:
    """f32 [B, T, J] of index queries [B, T, heads, Di], head weights [B, T, heads] and keys [B, J, Di]."""
    b, t, heads, width = iq.shape
    dots = torch.relu(torch.bmm(iq.reshape(b, t * heads, width), keys.transpose(1, 2)).float())
    return (dots.view(b, t, heads, -1) * iw.float().unsqueeze(-1)).sum(2)


def best_entries(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [B, T, J]: the ``count`` best allowed entries of every query."""
    if scores.shape[-1] <= count:
        return allowed.expand_as(scores)
    best = scores.masked_fill(~allowed, -torch.inf).topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & allowed


def candidate_entries(scores: Tensor, visible: Tensor, size: int, blocks: int) -> Tensor:
    """bool [B, T, J]: entries of the best ``blocks`` blocks of ``size`` entries; the newest block always stays."""
    length = scores.shape[-1]
    count = -(-length // size)
    if count <= blocks:
        return visible.expand_as(scores)
    padded = torch.nn.functional.pad(
        scores.masked_fill(~visible, -torch.inf), (0, count * size - length), value=-torch.inf
    )
    best = padded.unflatten(-1, (count, size)).amax(-1)
    newest = (visible.sum(-1) - 1) // size  # -1 while nothing is visible
    is_newest = torch.arange(count, device=scores.device) == newest.unsqueeze(-1)
    best = best.masked_fill(is_newest, torch.inf)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(blocks, -1).indices, True)
    kept = kept & (best > -torch.inf)
    return kept.repeat_interleave(size, -1)[..., :length] & visible


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(values [B, T, N, D], probabilities f32 [B, T, N, keys]) of queries over ``keys`` [B, keys, D] under ``mask``.

    ``mask`` bool [B or 1, T, keys]; ``sink`` [N] is a further logit without a value.
    """
    b, t, heads, width = q.shape
    logits = torch.bmm(q.reshape(b, t * heads, width), keys.transpose(1, 2)).float().view(b, t, heads, -1)
    logits = (logits * width**-0.5).masked_fill(~mask.unsqueeze(2), -torch.inf)
    sink = sink.float().view(1, 1, heads, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    weight = torch.exp(logits - top)
    probs = weight / (weight.sum(-1, keepdim=True) + torch.exp(sink - top))
    values = torch.bmm(probs.to(q.dtype).view(b, t * heads, -1), keys)
    return values.view(b, t, heads, width), probs


def index_divergence(scores: Tensor, selected: Tensor, probs: Tensor) -> Tensor:
    """Mean KL(attention over the selected entries || softmax of the index scores); teaches the indexer only.

    Queries without a selected entry count as zero. ``probs`` [B, T, N, J] is the global part of the attention.
    """
    target = probs.detach().mean(2)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    log_index = torch.log_softmax(scores.masked_fill(~selected, -1e9), -1)
    log_target = target.clamp(min=1e-9).log()
    return torch.where(selected, target * (log_target - log_index), 0.0).sum(-1).mean()
