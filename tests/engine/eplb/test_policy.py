"""Laws of the planner: near the exact optimum, reproducible to the byte, scale-free, never worse than its
references."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.eplb import baselines, placement, policy, score
from deepinfer_engine.errors import ArtefactError, UsageError

FLASH = np.array([[[600, 560, 120, 120, 20, 10, 10, 10]]])


def peak(counts, slots):
    """Exact Σ_steps max_rank from slots alone, in plain integers."""
    copies = np.bincount(slots.reshape(-1), minlength=counts.shape[1]).tolist()
    return sum(
        max(sum(int(step[e]) * placement.LCM // copies[e] for e in row) for row in slots.tolist()) for step in counts
    )


def slots_of(plan):
    return np.stack([p.slot_RS for p in plan])


def test_worked_example_of_the_module():
    (got,) = policy.plan_experts(FLASH, policy.Topology(8, 2))
    assert got.copies_E.tolist() == [4, 4, 2, 2, 1, 1, 1, 1]
    assert got.slot_RS.tolist() == [[0, 4], [0, 5], [0, 6], [0, 7], [1, 2], [1, 2], [1, 3], [1, 3]]
    assert peak(FLASH[:, 0], got.slot_RS) == 200 * placement.LCM
    assert peak(FLASH[:, 0], baselines.totals_rule(FLASH[:, 0], 8, 2)) == 232 * placement.LCM


def best_possible(counts, ranks, slots):
    """The smallest Σ_steps max_rank over every plan, by enumeration of all distinct ranks' contents."""
    experts = counts.shape[1]
    rows = list(itertools.combinations(range(experts), slots))
    best = None
    for choice in itertools.combinations_with_replacement(rows, ranks):
        plan = np.array(choice)
        if len(np.unique(plan)) == experts:
            value = peak(counts, plan)
            best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "steps"), [(5, 3, 2, 1), (6, 3, 3, 6), (6, 2, 4, 12), (7, 3, 3, 10)]
)
def test_close_to_the_best_of_all_plans_and_never_below_it(experts, ranks, slots, steps, seed):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(
        np.exp(rng.normal(4, 0.6, experts)) * np.exp(rng.normal(0, 0.3, (steps, 1)) * rng.normal(0, 1, experts))
    )
    (got,) = policy.plan_experts(counts[:, None], policy.Topology(ranks, slots))
    best = best_possible(counts, ranks, slots)
    assert best is not None and best <= peak(counts, got.slot_RS) <= best * 1.12


def test_average_gap_to_the_exact_optimum_is_small():
    gaps = []
    for seed in range(12):
        rng = np.random.default_rng(100 + seed)
        counts = rng.poisson(np.exp(rng.normal(4, 0.5, 6)), (12, 6))
        (got,) = policy.plan_experts(counts[:, None], policy.Topology(3, 3))
        gaps.append(peak(counts, got.slot_RS) / best_possible(counts, 3, 3) - 1)
    assert np.mean(gaps) < 0.02


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_plan_is_legal_and_not_worse_than_longest_first(seed):
    rng = np.random.default_rng(seed)
    ranks, slots = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    experts = int(rng.integers(-(-ranks * slots // min(ranks, 16)), ranks * slots + 1))
    counts = rng.poisson(np.exp(rng.normal(2, 1, experts)), (int(rng.integers(1, 30)), experts))
    (got,) = policy.plan_experts(counts[:, None], policy.Topology(ranks, slots))
    assert (np.bincount(got.slot_RS.reshape(-1), minlength=experts) == got.copies_E).all() and got.copies_E.min() >= 1
    assert placement.colocated(got.slot_RS) == []
    if got.signal:
        assert peak(counts, got.slot_RS) <= peak(counts, baselines.totals_rule(counts, ranks, slots))


@pytest.mark.parametrize("factor", [3, 1024, 10**6])
def test_scaling_a_layer_changes_nothing(decode, factor):
    counts = decode(steps=120)
    scaled = counts * np.array([factor, 1])[None, :, None]
    a, b = policy.plan_experts(counts, policy.Topology(8, 7)), policy.plan_experts(scaled, policy.Topology(8, 7))
    assert (slots_of(a) == slots_of(b)).all()


def test_layers_do_not_influence_each_other(decode):
    counts = decode(steps=120)
    whole = policy.plan_experts(counts, policy.Topology(8, 7))
    alone = policy.plan_experts(counts[:, 1:], policy.Topology(8, 7))
    assert (whole[1].slot_RS == alone[0].slot_RS).all()


def test_idle_steps_change_nothing(decode):
    counts = decode(steps=120)
    padded = np.insert(counts, [0, 50, 120], 0, axis=0)
    assert (
        slots_of(policy.plan_experts(counts, policy.Topology(8, 7)))
        == slots_of(policy.plan_experts(padded, policy.Topology(8, 7)))
    ).all()


def test_renaming_experts_keeps_the_balance(decode):
    counts = decode(steps=120)[:, :1]
    order = np.random.default_rng(0).permutation(counts.shape[2])
    a, b = (
        policy.plan_experts(counts, policy.Topology(8, 7)),
        policy.plan_experts(counts[:, :, order], policy.Topology(8, 7)),
    )
    x, y = peak(counts[:, 0], a[0].slot_RS), peak(counts[:, 0][:, order], b[0].slot_RS)
    assert x == pytest.approx(y, rel=5e-3)


@pytest.mark.parametrize("load", [1, 100, 10_000, 1_000_000])
def test_uniform_loads_spread_the_copies_whatever_their_size(load):
    (got,) = policy.plan_experts(np.full((20, 1, 64), load), policy.Topology(16, 5))
    assert np.bincount(got.copies_E).tolist() == [0, 48, 16] and placement.colocated(got.slot_RS) == []


def test_tied_hot_experts_are_both_copied():
    counts = np.full((10, 1, 16), 1000)
    counts[:, :, [3, 7]] = 5_000_000
    (got,) = policy.plan_experts(counts, policy.Topology(6, 3))
    assert got.copies_E[3] == got.copies_E[7] == 2


SCRIPT = """
import hashlib, sys
import numpy as np
from deepinfer_engine.eplb import policy, traces
spec = traces.TraceSpec(
    experts=48, layers=4, ranks=8, top_k=4, tokens_per_rank=200, requests=256, lifetime_steps=100.0, skew=0.8
)
counts = traces.synthetic(spec, 200, 1)
settings = policy.PlanSettings(threads=int(sys.argv[1]))
cold = np.stack([p.slot_RS for p in policy.plan_experts(counts[:100], policy.Topology(8, 7), settings=settings)])
warm = policy.plan_experts(counts[100:], policy.Topology(8, 7), old_LRS=cold, settings=settings)
print(hashlib.sha256(cold.tobytes() + np.stack([p.slot_RS for p in warm]).tobytes()).hexdigest())
"""


def test_same_bytes_in_other_processes_on_other_thread_counts():
    root = Path(__file__).resolve().parents[3]
    digests = set()
    for threads, hash_seed, blas in ((1, "0", "1"), (2, "1", "2"), (4, "2", "1")):
        env = os.environ | {
            "PYTHONPATH": f"{root}:{root / 'engine'}",
            "PYTHONHASHSEED": hash_seed,
            "OMP_NUM_THREADS": blas,
            "OPENBLAS_NUM_THREADS": blas,
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(threads)], env=env, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1 and len(digests.pop()) == len(hashlib.sha256().hexdigest())


# ---------------------------------------------------------------------- old plans, failures, nodes


def received(new, old):
    return [
        sum(len(set(a) - set(b)) for a, b in zip(x, y, strict=True))
        for x, y in zip(new.tolist(), old.tolist(), strict=True)
    ]


def test_warm_start_moves_little_and_is_never_worse_than_keeping(decode):
    counts = decode(steps=480)
    topology = policy.Topology(8, 7)
    old = slots_of(policy.plan_experts(counts[:240], topology))
    cold = slots_of(policy.plan_experts(counts[240:], topology))
    warm = slots_of(policy.plan_experts(counts[240:], topology, old_LRS=old))
    assert sum(received(warm, old)) < 0.6 * sum(received(cold, old))
    for k in range(counts.shape[1]):
        now = counts[240:, k]
        assert peak(now, warm[k]) <= peak(now, old[k])
        assert peak(now, warm[k]) <= 1.02 * peak(now, cold[k])


@pytest.mark.parametrize("cap", [0, 2, 9])
def test_cap_on_moves_holds_per_layer(decode, cap):
    counts = decode(steps=480)
    topology = policy.Topology(8, 7)
    old = slots_of(policy.plan_experts(counts[:240], topology))
    warm = policy.plan_experts(
        counts[240:], topology, old_LRS=old, settings=policy.PlanSettings(move_price=0.0, max_moves=cap)
    )
    assert max(received(slots_of(warm), old)) <= cap


def test_experts_that_stay_keep_their_slots(decode):
    counts = decode(steps=480)
    old = slots_of(policy.plan_experts(counts[:240], policy.Topology(8, 7)))
    warm = slots_of(policy.plan_experts(counts[240:], policy.Topology(8, 7), old_LRS=old))
    for a, b in zip(old.reshape(-1, 7).tolist(), warm.reshape(-1, 7).tolist(), strict=True):
        for s, e in enumerate(a):
            assert e not in b or b[s] == e


def test_same_statistics_give_the_plan_back(decode):
    counts = decode(steps=240)
    old = slots_of(policy.plan_experts(counts, policy.Topology(8, 7)))
    again = policy.plan_experts(
        counts, policy.Topology(8, 7), old_LRS=old, settings=policy.PlanSettings(move_price=1.0)
    )
    assert sum(received(slots_of(again), old)) == 0


def test_lost_ranks_only_move_what_died(decode):
    counts = decode(steps=240)
    old = slots_of(policy.plan_experts(counts, policy.Topology(8, 8)))
    new = policy.plan_experts(
        counts, policy.Topology(8, 8, dead=(2, 5)), old_LRS=old, settings=policy.PlanSettings(move_price=50.0)
    )
    for k, p in enumerate(new):
        assert (p.slot_RS[[2, 5]] == -1).all() and p.copies_E.min() >= 1 and placement.colocated(p.slot_RS) == []
        orphans = set(range(48)) - set(np.delete(old[k], [2, 5], axis=0).reshape(-1).tolist())
        moved = sum(
            len(set(a) - set(b))
            for r, (a, b) in enumerate(zip(p.slot_RS.tolist(), old[k].tolist(), strict=True))
            if r not in (2, 5)
        )
        assert len(orphans) <= moved <= len(orphans) + 12


@pytest.mark.parametrize(("ranks", "slots"), [(10, 6), (6, 9), (8, 9), (8, 6)])
def test_resizing_keeps_surviving_experts(decode, ranks, slots):
    counts = decode(steps=240)
    old = slots_of(policy.plan_experts(counts, policy.Topology(8, 7)))
    new = policy.plan_experts(counts, policy.Topology(ranks, slots), old_LRS=old)
    cold = policy.plan_experts(counts, policy.Topology(ranks, slots))
    for k, p in enumerate(new):
        assert p.slot_RS.shape == (ranks, slots) and placement.colocated(p.slot_RS) == []
        stay = sum(len(set(a) & set(b)) for a, b in zip(p.slot_RS.tolist(), old[k].tolist(), strict=False))
        stay_cold = sum(len(set(a) & set(b)) for a, b in zip(cold[k].slot_RS.tolist(), old[k].tolist(), strict=False))
        assert stay > stay_cold


def test_groups_stay_inside_their_node(decode):
    counts = decode(steps=240)
    for p in policy.plan_experts(counts, policy.Topology(8, 8, nodes=2, groups=8)):
        nodes = [{e // 6 for e in p.slot_RS[n * 4 : n * 4 + 4].reshape(-1).tolist()} for n in range(2)]
        assert len(nodes[0]) == len(nodes[1]) == 4 and not nodes[0] & nodes[1]
        assert placement.colocated(p.slot_RS) == []


# ---------------------------------------------------------------------- edges


def test_layer_without_tokens_is_identity_like_or_kept(decode):
    counts = decode(steps=60).copy()
    counts[:, 0] = 0
    fresh = policy.plan_experts(counts, policy.Topology(8, 7))
    assert not fresh[0].signal and fresh[1].signal
    assert [row[:6] for row in fresh[0].slot_RS.tolist()] == np.arange(48).reshape(8, 6).tolist()
    old = slots_of(fresh)[:, ::-1]
    kept = policy.plan_experts(counts, policy.Topology(8, 7), old_LRS=old)
    assert kept[0].start == "kept" and (kept[0].slot_RS == old[0]).all()


def test_one_expert_takes_everything():
    counts = np.zeros((20, 1, 16), np.int64)
    counts[:, 0, 5] = 1000
    (got,) = policy.plan_experts(counts, policy.Topology(8, 3))
    assert got.copies_E[5] == 8 and score.layer_balance(counts[:, 0], got.slot_RS, got.copies_E).moe_lb == 1.0


def test_one_rank_holds_everything():
    (got,) = policy.plan_experts(np.full((9, 1, 5), 3), policy.Topology(1, 5))
    assert sorted(got.slot_RS[0].tolist()) == [0, 1, 2, 3, 4]


def test_more_slots_than_useful_copies_share_ranks_only_then():
    (got,) = policy.plan_experts(np.full((9, 1, 3), 3), policy.Topology(2, 5))
    assert got.copies_E.sum() == 10 and got.copies_E.min() >= 3 and len(placement.colocated(got.slot_RS)) >= 4


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: policy.Topology(0, 1), "ranks is 0"),
        (lambda: policy.Topology(4, 0), "slots per rank is 0"),
        (lambda: policy.Topology(4, 2, dead=(4,)), "rank 4 does not exist, expected 0..3"),
        (lambda: policy.Topology(2, 2, dead=(0, 1)), "no rank of 2 is alive"),
        (lambda: policy.Topology(6, 2, nodes=4), "divisor of the 6 ranks"),
        (lambda: policy.Topology(8, 2, nodes=2, groups=3), "multiple of the 2 nodes"),
        (lambda: policy.PlanSettings(move_price=-1), "move price"),
        (lambda: policy.PlanSettings(max_moves=-1), "max moves"),
        (lambda: policy.PlanSettings(threads=0), "threads"),
    ],
)
def test_impossible_settings_are_refused(build, text):
    with pytest.raises(UsageError, match=text):
        build()


@pytest.mark.parametrize(
    ("topology", "text", "hint"),
    [
        (policy.Topology(4, 3), "12 slots for 16 experts", "4 slots per rank, or 6 live ranks"),
        (policy.Topology(4, 5, dead=(0,)), "15 slots for 16 experts", "6 slots per rank, or 4 live ranks"),
        (policy.Topology(4, 8, nodes=2, groups=6), "divisor of the 16 experts", None),
        (policy.Topology(4, 4, dead=(0,), nodes=2, groups=2), "16 live|12 slots|node 0", None),
        (policy.Topology(64, 5), "more than 16 replicas", "4 slots per rank"),
    ],
)
def test_sizes_that_do_not_fit_name_the_nearest_legal_value(topology, text, hint):
    with pytest.raises(UsageError, match=text) as e:
        policy.plan_experts(np.ones((1, 1, 16), np.int64), topology)
    assert hint is None or hint in e.value.hint


def test_counts_too_large_for_exact_arithmetic_are_refused():
    counts = np.array([[[2**62, 1, 1, 3]]])
    with pytest.raises(ArtefactError, match=r"layer 0: .* tokens in the window"):
        policy.plan_experts(counts, policy.Topology(2, 2))


def test_old_plan_with_other_layers_is_refused(decode):
    counts = decode(steps=60)
    with pytest.raises(ArtefactError, match="old plan has 1 layers, the statistics have 2"):
        policy.plan_experts(counts, policy.Topology(8, 7), old_LRS=np.zeros((1, 8, 7), np.int64))
