"""Recipes of sweeps: every problem with its place, and what a run makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sweep.job import open_job
from deepinfer_engine.sweep.recipe import find_sweep, load_sweep, shipped_sweeps

GOOD = """\
schema_version: 1
kind: sweep
name: small
description: two by two
set:
  sched.max_rows_per_rank: 4
workload:
  requests: 2
  load: {kind: fixed, input_tokens: 4, output_tokens: 2}
  arrivals: {mode: closed}
grid:
  - workload.arrivals.concurrency: [1, 2]
  - sched.overlap: [false, true]
exclude:
  - {workload.arrivals.concurrency: 2, sched.overlap: true}
embedded:
  grid:
    - workload.arrivals.concurrency: [1]
plots:
  - {name: a, title: A, x: rows_per_rank, y: output_tok_s}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def test_the_embedded_section_replaces_the_grid_and_its_exclusions(tmp_path):
    loaded = load_sweep(write(tmp_path, GOOD))
    assert [dict(c.values) for c in loaded.plan(embedded=False).cells] == [
        {"workload.arrivals.concurrency": 1, "sched.overlap": False},
        {"workload.arrivals.concurrency": 1, "sched.overlap": True},
        {"workload.arrivals.concurrency": 2, "sched.overlap": False},
    ]
    assert [dict(c.values) for c in loaded.plan(embedded=True).cells] == [{"workload.arrivals.concurrency": 1}]
    assert loaded.digest(embedded=False) != loaded.digest(embedded=True)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("set:", "sets:", "small.yaml:5:1: unknown key 'sets'; nearest is 'set'"),
        (
            "max_rows_per_rank",
            "max_row_per_rank",
            "small.yaml:6:3: unknown key 'max_row_per_rank' in sched",
        ),
        ("arrivals.concurrency: [1, 2]", "arrivals.concurency: [1, 2]", "small.yaml:12:5: unknown key 'concurency' in"),
        ("overlap: [false, true]", "overlap: true", "small.yaml:13:20: sched.overlap is true, expected a list"),
        ("overlap: [false, true]", "overlap: [true, true]", "small.yaml:13:27: sched.overlap has true twice"),
        ("sched.overlap: true}", "sched.overlap: 1}", "sched.overlap never is the number 1"),
        ("{workload.arrivals.concurrency: 2, ", "{spec.verify: fixed, ", "spec.verify is no axis"),
        ("  - sched.overlap", "    sched.overlap: [true]\n  - cache.prefix", "need equally many values"),
        ("  requests: 2", "  request: 2", "unknown key 'request'; nearest is 'requests'"),
        ("kind: fixed", "kind: fixd", "load.kind is the text 'fixd'"),
        ("  sched.max_rows_per_rank: 4", "  sched.overlap: true", "sched.overlap is given under set too"),
        ("  arrivals: {mode: closed}", "  arrivals: {concurrency: 3}", "is an axis and also given for every cell"),
        ("y: output_tok_s}", "kind: gain, y: output_tok_s}", "over, with one key, goes with kind gain"),
        ("kind: sweep", "kind: workload", "kind is the text 'workload', expected sweep"),
        ("[1, 2]", "[" + ", ".join(map(str, range(1, 2050))) + "]", "4,098 cells before exclusions"),
        ("{workload.arrivals.concurrency: 2, sched.overlap: true}", "{sched.overlap: [true, false]}", "every cell is"),
    ],
)
def test_a_problem_is_named_with_its_place(tmp_path, old, new, expected):
    text = GOOD.replace("embedded:\n  grid:\n    - workload.arrivals.concurrency: [1]\n", "")
    assert old in text
    with pytest.raises(UsageError) as caught:
        path = write(tmp_path, text.replace(old, new, 1))
        open_job(str(path), profile=None, sets=(), model=None, simulate=False, repeats=None)
    assert expected in caught.value.message and caught.value.exit_code == 2


def test_set_wins_over_the_recipe_but_may_not_touch_an_axis(tmp_path):
    path = str(write(tmp_path, GOOD))
    job = open_job(path, profile=None, sets=["sched.max_rows_per_rank=8"], model=None, simulate=False, repeats=2)
    assert job.tasks[0].profile.profile.sched.max_rows_per_rank == 8 and job.plan.repeats == 2
    with pytest.raises(UsageError, match="the sweep varies this key"):
        open_job(path, profile="decode-ep64", sets=["sched.overlap=true"], model=None, simulate=True, repeats=None)


def test_a_value_that_the_profile_refuses_names_its_cell(tmp_path):
    text = GOOD.replace("sched.overlap: [false, true]", "sched.overlap: [false, maybe]").replace(
        "overlap: true}", "overlap: maybe}"
    )
    path = str(write(tmp_path, text))
    with pytest.raises(UsageError, match=r"cell 2 \(workload.arrivals.concurrency=1 sched.overlap=maybe\)"):
        open_job(path, profile="decode-ep64", sets=(), model=None, simulate=True, repeats=None)


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(UsageError, match="nearest is 'prefill-chunk'"):
        find_sweep("prefil-chunk")


#: A real profile for each sweep whose default here would serve the other phase.
_REAL = {"prefill-chunk": "prefill-ep4", "prefix-reuse": "prefill-ep8", "cpu-nano-quick": "h200x8"}
SHIPPED = ("cpu-nano-quick", "decode-concurrency", "dspark-table", "ep-width", "prefill-chunk", "prefix-reuse")


def test_the_shipped_sweeps_are_the_documented_ones():
    assert tuple(loaded.sweep.name for loaded in shipped_sweeps()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("embedded", [True, False])
def test_every_shipped_cell_resolves_and_every_axis_is_drawn(name: str, embedded: bool):
    """What varies must be x, a line of its own, or implied by one of them: no picture averages over an axis."""
    profile = "cpu-nano" if embedded else _REAL.get(name, "decode-ep64")
    job = open_job(name, profile=profile, sets=(), model=None, simulate=not embedded, repeats=None)
    assert job.tasks
    for plot in job.sweep.plots:
        told = {plot.x, *plot.by, *(plot.over or {})}
        load = {"rows_per_rank", "workload.arrivals.concurrency"}
        for axis in job.plan.axes:
            by_load = plot.kind == "pareto" or told & load
            assert set(axis) & told or ("workload.arrivals.concurrency" in axis and by_load), (plot.name, list(axis))
