"""The results folder under interruption, failure, damage and a second run; rows are never lost or doubled."""

from __future__ import annotations

import csv
import json
from itertools import count
from pathlib import Path

import pytest

from deepinfer_engine.errors import ArtefactError, CapacityError, UsageError
from deepinfer_engine.sweep.job import identity, manifest, open_job
from deepinfer_engine.sweep.report import sources
from deepinfer_engine.sweep.results import Folder, read_recorded
from deepinfer_engine.sweep.run import Measurement, run
from deepinfer_engine.sweep.series import curves

RECIPE = """\
schema_version: 1
kind: sweep
name: small
description: three cells
workload:
  requests: 2
  load: {kind: fixed, input_tokens: 4, output_tokens: 2}
  arrivals: {mode: closed}
grid:
  - workload.arrivals.concurrency: [1, 2, 3]
repeats: 2
"""


class Clock:
    """Measures nothing: the row says the how-manieth call it was. Raises where told."""

    def __init__(self, fail_at: dict[int, BaseException] | None = None):
        self.calls = count(1)
        self.fail_at = fail_at or {}

    def __call__(self, task):
        call = next(self.calls)
        if call in self.fail_at:
            raise self.fail_at[call]
        row = {"kind": "measured", "model": "m", "output_tok_s": 100.0 + call, "failed": 0, "undefined": None}
        return Measurement(row, [{"index": 0}])


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return open_job(str(path), profile="cpu-nano", sets=(), model=None, simulate=False, repeats=None)


COMMAND = ["deepinfer", "sweep", "a b.yaml", "--dir", "here", "-q", "--dir=x"]


def about(job, **changes):
    return manifest(job, identity(job, {"name": "cpu"}, "abc") | changes, COMMAND)


def go(job, path: Path, measure, *, resume=False, keep_going=False, **changes):
    with Folder(path, about(job, **changes), resume=resume) as folder:
        try:
            return run(folder, job.tasks, job.plan.repeats, measure, common={"sweep": "small"}, keep_going=keep_going)
        finally:
            folder.finish("complete")


def cells(path: Path) -> list[tuple[int, int]]:
    return [(row["cell"], row["repeat"]) for row in read_recorded(path).rows]


ALL = [(1, 1), (2, 1), (3, 1), (3, 2), (2, 2), (1, 2)]


def test_rows_table_requests_and_manifest_agree(job, tmp_path):
    path = tmp_path / "out"
    outcome = go(job, path, Clock())
    assert (outcome.added, outcome.failed, outcome.partial) == (6, 0, 0) and cells(path) == ALL
    with (path / "rows.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [(int(r["cell"]), int(r["repeat"])) for r in table] == sorted(ALL)
    assert table[0]["workload.arrivals.concurrency"] == "1" and table[0]["undefined"] == ""
    assert sorted(p.name for p in (path / "requests").iterdir()) == sorted(f"{c:03d}-{r}.jsonl" for c, r in ALL)
    about_it = json.loads((path / "manifest.json").read_text())
    assert about_it["command"] == "deepinfer sweep 'a b.yaml' -q"
    assert (about_it["rows"], about_it["state"], about_it["keys"]) == (6, "complete", ["workload.arrivals.concurrency"])


@pytest.mark.parametrize("stop", range(1, 7))
def test_an_interrupted_sweep_resumes_to_the_same_rows(job, tmp_path, stop):
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(job, path, Clock({stop: KeyboardInterrupt()}))
    assert cells(path) == ALL[: stop - 1]
    go(job, path, Clock(), resume=True)
    assert cells(path) == ALL


def test_a_torn_last_line_is_measured_again(job, tmp_path):
    path = tmp_path / "out"
    go(job, path, Clock())
    rows = path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-7])
    outcome = go(job, path, Clock(), resume=True)
    assert outcome.added == 1 and cells(path) == ALL


def test_a_folder_is_not_overwritten_and_not_continued_by_another_run(job, tmp_path):
    path = tmp_path / "out"
    go(job, path, Clock())
    before = (path / "rows.jsonl").read_bytes()
    with pytest.raises(UsageError, match="exists and is not overwritten") as caught:
        go(job, path, Clock())
    assert "--resume" in (caught.value.hint or "")
    with pytest.raises(UsageError, match='commit was "abc", now "other"'):
        go(job, path, Clock(), resume=True, commit="other")
    with pytest.raises(UsageError, match="nothing to resume"):
        go(job, tmp_path / "nothing", Clock(), resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        go(job, tmp_path / "mine", Clock())
    assert (path / "rows.jsonl").read_bytes() == before


def test_two_runs_cannot_share_a_folder(job, tmp_path):
    path = tmp_path / "out"
    go(job, path, Clock())
    with Folder(path, about(job), resume=True), pytest.raises(UsageError, match="in use by another run"):
        Folder(path, about(job), resume=True)


def test_a_failure_stops_the_sweep_or_is_noted_and_tried_again(job, tmp_path):
    path = tmp_path / "out"
    with pytest.raises(CapacityError):
        go(job, path, Clock({3: CapacityError("too big", hint="smaller")}))
    assert cells(path) == ALL[:2]
    outcome = go(
        job,
        path,
        Clock({2: CapacityError("too big", hint="smaller"), 3: ValueError("odd")}),
        resume=True,
        keep_going=True,
    )
    assert (outcome.added, outcome.failed) == (2, 2)
    failures = [json.loads(line) for line in (path / "failures.jsonl").read_text().splitlines()]
    assert [(f["cell"], f["error"], f["exit_code"], f["hint"]) for f in failures] == [
        (3, "CapacityError", 3, "smaller"), (2, "ValueError", 1, None),
    ]  # fmt: skip
    assert failures[0]["traceback"] is None and "odd" in failures[1]["traceback"]
    go(job, path, Clock(), resume=True)
    assert sorted(cells(path)) == sorted(ALL) and not (path / "failures.jsonl").exists()


def test_more_repeats_extend_a_folder_and_fewer_are_refused(job, tmp_path):
    from dataclasses import replace

    path = tmp_path / "out"
    go(job, path, Clock())
    more = replace(job, plan=replace(job.plan, repeats=3))
    assert go(more, path, Clock(), resume=True).added == 3
    with pytest.raises(UsageError, match="started with 3 repeats"):
        go(job, path, Clock(), resume=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "rows.jsonl:7"),
        ('{"a": [1]}', "a is not a single value"),
        ("3", "is no object"),
        ('{"a": NaN}', "rows.jsonl:7"),
    ],
)
def test_damaged_rows_are_refused_with_their_line(job, tmp_path, line, expected):
    path = tmp_path / "out"
    go(job, path, Clock())
    with (path / "rows.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ArtefactError, match=expected):
        read_recorded(path)


def test_rows_of_bench_are_drawn_under_the_names_of_a_sweep_and_guesses_refused(tmp_path):
    path = tmp_path / "h200.jsonl"
    path.write_text('{"kind": "measured", "concurrency": 8, "hardware": "H200", "gpus": 1, "output_tok_s": 5.0}\n')
    (source,) = sources([path])
    (series,) = curves([source], "workload.arrivals.concurrency", "output_tok_s", ())
    assert series.label == "h200: 1 x H200" and [(p.x, p.y.mean) for p in series.points] == [(8.0, 5.0)]
    path.write_text('{"kind": "vendor", "output_tok_s": 5.0}\n')
    with pytest.raises(ArtefactError, match="kind is 'vendor', expected measured or simulated"):
        sources([path])
