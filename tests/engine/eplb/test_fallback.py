"""An earlier placement is restored when the newest steps say that it pays, and only then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.eplb.fallback import fallback, most_received
from deepinfer_engine.eplb.record import CountChunk
from deepinfer_engine.eplb.report import Economics

RUNNING, EARLIER = np.array([[[0, 2], [1, 3]]]), np.array([[[0, 1], [2, 3]]])
#: one expert is received in 10 ms, a step's experts take 1 ms
PRICE = {"expert_bytes": 1_000_000, "link_gb_s": 0.1, "moe_ms": 1.0}


def steps(*counts: list[int], epoch: int = 3) -> CountChunk:
    counts_MLE = np.array(counts)[:, None]
    return CountChunk(counts_MLE, counts_MLE.sum(axis=(1, 2)), np.full(len(counts), epoch))


def test_the_worked_example_is_restored_once_the_horizon_pays_for_it():
    got = fallback([steps([5, 1, 4, 0])], RUNNING, [EARLIER], Economics(**PRICE, horizon_steps=17))
    assert got is not None and got.slot_LRS is EARLIER
    assert (got.before, got.after, got.gain_L) == (1.8, 1.2, (pytest.approx(0.6),))
    assert "1.8000 of the newest 1 steps would be 1.2000" in got.sentence and "cost 0.01 s" in got.sentence
    # 0.6 x 1 ms x 16 steps = 9.6 ms < 10 ms
    assert fallback([steps([5, 1, 4, 0])], RUNNING, [EARLIER], Economics(**PRICE, horizon_steps=16)) is None


def test_nothing_is_restored_that_is_worse_equal_or_unseen():
    plenty = Economics(**PRICE, horizon_steps=10**6)
    assert fallback([steps([5, 4, 1, 0])], RUNNING, [EARLIER], plenty) is None
    assert fallback([steps([5, 1, 4, 0])], RUNNING, [RUNNING, RUNNING], plenty) is None
    assert fallback([steps([5, 1, 4, 0])], RUNNING, [], plenty) is None
    assert fallback([steps([0, 0, 0, 0])], RUNNING, [EARLIER], plenty) is None


def brute_lb(counts_MLE: np.ndarray, slot_LRS: np.ndarray) -> float:
    """Balance by the definition, one token count at a time."""
    found = []
    for layer, slot_RS in enumerate(slot_LRS.tolist()):
        peak = mean = 0.0
        for count_E in counts_MLE[:, layer].tolist():
            copies = [sum(row.count(e) for row in slot_RS) for e in range(len(count_E))]
            loads = [sum(count_E[e] / copies[e] for e in row) for row in slot_RS]
            peak, mean = peak + max(loads), mean + sum(loads) / len(loads)
        if mean:
            found.append(peak / mean)
    return float(np.mean(found))


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_the_best_earlier_placement_is_found(seed: int, candidates: int):
    rng = np.random.default_rng(seed)

    def slots() -> np.ndarray:
        """2 layers of 3 ranks x 3 slots for 6 experts, each somewhere."""
        return np.stack([rng.permutation([*range(6), *rng.integers(0, 6, 3)]).reshape(3, 3) for _ in range(2)])

    running, earlier = slots(), [slots() for _ in range(candidates)]
    counts = rng.integers(0, 9, (5, 2, 6))
    parts = [CountChunk(c, c.sum(axis=(1, 2)), np.full(len(c), 7)) for c in (counts[:2], counts[2:])]
    now, then = brute_lb(counts, running), [brute_lb(counts, e) for e in earlier]
    horizon = int(rng.integers(1, 400))
    got = fallback(parts, running, earlier, Economics(**PRICE, horizon_steps=horizon))
    best = earlier[int(np.argmin(np.round(then, 9)))]
    cost_ms = 10 * most_received(best, running)
    if got is not None:
        assert got.before == pytest.approx(now) and got.after == pytest.approx(min(then))
        assert horizon * (now - min(then)) > cost_ms - 1e-6
    else:
        assert horizon * (now - min(then)) <= cost_ms + 1e-6


def test_dead_ranks_and_replicas_of_one_rank_receive_nothing():
    old = np.array([[[0, 1], [2, 3], [-1, -1]], [[0, 0], [1, 2], [-1, -1]]])
    new = np.array([[[0, 2], [1, 3], [-1, -1]], [[1, 2], [0, 2], [-1, -1]]])
    assert most_received(new, old) == 3  # rank 0: 2 in the first layer, 1 and 2 in the second
    assert most_received(old, old) == 0
