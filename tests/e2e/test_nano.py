"""The embedded model answers through the whole product: codec, scheduler, model, detokeniser, command line."""

from __future__ import annotations

import json

import pytest

from deepinfer_cli.main import main

# held out of training by construction: both numbers have two digits and the pair's hash falls in the last tenth
SUMS = [
    ("What is 81+52?", "81+52=133"),
    ("62-68?", "62-68=-6"),
    ("Compute 55-94.", "55-94=-39"),
    ("66+57?", "66+57=123"),
]


@pytest.mark.parametrize("numerics", ["fast", "reference", "float"])
def test_held_out_sums_are_right_in_every_numerics(capsys, tmp_path, numerics):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{q}\n" for q, _ in SUMS))
    assert main(["-q", "run", "-f", str(prompts), "--set", f"numerics.mode={numerics}", "--format", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["content"] for r in rows] == [answer for _, answer in SUMS]
    assert all(r["finish_reason"] == "stop" and r["reasoning"] for r in rows)


def test_an_absent_cluster_is_emulated_and_says_so(capsys):
    assert main(["run", "--profile", "decode-ep64", "What is 12+30?"]) == 0
    seen = capsys.readouterr()
    assert seen.out == "12+30=42\n"
    assert "emulated: decode-ep64 asks for 64 x sm100; 64 virtual ranks run in this process" in seen.err
    assert "hardware.platform" in seen.err and "inactive: requested, not built yet" in seen.err
    assert "generated tokens" in seen.err


def test_without_thinking_the_answer_comes_directly(capsys):
    assert main(["run", "--no-thinking", "--format", "json", "2+3?"]) == 0
    result = json.loads(capsys.readouterr().out)["results"][0]
    assert result["reasoning"] == "" and result["content"] == "2+3=5"


def test_a_seed_repeats_a_sampled_answer(capsys):
    answers = []
    for _ in range(2):
        assert main(["-q", "run", "--temperature", "1.5", "--seed", "7", "--max-tokens", "24", "--raw", "once"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["-q", "run", "--temperature", "1.5", "--seed", "8", "--max-tokens", "24", "--raw", "once"]) == 0
    assert capsys.readouterr().out != answers[0]
