"""The tensor plan against the published totals of the release."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from deepinfer_engine.config.model import load_model_config, parse_model_config
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.weights.header import scan_header
from deepinfer_engine.weights.plan import parameter_summary, tensor_families, tensor_plan


def test_release_plan_has_the_published_totals(vectors):
    plan = tensor_plan(load_model_config(vectors / "v41-flash-config.json"))
    elements: Counter[str] = Counter()
    for spec in plan.values():
        elements[spec.dtype] += spec.numel
    assert len(plan) == 96_085
    assert sum(s.nbytes for s in plan.values()) == 510_286_023_000
    assert elements == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
    }


def test_release_shards_have_the_published_payloads(vectors):
    plan = tensor_plan(load_model_config(vectors / "v41-flash-config.json"))
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for spec in plan.values():
        count[spec.shard] += 1
        nbytes[spec.shard] += spec.nbytes
    assert list(count) == [
        "vision", "embed", *(f"layers.{i}" for i in range(40)), "head", "mtp.0", "mtp.1", "mtp.2",
        "layers.1.engram", "layers.14.engram",
    ]  # fmt: skip
    published = {
        "vision": (266, 970_536_960),
        "embed": (1, 1_323_827_200),
        "layers.0": (2334, 7_389_500_888),
        "head": (2, 1_323_837_440),
        "mtp.0": (801, 2_652_643_800),
        "mtp.1": (798, 2_573_913_560),
        "mtp.2": (802, 2_706_317_272),
        "layers.1.engram": (6, 101_535_150_272),
        "layers.14.engram": (6, 101_537_925_968),
    }
    assert {k: (count[k], nbytes[k]) for k in published} == published
    assert {count[f"layers.{i}"] for i in range(40)} == {2334, 2337, 2341, 2342}


def test_summary_equals_the_expanded_plan(vectors):
    config = load_model_config(vectors / "v41-flash-config.json")
    plan = tensor_plan(config)
    summary = parameter_summary(config)
    assert summary.tensors == len(plan)
    assert summary.nbytes == sum(s.nbytes for s in plan.values())
    assert summary.parameters == sum(s.parameters for s in plan.values())
    groups = Counter()
    for spec in plan.values():
        groups[spec.group] += spec.nbytes
    assert summary.bytes_by_group == groups
    # figures of the model report: 551.57 B backbone, 196.61 B tables, 763.21 B in all
    assert round(summary.parameters / 1e9, 2) == 763.21
    assert round(parameter_summary(config, groups=("backbone",)).parameters / 1e9, 2) == 551.57
    assert round(summary.parameters_by_component["engram tables"] / 1e9, 2) == 196.61


def test_families_fold_the_experts(vectors):
    config = load_model_config(vectors / "v41-flash-config.json")
    assert sum(len(f.specs) for f in tensor_families(config)) < 2_500
    one = next(f for f in tensor_families(config) if f.component == "routed experts")
    assert one.count == 384 and one.nbytes // one.count == 18_800_640


def test_plan_equals_the_headers_of_the_golden_checkpoint(golden):
    plan = tensor_plan(load_model_config(golden))
    stored = {}
    problems: list[str] = []
    for path in golden.glob("*.safetensors"):
        header = scan_header(path, problems)
        assert header is not None
        stored |= {name: (t.dtype, t.shape) for name, t in header.tensors.items()}
    assert problems == []
    assert stored == {s.name: (s.dtype, s.shape) for s in plan.values()}


def test_config_without_vision_and_draft_plans_neither(tiny):
    raw = tiny.raw_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1])
    del raw["vision_config"]
    assert {s.group for s in tensor_plan(parse_model_config(raw)).values()} == {"backbone", "engram"}


def test_absurd_sizes_are_refused_before_they_are_listed(tiny):
    for raw, fragment in (
        (tiny.raw_config(n_routed_experts=2**31), "the config implies 77309411"),
        (tiny.raw_config() | {"vision_config": tiny.raw_config()["vision_config"] | {"num_hidden_layers": 2**62}},
         "vision_config.num_hidden_layers is 4611686018427387904, at most 4096"),
    ):  # fmt: skip
        with pytest.raises(ArtefactError, match=fragment):
            tensor_plan(parse_model_config(raw))


def test_planning_and_validating_import_no_torch(checkpoint_dir):
    code = (
        "import sys; from deepinfer_engine.weights.checkpoint import Checkpoint; "
        f"Checkpoint.open({str(checkpoint_dir)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
