"""Level 2 on the recorded tiny checkpoint: equalities hold, drift is measured, faults change numbers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deepinfer_engine.verify.yoco import open_level2
from deepinfer_engine.verify.yoco_level2 import FROZEN, Budget, Level2, Level2Check, Row
from deepinfer_engine.verify.yoco_subject import MUTATIONS, Subject

CHECKPOINT = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
#: random weights exaggerate what a replay costs; the budget of real ones is not theirs
RANDOM = Budget(kl=0.1, top1=0.5, overlap=0.5)
LEVEL2 = [name for name, mutation in MUTATIONS.items() if 2 in mutation.levels]
QUICK = ["ring-short", "pair-ring-short", "floor-decoder-high", "blocks-unwritten", "tail-short"]


@pytest.fixture(scope="module")
def opened() -> tuple[Level2Check, list[Row]]:
    return open_level2(CHECKPOINT, None, ranks=2, progress=lambda text: None)


@pytest.fixture(scope="module")
def result(opened: tuple[Level2Check, list[Row]]) -> Level2:
    check, rows = opened
    found = check.judge(Subject())
    return Level2(found.prompt, found.forced, (*rows, *found.rows), found.drifts)


def test_equalities_hold_element_by_element(result):
    assert [r for r in result.rows if not r.good] == []
    assert len(result.rows) == 15 and all(r.largest == 0.0 for r in result.rows)
    assert all(r.compared > 1000 for r in result.rows)
    assert result.verdict(dict.fromkeys(FROZEN, RANDOM)) == []


def test_replays_are_approximations_and_a_tight_budget_says_no(result):
    bounded, replay = result.drifts
    assert 0 < bounded.mean_kl < replay.mean_kl, "a replay also changes the encoder half"
    assert bounded.late_kl is not None and bounded.late_kl < bounded.mean_kl / 10, "the drift decays with distance"
    bad = result.verdict(dict.fromkeys(FROZEN, Budget(kl=0.0, top1=1.0, overlap=1.0)))
    assert len(bad) == 2 and "mean KL" in bad[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_changes_numbers(opened, name):
    assert opened[0].noticed(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(LEVEL2) - set(QUICK)))
def test_every_other_fault_changes_numbers(opened, name):
    assert opened[0].noticed(name)


@pytest.mark.slow
def test_level_2_of_a_model_whose_window_is_a_block(tmp_path):
    for file in CHECKPOINT.iterdir():
        if not file.name.startswith("config"):
            os.symlink(file, tmp_path / file.name)
    shutil.copy(CHECKPOINT / "config.w128.json", tmp_path / "config.json")
    check, rows = open_level2(tmp_path, None, ranks=1, progress=lambda text: None)
    found = check.judge(Subject())
    assert [r for r in (*rows, *found.rows) if not r.good] == []
    assert check.noticed("ring-short") and check.noticed("pivot-of-chunk")
