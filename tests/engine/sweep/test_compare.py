"""``--compare``: verdicts follow from intervals, nothing is concluded without repeats or across workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sweep.compare import compare
from deepinfer_engine.sweep.results import Recorded


def side(values, *, cells=(1,), hit=0.0, workload="w", name="a", **columns):
    rows = tuple(
        {"cell": c, "repeat": i, "load": c, "cache_hit_share": hit, "output_tok_s": v, "ttft_mean_ms": 1000 / v}
        | columns
        for c in cells
        for i, v in enumerate(values, 1)
    )
    return Recorded(Path(name), {"identity": {"workload": workload}, "keys": ["load"]}, rows)


def verdicts(a, b, metrics=()):
    return {line.metric: line.verdict for line in compare(a, b, metrics).lines}


def test_a_clear_gain_is_better_in_speed_and_in_latency():
    found = compare(side((100, 101, 99)), side((150, 151, 149), name="b"))
    assert {line.metric: line.verdict for line in found.lines} == {"output_tok_s": "better", "ttft_mean_ms": "better"}
    assert found.totals["output_tok_s"].mean == pytest.approx(1.5, rel=0.01)
    assert verdicts(side((150, 151, 149)), side((100, 101, 99))) == {"output_tok_s": "worse", "ttft_mean_ms": "worse"}


def test_a_gain_smaller_than_the_scatter_is_within_noise():
    assert set(verdicts(side((100, 140, 80)), side((110, 150, 90))).values()) == {"within noise"}


def test_without_repeats_nothing_is_concluded():
    found = compare(side((100,)), side((200,)))
    assert {line.verdict for line in found.lines} == {"noise unknown"} and found.lines[0].ratio.low is None


def test_a_warmer_cache_is_not_a_faster_engine():
    found = compare(side((100, 101)), side((200, 201), hit=0.5))
    assert {line.verdict for line in found.lines} == {"other cache share"} and not found.totals


def test_cells_of_one_side_are_named_and_rows_with_failures_left_out():
    found = compare(side((1, 2), cells=(1, 2)), side((1, 2), cells=(2, 3)))
    assert found.only_a == ("load=1",) and found.only_b == ("load=3",)
    with pytest.raises(UsageError, match="share no cell"):
        compare(side((1, 2)), side((1, 2), failed=1))


def test_other_workloads_and_bare_files_are_refused():
    with pytest.raises(UsageError, match="other workloads"):
        compare(side((1, 2)), side((1, 2), workload="v"))
    with pytest.raises(UsageError, match="no results folder"):
        compare(side((1, 2)), Recorded(Path("rows.jsonl"), {}, ()))


def test_a_metric_that_is_zero_or_missing_is_undefined():
    assert verdicts(side((100, 100)), side((100, 100)), ["tpot_mean_ms"]) == {"tpot_mean_ms": "undefined"}
