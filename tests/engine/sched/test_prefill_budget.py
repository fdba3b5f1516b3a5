"""The quadratic step-time model: its inverse is exact, its fit finds the coefficients."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.sched.prefill_budget import CostFit, StepCost

positive = st.floats(1e-5, 10)


@given(positive, st.floats(0, 1e-2), st.integers(0, 100_000), st.floats(0.01, 10_000))
def test_longest_chunk_fits_and_one_token_more_does_not(token: float, pair: float, start: int, left: float):
    cost = StepCost(1.0, token, pair)
    count = cost.longest(start, left)
    assert cost.part_ms(start, count) <= left * (1 + 1e-9)
    assert cost.part_ms(start, count + 1) > left * (1 - 1e-9)


def test_worked_example():
    cost = StepCost(0.0, 0.1, 0.001)
    assert cost.longest(0, 20.0) == 123
    assert cost.longest(1000, 20.0) == 18
    assert cost.longest(0, 0.0) == cost.longest(0, -1.0) == 0


def test_fit_recovers_the_coefficients_of_exact_measurements():
    truth = StepCost(3.0, 0.05, 0.0001)
    fit, rng = CostFit(), random.Random(1)
    assert fit.cost is None
    for _ in range(40):
        parts = [(rng.randrange(4000), rng.choice((1, 1, 1, 64, 500))) for _ in range(rng.randrange(1, 9))]
        fit.observe(parts, truth.ms(parts))
    assert fit.cost is not None
    for name in ("base", "token", "pair"):
        assert abs(getattr(fit.cost, name) / getattr(truth, name) - 1) < 1e-3


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2000), st.floats(0.01, 5000)), min_size=4, max_size=20))
def test_fit_never_has_a_negative_coefficient(steps: list[tuple[int, int, float]]):
    fit = CostFit()
    for start, count, ms in steps:
        fit.observe([(start, count)], ms)
    assert fit.cost is not None
    assert min(fit.cost.base, fit.cost.token, fit.cost.pair) >= 0
