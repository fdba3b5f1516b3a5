"""``deepinfer run`` over a tiny model: batches, their failures, kill and resume, stop strings, loops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_cli.main import main
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SETS = ["--set", "sched.max_context_tokens=1024", "--set", "numerics.mode=float"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(model: Path, *args: str | Path) -> int:
    return main(["run", "--model", str(model), *SETS, *map(str, args)])


def test_batch_answers_every_line_in_order(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    file = write(
        tmp_path / "in.jsonl",
        [
            {"id": "slow", "token_ids": [20, 21], "max_tokens": 25, "ignore_eos": True},
            {"custom_id": "chat", "body": chat},
            {"id": "too long", "token_ids": [5], "max_tokens": 5000},
            {"id": 4, "prompt": "hi", "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 3},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert run(model, "-f", file, "--out", out) == 5
    slow, answered, failed, two = rows(out)
    assert (slow["id"], slow["usage"]["generated"], slow["error"]) == ("slow", 25, None)
    assert answered["custom_id"] == "chat" and answered["response"]["status_code"] == 200
    body = answered["response"]["body"]
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] <= 4
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert failed["error"]["code"] == "invalid_request" and "5000" in failed["error"]["message"]
    assert two["id"] == 4 and len(two["choices"]) == 2
    err = capsys.readouterr().err
    assert "4 of 4 lines answered" in err and f"1 of 4 lines of {file} failed" in err
    assert f"  line {failed['error']['line']}: {failed['error']['message']}\n" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_bad_lines_are_reported_before_loading(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(
        tmp_path / "in.jsonl",
        [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "x", "top_p": 2}],
    )
    # the model folder is not even looked at
    assert run(tmp_path / "nowhere", "-f", file, "--out", tmp_path / "o") == 2
    err = capsys.readouterr().err
    assert "line 2: id 'a' is already on line 1" in err and "line 3: top_p is 2" in err
    file = write(tmp_path / "in.jsonl", [{"id": "a", "messages": [{"role": "nobody", "content": "x"}]}])
    assert run(model, "-f", file, "--out", tmp_path / "o") == 2
    assert "line 1: invalid request" in capsys.readouterr().err
    assert not (tmp_path / "o").exists() and not (tmp_path / "o.part").exists()


def test_options_that_do_not_fit_together(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}])
    for args, reason in (
        (("-f", file), "needs --out"),
        (("-f", file, "--out", file), "--out names the input file"),
        (("-f", file, "--out", tmp_path / "o", "--system", "s"), "--system does not apply"),
        (("-f", file, "--out", tmp_path / "o", "--resume"), "nothing to resume"),
        (("--resume", "hello"), "belong to a file of requests"),
        (("--regex", "a", "--json-schema", file, "hello"), "exclude each other"),
    ):
        assert run(model, *args) == 2
        assert reason in capsys.readouterr().err


def start(model: Path, *args: str | Path) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), str(ROOT / "engine"), str(ROOT / "kernels")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deepinfer_cli", "run", "--model", str(model), *SETS, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE)


def wait_for_lines(part: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not part.exists() or part.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_batch_resumes_with_nothing_lost_or_doubled(model: Path, tmp_path: Path):
    requests = [
        {"id": i, "token_ids": [20 + i, 30, 40 + i], "max_tokens": 3 + i % 9, "ignore_eos": True} for i in range(60)
    ]
    file, out, whole = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    part = tmp_path / "out.jsonl.part"
    for lines, resume in ((12, ()), (30, ("--resume",))):
        killed = start(model, "-f", file, "--out", out, *resume)
        wait_for_lines(part, lines, killed)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL and not out.exists()
    kept = part.read_bytes().count(b"\n") - 1
    assert 29 <= kept < 60
    assert run(model, "-f", file, "--out", out, "--resume") == 0
    assert [r["id"] for r in rows(out)] == list(range(60))
    assert run(model, "-f", file, "--out", whole) == 0
    assert [r["content"] for r in rows(out)] == [r["content"] for r in rows(whole)]


def test_interrupted_batch_keeps_what_it_has(model: Path, tmp_path: Path):
    requests = [{"id": i, "token_ids": [20 + i], "max_tokens": 40, "ignore_eos": True} for i in range(80)]
    file, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    process = start(model, "-f", file, "--out", out)
    wait_for_lines(tmp_path / "out.jsonl.part", 5, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"lines are kept in" in err and b"--resume continues" in err
    assert not out.exists() and (tmp_path / "out.jsonl.part").read_bytes().count(b"\n") >= 5


def test_unordered_is_the_same_set(model: Path, tmp_path: Path):
    requests = [
        {"id": i, "token_ids": [20 + i], "max_tokens": 30 if i == 0 else 2, "ignore_eos": True} for i in range(6)
    ]
    file, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run(model, "-f", file, "--out", out, "--unordered") == 0
    ids = [r["id"] for r in rows(out)]
    assert sorted(ids) == list(range(6)) and ids[-1] == 0


def test_plain_loop_and_overlap_answer_the_same(model: Path, capsys: pytest.CaptureFixture[str]):
    texts = []
    for loop in ("--overlap", "--no-overlap"):
        assert run(model, loop, "--raw", "--max-tokens", "12", "--format", "jsonl", "hello", "12+30?") == 0
        texts.append([json.loads(line)["content"] for line in capsys.readouterr().out.splitlines()])
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_stop_string_ends_the_shown_answer(model: Path, capsys: pytest.CaptureFixture[str]):
    args = ("--raw", "--max-tokens", "16", "--format", "jsonl", "hello")
    assert run(model, *args) == 0
    content = json.loads(capsys.readouterr().out)["content"]
    stop = content[len(content) // 2 :][:2]
    assert run(model, "--stop", stop, *args) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["content"] == content[: content.index(stop)]
    assert (row["finish_reason"], row["stop_reason"]) == ("stop", stop)


def test_answers_follow_a_schema_and_a_bad_one_is_refused_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}')
    args = ("--no-thinking", "--temperature", "1", "--seed", "3", "--max-tokens", "60", "--format", "jsonl", "hello")
    assert run(model, "--json-schema", schema, *args) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["finish_reason"] == "stop"
    assert [type(v) for v in json.loads(row["content"])] == [bool, bool]
    schema.write_text('{"type": "array", "uniqueItems": true}')
    assert run(tmp_path / "nowhere", "--json-schema", schema, *args) == 2
    assert "#/uniqueItems: keyword 'uniqueItems' is not enforced" in capsys.readouterr().err
    ebnf = tmp_path / "g.ebnf"
    ebnf.write_text('root ::= "a"\n  | b')
    schema.write_text('{"type": "array",')
    for given, place in (
        (("--regex", "a(b"), "--regex: the end of the pattern: the parenthesis is not closed"),
        (("--ebnf", ebnf), f'--ebnf {ebnf}: line 2, column 5: rule "b" is not defined'),
        (("--json-schema", schema), f"--json-schema {schema}: not valid JSON"),
        (("--json-schema", tmp_path), f"--json-schema {tmp_path}: not a regular file"),
        (("--ebnf", tmp_path / "none"), f"--ebnf {tmp_path / 'none'}: No such file"),
    ):
        assert run(model, *given, *args) == 2
        assert capsys.readouterr().err.startswith(f"error: {place}")


def test_an_answer_that_never_fits_is_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def read(*args, **named):
        raise AssertionError("weights were read")

    monkeypatch.setattr("deepinfer_engine.engine.host_runner", read)
    small = ["run", "--model", str(model), "--set", "sched.max_context_tokens=512", "--raw", "ab", "--max-tokens"]
    assert main([*small, "512"]) == 3
    err = capsys.readouterr().err
    assert "the context holds 512 (sched.max_context_tokens of profile cpu-nano)" in err
    assert "of max_tokens fit behind this prompt, or --set sched.max_context_tokens=51" in err
    assert main([*small, "1024"]) == 2
    assert "the model has 1024 positions" in capsys.readouterr().err


def test_batch_line_with_a_grammar(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    body = {
        "messages": [{"role": "user", "content": "json"}],
        "thinking": {"type": "disabled"},
        "response_format": wanted,
        "max_tokens": 30,
    }
    file = write(
        tmp_path / "in.jsonl",
        [
            {"custom_id": "b", "body": body},
            {"id": "r", "token_ids": [20], "regex": "x{3}"},
            {"id": "e", "prompt": "a", "regex": "("},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert run(model, "-f", file, "--out", out) == 5
    chat, raw, bad = rows(out)
    assert json.loads(chat["response"]["body"]["choices"][0]["message"]["content"]) in (True, False)
    assert raw["content"] == "xxx" and raw["finish_reason"] == "stop"
    assert (bad["error"]["code"], bad["error"]["line"]) == ("grammar", 3)
    assert "line 3: the end of the pattern: the parenthesis is not closed" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [MemoryError("64 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_is_not_a_bug(monkeypatch, capsys, failure):
    def fail(*args, **options):
        raise failure

    monkeypatch.setattr("deepinfer_engine.launch.prepare", fail)
    assert main(["run", "1+1?"]) == 3
    assert "out of memory" in capsys.readouterr().err


def test_recorded_experts_are_what_eplb_plan_reads(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mesh = ["--set", "parallel.ep=4", "--set", "parallel.redundant_experts_per_rank=1"]
    file = write(tmp_path / "in.jsonl", [{"id": i, "token_ids": [20 + i, 21], "max_tokens": 9} for i in range(6)])
    stats, out = tmp_path / "stats.npz", tmp_path / "out.jsonl"
    assert run(model, "-f", file, "--out", out, "--record-experts", stats, *mesh) == 0
    err = capsys.readouterr().err
    assert f"steps are in {stats}" in err and "moe_lb 1." in err
    assert main(["eplb-plan", str(stats), "--loop", "numpy", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shape"]["ranks"] == 4 and report["shape"]["experts"] == 8
    assert run(model, "ab", "cd", "--max-tokens", "3", "--format", "json", "--record-experts", stats, *mesh) == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert experts["ranks"] == 4 and experts["moe_lb"] >= 1 and experts["moe_lb_step"] >= 1
    assert run(model, "ab", "--record-experts", tmp_path / "no" / "stats.npz") == 2
    assert run(model, "ab", "--record-experts", stats, "--out", stats) == 2


def test_explain_shows_every_rank_and_the_uneven_layers(model: Path, capsys: pytest.CaptureFixture[str]):
    mesh = ["--set", "parallel.ep=20", "--set", "parallel.dp=10", "--max-tokens", "4"]
    assert run(model, "ab", "cd", "ef", "--explain", *mesh) == 0
    err = capsys.readouterr().err
    lines = [line.strip() for line in err[err.index("10 attention ranks") :].splitlines()]
    assert [line.split(" |")[0] for line in lines if " | " in line] == ["0", "8", "0", "8", "16"]
    cells = [cell for line in lines if " | " in line for cell in line.split(" | ")[1].split("  ")]
    assert len(cells) == 30 and sum(c.strip() == "0 (0.0)" for c in cells) == 7, "three rows on ten ranks"
    assert any(line.startswith("hottest") and "(layer " in line for line in lines)
    assert "20 expert ranks of 1 slots" in err and "hottest rank" in err
    assert run(model, "ab", "--explain", "--format", "json", *mesh) == 0
    by_rank = json.loads(capsys.readouterr().out)["experts"]["by_rank"]
    assert sum(by_rank["attention_tokens"]) > 3 and len(by_rank["expert_load"]) == 6
    assert all(abs(sum(row) - 20) < 1e-3 for row in by_rank["expert_load"])
    assert run(model, "ab", "--explain", "--max-tokens", "2") == 0
    assert "1 attention rank:" in capsys.readouterr().err, "one rank has no expert ranks to compare"


def test_a_plan_file_is_where_experts_start_and_another_models_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mesh = ["--set", "parallel.ep=4", "--set", "parallel.redundant_experts_per_rank=1", "--max-tokens", "6"]
    stats, plan = tmp_path / "stats.npz", tmp_path / "stats.plan.json"

    def balance(*args: str) -> tuple[float, str]:
        assert run(model, "ab", "cd", "xyz", "--format", "json", *mesh, *args) == 0
        document = json.loads(capsys.readouterr().out)
        return document["experts"]["moe_lb"], [row["content"] for row in document["results"]]

    built_in, said = balance("--record-experts", str(stats))
    assert main(["eplb-plan", str(stats), "--loop", "numpy", "--holdout", "0"]) == 0
    capsys.readouterr()
    planned, same = balance("--set", f"eplb.plan_path={plan}")
    assert planned < built_in and same == said
    values = json.loads(plan.read_text())
    other = tmp_path / "other.json"
    for change, words in (
        ({"config_digest": "0" * 64}, "another model: its config digest is 000000000000"),
        ({"weights_digest": "0" * 64}, "its weights digest"),
        ({"slot_expert": "not slots"}, "slot_expert is a str"),
    ):
        other.write_text(json.dumps(values | change))
        assert run(model, "ab", *mesh, "--set", f"eplb.plan_path={other}") == 4
        assert words in capsys.readouterr().err
    assert run(model, "ab", "--set", "parallel.ep=2", "--set", f"eplb.plan_path={plan}") == 4
    assert "the profile has 2 ranks x 4 slots" in capsys.readouterr().err
