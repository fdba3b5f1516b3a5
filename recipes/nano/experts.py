"""Router and experts of the training model.

Two interchangeable paths compute the routed experts: ``dense`` runs every expert on every token with zero weights for
those not selected (exact, simple, for the CPU and as a check), ``grouped`` sorts the rows by expert and uses the
grouped matrix product of recent GPUs. Neither drops a token and neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def route(
    x: Tensor, gate: Tensor, bias: Tensor, *, k: int, temperature: float, norm: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(expert ids [T, k], weights f32 [T, k], scores f32 [T, E]): top-k of score + bias, weights from the scores."""
    # 1e-30 changes no score and keeps the gradient of the root finite when softplus underflows
    scores = torch.sqrt(torch.nn.functional.softplus(x.float() @ gate.float().t() / temperature) + 1e-30)
    ids = (scores.detach() + bias).topk(k, -1).indices
    weights = scores.gather(-1, ids)
    if norm and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling, scores


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """f32 silu(min(gate, limit)) · clamp(up, ±limit)."""
    return torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


Quantise = Callable[[Tensor], Tensor]


def weighted(gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
    """The hidden rows of routed experts: the routing weight is applied before the down projection."""
    return (gated(gate, up, limit) * weight.unsqueeze(-1)).to(gate.dtype)


def dense_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    limit: float,
    act: Quantise,
    hidden_rows: Callable[..., Tensor] = weighted,
) -> Tensor:
    """f32 [T, H]; every expert on every token."""
    experts, inner, hidden = w1.shape
    spread = torch.zeros(x.shape[0], experts, device=x.device).scatter(1, ids, weights)
    gate = (x @ w1.reshape(-1, hidden).t()).view(-1, experts, inner)
    up = (x @ w3.reshape(-1, hidden).t()).view(-1, experts, inner)
    rows = act(hidden_rows(gate, up, spread, limit)).flatten(1)
    return (rows @ w2.transpose(1, 2).reshape(-1, hidden)).float()


class _Spread(torch.autograd.Function):
    """Rows of [T, H] repeated k times and sorted by expert; the gradient is a gather and a sum, not a scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """The inverse of ``_Spread``: sums the k rows of every token in f32."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(order)
        ctx.k, ctx.dtype = k, rows.dtype
        return rows[inverse].unflatten(0, (-1, k)).sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return grad.to(ctx.dtype)[order // ctx.k], None, None, None


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    limit: float,
    act: Quantise,
    hidden_rows: Callable[..., Tensor] = weighted,
) -> Tensor:
    """f32 [T, H]; rows sorted by expert, three grouped matrix products."""
    k = ids.shape[1]
    flat = ids.flatten()
    sorted_ids, order = flat.sort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=x.device))
    every = torch.arange(w1.shape[0], device=x.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, every, right=True).to(torch.int32)
    rows = _Spread.apply(x, order, inverse, k)
    gate = torch.ops.aten._grouped_mm(rows, w1.transpose(1, 2), offs=ends)
    up = torch.ops.aten._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    hidden = act(hidden_rows(gate, up, weights.flatten().gather(0, order), limit))
    return _Collect.apply(torch.ops.aten._grouped_mm(hidden, w2.transpose(1, 2), offs=ends), order, inverse, k)


def expert_loads(ids: Tensor, experts: int) -> Tensor:
    """f32 [E]: share of the selections that each expert received."""
    every = torch.arange(experts, device=ids.device)
    return (ids.flatten().unsqueeze(1) == every).sum(0).float() / ids.numel()  # no scatter: 64 counters would collide


def balance_loss(scores: Tensor, loads: Tensor) -> Tensor:
    """E · Σ load · mean share of the score; 1 when even."""
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return scores.shape[-1] * (loads * share).sum()
