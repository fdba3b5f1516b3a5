"""Re-planning comparison and the tables made from recorded results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.eplb import bench, replan, results
from deepinfer_engine.eplb.loops import NumpyLoops
from deepinfer_engine.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]


def test_warm_plans_move_a_fraction_of_what_cold_plans_move():
    recipe = bench.read_recipe(ROOT / "recipes" / "eplb" / "replan-ep64.yaml")
    assert recipe.replans == 8 and recipe.trace is not None
    trace = replace(recipe.trace, layers=1, ranks=16, experts=96)
    got = replan.run_replan(replace(recipe, trace=trace, train_steps=120, seeds=(1,)), 2, NumpyLoops())
    rows = {row.strategy: row for row in got.rows}
    cold, warm = rows["deepinfer, cold"], rows["deepinfer, warm, price 0.5"]
    assert warm.moves < 0.5 * cold.moves and warm.next < cold.next + 0.005
    assert rows["deepinfer, warm, at most 5 moves"].moves <= 5 and rows["keep the first plan"].moves == 0
    assert warm.share == pytest.approx(warm.moves / 112)


def test_received_counts_experts_a_rank_did_not_hold():
    old, new = np.array([[[0, 1], [2, 3]]]), np.array([[[1, 0], [3, 0]]])
    assert replan.received(new, old) == 1 and replan.received(old, old) == 0


def test_recorded_routing_cannot_be_continued():
    recipe = bench.read_recipe(ROOT / "recipes" / "eplb" / "real-decode-ep16.yaml")
    with pytest.raises(UsageError, match="needs a trace that goes on"):
        replan.run_replan(recipe, 1, NumpyLoops())


def test_published_tables_are_the_recorded_ones():
    folder = ROOT / "recipes" / "results"
    text = (folder / "eplb.md").read_text(encoding="utf-8")
    for table in results.tables(folder / "eplb.jsonl").split("\n\n"):
        assert table in text
