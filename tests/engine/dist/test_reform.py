"""What is left of a deployment after ranks are lost: legal or refused, survivors in place, only the rest placed anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.reform import read_healthy, reform
from deepinfer_engine.errors import CapacityError, UsageError


def deployment(ep: int, experts: int, redundant: int, layers: int = 2):
    sets = [f"parallel.ep={ep}", f"parallel.dp={ep}", f"parallel.redundant_experts_per_rank={redundant}"]
    profile = load_profile("cpu-nano", sets).profile
    return profile, Placement.static(layers, experts, ranks=ep, redundant_per_rank=redundant).slots_LRS


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_survivors_keep_their_experts_and_every_expert_has_a_slot(data):
    ep, experts = data.draw(st.integers(2, 8)), data.draw(st.integers(8, 24))
    profile, slots_LRS = deployment(ep, experts, data.draw(st.integers(1, 3)))
    alive = tuple(sorted(data.draw(st.sets(st.integers(0, ep - 1), min_size=1))))
    slots = slots_LRS.shape[2]
    if len(alive) * slots < experts:
        with pytest.raises(CapacityError, match=f"need {experts} expert slots"):
            reform(profile, slots_LRS, experts, alive)
        return
    again = reform(profile, slots_LRS, experts, alive)
    Placement.of(again.slots_LRS).check(experts)
    assert again.slots_LRS.shape == (2, len(alive), slots)
    now = again.profile
    assert now.ranks == len(alive) and now.ranks % now.parallel.dp == 0
    assert now.slots_per_rank(experts) == slots  # a rank's memory does not grow
    # an expert is read by at most one rank per copy that was lost: what is held is not read again
    held = slots_LRS[:, list(alive)]
    moved = sum(
        len(set(new.tolist()) - set(old.tolist()))
        for new, old in zip(again.slots_LRS.reshape(-1, slots), held.reshape(-1, slots), strict=True)
    )
    orphans = sum(experts - len(set(layer.flatten().tolist())) for layer in held)
    assert moved == again.read == orphans


def test_the_published_width_survives_nine_lost_ranks_and_not_ten():
    profile = load_profile("decode-ep64").profile
    slots_LRS = Placement.static(1, 384, ranks=64, redundant_per_rank=1).slots_LRS
    again = reform(profile, slots_LRS, 384, tuple(range(55)))
    assert (again.profile.ranks, again.profile.hardware.gpus, again.profile.hardware.gpus_per_node) == (55, 55, 1)
    with pytest.raises(CapacityError, match="54 of 64 ranks are left: need 384 expert slots, have 54 x 7 = 378"):
        reform(profile, slots_LRS, 384, tuple(range(54)))


def test_nothing_lost_changes_nothing():
    profile, slots_LRS = deployment(4, 8, 1)
    again = reform(profile, slots_LRS, 8, (0, 1, 2, 3))
    assert again.read == 0 and np.array_equal(again.slots_LRS, slots_LRS)


def test_healthy_ranks_are_counted_or_listed(tmp_path: Path):
    listed = tmp_path / "healthy"
    listed.write_text("0-2, 5 # rack one\n7\n")
    assert read_healthy(str(listed), 8) == (0, 1, 2, 5, 7)
    assert read_healthy("3", 8) == (0, 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-9", "rank 8 does not exist"),
        ("x", ":1: 'x' is not a rank or a range"),
        ("# none", "lists no rank"),
        ("3-", "is not a rank or a range"),
    ],
)
def test_a_bad_list_is_refused_with_its_place(tmp_path: Path, text: str, message: str):
    listed = tmp_path / "healthy"
    listed.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_healthy(str(listed), 8)
    with pytest.raises(UsageError, match="expected 1 to 8"):
        read_healthy("9", 8)
