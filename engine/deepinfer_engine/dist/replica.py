"""Which replica of an expert serves a token.

``hash``: by the token's own key and the expert, nothing of the batch, so that a row takes the same way in any batch.
``least_load``: the step's tokens are spread so that ranks get equal shares. Shares y of an expert's replicas start
even and are reweighted a few times against the load of their ranks; then the i-th of an expert's n tokens goes to the
replica whose part of [0, 1) holds (i + ½) / n.

Worked example of ``least_load``: expert 0 (8 tokens) on ranks 0 and 1, expert 1 (8 tokens) on rank 0 alone. Even
shares load the ranks 12 : 4; reweighting gives expert 0 to rank 1 almost wholly, about 8 : 8.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepinfer_engine.dist.placement import SlotTable

Choice = Literal["hash", "least_load"]

#: Knuth's multiplicative constant: spreads consecutive keys over replicas
_HASH = 2654435761
#: keys are cut to 31 bits, so that a product with the constant stays within int64
_KEY_BITS = 0x7FFFFFFF
#: a prime above every vocabulary: position and token id rarely make the same key
_POSITION = 1_000_003
#: rounds of reweighting; shares are within a few per cent of the best ones after six
_ROUNDS = 8


def route_key(position: Tensor, token_id: Tensor) -> Tensor:
    """int64 [T] that decides a row's replicas: its position and token id, nothing of the batch."""
    return position * _POSITION + token_id


def choose(table: SlotTable, layer: int, experts: Tensor, key: Tensor, choice: Choice) -> Tensor:
    """Physical slot int64 [T, K] of each (token, expert) pair; ``key`` [T] as ``route_key`` makes it."""
    if not table.replicated:
        return table.slot_of[layer, experts, 0]
    if choice == "least_load":
        return _least_load(table, layer, experts)
    hashed = (((key.unsqueeze(1) + experts) & _KEY_BITS) * _HASH) >> 16
    return table.slot_of[layer, experts, hashed % table.copies[layer, experts]]


def _least_load(table: SlotTable, layer: int, experts: Tensor) -> Tensor:
    slot_EX, copies_E = table.slot_of[layer], table.copies[layer]
    place = table.placement
    flat = experts.flatten()
    tokens_E = torch.zeros(table.experts, dtype=torch.int64, device=flat.device)
    tokens_E.scatter_add_(0, flat, torch.ones_like(flat))
    valid_EX = torch.arange(slot_EX.shape[1], device=flat.device) < copies_E.unsqueeze(1)
    rank_EX = slot_EX // place.slots_per_rank
    share_EX = valid_EX.double() / copies_E.unsqueeze(1)
    load_E = tokens_E.double().unsqueeze(1)
    mean = flat.numel() / place.ranks
    for _ in range(_ROUNDS):
        load_R = torch.zeros(place.ranks, dtype=torch.float64, device=flat.device)
        load_R.scatter_add_(0, rank_EX.flatten(), (share_EX * load_E).flatten())
        share_EX = share_EX * (mean / load_R.clamp(min=mean / 16))[rank_EX]
        share_EX = share_EX / share_EX.sum(1, keepdim=True)
    # rank of each pair among its expert's pairs, in token order
    order = torch.sort(flat, stable=True).indices
    before_E = tokens_E.cumsum(0) - tokens_E
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(flat.numel(), device=flat.device) - before_E[flat[order]]
    at = (nth.double() + 0.5) / tokens_E[flat]
    upto_EX = share_EX.cumsum(1)[flat]
    which = (at.unsqueeze(1) >= upto_EX).sum(1).clamp(max=copies_E[flat] - 1)
    return slot_EX[flat, which].view_as(experts)
