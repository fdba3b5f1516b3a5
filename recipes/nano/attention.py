"""Attention of the training model: whole sequences from position 0, dense scores under exact selection masks.

Shapes: B sequences, T tokens, N heads, D head dim, J global entries (J = T at ratio 1, T // 2 at ratio 2). Keys and
values are one vector per entry. A query sees its window rows and the global entries that the index source selected
for it, in one softmax with a sink.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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


def visible_entries(start_BT: Tensor, ratio: int, count: int) -> Tensor:
    """bool [B, T, J]: entries complete at query t that begin in its own chat."""
    t = torch.arange(start_BT.shape[1], device=start_BT.device).unsqueeze(1)
    entry = torch.arange(count, device=start_BT.device)
    return (entry < (t + 1) // ratio) & (entry * ratio >= start_BT.unsqueeze(2))


def pick(x: Tensor, queries: Tensor | None) -> Tensor:
    """[B, Q, ...]: the rows of [B, T, ...] at ``queries`` [B, Q]; all of them with None."""
    if queries is None:
        return x
    place = queries.view(*queries.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, place)


def head_sum(dots: Tensor, iw: Tensor) -> Tensor:
    """f32 [B, Q, J]: index scores from dots [B, Q, heads, J] and head weights [B, Q, heads]."""
    return (torch.relu(dots.float()) * iw.float().unsqueeze(-1)).sum(2)


def index_scores(iq: Tensor, iw: Tensor, keys: Tensor, reduce: Callable[..., Tensor] = head_sum) -> Tensor:
    """f32 [B, Q, J] of index queries [B, Q, heads, Di], head weights [B, Q, heads] and keys [B, J, Di]."""
    b, t, heads, width = iq.shape
    dots = torch.bmm(iq.reshape(b, t * heads, width), keys.transpose(1, 2))
    return reduce(dots.view(b, t, heads, -1), iw)


def best_entries(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [B, T, J]: the ``count`` best allowed entries of every query."""
    if scores.shape[-1] <= count:
        return allowed.expand_as(scores)
    best = scores.masked_fill(~allowed, -torch.inf).topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & allowed


def candidate_entries(scores: Tensor, visible: Tensor, size: int, blocks: int) -> Tensor:
    """bool [B, T, J]: entries of the best ``blocks`` blocks of ``size`` entries; the newest block always stays.

    For the full-length source (J = T), where the newest entry of query t is t.
    """
    length = scores.shape[-1]
    count = -(-length // size)
    if count <= blocks:
        return visible.expand_as(scores)
    padded = torch.nn.functional.pad(
        scores.masked_fill(~visible, -torch.inf), (0, count * size - length), value=-torch.inf
    )
    best = padded.unflatten(-1, (count, size)).amax(-1)
    newest = torch.arange(scores.shape[-2], device=scores.device).unsqueeze(-1) // size
    is_newest = torch.arange(count, device=scores.device) == newest
    best = best.masked_fill(is_newest, torch.inf)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(blocks, -1).indices, True)
    kept = kept & (best > -torch.inf)
    return kept.repeat_interleave(size, -1)[..., :length] & visible


def window_logits(q: Tensor, keys: Tensor, window: int) -> Tensor:
    """[B, T, N, 2W] of queries [B, T, N, D] over the rows of their block of ``window`` rows and of the block before.

    Column c of query t is row (t // W - 1) * W + c.
    """
    b, t, heads, width = q.shape
    blocks = -(-t // window)
    spare = blocks * window - t
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, spare)).reshape(b * blocks, window * heads, width)
    logits = torch.bmm(q, _window_keys(keys, window, blocks, spare).transpose(1, 2))
    return logits.view(b, blocks * window, heads, 2 * window)[:, :t]


def _window_keys(keys: Tensor, window: int, blocks: int, spare: int) -> Tensor:
    """[B * blocks, 2W, D]: the rows of every block after those of the block before (zeros in front of the first)."""
    padded = torch.nn.functional.pad(keys, (0, 0, window, spare)).unflatten(1, (blocks + 1, window))
    return torch.cat((padded[:, :-1], padded[:, 1:]), 2).flatten(0, 1)


def window_values(probs: Tensor, keys: Tensor, window: int) -> Tensor:
    """[B, T, N, D] of probabilities as ``window_logits`` lays them out."""
    b, t, heads, _ = probs.shape
    blocks = -(-t // window)
    spare = blocks * window - t
    padded = torch.nn.functional.pad(probs, (0, 0, 0, 0, 0, spare)).reshape(b * blocks, window * heads, 2 * window)
    values = torch.bmm(padded, _window_keys(keys, window, blocks, spare))
    return values.view(b, blocks * window, heads, -1)[:, :t]


def window_softmax(logits: Tensor, start_BT: Tensor, sink: Tensor, window: int, scale: float) -> Tensor:
    """Probabilities over the window rows of a query's own chat, with a sink [N] as a further logit without a value."""
    logits = torch.where(_in_window(start_BT, window), logits.float() * scale, -torch.inf)
    sink = sink.float().view(1, 1, -1, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    weight = torch.exp(logits - top)
    return weight / (weight.sum(-1, keepdim=True) + torch.exp(sink - top))


def _in_window(start_BT: Tensor, window: int) -> Tensor:
    """bool [B, T, 1, 2W]."""
    t = torch.arange(start_BT.shape[1], device=start_BT.device).view(1, -1, 1, 1)
    row = (t // window - 1) * window + torch.arange(2 * window, device=start_BT.device)
    return (row <= t) & (row > t - window) & (row >= start_BT.unsqueeze(-1).unsqueeze(-1))


def joint_softmax(
    near: Tensor,
    far: Tensor,
    start_BT: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    window: int,
    ratio: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One softmax over window logits [B, T, N, 2W] and global logits [B, T, N, J] with a sink; both parts.

    Global entries are those ``selected`` (bool [B, T, J]), or all visible ones with None.
    """
    if not far.shape[-1]:  # no entry is complete yet
        return window_softmax(near, start_BT, sink, window, scale).to(far.dtype), far
    seen = visible_entries(start_BT, ratio, far.shape[-1]) if selected is None else selected
    near = torch.where(_in_window(start_BT, window), near.float() * scale, -torch.inf)
    far_f = torch.where(seen.unsqueeze(2), far.float() * scale, -torch.inf)
    sink = sink.float().view(1, 1, -1, 1)
    top = torch.maximum(torch.maximum(near.amax(-1, keepdim=True), far_f.amax(-1, keepdim=True)), sink).detach()
    near, far_f = torch.exp(near - top), torch.exp(far_f - top)
    total = near.sum(-1, keepdim=True) + far_f.sum(-1, keepdim=True) + torch.exp(sink - top)
    return (near / total).to(far.dtype), (far_f / total).to(far.dtype)


def index_divergence(scores: Tensor, selected: Tensor, probs: Tensor) -> Tensor:
    """Mean KL(attention over the selected entries || softmax of the index scores); teaches the indexer only.

    Queries that give the global entries no weight count as zero. ``probs`` [B, Q, N, J] is the global part of the
    attention; every query counts with the share of attention that it gives to global entries.
    """
    target = probs.detach().float().mean(2)
    mass = target.sum(-1, keepdim=True)
    target = target / mass.clamp(min=1e-6)
    log_index = torch.log_softmax(scores.masked_fill(~selected, -1e9), -1)
    log_target = target.clamp(min=1e-9).log()
    divergence = torch.where(selected, target * (log_target - log_index), 0.0).sum(-1)
    mass = mass.squeeze(-1)
    return (divergence * mass).sum() / mass.sum().clamp(min=1e-6)
