"""Dispatch, grouped experts, combine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank, swiglu
from deepinfer_kernels.registry import IMPLEMENTATIONS, Ops, resolve

#: those of other devices have tests of their own
ON_CPU = [i for i in IMPLEMENTATIONS["moe_experts"] if "cpu" in i.platforms]


def bank(ops: Ops, slots: int, hidden: int, width: int) -> ExpertBank:
    torch.manual_seed(3)
    made = []
    for out, inner in ((width, hidden), (width, hidden), (hidden, width)):
        packed = torch.randint(0, 256, (slots, out, inner // 2), dtype=torch.uint8).view(torch.int8)
        scale = torch.randint(121, 125, (slots, out, inner // 32), dtype=torch.uint8)
        made.append(ops.prepare_weight(packed, scale, "fp4"))
    return ExpertBank(*made)


def oracle(rows, slots_TK, weights_TK, b: ExpertBank, shared, limit):
    """Token by token, expert by expert, in f64."""
    out = shared.double().clone()
    for t in range(len(rows)):
        for s, w in zip(slots_TK[t].tolist(), weights_TK[t].tolist(), strict=True):
            x = rows[t].double()
            gate = (b.w1.dense[s].double() @ x).clamp(max=limit)
            up = (b.w3.dense[s].double() @ x).clamp(-limit, limit)
            out[t] += b.w2.dense[s].double() @ (w * F.silu(gate) * up)
    return out


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_dispatch_experts_combine_equal_the_token_by_token_oracle(tokens):
    ops = resolve("float", "cpu")
    b = bank(ops, 8, 64, 32)
    torch.manual_seed(tokens)
    x, shared = torch.randn(tokens, 64), torch.randn(tokens, 64)
    slots = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    token, order, counts = ops.dispatch_permute(slots, 8)
    weight = torch.empty(tokens * 3).index_copy_(0, order, weights.flatten())
    y = ops.moe_experts(x[token], counts, b, weight, 10.0)
    out = ops.moe_combine(y, order, shared, 3)
    expected = oracle(x, slots, weights, b, shared, 10.0)
    assert ((out - expected).norm() / expected.norm()) < 1e-5
    assert counts.tolist() == torch.bincount(slots.flatten(), minlength=8).tolist()


@pytest.mark.parametrize("implementation", ON_CPU, ids=lambda i: i.backend)
@pytest.mark.parametrize("counts", [[3, 0, 0, 5], [0, 0, 0, 1], [16, 1, 1, 2]])
def test_every_implementation_of_the_experts_agrees_with_the_reference(implementation, counts, request):
    # skips where there is no compiler
    cache = request.getfixturevalue("kernel_cache") if implementation.backend == "cpu" else None
    mode = "fast" if "fast" in implementation.numerics else "reference"
    ops = resolve(mode, "cpu", {"moe_experts": implementation.backend}, cache=cache)
    b = bank(ops, 4, 64, 32)
    torch.manual_seed(7)
    rows = torch.randn(sum(counts), 64).to(ops.numerics.act)
    weight = torch.rand(sum(counts))
    reference = resolve(mode, "cpu", {"moe_experts": "reference"}).moe_experts
    mine = ops.moe_experts(rows, torch.tensor(counts), b, weight, 10.0).float()
    want = reference(rows, torch.tensor(counts), b, weight, 10.0).float()
    assert torch.isfinite(mine).all()
    assert ((mine - want).norm() / want.norm()) < 5e-3


def test_clamps_are_one_sided_for_the_gate_and_two_sided_for_up():
    ops = resolve("float", "cpu")
    out = swiglu(ops.numerics, torch.tensor([[50.0, -50.0]]), torch.tensor([[50.0, -50.0]]), 10.0)
    assert torch.allclose(out, torch.tensor([[F.silu(torch.tensor(10.0)) * 10, F.silu(torch.tensor(-50.0)) * -10]]))


def test_prepared_weights_keep_the_kind():
    ops = resolve("fast", "cpu")
    w = ops.prepare_weight(torch.randn(4, 32), None, "f32")
    assert isinstance(w, Weight) and w.kind == "f32" and w.dense.dtype == torch.float32
