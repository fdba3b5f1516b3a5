"""``deepinfer bench``: exit codes, forms of a result, what is refused, and a small run of the embedded model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.main import main
from tests.engine.bench.scripted_stream import Turn, serving

TINY_MODEL = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
HELP = Path(__file__).parent / "texts" / "help_bench.txt"
Cli = Callable[..., tuple[int, str, str]]
TINY = ("--requests", "4", "--concurrency", "2", "-w", "load.input_tokens=12", "-w", "load.output_tokens=4")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: str) -> tuple[int, str, str]:
        code = main(["bench", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_text_is_the_kept_one(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """``COLUMNS=100 python -m deepinfer_cli bench --help > tests/cli/texts/help_bench.txt`` writes it anew."""
    monkeypatch.setenv("COLUMNS", "100")
    assert cli("--help")[1] == HELP.read_text(encoding="utf-8")


def test_every_shipped_workload_is_listed_and_plans(cli: Cli):
    code, out, _ = cli("--list", "--format", "json")
    assert code == 0
    names = [row["name"] for row in json.loads(out)["rows"]]
    assert "cpu-nano-quick" in names and "agent-77k" in names
    for name in names:
        code, out, err = cli(name, "--dry-run", "--endpoint", "http://host:1/v1", "--format", "json")
        assert code == 0, err
        plan = {row["what"]: row["value"] for row in json.loads(out)["rows"]}
        assert plan["workload"] == name and plan["requests"] > 0


def test_dry_run_refuses_what_exceeds_the_context(cli: Cli):
    code, _, err = cli("agent-77k", "--dry-run")
    assert code == 3 and "94900 tokens, the context holds 16384" in err


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ((), "no recipe given"),
        (("cpu-nano-quik",), "nearest is 'cpu-nano-quick'"),
        (("cpu-nano-quick", "-w", "arrivals.concurency=2"), "nearest is 'concurrency'"),
        (("cpu-nano-quick", "-w", "requests=1", "--requests", "2"), "requests is set twice"),
        (("cpu-nano-quick", "--interface", "chat"), "only with --endpoint"),
        (("cpu-nano-quick", "--writer", "inferencex"), "only with --format json"),
        (("cpu-nano-quick", "--format", "text"), "bench has no --format text"),
        (("cpu-nano-quick", "--forward", "decode", "--rate", "2"), "not used by single forwards"),
        (("nano-tasks", "--salt", "3"), "a salt cannot change them"),
        (("nano-tasks", "--forward", "decode"), "texts have none"),
        (("nano-tasks", "-w", "sampling.ignore_eos=true"), "end where the model ends"),
        (("cpu-nano-quick", "-w", "load.turns=4"), "load.turns goes with kind agent"),
        (("cpu-nano-quick", "-w", "load.kind=azure"), "load.file is needed"),
    ],
)
def test_what_is_refused_names_the_place(cli: Cli, args: tuple[str, ...], part: str):
    code, out, err = cli(*args)
    assert (code, out) == (2, "") and part in err


def test_endpoint_failures_exit_5_and_the_rows_add_up(cli: Cli, tmp_path: Path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run.json"
    with serving(lambda n, body: Turn(status=500) if n == 2 else Turn()) as server:
        args = ("cpu-nano-quick", *TINY, "-w", "warmup.requests=0", "--endpoint", server.url)
        code, _, err = cli(*args, "--format", "json", "--out", str(out), "--rows", str(rows))
    assert code == 5 and "1 of 4 requests failed: http_500 1" in err
    document = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert (document["num_prompts"], document["completed"], document["failed"]) == (4, 3, 1)
    assert document["request_rate"] == "inf" and document["max_concurrency"] == 2
    assert document["model_id"] == "scripted" and document["request_goodput"] is None
    assert document["deepinfer"]["summary"]["completed"] == 3
    assert document["deepinfer"]["meta"]["kind"] == "measured"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [r["status"] for r in lines].count("failed") == 1 and len(lines) == 4


def test_gpus_come_from_the_named_profile_only(cli: Cli):
    with serving(lambda n, body: Turn()) as server:
        args = ("cpu-nano-quick", *TINY, "-w", "warmup.requests=0", "--endpoint", server.url, "--format", "json")
        alone = json.loads(cli(*args)[1])["deepinfer"]
        named = json.loads(cli(*args, "--profile", "decode-ep8")[1])["deepinfer"]
    assert alone["summary"]["output_tok_s_gpu"] is None and "no profile" in alone["undefined"]["output_tok_s_gpu"]
    assert named["summary"]["gpus"] == 8
    assert named["summary"]["output_tok_s_gpu"] == pytest.approx(named["summary"]["output_tok_s"] / 8)


def test_the_embedded_model_in_every_form(cli: Cli):
    args = ("cpu-nano-quick", *TINY, "-w", "warmup.requests=1", "--quiet")
    code, out, _ = cli(*args, "--format", "csv")
    assert code == 0
    (row,) = csv.DictReader(out.splitlines())
    assert (row["completed"], row["output_tokens"], row["profile"], row["gpus"]) == ("4", "16", "cpu-nano", "")
    assert float(row["queued_share_of_ttft"]) < 1
    code, out, _ = cli(*args)
    assert code == 0 and "4 completed" in out and "profile cpu-nano names no GPU" in out


@pytest.mark.parametrize(("phase", "rate"), [("prefill", "input_tok_s"), ("decode", "output_tok_s")])
def test_single_forwards(cli: Cli, phase: str, rate: str):
    code, out, _ = cli("cpu-nano-quick", *TINY, "-w", "load.spread=0.0", "--forward", phase, "--format", "json", "-q")
    assert code == 0
    s = json.loads(out)["deepinfer"]["summary"]
    assert s["completed"] == 4 and s[rate] > 0
    assert s["forwards"] == (4 if phase == "prefill" else 2 * 4)
    assert s["forward_tokens_mean"] == (12 if phase == "prefill" else 2)
    assert (s["tpot_mean_ms"] is None) == (phase == "prefill")
    assert s["duration_s"] == pytest.approx(s["forwards"] * s["forward_mean_ms"] / 1e3)


def test_drafts_are_counted_by_row_and_place(cli: Cli):
    """A checkpoint with draft weights: accepted drafts and one more token a row make up what decoding produced."""
    sets = (
        "sched.max_context_tokens=1024", "cache.hbm_tokens_per_rank=8192", "numerics.mode=float", "spec.verify=fixed",
        "spec.draft_tokens=4", "sched.max_rows_per_rank=2",
    )  # fmt: skip
    tiny = ("--model", str(TINY_MODEL), *(text for s in sets for text in ("--set", s)), "--format", "json", "-q")
    args = ("decode-fixed", "--requests", "4", "--concurrency", "2", "-w", "load.output_tokens=24")
    code, out, err = cli(*args, *tiny)
    assert code == 0, err
    document = json.loads(out)
    s = document["deepinfer"]["summary"]
    places = [s[f"acceptance_place_{k}"] for k in range(1, 5)]
    assert s["drafted_tokens"] > 0 and s["acceptance_rate"] == s["accepted_tokens"] / s["drafted_tokens"]
    assert 1 <= s["tokens_per_verify_row"] <= 1 + s["verify_length_mean"] and s["verify_length_mean"] <= 4
    assert all(0 <= p <= 1 for p in places)
    assert document["spec_decode_num_drafts"] == s["verify_rows"]
    assert document["spec_decode_per_position_acceptance_rates"] == places
    assert s["tokens_per_chunk"] >= 1
    code, out, err = cli("--curve", "--concurrency", "2", *tiny)
    assert code == 0, err
    assert {step["path"] for step in json.loads(out)["steps"]} == {"off", "fixed", "adaptive"}


def test_the_curve_has_a_point_for_every_load_and_rises(cli: Cli):
    code, out, _ = cli("--curve", "--concurrency", "2", "--format", "json", "-q")
    assert code == 0
    points = json.loads(out)["points"]
    assert [(p["rows"], p["tokens_per_row"]) for p in points] == [(r, t) for r in (1, 2) for t in (1, 2, 4, 6)]
    assert all(p["min_ms"] <= p["median_ms"] <= p["max_ms"] for p in points)
    fitted = [[p["fitted_ms"] for p in points if p["rows"] == r] for r in (1, 2)]
    assert all(row == sorted(row) for row in fitted) and all(a <= b for a, b in zip(*fitted, strict=True))
    assert cli("--curve", "cpu-nano-quick")[0] == 2 and cli("--curve", "--rate", "1")[0] == 2


def test_replays_and_a_hit_are_measured_beside_the_plan(cli: Cli):
    code, out, err = cli("--replay", "512,1024", "--requests", "1", "--format", "json", "-q")
    assert code == 0, err
    cells = {(c["tokens"], c["case"]): c for c in json.loads(out)["cells"]}
    assert list(cells) == [(n, case) for n in (512, 1024) for case in ("off", "exact", "bounded", "hit")]
    off, exact, bounded, hit = (cells[1024, case] for case in ("off", "exact", "bounded", "hit"))
    assert (hit["cached"], hit["replayed"], hit["against"], off["cached"]) == (768, 128, "bounded", 0)
    assert off["row_layers"] == 1024 * 8 and bounded["row_layers"] == 1024 * 4 + 128 * 4
    assert off["gflop"] > exact["gflop"] > bounded["gflop"] > hit["gflop"] > 0
    assert bounded["ratio"] == pytest.approx(bounded["cpu_ms"] / off["cpu_ms"]) and bounded["ratio"] < 1
    assert hit["predicted_rows"] == hit["row_layers"] / bounded["row_layers"]
    assert hit["reached"] == pytest.approx(hit["predicted_rows"] / hit["ratio"])


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (("cpu-nano-quick", "--replay", "512"), 2, "--replay runs no recipe"),
        (("--replay", "512", "--concurrency", "2"), 2, "--concurrency is not used by --replay"),
        (("--replay", "512,512"), 2, "expected different prompt lengths"),
        (("--replay", "64,512"), 2, "a prompt of 64 tokens, expected"),
        (("--replay", "16384"), 3, "a prompt of 16384 tokens, expected"),
    ],
)
def test_replay_lengths_that_cannot_be_measured_are_refused(cli: Cli, args, code, part):
    got, _, err = cli(*args)
    assert got == code and part in err
