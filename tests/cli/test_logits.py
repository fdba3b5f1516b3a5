"""``deepinfer logits``: the acceptance interface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_cli.main import main

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a"


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    chosen = ("base_n0005", "base_n0017", "base_n0035")
    return [c for c in json.loads((VECTORS / "cases.json").read_text())["cases"] if c["id"] in chosen]


def run(tmp_path: Path, tokens: object, *options: str) -> tuple[int, Path]:
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    out = tmp_path / "out.safetensors"
    files = ["--model", str(VECTORS / "checkpoint"), "--tokens", str(tmp_path / "tokens.json"), "--out", str(out)]
    code = main(["logits", *files, *options])
    return code, out


@pytest.mark.parametrize("chunk", [None, 7])
def test_float_logits_and_greedy_continuations_are_the_recorded_ones(tmp_path, cases, chunk):
    options = ["--numerics", "float", "--greedy", "32", *(["--chunk", str(chunk)] if chunk else [])]
    code, out = run(tmp_path, [c["prompt_ids"] for c in cases], *options)
    assert code == 0
    result, recorded = load_file(out), load_file(VECTORS / "expected.safetensors")
    assert sorted(result) == sorted(f"{kind}.{i}" for kind in ("greedy", "logits") for i in range(3))
    for i, case in enumerate(cases):
        expected = recorded[f"case/{case['id']}/float/logits"]
        assert result[f"logits.{i}"].dtype == torch.float32 and result[f"greedy.{i}"].dtype == torch.int64
        assert (result[f"logits.{i}"] - expected).abs().max() <= 2e-4
        assert result[f"greedy.{i}"].tolist() == case["float"]["greedy_ids"]


@pytest.mark.parametrize(
    ("tokens", "code", "sentence"),
    [
        ([], 4, "expected a non-empty JSON list"),
        ({"a": 1}, 4, "expected a non-empty JSON list"),
        ([[1, True]], 4, "item 0 is not a list of integers"),
        ([[1], "x"], 4, "item 1 is not a list of integers"),
        ([[]], 2, "prompt 0 is empty"),
        ([[1, 368]], 2, "prompt 0 holds token 368, the vocabulary has ids 0..367"),
        ([[1] * 2000], 2, "needs 2000 positions, the model has 1024"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_file(tmp_path, capsys, tokens, code, sentence):
    got, out = run(tmp_path, tokens)
    assert got == code and sentence in capsys.readouterr().err
    assert not out.exists() and [p.name for p in tmp_path.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize("verb", [["profile", "list"], ["run", "1+1?"], ["kv", "explain", "--length", "1000"]])
def test_a_result_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, verb):
    assert main([*verb, "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main([*verb, "--out", str(tmp_path / "no" / "file")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
