"""``deepinfer plan``: kept texts of all shipped profiles, the published rows, files it writes, and every refusal."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_cli.commands.plan import tokens
from deepinfer_engine.config.resources import profile_names
from deepinfer_engine.cost import published
from deepinfer_engine.cost.steptime import DecodeTime
from deepinfer_engine.errors import UsageError

TEXTS = Path(__file__).parent / "texts"
#: A cpu profile is planned for the embedded model, others for the released one unless it is named.
PLANS = {f"plan_{name}": ["-p", name] for name in profile_names()} | {
    "plan_h200x1-nano": ["-p", "h200x1-nano", "--model", "nano"],
    "plan_h200x1-nano_release": ["-p", "h200x1-nano"],
    "plan_anchors": ["--check-anchors"],
    "plan_healthy": ["-p", "decode-ep64", "--healthy", "61"],
}
REFUSED = {"plan_h200x1-nano_release": 3}


def run(args, capsys):
    code = cli.main(["plan", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def compare(name: str, text: str) -> None:
    """Equal to the kept text; ``python tests/cli/test_plan.py`` writes the texts anew."""
    assert text == (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_the_kept_one(name, capsys):
    code, out, err = run(PLANS[name], capsys)
    assert code == REFUSED.get(name, 0) and (err == "") == (code == 0)
    compare(name, out)


def test_help_is_the_kept_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    compare("help_plan", out)


def test_every_number_says_where_it_is_from(capsys):
    _, out, _ = run(["-p", "decode-ep64", "--format", "json"], capsys)
    document = json.loads(out)
    assert document["schema"] == "deepinfer/plan/1"
    labelled = [*document["memory"], *document["frontier"], *document["figures"]]
    assert len(labelled) > 20 and {row["source"] for row in labelled} == {"computed", "assumed", "simulated"}
    assert document["device_bytes"] == sum(r["bytes"] for r in document["memory"] if r["where"] == "device")
    assert document["fits"] is True and document["mesh"]["legal"] is True


def test_plan_that_does_not_fit_is_shown_and_refused(capsys):
    code, out, err = run(["-p", "h200x1-nano", "--model", "deepseek-v4.1-flash"], capsys)
    assert code == 3 and "missing" in out
    assert err == (
        "error: a rank needs 476.1 GiB, it has 139.0 GiB\n\n"
        "hint: use more ranks (parallel.ep), each holds fewer experts\n"
    )


# ---------------------------------------------------------------- what is asked


def test_context_and_rows_are_planned(capsys):
    _, out, _ = run(["-p", "h200x8", "--context", "1m", "--rows", "8", "--format", "json"], capsys)
    document = json.loads(out)
    assert (document["context"], document["rows"]) == (1_048_576, 8)


def test_context_raises_a_kv_capacity_that_is_smaller(capsys):
    args = ["-p", "cpu-nano", "--model", "deepseek-v4.1-flash", "--context", "512k"]
    code, out, _ = run([*args, "--format", "json"], capsys)
    assert code == 0 and "524,288 tokens" in out
    code, _, err = run([*args, "--set", "cache.hbm_tokens_per_rank=262144"], capsys)
    assert code == 2 and "cannot hold one request" in err  # what was set is not changed


def test_hbm_replaces_the_profiles(capsys):
    code, _, err = run(["-p", "h200x8", "--hbm", "40"], capsys)
    assert code == 3 and "it has 40.0 GiB" in err


def test_workload_and_limit_change_the_speeds(capsys):
    args = ["-p", "h200x8", "--input-tokens", "4k", "--output-tokens", "4k", "--hit-rate", "0", "--tpot-ms", "12",
            "--format", "json"]  # fmt: skip
    _, out, _ = run(args, capsys)
    figures = {f["figure"]: f for f in json.loads(out)["figures"]}
    assert figures["TPOT"]["value"] <= 12 and figures["with hits counted"]["note"] == "0% of the prompt cached"
    assert figures["prefill GPUs per decode GPU"]["value"] < 1


def test_plan_goes_to_a_file(capsys, tmp_path):
    code, out, _ = run(["-p", "decode-ep8", "--out", str(tmp_path / "plan.txt")], capsys)
    assert (code, out) == (0, "") and (tmp_path / "plan.txt").read_text().startswith("profile  decode-ep8")


@pytest.mark.parametrize(("text", "value"), [("4096", 4096), ("128k", 131_072), ("1M", 1_048_576), (" 2K ", 2048)])
def test_sizes(text, value):
    assert tokens(text, "--context") == value


@pytest.mark.parametrize("text", ["", "0", "0k", "-1", "1.5k", "4kb", "k", "９"])
def test_no_sizes(text):
    if text == "９":
        assert tokens(text, "--context") == 9  # a digit is a digit
        return
    with pytest.raises(UsageError, match="expected a number of tokens such as"):
        tokens(text, "--context")


# ---------------------------------------------------------------------- writing


def test_written_profile_is_the_planned_one(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    args = ["--gpus", "8", "--platform", "sm90", "--hbm", "139", "--context", "128k", "--write", str(path)]
    code, out, err = run(args, capsys)
    assert code == 0 and err.startswith(f"wrote {path}, profile mine, ")
    again, text, _ = run(["-p", str(path)], capsys)
    assert again == 0
    assert text.splitlines()[1:] == out.splitlines()[1:]
    assert cli.main(["profile", "validate", str(path)]) == 0


def test_reformed_profile_is_written_whole(capsys, tmp_path):
    path = tmp_path / "after-failure.yaml"
    code, _, _ = run(["-p", "decode-ep64", "--healthy", "61", "--write", str(path)], capsys)
    assert code == 0
    _, out, _ = run(["-p", str(path), "--format", "json"], capsys)
    assert json.loads(out)["mesh"] == {
        "ranks": 61, "hosts": 61, "experts": 384, "slots_per_rank": 8, "replicas": 104, "legal": True,
    }  # fmt: skip


def test_nothing_is_written_over_or_for_a_plan_that_does_not_fit(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("precious")
    code, out, err = run(["-p", "decode-ep64", "--write", str(path)], capsys)
    assert (code, out) == (2, "") and "the file exists" in err and path.read_text() == "precious"
    other = tmp_path / "other.yaml"
    code, _, _ = run(["-p", "h200x8", "--hbm", "40", "--write", str(other)], capsys)
    assert code == 3 and not other.exists()


def test_file_name_must_be_a_profile_name(capsys, tmp_path):
    code, _, err = run(["-p", "decode-ep64", "--write", str(tmp_path / "My Plan.yaml")], capsys)
    assert code == 2 and "name" in err and list(tmp_path.iterdir()) == []


def test_json_after_reforming_keeps_the_mesh_before(capsys):
    _, out, _ = run(["-p", "decode-ep64", "--healthy", "48", "--format", "json"], capsys)
    document = json.loads(out)
    assert (document["before"]["ranks"], document["mesh"]["ranks"]) == (64, 48)


# ---------------------------------------------------------------------- anchors


def test_anchors_beyond_their_bound_are_exit_6(capsys, monkeypatch):
    law = published._EP64
    slower = DecodeTime(law.base_s * 1.3, law.token_s, law.row_s)
    monkeypatch.setattr(published, "_EP64", slower)
    code, out, err = run(["--check-anchors"], capsys)
    assert code == 6 and " beyond\n" in out
    assert "published rows are not met" in err and "EP64 speed, 8 rows is off by -" in err


def test_anchors_as_rows(capsys):
    _, out, _ = run(["--check-anchors", "--format", "csv"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {r["kind"] for r in rows} == {"fitted", "predicted", "arithmetic"}
    assert {r["result"] for r in rows} == {"ok", "shown"} and len(rows) == 40
    _, out, _ = run(["--check-anchors", "--format", "jsonl"], capsys)
    assert len(out.splitlines()) == 40


# ------------------------------------------------------------------- simulation


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 40 * i, "input_length": 2560 + 512 * (i % 5), "output_length": 20 + i % 7,
         "hash_ids": list(range(3 + i % 3))}
        for i in range(60)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_simulation_of_a_trace(capsys, mooncake):
    args = ["--simulate", mooncake, "--ttft-ms", "500", "--tpot-ms", "8"]
    code, out, err = run(args, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("trace    t.jsonl: 60 requests in 2 s")
    assert "blocks are kept for ever" in out and "requests within limits" in out
    _, again, _ = run(args, capsys)
    assert again == out


def test_simulation_forms(capsys, mooncake):
    _, out, _ = run(["--simulate", mooncake, "--format", "json"], capsys)
    document = json.loads(out)
    assert document["schema"] == "deepinfer/plan-simulation/1" and document["trace"]["requests"] == 60
    assert {f["source"] for f in document["figures"]} == {"simulated"}
    _, out, _ = run(["--simulate", mooncake, "--format", "csv"], capsys)
    assert "TTFT p90" in [r["figure"] for r in csv.DictReader(io.StringIO(out))]


def test_simulated_efficiency_stands_beside_the_published_one(capsys, mooncake):
    args = ["--simulate", mooncake, "--ttft-ms", "500", "--tpot-ms", "8", "--efficiency", "--format", "json"]
    _, out, _ = run(args, capsys)
    found = {f["figure"]: f["source"] for f in json.loads(out)["figures"]}
    assert found["prefill efficiency"] == "simulated" and found["published efficiency"] == "vendor"


def test_azure_trace_has_no_hits_unless_they_are_assumed(capsys, tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"2023-11-16 18:17:{i:02d}.0000000,{1000 + i},{5 + i}" for i in range(30)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    _, out, _ = run(["--simulate", str(path)], capsys)
    assert "none: the trace names no prefixes; give --hit-rate" in out
    _, out, _ = run(["--simulate", str(path), "--hit-rate", "0.5"], capsys)
    assert "assumed: 50% of every prompt" in out
    code, _, err = run(["--simulate", str(path), "--ttl-s", "60"], capsys)
    assert code == 2 and "names no prefixes" in err


def test_blocks_expire_and_policies_change(capsys, mooncake):
    def figure(name, *args):
        _, out, _ = run(["--simulate", mooncake, "--format", "json", *args], capsys)
        return next(f["value"] for f in json.loads(out)["figures"] if f["figure"] == name)

    assert figure("prefix hits", "--ttl-s", "0.01") < figure("prefix hits")
    assert figure("TTFT p90", "--router", "random", "--rate-scale", "20") != figure("TTFT p90", "--rate-scale", "20")
    _, out, _ = run(["--simulate", mooncake, "--router", "bucket", "--placement", "least_kv", "--ttl-s", "9"], capsys)
    assert "(bucket)" in out and "(least_kv)" in out and "kept 9 s after their last use" in out


def test_synthetic_trace_is_called_synthetic(capsys):
    code, out, _ = run(["--simulate", "agent-32k", "--requests", "200", "--seed", "1"], capsys)
    assert code == 0 and out.startswith("trace    agent-32k (synthetic): 200 requests")


# --------------------------------------------------------------------- refusals

BAD_USE = [
    ([], "nothing to plan"),
    (["--gpus", "8"], "nothing to plan"),
    (["--platform", "sm90"], "nothing to plan"),
    (["--gpus", "8", "--platform", "cpu"], "no accelerators to plan for"),
    (["--gpus", "8", "--platform", "sm90", "--role", "encode"], "--role is 'encode'"),
    (["--gpus", "8", "--platform", "sm90", "--set", "cache.prefix=true"], "--set changes a profile"),
    (["-p", "decode-ep64", "--gpus", "8"], "--gpus does nothing with --profile"),
    (["-p", "decode-ep64", "--platform", "sm90"], "--platform does nothing with --profile"),
    (["-p", "decode-ep65"], "no shipped profile is called 'decode-ep65'"),
    (["-p", "decode-ep64", "--context", "lots"], "--context is 'lots'"),
    (["-p", "decode-ep64", "--rows", "0"], "sched.max_rows_per_rank"),
    (["-p", "decode-ep64", "--context", "2m"], "sched.max_context_tokens"),
    (["-p", "decode-ep64", "--healthy", "65"], "expected 1 to 64"),
    (["-p", "cpu-nano", "--model", "deepseek-v4.1-flash", "--healthy", "1"], "the profile is for cpu"),
    (["-p", "decode-ep64", "--hit-rate", "1.5"], "the hit rate is 1.5"),
    (["-p", "decode-ep64", "--tpot-ms", "0"], "--tpot-ms is 0, expected milliseconds above 0"),
    (["-p", "decode-ep64", "--ttft-ms", "-1"], "--ttft-ms is -1,"),
    (["-p", "h200x8", "--hbm", "0"], "--hbm is 0, expected GiB above 0"),
    (["-p", "cpu-nano", "--hbm", "nan"], "--hbm is nan, expected GiB above 0"),
    (["--gpus", "8", "--platform", "sm90", "--rows", "0"], "--rows 0: at least one"),
    (["--gpus", "2048", "--platform", "sm90"], "expected 1024 or less"),
    (["-p", "h200x8", "--write", "absent-folder/x.yaml"], "absent-folder"),
    (["-p", "decode-ep64", "--format", "csv"], "plan has no --format csv"),
    (["--check-anchors", "-p", "decode-ep64"], "--profile does nothing with --check-anchors"),
    (["--check-anchors", "--simulate", "t.jsonl"], "--simulate does nothing with --check-anchors"),
    (["--check-anchors", "--format", "text"], "plan --check-anchors has no --format text"),
    (["--simulate", "t.jsonl", "-p", "decode-ep64"], "--profile does nothing with --simulate"),
    (["--simulate", "t.jsonl", "--input-tokens", "5"], "--input-tokens does nothing with --simulate"),
    (["--simulate", "t.parquet"], "Azure .csv or a Mooncake .jsonl"),
    (["--simulate", "t.jsonl", "--requests", "0"], "--requests is 0"),
    (["--simulate", "agent-32k", "--rate-scale", "0"], "arrival rate is scaled by 0"),
    (["--simulate", "agent-32k", "--engines", "0"], "at least one engine"),
    (["--simulate", "agent-32k", "--groups", "0"], "at least one group"),
    (["--simulate", "agent-32k", "--cost-error", "9"], "--cost-error is 9, expected 0 to 3"),
    (["--simulate", "agent-32k", "--snapshot-ms", "-1"], "--snapshot-ms is -1"),
    (["--simulate", "agent-32k", "--seed", "-1"], "--seed is -1"),
    (["--simulate", "agent-32k", "--ttl-s", "0"], "--ttl-s is 0"),
    (["--simulate", "agent-32k", "--ttl-s", "9", "--hit-rate", "0.5"], "--ttl-s does nothing with --hit-rate"),
    (["--simulate", "agent-32k", "--router", "best"], "--router is 'best', expected one of least_work"),
    (["--simulate", "agent-32k", "--placement", "best"], "--placement is 'best', expected one of two_level"),
    (["-p", "decode-ep64", "--engines", "2"], "--engines does nothing with a plan"),
    (["-p", "decode-ep64", "--efficiency"], "--efficiency does nothing with a plan"),
    (["-p", "decode-ep64", "--ttft-ms", "400"], "--ttft-ms does nothing with a plan"),
    (["--check-anchors", "--seed", "0"], "--seed does nothing with --check-anchors"),
    (["--check-anchors", "--hit-rate", "0.5"], "--hit-rate does nothing with --check-anchors"),
    (["--simulate", "agent-32k", "--prefill", "decode-ep64"], "cannot be the prefill pool"),
    (["--simulate", "agent-32k", "--decode", "cpu-nano"], "nothing is published for cpu"),
    (["--simulate", "agent-32k", "--requests", "20", "--efficiency"], "needs both limits"),
]


@pytest.mark.parametrize(("args", "part"), BAD_USE, ids=[" ".join(a) or "nothing" for a, _ in BAD_USE])
def test_bad_use_is_exit_2(args, part, capsys):
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "") and part in err and err.startswith("error: ")


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["--gpus", "1", "--platform", "sm90"], 3, "not one row of 1,048,576 tokens fits: a rank needs"),
        (["-p", "decode-ep64", "--healthy", "1"], 3, "a rank needs"),
        (["-p", "cpu-nano", "--hbm", "0.1"], 3, "the process needs 0.2 GiB, it has 0.1 GiB"),
        (["-p", "decode-ep64", "--model", "absent.json"], 4, "absent.json: no such file"),
        (["--simulate", "absent.jsonl"], 4, "absent.jsonl: no such file"),
    ],
)
def test_other_refusals_by_code(args, code, part, capsys):
    found, _, err = run(args, capsys)
    assert found == code and part in err


def test_a_row_that_no_decode_rank_can_hold_is_exit_3(capsys, mooncake):
    args = ["--simulate", mooncake, "--decode", "h200x8", "--prefill", "h200x8"]
    assert run(args, capsys)[0] == 0
    path = Path(mooncake).with_name("long.jsonl")
    path.write_text(json.dumps({"timestamp": 0, "input_length": 9_000_000, "output_length": 5, "hash_ids": []}) + "\n")
    code, _, err = run(["--simulate", str(path)], capsys)
    assert code == 3 and "needs more KV than a decode rank has" in err


def test_embedded_model_is_the_default_on_a_cpu(capsys, monkeypatch):
    from deepinfer_engine.errors import NotReadyError
    from deepinfer_engine.sim import models

    def absent(name):
        raise NotReadyError(f"the embedded model {name!r} is not part of this installation", hint="give --model DIR")

    monkeypatch.setattr(models, "model_dir", absent)
    code, _, err = run(["-p", "cpu-nano"], capsys)
    assert code == 3 and "'nano' is not part" in err and "hint: give --model DIR" in err


def test_planning_imports_no_torch(tmp_path):
    import os
    import subprocess

    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys; from deepinfer_cli.main import main; rc = main(['plan', '-p', 'decode-ep64']);"
        "print(rc, 'torch' in sys.modules, file=sys.stderr)"
    )
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'engine'}:{root / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.stderr == "0 False\n"


def write_texts() -> None:
    """Keep the texts of this version; look at the difference before committing it."""
    import contextlib
    import os

    os.environ["COLUMNS"] = "100"
    every = PLANS | {"help_plan": ["--help"]}
    for name, args in every.items():
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(io.StringIO()):
            cli.main(["plan", *args])
        (TEXTS / f"{name}.txt").write_text(stream.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    write_texts()
