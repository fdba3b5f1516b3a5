"""What may share a line: one kind, one model, one machine, one file, one value of ``by``. And the Pareto front."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.sweep.noise import Interval
from deepinfer_engine.sweep.series import Point, Source, curves, front, gains
from deepinfer_engine.sweep.vendor import vendor_rows

ROWS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["measured", "simulated"]),
        "model": st.sampled_from(["a", "b"]),
        "platform": st.sampled_from(["cpu", "sm90"]),
        "gpus": st.sampled_from([None, 1, 8]),
        "hardware": st.sampled_from(["one", "two"]),
        "mode": st.sampled_from(["on", "off", None]),
        "failed": st.sampled_from([0, 0, 0, 2]),
        "status": st.sampled_from(["complete", "complete", "interrupted"]),
        "x": st.one_of(st.integers(1, 4), st.none()),
        "y": st.one_of(st.floats(1, 9), st.none()),
    }
)


@given(st.lists(ROWS, max_size=12), st.lists(ROWS, max_size=12))
def test_no_line_joins_what_differs_and_no_usable_row_is_lost(mine, other):
    sources = [Source("", [r | {"cell": i} for i, r in enumerate(mine)]), Source("other", other)]
    drawn = [(s.label, s.kind, p) for s in curves(sources, "x", "y", ["mode"]) for p in s.points]
    assert len({(label, kind) for label, kind, _ in drawn}) == len(curves(sources, "x", "y", ["mode"]))
    wanted = {}
    for source in sources:
        for i, r in enumerate(source.rows):
            if r["x"] and r["y"] and not r["failed"] and r["status"] == "complete":
                line = (source.name, *(r[k] for k in ("kind", "model", "platform", "gpus", "hardware", "mode")))
                wanted.setdefault(line, {}).setdefault(i if not source.name else r["x"], []).append(r["y"])
    assert len(drawn) == sum(len(points) for points in wanted.values())
    means = sorted(sum(ys) / len(ys) for points in wanted.values() for ys in points.values())
    assert sorted(p.y.mean for *_, p in drawn) == pytest.approx(means)


def test_a_row_of_no_known_kind_is_refused():
    with pytest.raises(ArtefactError, match="kind 'guessed'"):
        curves([Source("", [{"kind": "guessed", "x": 1, "y": 2}])], "x", "y", [])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_the_front_holds_exactly_the_points_that_nothing_dominates(pairs):
    points = [Point(float(x), Interval(float(y), None, None, 1), "") for x, y in pairs]
    kept = {(p.x, p.y.mean) for p in front(points)}
    brute = {(x, y) for x, y in pairs if not any((a >= x and b >= y) and (a > x or b > y) for a, b in pairs)}
    assert kept == brute and [p.x for p in front(points)] == sorted(p.x for p in front(points))
    assert len(front(points)) == len(kept)  # of equal points one stays


def test_a_gain_compares_only_the_cell_that_differs_in_nothing_else():
    def row(cell, verify, load, speed, **more):
        return {"kind": "measured", "model": "m", "platform": "cpu", "cell": cell, "v": verify, "load": load,
                "y": speed, "repeat": 1} | more  # fmt: skip

    rows = [row(1, "fixed", 1, 100.0), row(2, "fixed", 2, 200.0), row(3, "adaptive", 1, 110.0),
            row(4, "adaptive", 2, 180.0), row(5, "adaptive", 4, 500.0)]  # fmt: skip
    (series,) = gains([Source("", rows)], "load", "y", {"v": "fixed"}, ("v", "load"))
    assert [(p.x, round(p.y.mean, 6)) for p in series.points] == [(1.0, 10.0), (2.0, -10.0)]
    other = [r | {"platform": "sm90"} for r in rows if r["v"] == "adaptive"]
    assert gains([Source("", rows[:2] + other)], "load", "y", {"v": "fixed"}, ("v", "load")) == ()


@pytest.mark.parametrize("which", ["prefill-chunk", "decode", "decode-by-ep", "dspark"])
def test_vendor_rows_say_what_they_are_and_carry_their_gpus(which):
    rows = vendor_rows(which)
    assert rows and all(r["kind"] == "vendor" and r["gpus"] in (4, 8, 64) for r in rows)
