"""Router, routed experts over physical slots, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_kernels.reference.linear import Weight, linear, matmul, quantised_input
from deepinfer_kernels.reference.numerics import Numerics


@dataclass(frozen=True)
class ExpertBank:
    """Weights of one layer's physical slots: w1 (gate) and w3 (up) [S, I, H], w2 (down) [S, H, I]."""

    w1: Weight
    w3: Weight
    w2: Weight


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(expert ids [T, k] ascending int64, weights [T, k] f32).

    Scores sqrt(softplus(x·Wᵀ/temperature)) choose with the correction bias added (ties: lowest id) and weigh
    without it, normalised over the chosen when ``normalise`` and k > 1, then times ``scale``.
    """
    score = F.softplus(x.float() @ weight.float().mT / temperature).sqrt()
    order = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices
    ids = order[:, :k].sort(-1).values
    w = score.gather(1, ids)
    if normalise and k > 1:
        w = w / (w.sum(-1, keepdim=True) + 1e-20)  # 1e-20: the release's guard against an all-zero row
    return ids, w * scale


def swiglu(num: Numerics, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit), times the routing weight [M] if given, in the activation dtype."""
    g = gate.float().clamp(max=limit)
    u = up.float().clamp(-limit, limit)
    a = F.silu(g) * u
    if weight is not None:
        a = a * weight.unsqueeze(-1)
    return num.round(a)


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] of ``rows`` [M, H] sorted by slot; ``counts`` [S] int64 rows per slot; weight [M].

    The routing weight is applied before the down projection, that is before its activation quantisation.
    """
    out = torch.empty_like(rows)
    w1, w3, w2 = bank.w1.dense, bank.w3.dense, bank.w2.dense
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        part = slice(start, start + count)
        x = quantised_input(num, rows[part], bank.w1.kind)
        g = num.round(matmul(x, w1[slot]))
        u = num.round(matmul(x, w3[slot]))
        a = swiglu(num, g, u, limit, weight[part])
        out[part] = num.round(matmul(quantised_input(num, a, bank.w2.kind), w2[slot]))
        start += count
    return out


def moe_experts_grouped(
    num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float
) -> Tensor:
    """``moe_experts`` as three grouped matrix products: no loop over slots, no host synchronisation. bf16 only."""
    ends = counts.cumsum(0).to(torch.int32)
    g = F.grouped_mm(rows, bank.w1.dense.mT, offs=ends)
    u = F.grouped_mm(rows, bank.w3.dense.mT, offs=ends)
    a = swiglu(num, g, u, limit, weight)
    return F.grouped_mm(a, bank.w2.dense.mT, offs=ends)


def moe_combine(num: Numerics, y: Tensor, order: Tensor, shared: Tensor, k: int) -> Tensor:
    """[T, H]: Σ over the k expert rows of each token (f32, ascending expert id) plus the shared expert, rounded once.

    ``y`` [T·k, H] holds expert rows in slot order; ``order`` [T·k] is the position of each (token, choice) in it.
    """
    routed = y.index_select(0, order).unflatten(0, (-1, k)).float()
    total = routed[:, 0]
    for choice in range(1, k):  # fixed order of the sum, k is a small constant
        total = total + routed[:, choice]
    return num.round(total + shared.float())


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert: same clamps, no routing weight. [T, H] → [T, H]."""
    return linear(num, swiglu(num, linear(num, x, w1), linear(num, x, w3), limit), w2)


def dispatch_permute(num: Numerics, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by slot.

    slots [T, k] int64 → (source token of each sorted row [T·k], position of each pair in the sorted rows [T·k],
    rows per slot [num_slots]). Pairs of one slot keep token order.
    """
    flat = slots.flatten()
    perm = torch.sort(flat, stable=True).indices
    order = torch.empty_like(perm)
    order[perm] = torch.arange(flat.numel(), device=flat.device)
    counts = torch.zeros(num_slots, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return perm // slots.shape[1], order, counts


def dispatch_rows(
    num: Numerics, x: Tensor, slots: Tensor, weights: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dispatch_permute`` with what travels: x [T, H] and weights [T, k] of the pairs.

    (rows [T·k, H] and weights [T·k] in sorted order, position of each pair in it [T·k], rows per slot [num_slots]).
    """
    token, order, counts = dispatch_permute(num, slots, num_slots)
    weight = torch.empty_like(weights.flatten()).index_copy_(0, order, weights.flatten())
    return x.index_select(0, token), weight, order, counts


def count_choices(num: Numerics, ids: Tensor, total: int) -> Tensor:
    """int64 [L, total]: how often each of ``total`` experts is among the choices int64 [L, T, k] of a layer."""
    flat = ids.flatten(1)
    counts = torch.zeros((ids.shape[0], total), dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))
