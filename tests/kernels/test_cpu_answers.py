"""The embedded model with compiled operations: the same answers, and the same bits in any batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.main import main

SUMS = [f"{a}{op}{b}?" for a, op, b in zip(range(11, 99, 9), "+-" * 5, range(90, 20, -7), strict=False)]
QUESTIONS = [*SUMS, *(f"What is {q[:-1]}?" for q in SUMS)]


@pytest.fixture
def answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    def run(questions: list[str], *arguments: str) -> list[dict[str, Any]]:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("".join(f"{q}\n" for q in questions))
        assert main(["-q", "run", "-f", str(prompts), "--format", "jsonl", *arguments]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def said(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(r["reasoning"], r["content"], r["finish_reason"]) for r in rows]


def test_twenty_answers_are_those_of_the_torch_operations(answers, kernel_cache: Path, tmp_path: Path):
    assert len(QUESTIONS) == 20
    compiled = answers(QUESTIONS, "--set", f"kernels.cache_dir={kernel_cache}", "--set", "kernels.backend=cpu")
    plain = answers(QUESTIONS, "--set", f"kernels.cache_dir={tmp_path / 'empty'}")
    assert said(compiled) == said(plain)


def test_a_seeded_answer_is_the_same_alone_and_beside_others(answers, kernel_cache: Path):
    held = ("--set", f"kernels.cache_dir={kernel_cache}", "--set", "kernels.backend=cpu")
    drawn = (
        *held,
        "--set",
        "numerics.batch_invariant=true",
        "--temperature",
        "1.2",
        "--seed",
        "5",
        "--max-tokens",
        "40",
    )
    together = said(answers(QUESTIONS[:6], *drawn))
    for i in (0, 5):
        assert said(answers([QUESTIONS[i]], *drawn)) == together[i : i + 1]
