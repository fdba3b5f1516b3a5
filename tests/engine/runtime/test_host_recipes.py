"""The recipes that measure the host beside the model: what they compare and how they count."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from deepinfer_engine.engine import Engine
from recipes.host import decisions, invariance, pairs


def test_ratio_of_pairs_has_the_interval_of_its_logarithm():
    middle, low, high = pairs.interval([2.0, 0.5, 2.0, 0.5])
    half = 3.18 * math.log(2) * math.sqrt(4 / 3) / 2
    assert (
        middle == pytest.approx(1) and low == pytest.approx(math.exp(-half)) and high == pytest.approx(math.exp(half))
    )


def test_pairs_report_the_settings_and_that_tokens_agree(tmp_path: Path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--base", "sched.overlap=false", "--other", "sched.overlap=true", "--thread", "--rows", "2"]
    pairs.main([*arguments, "--steps", "2", "--pairs", "2", "--out", str(out)])
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["overlap"] == [False, True] and line["same_tokens"] and line["base_wall_ms"] > 0


def test_compositions_cover_every_text_once_and_in_order():
    texts, rng = invariance.draw_texts(24, 300), Random(1)
    seen = set()
    for _ in range(200):
        made = invariance.draw_composition(texts, rng)
        for text in made.texts:
            chunks = [(s, e) for step in made.steps for t, s, e in step if t == text]
            assert chunks[0][0] == 0 and chunks[-1][1] == len(texts[text])
            assert all(a[1] == b[0] for a, b in pairwise(chunks))
            seen.add(len(chunks))
        assert all(len({t for t, _, _ in step}) == len(step) for step in made.steps)
    assert seen == {1, 2, 3, 4}


def test_invariance_finds_a_model_that_sees_its_batch():
    sets = ["numerics.batch_invariant=true", "sched.max_rows_per_rank=2"]
    with torch.inference_mode(), Engine.open("cpu-nano", sets=sets) as engine:
        assert invariance.check(engine, 6, longest=170)["different"] == []
        plain = engine.runner.ops.rms_norm

        def leaky(x: torch.Tensor, *rest: object) -> torch.Tensor:
            return plain(x, *rest) * (1 + 1e-3 * x.shape[0])

        engine.runner.ops.rms_norm = leaky
        assert invariance.check(engine, 6, longest=170)["different"]


def test_decisions_count_every_step_and_admission(tmp_path: Path):
    out = tmp_path / "rows.jsonl"
    decisions.main(["--rows", "4", "--steps", "20", "--out", str(out)])
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["steps"] == 20 and line["admitted"] >= 4
    assert 0 < line["schedule_us"]["p50"] <= line["schedule_us"]["p99"]
