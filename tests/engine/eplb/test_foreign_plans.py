"""Peers' plan files: what is written reads back to the same slots, and says exactly what their loaders expect."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from deepinfer_engine.eplb import foreign_plans, policy
from deepinfer_engine.eplb import plan as plans
from deepinfer_engine.errors import ArtefactError, UsageError

SUFFIX = {"sglang": "json", "trtllm": "yaml", "ascend": "json", "npz": "npz"}


@pytest.fixture
def made(decode) -> plans.ExpertPlan:
    slots = np.stack([p.slot_RS for p in policy.plan_experts(decode(steps=60), policy.Topology(8, 7))])
    return plans.ExpertPlan(2, 48, slots, (1, 2), "test", (1.1, None), plans.Digests("cfg", "wts", "sts"))


@pytest.mark.parametrize("kind", foreign_plans.EXPORTS)
def test_round_trip(tmp_path, made, kind):
    path = tmp_path / f"plan.{SUFFIX[kind]}"
    foreign_plans.export_plan(made, kind, path)
    back = foreign_plans.read_any_plan(path, ranks=8, experts=48)
    rows = back.slot_expert_LRS[-2:] if kind == "sglang" else back.slot_expert_LRS
    assert (rows == made.slot_expert_LRS).all()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_our_own_file_is_recognised(tmp_path, made):
    plans.write_plan(made, tmp_path / "p.json")
    assert foreign_plans.read_any_plan(tmp_path / "p.json").to_dict() == made.to_dict()


def test_sglang_file_has_one_key_and_a_row_for_every_layer(tmp_path, made):
    notes = foreign_plans.export_plan(made, "sglang", tmp_path / "p.json")
    value = json.loads((tmp_path / "p.json").read_text())
    assert list(value) == ["physical_to_logical_map"] and len(value["physical_to_logical_map"]) == 3
    assert {len(set(row)) for row in value["physical_to_logical_map"]} == {48}
    assert "--ep-num-redundant-experts 8" in notes[0] and "layers [0] are not" in notes[1]


def test_tensorrt_llm_file_is_keyed_by_model_layer(tmp_path, made):
    foreign_plans.export_plan(made, "trtllm", tmp_path / "p.yaml")
    value = yaml.safe_load((tmp_path / "p.yaml").read_text())
    assert (
        value["num_slots"] == 56
        and value["layer_updates_per_iter"] == 0
        and list(value["initial_global_assignments"]) == [1, 2]
    )


def test_ascend_file_numbers_moe_layers(tmp_path, made):
    foreign_plans.export_plan(made, "ascend", tmp_path / "p.json")
    value = json.loads((tmp_path / "p.json").read_text())
    assert value["moe_layer_count"] == 2 and [layer["layer_id"] for layer in value["layer_list"]] == [0, 1]
    assert (
        value["layer_list"][0]["device_count"] == 8
        and len(value["layer_list"][0]["device_list"][7]["device_expert"]) == 7
    )


def test_npz_holds_both_directions(tmp_path, made):
    foreign_plans.export_plan(made, "npz", tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as z:
        forward, back, copies = z["physical_to_logical"], z["logical_to_physical"], z["copies"]
        assert json.loads(str(z["meta"]))["config_digest"] == "cfg"
    for k in range(2):
        for e in range(48):
            at = back[k, e][back[k, e] >= 0]
            assert len(at) == copies[k, e] and (forward[k, at] == e).all()


def test_dead_ranks_survive_only_where_the_form_can_say_so(tmp_path):
    slots = np.array([[[0, 1], [-1, -1], [2, 0]]])
    p = plans.ExpertPlan(0, 3, slots, (0,), "test", (None,))
    foreign_plans.export_plan(p, "npz", tmp_path / "p.npz")
    assert foreign_plans.read_any_plan(tmp_path / "p.npz").dead_ranks == (1,)
    for kind in ("sglang", "trtllm", "ascend"):
        with pytest.raises(UsageError, match="ranks \\[1\\] are dead"):
            foreign_plans.export_plan(p, kind, tmp_path / "x")


BAD = {
    "p.json": [
        ({"physical_to_logical_map": [[0, 1]], "x": 1}, "expected only physical_to_logical_map"),
        ({"physical_to_logical_map": [[0, 1], [0]]}, "rows of different lengths"),
        ({"physical_to_logical_map": [[0, 1, 0]]}, "3 slots do not divide over 2 ranks"),
        ({"physical_to_logical_map": [[0, 0]]}, "expert 1 has no slot"),
        ({"layer_list": [{"layer_id": 0}]}, "not an expert map"),
        (
            {
                "moe_layer_count": 2,
                "layer_list": [
                    {"layer_id": 0, "device_count": 1, "device_list": [{"device_id": 0, "device_expert": [0, 1]}]}
                ],
            },
            "do not match the lists",
        ),
    ],
    "p.yaml": [
        ({"num_slots": 2}, "no initial_global_assignments"),
        ({"num_slots": 3, "initial_global_assignments": {0: [0, 1]}}, "num_slots is 3, the rows have 2"),
    ],
}


@pytest.mark.parametrize(("name", "k"), [(name, k) for name, cases in BAD.items() for k in range(len(cases))])
def test_files_that_are_not_plans(tmp_path, name, k):
    value, text = BAD[name][k]
    (tmp_path / name).write_text(json.dumps(value) if name.endswith("json") else yaml.safe_dump(value))
    with pytest.raises(ArtefactError, match=text) as e:
        foreign_plans.read_any_plan(tmp_path / name, ranks=2, experts=2)
    assert name in e.value.message


def test_flat_forms_need_the_ranks(tmp_path, made):
    foreign_plans.export_plan(made, "trtllm", tmp_path / "p.yaml")
    with pytest.raises(UsageError, match="lists slots only") as e:
        foreign_plans.read_any_plan(tmp_path / "p.yaml")
    assert e.value.hint == "give --ranks"


def test_unknown_kind(tmp_path, made):
    with pytest.raises(UsageError, match="expected one of sglang, trtllm, ascend, npz"):
        foreign_plans.export_plan(made, "vllm", tmp_path / "x")
