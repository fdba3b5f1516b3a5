"""Intervals against simulation: they cover the truth as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer_engine.sweep.noise import interval, overall, ratio, t95


def test_the_worked_example():
    found = ratio((100, 102, 98), (110, 113, 107))
    assert found is not None and found.low is not None and found.high is not None
    assert (round(found.mean, 3), round(found.low, 3), round(found.high, 3)) == (1.100, 1.034, 1.170)


@pytest.mark.parametrize(("df", "expected"), [(1, 12.706), (4, 2.776), (30, 2.042), (40, 2.021), (120, 1.980)])
def test_student_quantiles_are_the_tabled_ones(df: int, expected: float):
    assert t95(df) == pytest.approx(expected, abs=0.001)


def test_fractional_degrees_of_freedom_take_the_wider_quantile():
    assert t95(4.9) == t95(4) and t95(0.3) == t95(1)


def test_intervals_cover_the_mean_in_95_of_100_cases():
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(2000):
        found = interval(list(rng.normal(50.0, 5.0, 4)))
        assert found.low is not None and found.high is not None
        hits += found.low <= 50.0 <= found.high
    assert 0.935 <= hits / 2000 <= 0.965


def test_ratio_intervals_cover_the_true_ratio_in_95_of_100_cases_with_unequal_noise():
    rng = np.random.default_rng(8)
    hits = 0
    for _ in range(2000):
        a, b = np.exp(rng.normal(0.0, 0.02, 5)), np.exp(rng.normal(math.log(1.1), 0.06, 3))
        found = ratio(list(a), list(b))
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 1.1 <= found.high
    assert 0.93 <= hits / 2000 <= 0.975


def test_one_measurement_has_no_noise_and_zero_has_no_ratio():
    single = ratio((5.0,), (6.0, 6.1))
    assert single is not None and single.low is None and single.count == 1
    assert interval((3.0,)).low is None
    assert ratio((0.0, 1.0), (1.0, 1.0)) is None and ratio((), (1.0,)) is None


def test_overall_is_the_geometric_mean_over_cells():
    parts = [r for r in (ratio((1.0, 1.0), (2.0, 2.0)), ratio((1.0, 1.0), (0.5, 0.5))) if r]
    found = overall(parts)
    assert found is not None and found.mean == pytest.approx(1.0)
    assert found.low is not None and found.low < 0.01  # two cells that disagree say nothing together
