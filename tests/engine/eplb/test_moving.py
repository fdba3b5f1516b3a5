"""Move plans against a simulation of slots as bytes; the mover against the same plans on real tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.eplb.moving import MovePlan, plan_moves
from deepinfer_engine.runtime.expert_mover import ExpertMover
from deepinfer_kernels.registry import resolve

SIZE = 10  # bytes of an expert in the simulation


def random_slots(rng: np.random.Generator, layers: int, experts: int, ranks: int, slots: int) -> np.ndarray:
    """Every expert somewhere, the rest at random."""
    out = []
    for _ in range(layers):
        spare = rng.integers(0, experts, ranks * slots - experts)
        out.append(rng.permutation(np.concatenate([np.arange(experts), spare])))
    return np.stack(out).reshape(layers, ranks, slots).astype(np.int64)


def simulate(old: np.ndarray, plan: MovePlan) -> np.ndarray:
    """Run the steps on slots of ``SIZE`` bytes, each byte carrying its expert and offset; check the table each step."""
    layers = old.shape[0]
    offsets = np.arange(SIZE)
    held = old.reshape(layers, -1, 1) * SIZE + offsets
    staging: dict[int, np.ndarray] = {}
    now = old.copy()
    for parts, after in zip(plan.steps, plan.after, strict=True):
        for part in parts:
            for piece in part.pieces:
                space = staging.setdefault(piece.dst, np.full(SIZE, -1))
                space[piece.lo : piece.hi] = held[part.layer, piece.src, piece.lo : piece.hi]
            if part.last:
                assert set(part.slots) == set(staging), "a layer is filled from what was staged for it"
                for dst, data in staging.items():
                    held[part.layer, dst] = data
                staging.clear()
        for layer in {part.layer for part in parts if part.last}:
            now[layer] = after[layer]
        assert (now == after).all(), "only layers that are complete change in the table"
        assert (held == now.reshape(layers, -1, 1) * SIZE + offsets).all(), "a slot holds what the table does not say"
    assert not staging
    return now


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_slots_hold_what_the_table_says_after_every_step_within_the_limit(seed, ranks, extra, limit):
    rng = np.random.default_rng(seed)
    experts = ranks * 2
    old, new = (random_slots(rng, 3, experts, ranks, 2 + extra) for _ in range(2))
    order = rng.permutation(3).tolist()
    plan = plan_moves(old, new, expert_bytes=SIZE, limit=limit, order=order)
    assert (simulate(old, plan) == new).all()
    total = np.zeros(ranks, np.int64)
    for parts, most in zip(plan.steps, plan.most, strict=True):
        received = np.zeros(ranks, np.int64)
        for part in parts:
            for piece in part.pieces:
                here = piece.src // (2 + extra) == piece.dst // (2 + extra)
                assert piece.received != here
                if piece.received:
                    received[piece.dst // (2 + extra)] += piece.hi - piece.lo
        assert received.max() == most <= limit
        total += received
    assert (total == plan.received_R).all() and plan.bytes == plan.experts * SIZE


def test_the_worked_example():
    old, new = np.array([[[0, 1], [2, 3]]]), np.array([[[2, 1], [0, 3]]])
    plan = plan_moves(old, new, expert_bytes=10, limit=6)
    pieces = [[(p.src, p.dst, p.lo, p.hi) for part in step for p in part.pieces] for step in plan.steps]
    assert pieces == [[(2, 0, 0, 6), (0, 2, 0, 6)], [(2, 0, 6, 10), (0, 2, 6, 10)]]
    assert [[part.last for part in step] for step in plan.steps] == [[False], [True]]
    assert plan.received_R.tolist() == [10, 10]


def test_receivers_are_dealt_to_the_holders():
    old = np.array([[[0, 1], [0, 1], [2, 3], [4, 5], [6, 7], [2, 3]]])
    new = np.array([[[0, 1], [0, 1], [0, 3], [0, 5], [0, 7], [2, 4]]])
    new[0, 4, 1], new[0, 3, 1] = 6, 5
    new[0, 1] = [0, 7]
    sources = [p.src for part in plan_moves(old, new, expert_bytes=1, limit=9).steps[0] for p in part.pieces]
    assert sources.count(0) == 2 and sources.count(2) == 1, "expert 0 goes to three ranks from two holders"


@dataclass(frozen=True)
class Stack:
    dense: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Bank:
    up: Stack
    down: torch.Tensor


@pytest.mark.parametrize("limit", [37, 1000, 1 << 20])
def test_the_mover_fills_slots_of_any_format_with_the_experts_of_the_plan(limit: int):
    rng = np.random.default_rng(limit)
    old, new = (random_slots(rng, 2, 12, 4, 4) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(2, 12, 6, 5, generator=generator).to(torch.bfloat16)
    scale = torch.randint(0, 255, (2, 12, 3), generator=generator, dtype=torch.uint8)
    down = torch.randn(2, 12, 7, generator=generator)

    def bank(layer: int, slots: np.ndarray) -> Bank:
        at = torch.from_numpy(slots[layer].reshape(-1))
        return Bank(Stack(up[layer][at], scale[layer][at]), down[layer][at])

    banks = [bank(layer, old) for layer in range(2)]
    mover = ExpertMover(banks, range(16), resolve("float", "cpu"))
    assert mover.expert_bytes == 6 * 5 * 2 + 3 + 7 * 4
    plan = plan_moves(old, new, expert_bytes=mover.expert_bytes, limit=limit)
    for step, after in zip(plan.steps, plan.after, strict=True):
        mover.run(step)
        for layer in range(2):
            want = bank(layer, after)
            assert torch.equal(banks[layer].up.dense, want.up.dense) and torch.equal(banks[layer].down, want.down)
            assert torch.equal(banks[layer].up.scale, want.up.scale)
    assert (plan.after[-1] == new).all() and mover.staging_bytes <= 16 * mover.expert_bytes
