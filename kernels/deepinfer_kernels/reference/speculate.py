"""Speculation on the device: split of the verify budget, layout of verified rows, acceptance, truncation.

Layout of a verify step: sequence b has ``length[b]`` drafts under test and ``length[b] + 1`` logits rows, one after
the other from row ``first[b]``: row i judges draft i, the last row draws the bonus token. ``first`` ascends. Rows that
belong to no sequence are padding. ``position[b]`` is the absolute index of the first token to be drawn, so draft i is
the token at ``position[b] + i``.

Nothing here waits for the device: lengths and counts stay on it, invalid places are masked, never compacted.

Two ways to accept:

* coupled: row i draws the token that plain sampling would draw at that position (stream 0 of the keyed noise); the
  draft stands iff it is that token. What is emitted is what plain sampling emits, whatever the drafter and lengths.
* rejection: draft x with draft probability q(x) and target probability p(x) stands with probability min(1, p/q); at
  the first refusal the token is drawn from the normalised positive part of p − q. The law of the output is p.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (rejection); Daliri et al. 2024 (coupling by shared Gumbel noise).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_kernels.reference import sample as sampling
from deepinfer_kernels.reference.numerics import Numerics

#: place of a token that was not emitted; −1 and −2 say that a row's logits could not be sampled
NO_TOKEN = -3
#: log of the residual mass below which p and q are equal up to rounding
_NO_RESIDUAL = math.log(1e-12)


class StepRows(NamedTuple):
    """Arrays of a step, int64, of which the first F rows float; ``settle_rows`` writes into them.

    slot, limit, start, first, count [F]: ring slot, position from which on nothing is kept, first position, first token
    in the step, tokens. table [B, P]: blocks of every row. ids, pos, row, ring_slot, pair_slot, block_slot [T], lags
    [T, nmax]: of every token.
    """

    slot: Tensor
    limit: Tensor
    start: Tensor
    first: Tensor
    count: Tensor
    table: Tensor
    ids: Tensor
    pos: Tensor
    row: Tensor
    lags: Tensor
    ring_slot: Tensor
    pair_slot: Tensor
    block_slot: Tensor


def settle_rows(
    num: Numerics,
    rows: StepRows,
    recent: Tensor,
    drafts: Tensor,
    length: Tensor,
    shares: Tensor | None,
    *,
    tokens: int,
    ring: int,
    pair_ring: int,
    block_tokens: int,
) -> None:
    """Put the device's truth into the floating rows of a step, in place and without waiting.

    By ring slot S: recent [S, nmax]: newest token (the anchor) and those before it, −1 before the start; drafts [S, J];
    length [S] tokens committed, the anchor included. shares [F]: drafts of each row, whose sum with F is ``tokens``
    (None: as built). ring, pair_ring: records of a slot; ``block_tokens`` of a block. No entry is kept past a limit.
    """
    recent, drafts, length = recent[rows.slot], drafts[rows.slot], length[rows.slot]
    rows.start.copy_(length - 1)
    if shares is not None:
        rows.count.copy_(shares + 1)
        rows.first.copy_(rows.count.cumsum(0) - rows.count)
    at = torch.arange(tokens, device=recent.device)
    row = torch.searchsorted(rows.first, at, right=True) - 1
    off = at - rows.first[row]
    pos = rows.start[row] + off
    nmax = recent.shape[1]
    known = torch.cat((recent.flip(1), drafts), 1)[row]
    lags = known.gather(1, nmax - 1 + off.unsqueeze(1) - torch.arange(nmax, device=at.device))
    slot = rows.slot[row]
    block = (pos // block_tokens).clamp(max=rows.table.shape[1] - 1)
    blocks = rows.table[row, block] * block_tokens + pos % block_tokens
    rows.row[:tokens] = row
    rows.pos[:tokens] = pos
    rows.ids[:tokens] = lags[:, 0]
    rows.lags[:tokens] = lags
    rows.ring_slot[:tokens] = slot * ring + pos % ring
    rows.pair_slot[:tokens] = slot * pair_ring + pos % pair_ring
    rows.block_slot[:tokens] = torch.where(pos < rows.limit[row], blocks, -1)


def sampled_rows(
    num: Numerics, floating: Tensor, logits_row: Tensor, token: Tensor, first: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(first row of the logits, drafts under test, first token in the step) of sampled rows, int64 [B] each.

    floating [B]: which floating row it is, those come first and all their tokens have logits; −1: another, at
    ``logits_row`` and ``token`` [B]. first, count [F] of the floating rows.
    """
    floats, at = floating >= 0, floating.clamp(min=0)
    begin = first[at]
    drafts = torch.where(floats, count[at] - 1, 0)
    return torch.where(floats, begin, logits_row), drafts, torch.where(floats, begin, token)


def commit_rows(
    num: Numerics,
    tokens: Tensor,
    count: Tensor,
    token: Tensor,
    slot: Tensor,
    regime: Tensor,
    position: Tensor,
    lags: Tensor,
    length: Tensor,
    recent: Tensor,
    regimes: Tensor,
) -> None:
    """Keep what a verify step emitted, in place: length [S], newest tokens [S, nmax] and regime [S] by ring slot.

    Of B rows with distinct slots: tokens [B, J+1], of which the first ``count`` ≥ 1 are emitted (a failed one counts as
    id 0), first token in the step, ring slot, regime. position [T] and lags [T, nmax] of the step's tokens.
    """
    newest = tokens.gather(1, (count - 1).unsqueeze(1)).clamp(min=0)
    last = token + count - 1
    length.index_copy_(0, slot, position[last] + 2)
    recent.index_copy_(0, slot, torch.cat((newest, lags[last, :-1]), 1))
    regimes.index_copy_(0, slot, regime)


def dspark_confidence(num: Numerics, logits: Tensor, temperature: Tensor, regime: Tensor) -> Tensor:
    """Calibrated confidences f32 [B, J] = sigmoid(logits / temperature[regime]).

    logits f32 [B, J] of the confidence head, temperature f32 [G, J] > 0 of each sampling regime, regime int64 [B].
    """
    scaled = logits.float() / temperature[regime]
    return torch.sigmoid(_padded(scaled))[:, : scaled.shape[1]]


def _padded(x: Tensor) -> Tensor:
    """[..., n] with zeros up to a multiple of 64 columns: a vectorised function then has no remainder that other code
    computes, so a row's bits do not depend on the number of rows."""
    return F.pad(x, (0, -x.shape[-1] % 64))


def dspark_split(num: Numerics, confidence: Tensor, cap: Tensor, admission: Tensor, budget: Tensor) -> Tensor:
    """Drafts that each row verifies, int64 [B]; the budget goes to the largest survivals of all rows.

    confidence f32 [..., B, J] (not finite: 0; clamped to [0, 1]); survival is its running product in f32. cap int64
    [..., B]: most drafts of a row. admission int64 [..., B], unique. budget int64 [...]: leading dimensions are
    separate splits. Order: survival descending, position ascending, admission ascending.
    """
    rows, width = confidence.shape[-2:]
    conf = torch.where(torch.isfinite(confidence), confidence.float(), 0.0).clamp(0.0, 1.0)
    running, columns = torch.ones_like(conf[..., 0]), []
    for k in range(width):  # one f32 product after the other: a library's cumprod may hold more bits
        running = running * conf[..., k]
        columns.append(running)
    # bits of floats ≥ 0 order like the floats (adding 0 turns −0 into 0); J ≤ 255 and B < 2^23 keep 63 bits
    falling = 0xFFFFFFFF - (torch.stack(columns, -1) + 0.0).view(torch.int32).long()
    position = torch.arange(width, device=conf.device)
    key = (falling << 31) | (position << 23) | _places(admission).unsqueeze(-1)
    barred = position >= cap.unsqueeze(-1)
    rank = _places(key.masked_fill(barred, torch.iinfo(torch.int64).max).flatten(-2))
    within = (rank < budget.unsqueeze(-1)).unflatten(-1, (rows, width))
    return (within & ~barred).sum(-1)


def _places(keys: Tensor) -> Tensor:
    """int64 [..., n]: how many keys of the last dimension come before each, equal ones in their order."""
    order = torch.argsort(keys, dim=-1, stable=True)
    numbers = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, numbers)


def draft_sample(
    num: Numerics,
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    coupled: bool,
) -> tuple[Tensor, Tensor]:
    """(draft ids int64 [B], the log-distribution f32 [B, V] they were drawn from) for the drafter's logits [B, V].

    Coupled drafts use the noise of the target's own draw at ``position``, so that equal distributions give equal
    tokens; drafts for rejection use the draft stream, which must be independent of the target's.
    """
    logprobs = sampling.target_logprobs(num, logits, temperature, top_k, top_p, min_p).float()
    stream = sampling.TARGET if coupled else sampling.DRAFT
    return sampling.draw(num, logprobs.double(), seed, position, stream), logprobs


def adjust_verify_logits(
    num: Numerics,
    logits: Tensor,
    *,
    drafts: Tensor,
    first: Tensor,
    length: Tensor,
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
    """Copy of verify logits f32 [T, V], adjusted as ``adjust_logits`` would after the drafts before each row.

    (row, token) [P] are distinct pairs of sequence and token in its prompt or answer, ``count`` [P] how often in the
    answer, without drafts; presence, frequency, repetition f32 [B] are the penalties of each sequence (0, 0, 1: none).
    Row i of a sequence counts drafts 0..i−1 as answer tokens. Biases [Q] hold for every row of a sequence. mask int32
    [G, J+1, ceil(V/32)] of sequences mask_row [G] has the allowed tokens at every place.
    """
    width = drafts.shape[1]
    spare = logits.shape[0]  # a row for what lies outside
    out = torch.cat((logits, logits.new_zeros(1, logits.shape[1])))
    places = torch.arange(width + 1, device=logits.device)
    target = torch.where(places <= length.unsqueeze(1), first.unsqueeze(1) + places, spare)  # [B, J+1]
    at, ids, times = _counted(drafts, row, token, count)
    owner = at // (width + 1)
    flat = target.flatten()[at]
    flat = torch.where(times >= 0, flat, spare)
    x = out[flat, ids]
    repeat = repetition[owner]
    x = torch.where(x > 0, x / repeat, x * repeat)
    x = x - frequency[owner] * times - presence[owner] * (times > 0)
    out[flat, ids] = x
    if bias_row.numel():
        flat = target[bias_row]
        column = bias_token.unsqueeze(1).expand_as(flat)
        out[flat, column] = out[flat, column] + bias.unsqueeze(1)
    if mask_row.numel():
        bits = torch.arange(32, device=mask.device, dtype=torch.int32)
        allowed = ((mask.unsqueeze(-1) >> bits) & 1).flatten(2)[:, :, : out.shape[1]].bool()
        flat = target[mask_row]
        out[flat] = out[flat].masked_fill(~allowed, float("-inf"))
    return out[:spare]


def _counted(drafts: Tensor, row: Tensor, token: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(place b·(J+1)+i, token, answer count before place i) of known pairs and drafts; count −1: not a pair.

    Pairs of one place are distinct among those with a count ≥ 0.
    """
    rows, width = drafts.shape
    places = torch.arange(width + 1, device=drafts.device)
    before = places.unsqueeze(1) > places[:width]  # [J+1, J]: draft j lies before place i
    hits = (drafts[row] == token.unsqueeze(1)).unsqueeze(1) & before  # [P, J+1, J]
    known = count.unsqueeze(1) + hits.sum(-1)
    known_at = row.unsqueeze(1) * (width + 1) + places
    # drafts that are no known pair, each at its first occurrence in the block
    big = 1 << 32
    numbers = torch.arange(rows, device=drafts.device).unsqueeze(1)
    fresh = ~_among(numbers * big + drafts, row * big + token)
    same = drafts.unsqueeze(2) == drafts.unsqueeze(1)  # [B, J, J]
    fresh &= ~(same & before[:width].unsqueeze(0)).any(-1) & (drafts >= 0)
    drawn = (same.unsqueeze(1) & before.unsqueeze(0).unsqueeze(2)).sum(-1)  # [B, J+1, J]
    drawn = torch.where(fresh.unsqueeze(1) & (drawn > 0), drawn, -1)
    drawn_at = (numbers * (width + 1) + places).unsqueeze(2).expand_as(drawn)
    drawn_ids = drafts.clamp(min=0).unsqueeze(1).expand_as(drawn)
    return (
        torch.cat((known_at.flatten(), drawn_at.flatten())),
        torch.cat((token.unsqueeze(1).expand_as(known).flatten(), drawn_ids.flatten())),
        torch.cat((known.flatten(), drawn.flatten().to(known.dtype))),
    )


def _among(wanted: Tensor, keys: Tensor) -> Tensor:
    """Whether each value is one of ``keys`` [P]. ``torch.isin`` waits for the device, this does not."""
    if not keys.numel():
        return torch.zeros_like(wanted, dtype=torch.bool)
    ordered = keys.sort().values
    at = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=keys.numel() - 1)
    return ordered[at] == wanted


def accept_drawn(num: Numerics, drawn: Tensor, drafts: Tensor, first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, J+1], num_accepted int64 [B]) of coupled verification: drafts that equal what was drawn.

    drawn int64 [T] holds one token per verify row (negative where a row could not be sampled, which ends the run).
    A sequence emits num_accepted + 1 tokens; the places behind hold ``NO_TOKEN``.
    """
    width = drafts.shape[1]
    places = torch.arange(width + 1, device=drafts.device)
    tokens = drawn[(first.unsqueeze(1) + places).clamp(max=drawn.shape[0] - 1)]
    under_test = places[:width] < length.unsqueeze(1)
    stands = (tokens[:, :width] == drafts) & under_test & (drafts >= 0)
    accepted = stands.long().cumprod(1).sum(1)
    return torch.where(places <= accepted.unsqueeze(1), tokens, NO_TOKEN), accepted


def accept_rejection(
    num: Numerics,
    logits: Tensor,
    *,
    drafts: Tensor,
    draft_logprobs: Tensor,
    failed: Tensor,
    first: Tensor,
    length: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, J+1], num_accepted int64 [B]) of rejection verification over adjusted logits f32 [T, V].

    draft_logprobs f32 [B, J, V] is what ``draft_sample`` returned with the drafts [B, J] (normalised again here). One
    processed target distribution serves acceptance, residual and bonus. Parameters are [B]. failed int64 [T]: negative
    where a row cannot be sampled; the run ends there with that number.
    """
    rows, width = drafts.shape
    last = logits.shape[0] - 1
    t = torch.arange(last + 1, device=logits.device)
    owner = (torch.searchsorted(first, t, right=True) - 1).clamp(min=0)
    target = sampling.target_logprobs(
        num, logits, temperature[owner], top_k[owner], top_p[owner], min_p[owner]
    )  # f64 [T, V]
    places = torch.arange(width, device=drafts.device)
    flat = (first.unsqueeze(1) + places).clamp(max=last)
    ids = drafts.clamp(min=0)
    # the law of a Gumbel-max draw over rounded log-probabilities is their softmax
    draft = draft_logprobs.double().log_softmax(-1)
    p = target[flat, ids]
    q = draft.gather(2, ids.unsqueeze(2)).squeeze(2)
    u = accept_coins(seed.unsqueeze(1).expand(rows, width), position.unsqueeze(1) + places)
    coin = torch.log(_padded(u))[:, :width]
    stands = (coin + q < p) & (q > float("-inf")) & (drafts >= 0) & (failed[flat] == 0)
    stands &= places < length.unsqueeze(1)
    accepted = stands.long().cumprod(1).sum(1)
    end = (first + accepted).clamp(max=last)
    final = target[end]
    if width:
        refused = draft[torch.arange(rows, device=drafts.device), accepted.clamp(max=width - 1)]
        final = torch.where((accepted < length).unsqueeze(1), _residual(final, refused), final)
    token = sampling.draw(num, final, seed, position + accepted, sampling.TARGET)
    token = torch.where(failed[end] == 0, token, failed[end])
    spread = torch.cat((drafts, drafts.new_full((rows, 1), NO_TOKEN)), 1)
    places = torch.arange(width + 1, device=drafts.device)
    spread = torch.where(places < accepted.unsqueeze(1), spread, NO_TOKEN)
    return torch.where(places == accepted.unsqueeze(1), token.unsqueeze(1), spread), accepted


def accept_coins(seed: Tensor, position: Tensor) -> Tensor:
    """f64 in (0, 1) with 53 bits, of the accept stream; seed and position int64 of one shape."""
    zero = torch.zeros_like(position)
    words = sampling.philox(seed, position, zero + (sampling.ACCEPT << 24), zero, zero)
    # the midpoint of one of 2^52 cells, 26 bits of each word: neither 0 nor 1 is reached
    return (((words[..., 0] >> 6) << 26 | (words[..., 1] >> 6)).double() + 0.5) * 2.0**-52


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Log of the positive part of p − q, f64 [B, V] unnormalised; p where nothing is left but rounding."""
    gap = (draft - target).clamp(max=0.0)
    gap = torch.where(torch.isnan(gap), 0.0, gap)  # both zero
    log = target + torch.log1p(-torch.exp(_padded(gap)))[:, : gap.shape[1]]
    return torch.where(log.logsumexp(-1, keepdim=True) > _NO_RESIDUAL, log, target)


def truncate_emitted(
    num: Numerics, tokens: Tensor, accepted: Tensor, *, stop: Tensor, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(count int64 [B] of emitted tokens, num_accepted int64 [B], ended int64 [B]) after stops and length.

    tokens int64 [B, J+1] and accepted [B] from verification. stop int64 [B, S] are the ids that end a sequence, padded
    with ``NO_TOKEN``; the stop token itself is emitted and nothing behind it. room int64 [B] ≥ 0 is how many tokens a
    sequence may still emit. A failed draw (negative token) ends too. ended: 0 goes on, 1 stop, 2 length, 3 failed.
    num_accepted counts the emitted drafts: never the bonus token.
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    inside = places <= accepted.unsqueeze(1)
    stops = (tokens.unsqueeze(2) == stop.unsqueeze(1)).any(-1) & inside & (tokens >= 0)
    failed = (tokens < 0) & inside
    until = torch.where(stops | failed, places, width).amin(1) + 1  # tokens up to and with the first end
    count = torch.minimum(torch.minimum(until, accepted + 1), room)
    end = (count - 1).clamp(min=0).unsqueeze(1)
    one = count > 0
    ended = torch.where(
        one & failed.gather(1, end).squeeze(1),
        3,
        torch.where(one & stops.gather(1, end).squeeze(1), 1, torch.where(count >= room, 2, 0)),
    )
    return count, torch.minimum(accepted, count), ended
