"""Scores: intervals against their definition, consensus and pairing against brute force, counts that add up."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import UsageError
from deepinfer_engine.evals.grade import OUTCOMES
from deepinfer_engine.evals.report import parse_expect
from deepinfer_engine.evals.score import Sample, agreed, compare, sign_test, summarise, wilson
from deepinfer_engine.evals.task import find_task


@pytest.mark.parametrize(("hits", "of"), [(0, 1), (1, 1), (0, 30), (28, 30), (30, 30), (7, 480), (100, 200)])
def test_wilson_bounds_are_where_the_score_test_just_accepts(hits: int, of: int):
    z = 1.959963984540054
    low, high = wilson(hits, of)
    share = hits / of
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:  # |share - p| = z sqrt(p (1 - p) / n) at both ends
            assert abs(share - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / of), rel=1e-9)


def test_the_worked_example():
    low, high = wilson(28, 30)
    assert (round(low, 3), round(high, 3)) == (0.787, 0.982)
    assert high < 0.999


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 3), (1, 8), (0, 6), (2, 9)])
def test_sign_test_is_the_share_of_outcomes_at_least_as_lopsided(better: int, worse: int):
    total = better + worse
    worst = abs(better - worse)
    flips = itertools.product((0, 1), repeat=total)
    share = sum(abs(2 * sum(f) - total) >= worst for f in flips) / 2**total
    assert sign_test(better, worse) == pytest.approx(share)


OUTCOME = st.sampled_from(OUTCOMES)


@given(st.lists(st.lists(OUTCOME, min_size=3, max_size=3), min_size=1, max_size=8))
def test_counts_add_up_and_shares_are_ordered(groups):
    samples = [Sample(f"q{i}", j, outcome, "a") for i, group in enumerate(groups) for j, outcome in enumerate(group)]
    summary = summarise(samples, 3)
    assert sum(summary.outcomes.values()) == summary.samples == 3 * len(groups)
    missing = summary.outcomes["errored"] + summary.outcomes["ungraded"]
    assert summary.avg.of == summary.samples - missing
    complete = [g for g in groups if not {"errored", "ungraded"} & set(g)]
    assert summary.passed.of == summary.consensus.of == len(complete)
    assert summary.passed.hits == sum("correct" in g for g in complete)
    assert summary.consensus.hits <= summary.passed.hits


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("right", "x", "y", None)),
        ),
        min_size=1,
        max_size=7,
    )
)
def test_consensus_is_the_strict_plurality(votes):
    keys = [v for (v,) in votes]
    group = [
        Sample("q", i, "unparsed" if k is None else "correct" if k == "right" else "wrong", k)
        for i, k in enumerate(keys)
    ]
    counts = Counter(k for k in keys if k is not None)
    others = [n for k, n in counts.items() if k != "right"]
    assert agreed(group) == (counts["right"] > 0 and all(counts["right"] > n for n in others))


def test_comparison_pairs_by_question_and_leaves_out_what_did_not_run():
    mine = [Sample("a", 0, "correct"), Sample("b", 0, "wrong"), Sample("c", 0, "errored"), Sample("d", 0, "truncated")]
    other = [Sample("a", 0, "wrong"), Sample("b", 0, "correct"), Sample("c", 0, "correct"), Sample("d", 0, "wrong")]
    found = compare(mine, other)
    assert (found.better, found.worse, found.same) == (1, 1, 1)
    assert found.test.startswith("McNemar")
    assert found.p_value == 1.0


def test_comparison_of_averages_when_there_are_several_samples():
    mine = [Sample("a", j, "correct" if j < 3 else "wrong") for j in range(4)]
    other = [Sample("a", j, "correct" if j < 1 else "wrong") for j in range(2)]
    found = compare(mine, other)
    assert (found.better, found.worse, found.same) == (1, 0, 0)  # 3 of 4 against 1 of 2
    assert found.test.startswith("sign test")


def test_a_real_loss_is_significant_and_luck_is_not():
    items = [f"q{i}" for i in range(100)]
    before = [Sample(i, 0, "correct") for i in items]
    hurt = [Sample(i, 0, "wrong" if n < 8 else "correct") for n, i in enumerate(items)]
    lucky = [Sample(i, 0, "wrong" if n < 3 else "correct") for n, i in enumerate(items)]
    assert compare(hurt, before).p_value < 0.05
    assert compare(lucky, before).p_value > 0.05


def test_expectations_are_read_strictly():
    aime, nano = find_task("aime").task, find_task("nano-arith").task
    assert parse_expect("vendor", aime, whole=True).value == 0.999
    assert parse_expect("90%", nano, whole=True).value == pytest.approx(0.9)
    assert parse_expect(">=0.9", nano, whole=True).floor
    for text, task, whole in (
        ("vendor", nano, True), ("vendor", aime, False), ("90", nano, True), ("-1", nano, True), ("nan", nano, True),
        ("1e-1", nano, True), ("", nano, True), ("<=0.5", nano, True),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            parse_expect(text, task, whole=whole)


def test_expectation_is_judged_on_the_interval():
    task = find_task("nano-arith").task
    summary = summarise([Sample(f"q{i}", 0, "correct" if i < 28 else "wrong") for i in range(30)], 1)
    assert parse_expect("0.95", task, whole=True).verdict(summary) is None
    assert "below" in (parse_expect("0.999", task, whole=True).verdict(summary) or "")
    assert "above" in (parse_expect("0.5", task, whole=True).verdict(summary) or "")
    assert parse_expect(">=0.5", task, whole=True).verdict(summary) is None
    nothing = summarise([Sample("q", 0, "errored")], 1)
    assert parse_expect("0.5", task, whole=True).verdict(nothing) == "no sample was graded"
