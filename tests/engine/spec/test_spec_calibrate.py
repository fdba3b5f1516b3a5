"""Sequential temperature scaling recovers known distortions, and its measures agree with plain definitions."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.spec.calibrate import (
    REGIMES,
    TEMPERATURES,
    auc,
    calibrate,
    calibration_record,
    check_temperatures,
    ece,
    regime_of,
    reliability,
    temperature_table,
)


def outcomes(n: int, distortion, seed: int = 0):
    """(raw logits [n, J], accepted [n]): true conditional logits times the distortion of each position."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.8, 1.2, (n, len(distortion)))
    stands = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * np.asarray(distortion), np.cumprod(stands, axis=1).sum(1)


def test_fit_recovers_the_distortion_of_every_position():
    distortion = (2.0, 0.5, 1.0, 3.0, 1.5)
    logits, accepted = outcomes(60_000, distortion)
    found = calibrate(logits, accepted, "rejection")
    assert np.allclose(np.log(found.temperatures), np.log(distortion), atol=0.25)
    for before, after, factor in zip(found.before, found.after, distortion, strict=True):
        assert after.ece < 0.01 and after.brier <= before.brier + 1e-9
        assert before.ece > 0.03 or factor in (1.0, 1.5, 3.0)
        assert after.predicted == pytest.approx(after.observed, abs=0.01)


def test_a_calibrated_head_stays_as_it_is():
    logits, accepted = outcomes(60_000, (1.0, 1.0, 1.0))
    for found in calibrate(logits, accepted, "greedy").temperatures:
        assert abs(np.log(found)) < 0.15
    # where nothing can be told apart, the value closest to 1 wins
    assert calibrate(np.zeros((600, 2)), np.zeros(600, dtype=int), "greedy").temperatures == (1.0, 1.0)


def test_positions_behind_an_end_of_sequence_do_not_count():
    logits, accepted = outcomes(20_000, (2.0, 2.0))
    observed = np.full(len(logits), 2)
    ended = accepted == 1
    observed[ended] = 1  # as if each of these steps had ended with its first draft
    rows = reliability(logits, accepted, (1.0, 1.0), observed)
    assert rows[0].n == len(logits) and rows[1].n == int((~ended).sum())
    assert rows[1].observed == (accepted[~ended] == 2).mean()


def test_measures_are_their_definitions():
    rng = np.random.default_rng(1)
    p = rng.integers(0, 8, 300) / 7.0
    y = rng.random(300) < p
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    assert auc(p, y) == pytest.approx(np.mean(pairs))
    assert auc(p, np.ones(300, dtype=bool)) is None
    bins: dict[int, list] = {}
    for a, b in zip(p, y, strict=True):
        bins.setdefault(min(int(a * 20), 19), []).append((a, b))
    total = sum(abs(np.mean([a for a, _ in v]) - np.mean([b for _, b in v])) * len(v) for v in bins.values())
    assert ece(p, y, 20) == pytest.approx(total / 300)


def test_the_documented_example():
    z, y = np.full((1000, 1), np.log(9.0)), np.arange(1000) % 10 < 7
    found = calibrate(z, y.astype(int), "greedy")
    assert found.temperatures == (pytest.approx(10**0.4),) and found.before[0].ece == pytest.approx(0.2)
    assert found.after[0].ece == pytest.approx(0.0058, abs=1e-3)


def test_bad_input_is_refused_by_name():
    logits, accepted = outcomes(1000, (1.0, 1.0))
    with pytest.raises(UsageError, match="100 steps"):
        calibrate(logits[:100], accepted[:100], "greedy")
    with pytest.raises(UsageError, match="not all finite"):
        calibrate(logits * np.nan, accepted, "greedy")
    with pytest.raises(UsageError, match=r"0\.\.observed"):
        calibrate(logits, accepted + 5, "greedy")
    for bad, words in (
        ([1.0, 1.0], "has 2 temperatures for 5"),
        ([1.0, 0.0, 1, 1, 1], r"\[1\] is 0.0"),
        ([1, 1, 1, float("nan"), 1], r"\[3\] is nan"),
        ([1, 1, 1, 1, -2], r"\[4\] is -2"),
        ([True, 1, 1, 1, 1], r"\[0\] is True"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            check_temperatures(bad, 5, "spec.confidence_temperatures")
        assert caught.value.exit_code == 2


def test_one_vector_per_regime():
    logits, accepted = outcomes(1000, (1.0, 2.0))
    rows = [calibrate(logits, accepted, regime) for regime in REGIMES]
    record = calibration_record(rows, dataset="held-out answers")
    table = temperature_table((), record["temperatures"], 2)
    assert table.shape == (3, 2) and np.allclose(table, [r.temperatures for r in rows])
    assert np.array_equal(temperature_table((2.0, 3.0), record["temperatures"], 2), [[2, 3]] * 3)
    assert np.array_equal(temperature_table((), {}, 4), np.ones((3, 4)))
    with pytest.raises(ArtefactError, match="lack coupled, rejection"):
        temperature_table((), {"greedy": [1, 1]}, 2)
    with pytest.raises(ArtefactError, match="of greedy has 2 temperatures for 3"):
        temperature_table((), record["temperatures"], 3)
    assert [regime_of(t, m) for t, m in ((0, "coupled"), (1, "coupled"), (0.5, "rejection"))] == [0, 1, 2]
    assert TEMPERATURES[20] == 1.0
