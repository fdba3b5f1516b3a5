"""Balance figures against definitions written out, and the per-step optimum against its dual."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from deepinfer_engine.eplb import policy, score


def plain_loads(counts, slots, copies):
    return [[sum(Fraction(int(step[e]), int(copies[e])) for e in row) for row in slots] for step in counts]


def planned(decode, steps: int = 40):
    counts = decode(experts=12, ranks=4, steps=steps)[:, 0]
    p = policy.plan_experts(counts[:, None], policy.Topology(4, 4))[0]
    return counts, p.slot_RS, p.copies_E


def test_balance_is_the_definition(decode):
    counts, slots, copies = planned(decode)
    loads = plain_loads(counts, slots, copies)
    got = score.layer_balance(counts, slots, copies)
    assert got is not None
    assert got.moe_lb == pytest.approx(
        float(sum(max(s) for s in loads) / sum(sum(s) / len(s) for s in loads)), rel=1e-12
    )
    assert got.moe_lb_step == pytest.approx(float(np.mean([max(s) / (sum(s) / len(s)) for s in loads])), rel=1e-12)
    assert score.peak_sum(counts, slots, copies) == sum(max(s) for s in loads) * score.LCM


def test_huge_counts_stay_exact(decode):
    counts, slots, copies = planned(decode, 4)
    big = counts * 10**9
    assert score.peak_sum(big, slots, copies) == score.peak_sum(counts, slots, copies) * 10**9


def test_idle_steps_do_not_count_and_a_silent_layer_has_no_balance(decode):
    counts, slots, copies = planned(decode)
    padded = np.insert(counts, [3, 9], 0, axis=0)
    assert score.layer_balance(padded, slots, copies) == score.layer_balance(counts, slots, copies)
    assert score.layer_balance(np.zeros_like(counts), slots, copies) is None


def test_dead_ranks_are_left_out(decode):
    counts, slots, copies = planned(decode)
    with_dead = np.insert(slots, 2, -1, axis=0)
    assert score.layer_balance(counts, with_dead, copies) == score.layer_balance(counts, slots, copies)


@pytest.mark.parametrize(("ranks", "value"), [(2, 0.5642), (4, 1.0294), (64, 2.3437)])
def test_expected_maximum_of_normals(ranks, value):
    assert score.expected_normal_max(ranks) == pytest.approx(value, abs=2e-3)


def test_noise_floor_is_what_counting_noise_costs():
    rng = np.random.default_rng(3)
    counts = rng.poisson(300, (2000, 32))
    slots, copies = np.arange(32).reshape(8, 4), np.ones(32, np.int64)
    got = score.layer_balance(counts, slots, copies)
    assert got is not None and got.moe_lb == pytest.approx(got.floor, abs=2e-3)


def test_best_split_reaches_the_bound_of_its_dual(decode):
    """min max load = max over sets of ranks of (tokens that can only go there) ÷ (ranks in the set)."""
    counts, slots, _ = planned(decode, 12)
    where = [set(w) for w in score.holders(slots, 12)]
    loads = score.best_split_loads(counts, slots, tol=1e-9)
    assert loads.sum(axis=1) == pytest.approx(counts.sum(axis=1))
    for step, got in zip(counts, loads.max(axis=1), strict=True):
        sets = [set(c) for n in range(1, 5) for c in itertools.combinations(range(4), n)]
        bound = max(sum(int(step[e]) for e in range(12) if where[e] <= s) / len(s) for s in sets)
        assert got == pytest.approx(bound, rel=1e-4)


def test_dispatch_order_lp_even_hash(decode):
    counts, slots, copies = planned(decode)
    even = score.layer_balance(counts, slots, copies)
    lp = score.layer_balance(counts, slots, copies, dispatch="lp")
    hashed = score.layer_balance(counts, slots, copies, dispatch="hash", rng=np.random.default_rng(1))
    again = score.layer_balance(counts, slots, copies, dispatch="hash", rng=np.random.default_rng(1))
    assert even and lp and hashed and lp.moe_lb < even.moe_lb < hashed.moe_lb and hashed == again
