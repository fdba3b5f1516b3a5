"""``deepinfer sweep`` from the command line: results folders, refusals before anything runs, pages, comparisons."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import struct
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepinfer_cli.main import main
from deepinfer_engine.sweep import target

HELP = Path(__file__).parent / "texts" / "help_sweep.txt"
Cli = Callable[..., tuple[int, str, str]]

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot")

TINY = """\
schema_version: 1
kind: sweep
name: tiny
description: two cells
workload:
  requests: 2
  load: {kind: fixed, input_tokens: 8, output_tokens: 3}
  arrivals: {mode: closed, concurrency: 2}
grid:
  - sched.prefill_chunk_tokens: [4, 8]
plots:
  - {name: output, title: Output, x: sched.prefill_chunk_tokens, y: output_tok_s}
  - {name: nothing, title: Nothing, x: sched.prefill_chunk_tokens, y: no_such_column}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("tiny.yaml").write_text(TINY)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: str) -> tuple[int, str, str]:
        code = main(["sweep", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class Page(HTMLParser):
    """Every address a page loads something from, and its pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe", "object")


def test_help_text_is_the_kept_one(cli: Cli):
    """``COLUMNS=100 python -m deepinfer_cli sweep --help > tests/cli/texts/help_sweep.txt`` writes it anew."""
    assert cli("--help")[1] == HELP.read_text(encoding="utf-8")


def test_list_names_every_shipped_sweep(cli: Cli):
    code, out, _ = cli("list", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [r["sweep"] for r in rows] == [
        "cpu-nano-quick", "decode-concurrency", "dspark-table", "ep-width", "prefill-chunk", "prefix-reuse",
    ]  # fmt: skip
    assert all(0 < r["cells"] * r["repeats"] <= 36 for r in rows)


def test_dry_run_shows_cells_and_writes_nothing(cli: Cli, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli("tiny.yaml", "--dry-run", "--repeats", "3", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [r["sched.prefill_chunk_tokens"] for r in rows] == [4, 8]
    assert [(r["prompt_tokens"], r["output_tokens"]) for r in rows] == [(16, 6), (16, 6)]
    assert "2 cells x 3 repeats = 6 measurements" in err and sorted(tmp_path.rglob("*")) == before


@needs_matplotlib
def test_a_measured_sweep_leaves_rows_pictures_and_one_page_that_loads_nothing(cli: Cli):
    code, out, err = cli("tiny.yaml", "--dir", "out", "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(r["cell"], r["repeat"], r["kind"], r["status"], r["completed"]) for r in rows] == [
        ("1", "1", "measured", "complete", "2"), ("2", "1", "measured", "complete", "2"),
    ]  # fmt: skip
    assert all(float(r["output_tok_s"]) > 0 and r["gpus"] == "" and r["output_tok_s_gpu"] == "" for r in rows)
    assert all(r["model"] == "nano" and r["platform"] == "cpu" for r in rows)
    folder = Path("out")
    assert "nothing: not drawn: no row has both" in err and not (folder / "nothing.png").exists()
    data = (folder / "output.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (900, 672)
    page = Page((folder / "index.html").read_text())
    assert len(page.loaded) == 1 and page.loaded[0].startswith("data:image/png;base64,")
    about = json.loads((folder / "manifest.json").read_text())
    assert about["state"] == "complete" and about["identity"]["profile"] == "cpu-nano"
    again, _, err = cli("tiny.yaml", "--dir", "out")
    assert again == 2 and "is not overwritten" in err
    assert cli("tiny.yaml", "--dir", "out", "--resume", "--no-plots")[0] == 0


def test_without_matplotlib_nothing_runs_unless_no_plots_are_wanted(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    code, _, err = cli("tiny.yaml", "--dir", "out")
    assert code == 3 and "pip install 'deepinfer-cli[plot]'" in err and not Path("out").exists()
    assert cli("prefill-chunk", "--profile", "prefill-ep4", "--simulate", "--dir", "sim", "--no-plots")[0] == 0
    assert not list(Path("sim").glob("*.png")) and (Path("sim") / "index.html").is_file()


def test_a_wrong_key_is_named_with_line_column_and_nearest(cli: Cli):
    Path("tiny.yaml").write_text(TINY.replace("prefill_chunk_tokens: [4", "prefill_chunk_token: [4"))
    code, _, err = cli("tiny.yaml")
    assert code == 2
    assert "tiny.yaml:10:5: unknown key 'prefill_chunk_token' in sched; nearest is 'prefill_chunk_tokens'" in err


def test_options_without_effect_are_refused(cli: Cli):
    for args, named in (
        (("list", "--resume"), "--resume"),
        (("draw", "--profile", "cpu-nano"), "--profile"),
        (("tiny.yaml", "--simulate", "--model", "x"), "--model"),
        (("tiny.yaml", "--no-plots", "--rows", "x"), "--rows"),
        (("tiny.yaml", "--compare", "a", "b"), "--compare"),
        ((), "which sweep"),
    ):
        code, _, err = cli(*args)
        assert code == 2 and named in err, args


def test_an_interrupted_sweep_exits_130_and_resumes(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    real, calls = target.measure_of, []

    def stop_at_second(job):
        measure = real(job)

        def counted(task):
            calls.append(task.cell.number)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return measure(task)

        return counted

    monkeypatch.setattr(target, "measure_of", stop_at_second)
    args = ("prefill-chunk", "--profile", "prefill-ep4", "--simulate", "--dir", "sim", "--no-plots")
    code, _, err = cli(*args)
    assert code == 130 and "1 of 5 rows are in sim" in err and "--resume" in err
    assert json.loads(Path("sim/manifest.json").read_text())["state"] == "interrupted"
    assert cli(*args, "--resume")[0] == 0
    rows = [json.loads(line) for line in Path("sim/rows.jsonl").read_text().splitlines()]
    assert [r["cell"] for r in rows] == [1, 2, 3, 4, 5] and calls == [1, 2, 2, 3, 4, 5]


def test_cells_that_fail_are_noted_and_exit_5(cli: Cli):
    """Up to 32 rows per rank fit the profile; the cells with 60, 128 and 256 fail, the others stay."""
    args = ("decode-concurrency", "--profile", "decode-ep64", "--set", "sched.max_rows_per_rank=32", "--simulate",
            "--no-plots", "--dir", "sim")  # fmt: skip
    assert cli(*args)[0] == 2
    code, _, err = cli(*args, "--resume", "--continue-on-error")
    assert code == 5 and "3 cells failed" in err
    failures = [json.loads(line) for line in Path("sim/failures.jsonl").read_text().splitlines()]
    assert [f["workload.arrivals.concurrency"] for f in failures] == [3840, 8192, 16384]
    failure = failures[0]
    assert failure["exit_code"] == 2
    assert "60 rows per rank" in failure["message"] and "not complete: partial" in Path("sim/index.html").read_text()


def test_a_swept_key_that_would_be_replaced_here_is_refused(cli: Cli):
    Path("tiny.yaml").write_text(TINY.replace("sched.prefill_chunk_tokens: [4, 8]", "hardware.hbm_gib: [70.0, 80.0]"))
    code, _, err = cli("tiny.yaml", "--profile", "h200x1-nano", "--no-plots")
    assert code == 2 and "the swept key hardware.hbm_gib would be 0.0 here" in err
