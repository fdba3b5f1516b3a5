"""Counter-based sampling: Philox4x32-10 noise keyed by (sequence seed, absolute position, stream).

Counter layout: (position, stream << 24, token id // 4, 0); token v uses word v % 4. Nothing depends on the batch,
the step number or the device: ten rounds of two 32×32→64 multiplications. Gumbel noise and the comparison are f64.
Source: Salmon et al. 2011 (Philox), known-answer vectors of Random123.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.reference.numerics import Numerics

#: stream ids; plain sampling and coupled verification share TARGET
TARGET, DRAFT, ACCEPT = 0, 1, 2

#: ids of a row that cannot be drawn: its logits were not finite; no token was allowed
NON_FINITE, NOTHING_ALLOWED = -1, -2

_M32 = 0xFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85


def _mul32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32×32-bit product held in int64 without signed overflow."""
    low16 = (a & 0xFFFF) * b
    rest = (a >> 16) * b + (low16 >> 16)
    return (rest >> 16) & _M32, ((rest & 0xFFFF) << 16 | (low16 & 0xFFFF)) & _M32


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """[..., 4] words (int64 holding u32) of Philox4x32-10; key int64 (the 64-bit seed), counters int64 u32."""
    k0, k1 = key & _M32, (key >> 32) & _M32
    for _ in range(10):
        h0, l0 = _mul32(c0, _MUL0)
        h1, l1 = _mul32(c2, _MUL1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _WEYL0) & _M32, (k1 + _WEYL1) & _M32
    return torch.stack((c0, c1, c2, c3), -1)


def uniforms(seed: Tensor, position: Tensor, stream: int, n: int) -> Tensor:
    """f64 [B, n] in (0, 1): 24-bit midpoints, so neither end is reached. seed, position [B] int64."""
    block = torch.arange((n + 3) // 4, device=seed.device).unsqueeze(0)
    zero = torch.zeros_like(block)
    words = philox(seed.unsqueeze(1), position.unsqueeze(1) + zero, zero + (stream << 24), block + 0, zero)
    return ((words.flatten(1)[:, :n] >> 8).double() + 0.5) * 2.0**-24


def adjust_logits(
    num: Numerics,
    logits: Tensor,
    *,
    row: Tensor,
    token: Tensor,
    count: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_row: Tensor,
    bias_token: Tensor,
    bias: Tensor,
    mask_row: Tensor,
    mask: Tensor,
) -> Tensor:
    """Copy of logits f32 [B, V] with penalties, then biases, then masks applied.

    (row, token) [P] int64 are distinct pairs of tokens a row has in prompt or answer, ``count`` [P] how often in the
    answer; presence, frequency and repetition [P] are the row's penalties: a positive logit is divided by
    ``repetition``, another multiplied, then ``frequency`` · count and, for count > 0, ``presence`` are subtracted.
    (bias_row, bias_token) [Q] distinct, bias [Q] added. mask int32 [G, ceil(V/32)] of rows mask_row [G]: a token whose
    bit v % 32 of word v // 32 is clear gets −inf.
    """
    out = logits.clone()
    if row.numel():
        x = out[row, token]
        x = torch.where(x > 0, x / repetition, x * repetition)
        out[row, token] = x - frequency * count - presence * (count > 0)
    if bias_row.numel():
        out[bias_row, bias_token] = out[bias_row, bias_token] + bias
    if mask_row.numel():
        bits = torch.arange(32, device=mask.device, dtype=torch.int32)
        allowed = ((mask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : out.shape[1]].bool()
        out[mask_row] = out[mask_row].masked_fill(~allowed, float("-inf"))
    return out


def token_logprobs(num: Numerics, logits: Tensor, ids: Tensor, *, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability f32 [B] of ids [B], best ids int64 [B, top], their log-probabilities f32 [B, top]).

    Of the logits f32 [B, V] as given. Best first, equal values by ascending id.
    """
    logp = logits.log_softmax(-1)
    order = torch.sort(logp, dim=-1, descending=True, stable=True)
    return logp.gather(1, ids.unsqueeze(1)).squeeze(1), order.indices[:, :top], order.values[:, :top]


def target_logprobs(
    num: Numerics, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Processed log-distribution f64 [B, V], −inf where excluded.

    Order: temperature, top-k (0 = off), top-p over what is left (the token that crosses p is kept), min-p relative to
    the best token. Equal logits are ranked by ascending id. Rows with temperature 0 put everything on the argmax.
    """
    x = logits.double()
    greedy = temperature == 0
    x = x / torch.where(greedy, 1.0, temperature.double()).unsqueeze(1)
    best = logits.argmax(-1, keepdim=True)
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    rank = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    limit = torch.where(top_k > 0, top_k, x.shape[1]).unsqueeze(1)
    ranked = order.values.masked_fill(rank >= limit, float("-inf"))
    p = ranked.softmax(-1)
    before = p.cumsum(-1) - p
    keep = (before < top_p.double().unsqueeze(1)) & (p >= min_p.double().unsqueeze(1) * p[:, :1]) & (rank < limit)
    keep[:, 0] = True
    ranked = ranked.masked_fill(~keep, float("-inf")).log_softmax(-1)
    out = torch.full_like(x, float("-inf")).scatter_(1, order.indices, ranked)
    point = torch.full_like(x, float("-inf")).scatter_(1, best, 0.0)
    return torch.where(greedy.unsqueeze(1), point, out)


def draw(num: Numerics, logprobs: Tensor, seed: Tensor, position: Tensor, stream: int = TARGET) -> Tensor:
    """Token ids [B] by the Gumbel-max rule on f64 log-probabilities; ties go to the lowest id."""
    n = logprobs.shape[1]
    # whole multiples of 64 columns: a vectorised log then has no remainder that other code computes
    u = uniforms(seed, position, stream, -(-n // 64) * 64)
    return (logprobs - torch.log(-torch.log(u))[:, :n]).argmax(-1)


def next_tokens(num: Numerics, logits: Tensor, adjusted: Tensor | None, filters: dict[str, Tensor] | None) -> Tensor:
    """Next token ids int64 [B] by the logits f32 [B, V], or by what ``adjust_logits`` made of them.

    ``filters``: temperature, top_k, top_p, min_p, seed and position, each [B]; the last is the absolute index of the
    token being drawn. None: every row is greedy. A row gets ``NON_FINITE`` where a logit is not finite,
    ``NOTHING_ALLOWED`` where the adjusted ones are all −inf.
    """
    used = logits if adjusted is None else adjusted
    if filters is None:
        ids = used.argmax(-1)
    else:
        law = target_logprobs(num, used, *(filters[name] for name in ("temperature", "top_k", "top_p", "min_p")))
        ids = draw(num, law, filters["seed"], filters["position"])
    if adjusted is not None:
        ids = torch.where((adjusted > float("-inf")).any(-1), ids, NOTHING_ALLOWED)
    return torch.where(torch.isfinite(logits).all(-1), ids, NON_FINITE)
