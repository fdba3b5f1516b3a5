"""Replica counts and longest-first placement against brute force, and the law that replicas do not share a rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.eplb import layout, placement
from deepinfer_engine.errors import UsageError


@given(st.lists(st.integers(0, 50), min_size=2, max_size=5), st.integers(2, 3), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_replica_counts_minimise_the_largest_load_per_copy(weights, ranks, extra):
    weight = np.array(weights, np.int64)
    slots = len(weights) + min(extra, len(weights) * (ranks - 1))
    got = placement.replica_counts(weight, ranks, slots)
    assert got.sum() == slots and got.min() >= 1 and got.max() <= ranks
    options = (c for c in itertools.product(range(1, ranks + 1), repeat=len(weights)) if sum(c) == slots)
    best = min(max(w * placement.LCM // n for w, n in zip(weights, c, strict=True)) for c in options)
    assert (weight * placement.LCM // got).max() == best


@pytest.mark.parametrize("load", [1, 100, 10_000, 1_000_000, 10**9])
def test_equal_loads_spread_the_copies_over_the_lowest_ids_at_any_magnitude(load):
    copies = placement.replica_counts(np.full(384, load, np.int64), 64, 448)
    assert copies[:64].tolist() == [2] * 64 and copies[64:].max() == 1


def test_copies_stop_at_the_ranks_and_at_sixteen():
    hot = np.array([10**6, 1, 1, 1], np.int64)
    assert placement.replica_counts(hot, 2, 6).tolist() == [2, 2, 1, 1]
    wide = np.ones(64, np.int64)
    wide[0] = 10**9
    assert placement.replica_counts(wide, 40, 104).max() == 16


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(8, 4, 7), (2, 40, 33)])
def test_impossible_slot_counts_are_refused(experts, ranks, slots):
    with pytest.raises(UsageError, match="slots for"):
        placement.replica_cap(experts, ranks, slots)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_no_two_replicas_share_a_rank_when_copies_fit(ranks, slots, seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(max(1, -(-ranks * slots // min(ranks, 16))), ranks * slots + 1))
    weight = rng.integers(0, 1000, experts)
    copies = placement.replica_counts(weight, ranks, ranks * slots)
    for placed in (placement.longest_first(weight, copies, ranks), placement.dealt(copies, ranks)):
        assert (np.bincount(placed.reshape(-1), minlength=experts) == copies).all()
        assert placement.colocated(placed) == []


def test_worked_example_of_the_module():
    weight = np.array([6, 3, 2, 1], np.int64)
    copies = placement.replica_counts(weight, 2, 6)
    assert copies.tolist() == [2, 2, 1, 1]
    assert placement.longest_first(weight, copies, 2).tolist() == [[0, 2, 1], [0, 1, 3]]


def test_a_shared_rank_is_undone_by_a_swap():
    slots = np.array([[0, 0], [1, 2]])
    fixed = placement.separated(slots, np.array([4, 3, 3]), np.array([2, 1, 1]))
    assert placement.colocated(fixed) == [] and sorted(fixed.reshape(-1).tolist()) == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(384, 64, 7), (384, 55, 7), (10, 4, 3), (3, 4, 1), (4, 1, 4), (5, 2, 4)]
)
def test_identity_layout_holds_every_expert_and_fills_every_slot(experts, ranks, slots):
    if ranks * slots < experts:
        pytest.skip("does not fit")
    rows = layout.identity(experts, ranks, slots)
    copies = np.bincount(rows.reshape(-1), minlength=experts)
    assert rows.min() >= 0 and copies.min() >= 1 and copies.sum() == ranks * slots
    assert placement.colocated(rows) == [] or ranks == 1


def test_groups_go_to_nodes_whole_and_balanced():
    load = np.array([9, 9, 1, 1, 5, 5, 6, 6], np.int64)
    packed = layout.groups_on_nodes(load, groups=4, nodes=2)
    assert [ids.tolist() for ids in packed] == [[0, 1, 2, 3], [4, 5, 6, 7]]
