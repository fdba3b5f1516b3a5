"""Level 1 on the recorded tiny model and the released config: all checks pass, and every known fault is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.sim.models import release_config
from deepinfer_engine.verify.yoco_level1 import TITLES, Ledger, _judge, noticed_at_level1, verify_level1
from deepinfer_engine.verify.yoco_subject import MUTATIONS, Subject

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
CONFIGS = {
    "tiny": VECTORS / "v41-tiny-a" / "checkpoint" / "config.json",
    "w128": VECTORS / "v41-tiny-a" / "checkpoint" / "config.w128.json",
    "release": VECTORS / "v41-flash-config.json",
}


@pytest.mark.parametrize("name", ["tiny", "release"])
def test_every_check_compares_something_and_finds_nothing(name):
    results = verify_level1(load_model_config(CONFIGS[name]))
    assert [r.check for r in results] == list(TITLES) and len(results) == 18
    assert [(r.check, r.first) for r in results if r.failed] == []
    assert all(r.compared for r in results)
    assert results[-1].compared == len(MUTATIONS)


def test_the_shipped_release_config_is_the_recorded_one():
    assert release_config().digest == load_model_config(CONFIGS["release"]).digest


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed_in_a_model_whose_window_is_a_block(name):
    assert noticed_at_level1(load_model_config(CONFIGS["w128"]), name)


#: faults and the checks that must say no to them, so that no check is there for show
SAY_NO = {
    "cap-without-slack": {"L1-1", "L1-2"},
    "final-chunk-short": {"L1-3"},
    "floor-encoder-low": {"L1-1", "L1-4"},
    "floor-decoder-high": {"L1-1", "L1-4"},
    "ring-short": {"L1-11", "L1-12", "L1-17"},
    "ring-short-copy": {"L1-11", "L1-17"},
    "pair-ring-short": {"L1-12", "L1-17"},
    "blocks-overwritten": {"L1-6"},
    "blocks-unwritten": {"L1-6", "L1-8"},
    "pivot-copy-late": {"L1-11", "L1-13"},
    "replay-cached": {"L1-15"},
    "decoder-cached": {"L1-15"},
    "key-without-parent": {"L1-15"},
    "older-windows": {"L1-1"},
}


@pytest.mark.parametrize("name", SAY_NO)
def test_the_check_that_should_say_no_does(name):
    ledger = Ledger()
    _judge(load_model_config(CONFIGS["tiny"]), MUTATIONS[name].apply(Subject()), ledger, thorough=False)
    assert {r.check for r in ledger.results.values() if r.failed} >= SAY_NO[name]
