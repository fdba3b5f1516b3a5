"""The curve against isotonic regression by quadratic search, its file, and the planner against hindsight."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.spec.budget import split_budget, survival
from deepinfer_engine.spec.curve import (
    CurveKey,
    Load,
    StepCurve,
    curve_loads,
    curve_rows,
    fit_curve,
    load_curve,
    measure_curve,
    monotone,
    monotone_table,
    save_curve,
)
from deepinfer_engine.spec.planner import BudgetPlanner, Choice, best_choice, prospect, rates, regret

KEY = CurveKey("one CPU", "p0", "w0", "0.1.0")


def law(load: Load) -> float:
    """A machine that reads weights at low load and pays per token at high load."""
    tokens = load.rows * (1 + load.drafts)
    draft = {"off": 0.0, "fixed": 0.8, "adaptive": 0.9}[load.path]
    return 10 + 0.01 * load.rows + max(0.03 * tokens, 0.12 * tokens - 12) + draft


CURVE = fit_curve({load: law(load) for load in curve_loads(96, 5)})


def confidences(rows: int, seed: int, spread: float = 1.2, mean: float = 0.9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    z = mean + rng.normal(0, spread, (rows, 1)) + rng.normal(0, 1, (rows, 5)) - 0.1 * np.arange(5)
    return survival((1 / (1 + np.exp(-z))).astype(np.float32))


def test_the_documented_examples():
    curve = StepCurve(5, (8, 16), (0, 3, 5), (8, 9), (15, 22), ((10, 13, 15), (12, 18, 22)))
    assert curve.adaptive(12, np.array(36)) == pytest.approx(15.5)
    three = StepCurve(3, (4,), (0, 3), (10.0,), (15.0,), ((11.0, 15.0),))
    found = rates(three, 4, prospect(np.tile([0.9, 0.5, 0.2], (4, 1))))
    assert found["off"].tokens_s == pytest.approx(400)
    assert found["fixed"].tokens_s == pytest.approx(10400 / 15)
    assert found["adaptive"].budget == 8 and found["adaptive"].tokens_s == pytest.approx(9600 / (11 + 8 / 3))


def test_monotone_fits_are_the_closest_ones():
    rng = np.random.default_rng(0)
    for turn in range(50):
        values = rng.integers(0, 9, 4).astype(float)
        levels = np.arange(0, 9.01, 0.5)
        grid = np.stack(np.meshgrid(*[levels] * 4, indexing="ij"), -1).reshape(-1, 4) if turn < 3 else None
        fitted = monotone(values)
        assert (np.diff(fitted) >= 0).all() and fitted.sum() == pytest.approx(values.sum())
        if grid is not None:
            rising = grid[(np.diff(grid, axis=1) >= 0).all(1)]
            best = ((rising - values) ** 2).sum(1).min()
            assert ((fitted - values) ** 2).sum() <= best + 1e-9
    table = rng.normal(0, 1, (5, 4)).cumsum(0).cumsum(1)
    fitted = monotone_table(table)
    assert (np.diff(fitted, axis=0) >= -1e-12).all() and (np.diff(fitted, axis=1) >= -1e-12).all()
    distance = ((fitted - table) ** 2).sum()
    for _ in range(300):  # the projection on a convex set makes an obtuse angle with everything in it
        other = np.maximum.accumulate(np.maximum.accumulate(table + rng.normal(0, 1, table.shape), 0), 1)
        assert ((table - fitted) * (other - fitted)).sum() < 1e-3
        assert ((other - table) ** 2).sum() >= distance - 1e-6


def test_measuring_covers_the_grid_in_alternating_rounds_and_takes_medians():
    seen: list[Load] = []

    def step(load: Load) -> float:
        seen.append(load)
        slow = 50.0 if len(seen) % 7 == 0 else 0.0  # a hiccup now and then
        return law(load) + slow

    curve = measure_curve(step, 24, 5, rounds=5)
    loads = list(curve_loads(24, 5))
    assert seen[: len(loads)] == loads and seen[len(loads) : 2 * len(loads)] == loads[::-1]
    assert len(seen) == 6 * len(loads)
    assert curve.rows == (1, 2, 4, 8, 16, 24) and curve.drafts == (0, 1, 3, 5)
    for row in curve_rows(curve):
        assert row["step_ms"] == pytest.approx(law(Load(row["path"], row["rows"], row["drafts"])))
    with pytest.raises(UsageError, match="took nan ms"):
        measure_curve(lambda load: float("nan"), 2, 5)
    points = {load: law(load) for load in curve_loads(4, 5)}
    del points[Load("adaptive", 2, 3)]
    with pytest.raises(UsageError, match="no adaptive step of 2 rows and 3 drafts"):
        fit_curve(points)


def test_between_and_beyond_the_measured_points():
    assert CURVE.off(1) == pytest.approx(law(Load("off", 1, 0))) and CURVE.off(96) == pytest.approx(13.84)
    assert CURVE.off(48) == pytest.approx((CURVE.off(32) + CURVE.off(64)) / 2)
    assert CURVE.fixed(112) - CURVE.fixed(96) == pytest.approx(CURVE.fixed(96) - CURVE.fixed(80))
    budgets = np.arange(481)
    times = CURVE.adaptive(96, budgets)
    assert (np.diff(times) >= 0).all() and times[480] == pytest.approx(law(Load("adaptive", 96, 5)))


def test_a_kept_curve_is_used_while_key_and_age_allow(tmp_path):
    assert load_curve(tmp_path, KEY, ttl_s=60, now_s=0).curve is None
    path = save_curve(tmp_path / "new", KEY, CURVE, measured_s=1000.0)
    folder = path.parent
    assert load_curve(folder, KEY, ttl_s=60, now_s=1060).curve == CURVE
    assert "61 s old, spec.curve_ttl_s is 60" in load_curve(folder, KEY, ttl_s=60, now_s=1061).reason
    assert "from now" in load_curve(folder, KEY, ttl_s=60, now_s=900).reason
    for other in ("hardware", "profile", "weights", "version"):
        changed = CurveKey(**{**KEY.__dict__, other: "another"})
        assert load_curve(folder, changed, ttl_s=60, now_s=1001).curve is None
    assert [p.name for p in folder.iterdir()] == [KEY.file_name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r | {"extra": 1}, "expected the keys"),
        (lambda r: r | {"schema_version": 2}, "schema version 1"),
        (lambda r: r | {"key": r["key"] | {"weights": "x"}}, "it belongs to"),
        (lambda r: r | {"measured_s": "now"}, "measured_s is 'now'"),
        (lambda r: r | {"curve": {}}, "must have the keys"),
        (lambda r: r | {"curve": r["curve"] | {"rows": [1, 2.5]}}, "expected integers"),
        (lambda r: r | {"curve": r["curve"] | {"off_ms": 3}}, "expected a list"),
        (lambda r: r | {"curve": r["curve"] | {"off_ms": [1, True]}}, "expected numbers"),
        (lambda r: r | {"curve": r["curve"] | {"off_ms": r["curve"]["off_ms"][:-1]}}, "one time per"),
        (lambda r: r | {"curve": r["curve"] | {"off_ms": r["curve"]["off_ms"][::-1]}}, "must not fall"),
        (lambda r: r | {"curve": r["curve"] | {"off_ms": [0.0] * len(r["curve"]["off_ms"])}}, "above 0 ms"),
        (lambda r: r | {"curve": r["curve"] | {"draft_tokens": 4}}, "expected 4"),
        (lambda r: r | {"curve": r["curve"] | {"rows": []}}, "expected ascending"),
        (lambda r: r | {"curve": r["curve"] | {"drafts": [1, 5]}}, "expected 0 and more"),
    ],
)
def test_a_malformed_curve_file_is_refused(tmp_path, change, words):
    path = save_curve(tmp_path, KEY, CURVE, measured_s=0.0)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ArtefactError, match=words) as caught:
        load_curve(tmp_path, KEY, ttl_s=1e9, now_s=1.0)
    assert caught.value.exit_code == 4 and str(path) in caught.value.message
    path.write_text("{")
    with pytest.raises(ArtefactError):
        load_curve(tmp_path, KEY, ttl_s=1e9, now_s=1.0)


def test_the_best_choice_is_the_best_of_every_budget():
    for rows in (1, 3, 16, 60, 96):
        scores = confidences(rows, rows)
        gain = prospect(scores)
        by_hand = [("off", 0, rows / CURVE.off(rows))]
        by_hand.append(("fixed", 5 * rows, (rows + scores.sum(dtype=float)) / CURVE.fixed(rows)))
        for budget in range(5 * rows + 1):
            best = np.sort(scores.ravel())[::-1][:budget].sum(dtype=float)
            by_hand.append(("adaptive", budget, (rows + best) / CURVE.adaptive(rows, np.array(budget))))
        way, budget, speed = max(by_hand, key=lambda x: x[2])
        found = best_choice(CURVE, rows, gain)
        assert (found.way, found.tokens_s) == (way, pytest.approx(1e3 * float(speed)))
        assert found.budget == budget
        assert regret(CURVE, scores, found) == pytest.approx(0, abs=1e-9)
    # what a prospect promises is what the split delivers
    scores = confidences(9, 1)
    conf = np.concatenate((scores[:, :1], scores[:, 1:] / scores[:, :-1]), 1)
    for budget in (0, 7, 20, 45):
        lengths = split_budget(conf, np.full(9, 5), np.arange(9), budget)
        taken = survival(conf)[np.arange(5) < lengths[:, None]].sum(dtype=float)
        assert prospect(scores)[budget] == pytest.approx(taken, rel=1e-5)
    capped = prospect(scores, np.array([0, 1, 2, 3, 4, 5, 5, 5, 9]))
    assert len(capped) == 1 + 30


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 48, 60, 72, 96])
def test_planner_regret_against_hindsight_is_below_one_percent(rows):
    planner = BudgetPlanner(CURVE, "adaptive")
    lost, won = [], []
    seen: list[np.ndarray] = []
    for step in range(300):
        choice = planner.plan(rows)
        scores = confidences(rows, seed=1000 * rows + step)
        if step > 20:
            gain = prospect(scores)
            best = best_choice(CURVE, rows, gain)
            lost.append(best.tokens_s)
            won.append(best.tokens_s * (1 - regret(CURVE, scores, choice)))
        seen.append(scores)
        if choice.way != "off" and len(seen) > 2:
            planner.observe(seen[-2])  # two steps late, as a pipeline delivers them
    assert 1 - sum(won) / sum(lost) <= 0.01


def test_each_way_is_chosen_where_it_is_the_best():
    def settled(mean: float, rows: int, curve: StepCurve = CURVE) -> BudgetPlanner:
        planner = BudgetPlanner(curve, "adaptive")
        for step in range(30):
            planner.observe(confidences(rows, step, mean=mean))
            planner.plan(rows)
        return planner

    assert settled(-4, 8).way == "off"
    assert settled(6, 8).way == "fixed"
    assert settled(0.9, 96).way == "adaptive"


def test_a_way_is_left_only_after_several_plans_agree():
    planner = BudgetPlanner(CURVE, "adaptive")
    assert planner.plan(96) == Choice("fixed", 480, 0.0)  # nothing observed yet
    planner.observe(confidences(96, 0))
    ways = [planner.plan(96).way for _ in range(6)]
    assert ways == ["fixed"] * 3 + ["adaptive"] * 3
    assert [planner.plan(1).way for _ in range(3)] == ["adaptive", "fixed", "fixed"]
    assert [planner.plan(96).way, planner.plan(1).way] * 4 == ["fixed"] * 8  # a single vote never counts
    with pytest.raises(UsageError, match="0 rows"):
        planner.plan(0)


def test_without_drafts_a_fixed_step_is_run_now_and_then():
    planner = BudgetPlanner(CURVE, "adaptive")
    planner.observe(confidences(4, 0, mean=-6.0))
    ways = [planner.plan(4).way for _ in range(1200)]
    assert ways.count("fixed") == 1 + 1199 // 256
    while planner.plan(4).way != "fixed":
        pass
    for step in range(12):  # the text has become easy
        planner.observe(confidences(4, step, mean=6.0))
    assert [planner.plan(4).way for _ in range(3)] == ["off", "fixed", "fixed"]


def test_drafts_that_keep_less_than_they_promise_are_given_up_and_tried_again():
    rows = 96

    def promise(planner: BudgetPlanner) -> str:
        planner.observe(confidences(rows, 0, mean=6.0))  # nearly all of 480
        return planner.plan(rows).way

    planner = BudgetPlanner(CURVE, "adaptive")
    assert [promise(planner) for _ in range(20)][-1] != "off" and planner.trust == 1
    for _ in range(6):
        planner.outcome(470.0, 20)
        promise(planner)
    assert planner.way == "off" and planner.trust < 0.1
    plans = 0
    while planner.way == "off" and plans < 20 * 256:
        promise(planner)
        plans += 1
    assert 256 < plans < 20 * 256 and planner.way != "off"


def test_fixed_verification_always_verifies_everything():
    planner = BudgetPlanner(CURVE, "fixed")
    planner.observe(confidences(96, 0, mean=-6.0))
    assert planner.plan(96) == Choice("fixed", 480, 0.0)
