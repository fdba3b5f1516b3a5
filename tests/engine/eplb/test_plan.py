"""Plans: what is legal, what moves lead from one to the next, and a file that survives a round trip and nothing
else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_engine.eplb import plan as plans
from deepinfer_engine.eplb import policy
from deepinfer_engine.errors import ArtefactError


def make(slots, experts, **more) -> plans.ExpertPlan:
    slots = np.array(slots)
    fields = dict(epoch=3, layer_ids=tuple(range(5, 5 + len(slots))), algorithm="test", moe_lb_L=(1.25,) * len(slots))
    return plans.ExpertPlan(experts=experts, slot_expert_LRS=slots, **(fields | more))


OLD = [[[0, 1], [2, 3], [0, 2]]]
NEW = [[[1, 0], [2, 0], [3, 2]]]


def test_moves_name_what_each_rank_must_receive():
    assert make(NEW, 4).moves(make(OLD, 4)) == (plans.Move(0, 0, 0, 0, 1, 1), plans.Move(0, 3, 1, 1, 2, 0))
    assert make(OLD, 4).moves(make(OLD, 4)) == ()


def test_applying_the_moves_gives_every_rank_its_experts(decode):
    counts = decode(steps=480)
    a, b = (
        np.stack([p.slot_RS for p in policy.plan_experts(c, policy.Topology(8, 7))])
        for c in (counts[:240], counts[240:])
    )
    old, new = make(a, 48), make(b, 48)
    have = [[set(row) for row in layer] for layer in a.tolist()]
    for m in new.moves(old):
        assert m.expert in a[m.layer, m.src_rank] and a[m.layer, m.src_rank, m.src_slot] == m.expert
        assert b[m.layer, m.dst_rank, m.dst_slot] == m.expert and m.expert not in have[m.layer][m.dst_rank]
        have[m.layer][m.dst_rank].add(m.expert)
    assert all(set(row) <= have[k][r] for k, layer in enumerate(b.tolist()) for r, row in enumerate(layer))


def test_receivers_share_the_old_holders():
    old = make([[[0, 1], [0, 2], [1, 2], [1, 2]]], 3)
    new = make([[[1, 2], [0, 1], [0, 2], [0, 2]]], 3)
    assert [m.src_rank for m in new.moves(old) if m.expert == 0] == [0, 1]


def test_experts_without_a_live_holder_come_from_the_checkpoint():
    old = make([[[0, 1], [2, 3], [4, 5]]], 6)
    new = make([[[0, 1, 2, 3], [2, 3, 4, 5], [-1, -1, -1, -1]]], 6)
    assert new.dead_ranks == (2,)
    assert {(m.expert, m.src_rank) for m in new.moves(old)} == {(2, 1), (3, 1), (4, -1), (5, -1)}


def test_a_second_replica_on_a_rank_is_a_colocation_and_no_move():
    p = make([[[0, 0], [1, 2]]], 3)
    assert p.colocations() == ((0, 0, 1),)
    assert [m.expert for m in p.moves(make([[[1, 2], [0, 1]]], 3))] == [0, 2]


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([[[0, 1], [2, 4]]], "holds expert 4, expected 0..3"),
        ([[[0, 1], [2, -2]]], "holds expert -2"),
        ([[[0, 1], [2, 2]]], "expert 3 has no slot"),
        ([[[0, 1, 2], [3, -1, 0]]], "-1 is legal only in all slots of a dead rank"),
        ([[[0] * 17 + [1, 2, 3]]], "expert 0 has 17 replicas, at most 16"),
        ([[0, 1, 2, 3]], "expected \\[layers, ranks, slots\\]"),
    ],
)
def test_illegal_plans_are_refused(slots, text):
    with pytest.raises(ArtefactError, match=text):
        make(slots, 4)


def test_plan_is_read_only_and_knows_its_sizes():
    p = make(OLD, 4)
    assert (
        (p.layers, p.ranks, p.slots_per_rank) == (1, 3, 2)
        and p.replicas_LE.tolist() == [[2, 1, 2, 1]]
        and p.moe_lb == 1.25
    )
    with pytest.raises(ValueError, match="read-only"):
        p.slot_expert_LRS[0, 0, 0] = 1


def test_file_round_trip_is_exact_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "a.plan.json"
    p = make(OLD, 4, moe_lb_L=(None,), digests=plans.Digests("c", "w", "s"), tool_version="1")
    plans.write_plan(p, path)
    q = plans.read_plan(path)
    assert q.to_dict() == p.to_dict() and q.digest() == p.digest() and q.same_slots(p)
    assert [f.name for f in tmp_path.iterdir()] == ["a.plan.json"]


def broken(**changes):
    values = make(OLD, 4).to_dict() | changes
    return json.dumps({k: v for k, v in values.items() if v is not ...})


BAD_FILES = {
    "truncated": (broken()[:-20], "not JSON"),
    "nan": (broken().replace("1.25", "NaN"), "NaN is not JSON"),
    "twice": ('{"format": "x", "format": "y"}', "appears twice"),
    "list": ("[]", "expected an object"),
    "format": (broken(format="other"), "format is 'other'"),
    "version": (broken(version=2), "version is 2"),
    "missing": (broken(ranks=...), "ranks is missing"),
    "unknown": (broken(extra=1), "unknown field 'extra'"),
    "type": (broken(epoch=True), "epoch is a bool"),
    "ragged": (broken(slot_expert=[[[0, 1], [2]]]), "rows of different lengths"),
    "float": (broken(slot_expert=[[[0.5, 1], [2, 3], [0, 2]]]), "expected 3 levels of integers"),
    "sizes": (broken(ranks=4), "ranks x slots_per_rank says"),
    "layers": (broken(layer_ids=[1, 2]), "2 layer ids"),
    "ids": (broken(layer_ids=["a"]), "layer_ids must be integers"),
    "balance": (broken(moe_lb=[0.5]), "expected null or 1.0 or more"),
    "expert": (broken(experts=9), "expert 4 has no slot"),
    "deep": ("[" * 100_000, "nested too deeply|not JSON"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(tmp_path, name):
    text, message = BAD_FILES[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ArtefactError, match=message) as e:
        plans.read_plan(path)
    assert str(path) in e.value.message and e.value.exit_code == 4


def test_huge_and_binary_files_are_refused_before_parsing(tmp_path):
    big, binary = tmp_path / "big.json", tmp_path / "bin.json"
    with big.open("wb") as f:
        f.truncate(plans.MAX_FILE_BYTES + 1)
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtefactError, match="JSON files may have"):
        plans.read_plan(big)
    with pytest.raises(ArtefactError, match="not UTF-8"):
        plans.read_plan(binary)


def test_plans_of_other_sizes_have_no_moves_between_them():
    with pytest.raises(ArtefactError, match="1 layers x 4 experts, the new one 1 x 3"):
        make([[[0, 1], [2, 0]]], 3).moves(make(OLD, 4))
