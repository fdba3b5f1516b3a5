"""The swap search: a local optimum of its own cost, consistent with a recomputation, near the exact optimum on tiny
cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepinfer_engine.eplb import moments, placement, search


def case(decode, layer: int = 0, ranks: int = 8, slots: int = 7):
    m = moments.layer_moments(decode()[:, layer])
    copies = placement.replica_counts(m.total_E, ranks, ranks * slots)
    return placement.longest_first(m.total_E, copies, ranks), m.mean_E, m.cov_EE, copies


def cost(slots, mean, cov, copies, sharp_per_sigma):
    """Σφ from first principles: rank mean and variance, no incremental state."""
    ranks = len(slots)
    weight = np.zeros((ranks, len(mean)))
    for r, row in enumerate(slots):
        for e in row:
            weight[r, e] += ranks / copies[e]
    mu, var = weight @ mean, np.einsum("re,ef,rf->r", weight, cov, weight)
    b, base = sharp_per_sigma
    x = b * (mu - 1) + b * b / 2 * var - base
    return float((np.maximum(1 + x / 64, 0) ** 64).sum())


def stage_of(slots, mean, cov, copies):
    """b and the offset that the search fixes when it starts from ``slots``."""
    ranks = len(slots)
    weight = np.zeros((ranks, len(mean)))
    for r, row in enumerate(slots):
        for e in row:
            weight[r, e] += ranks / copies[e]
    var = np.einsum("re,ef,rf->r", weight, cov, weight)
    b = search.sharpness(ranks) / np.sqrt(var).mean()
    return b, b * b / 2 * var.mean()


def test_result_is_a_local_optimum_and_cheaper_than_the_start(decode):
    start, mean, cov, copies = case(decode)
    rules = search.SearchRules(tol=0.0)
    found, swaps = search.swap_search(start, mean, cov, copies, rules)
    stage = stage_of(start, mean, cov, copies)
    best = cost(found, mean, cov, copies, stage)
    assert swaps > 0 and best < cost(start, mean, cov, copies, stage)
    slots = found.shape[1]
    for i, j in itertools.combinations(range(found.size), 2):
        (a, s), (b, t) = divmod(i, slots), divmod(j, slots)
        if a == b or found[a, s] in found[b] or found[b, t] in found[a]:
            continue
        other = found.copy()
        other[a, s], other[b, t] = found[b, t], found[a, s]
        assert cost(other, mean, cov, copies, stage) >= best * (1 - 1e-9)


def test_incremental_state_equals_a_fresh_computation(decode):
    start, mean, cov, copies = case(decode, 1)
    state = search._State(start, mean, cov, copies, None)
    swaps = state.descend(search.SearchRules())
    assert swaps > 3
    found = state.slot.reshape(start.shape)
    assert state.total() == pytest.approx(cost(found, mean, cov, copies, stage_of(start, mean, cov, copies)), rel=1e-6)


def test_replicas_never_share_a_rank_and_copies_stay(decode):
    start, mean, cov, copies = case(decode)
    found, _ = search.swap_search(start, mean, cov, copies, search.SearchRules())
    assert placement.colocated(found) == []
    assert (np.bincount(found.reshape(-1), minlength=len(copies)) == copies).all()


@pytest.mark.parametrize("cap", [0, 3, 10])
def test_cap_on_received_experts_holds(decode, cap):
    start, mean, cov, copies = case(decode)
    held = np.zeros((len(start), len(mean)), bool)
    for r, row in enumerate(start):
        held[r, row] = True
    found, _ = search.swap_search(start, mean, cov, copies, search.SearchRules(price=0.0, cap=cap), held)
    received = sum(not held[r, e] for r, row in enumerate(found) for e in row)
    assert received <= cap and (cap == 0 or received > 0)


def test_a_higher_price_never_moves_more(decode):
    start, mean, cov, copies = case(decode)
    held = np.zeros((len(start), len(mean)), bool)
    for r, row in enumerate(start):
        held[r, row] = True
    moved = []
    for price in (0.0, 0.5, 2.0, 50.0):
        found, _ = search.swap_search(start, mean, cov, copies, search.SearchRules(price=price), held)
        moved.append(sum(not held[r, e] for r, row in enumerate(found) for e in row))
    assert moved == sorted(moved, reverse=True) and moved[-1] < moved[0]


def test_phi_is_close_to_the_exponential_where_it_matters():
    x = np.linspace(-3, 3, 101)
    assert np.abs(np.log(search.phi(1 + x / 64)) - x).max() < 0.08
