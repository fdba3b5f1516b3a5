"""V4 configs and their tensor plans against the published tensor counts and payloads."""

from __future__ import annotations

import json

import pytest

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.model_v4 import V4Config, load_any_config, parse_any_config, require_v41
from deepinfer_engine.errors import ArtefactError, CheckpointError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.plan import parameter_summary, tensor_plan


@pytest.mark.parametrize(
    ("file", "draft", "tensors", "nbytes"),
    [
        ("v4-flash-config.json", "mtp", 69_187, 159_609_485_896),
        ("v4-flash-dspark-config.json", "dspark", 72_317, 166_878_536_440),
    ],
)
def test_published_counts_and_payloads(vectors, file, draft, tensors, nbytes):
    config = load_any_config(vectors / file)
    assert isinstance(config, V4Config) and config.draft == draft
    plan = tensor_plan(config)
    assert (len(plan), sum(s.nbytes for s in plan.values())) == (tensors, nbytes)
    summary = parameter_summary(config)
    assert (summary.tensors, summary.nbytes) == (tensors, nbytes)


def test_dspark_draft_has_4705_tensors(vectors):
    plan = tensor_plan(load_any_config(vectors / "v4-flash-dspark-config.json"))
    assert sum(s.group == "draft" for s in plan.values()) == 4_705
    assert plan["mtp.2.markov_head.markov_w1.weight"].shape == (129_280, 256)
    assert plan["mtp.0.main_proj.scale"].shape == (32, 96)


def test_plan_equals_the_headers_of_the_golden_v4_checkpoint(golden_v4):
    checkpoint = Checkpoint.open(golden_v4)
    assert checkpoint.groups_present == {"backbone"}
    assert len(checkpoint.plan) == sum(len(h.tensors) for h in checkpoint.headers.values()) == 359
    assert checkpoint.tensor("layers.0.ffn.gate.tid2eid").shape == (320, 3)
    with pytest.raises(ArtefactError, match="forward pass of 'deepseek_v4' is not implemented"):
        _ = checkpoint.config


def test_forward_is_refused_by_name_and_v41_passes(vectors):
    with pytest.raises(ArtefactError, match="forward pass of 'deepseek_v4' is not implemented") as caught:
        require_v41(load_any_config(vectors / "v4-flash-config.json"))
    assert caught.value.exit_code == 4
    assert isinstance(require_v41(load_any_config(vectors / "v41-flash-config.json")), ModelConfig)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"compress_ratios": [0] * 43}, "compress_ratios has 43 entries, expected 43 layers + 1 draft blocks"),
        ({"compress_ratios": [0, 2] * 22}, "may hold 0, 4 and 128 only, found [2]"),
        ({"compress_ratios": [4] * 44}, "of draft blocks (entries past num_hidden_layers) must be 0"),
        ({"num_hash_layers": 44}, "num_hash_layers 44 exceeds the 43 layers"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok 300 exceeds n_routed_experts 256"),
        ({"n_shared_experts": 2}, "V4 checkpoints store exactly one"),
        ({"o_groups": 7}, "64 heads cannot be split into o_groups 7"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 must be even"),
        ({"hidden_size": 4100}, "hidden_size is 4100; quantised expert widths must be multiples of 32"),
        ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8', only 'fp4' is implemented (the Base releases"),
        ({"hidden_size": "4096"}, "hidden_size: expected an integer, found '4096'"),
        ({"hidden_size": -1}, "hidden_size is -1, it must be positive"),
        ({"num_hidden_layers": 10**9}, "more than 4096 is no model of this family"),
        ({"vision_n_layers": 32}, "vision_n_layers is not a field of a V4 config"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', only 'sqrtsoftplus'"),
        ({"dspark_block_size": 5}, "dspark_block_size is given without dspark_target_layer_ids"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq'"),
        ({"quantization_config": None}, "expert_dtype is given without a quantization_config"),
        ({"pad_token_id": 129280}, "pad_token_id is 129280, the vocabulary has ids 0..129279"),
    ],
)
def test_violations_are_named(vectors, change, fragment):
    raw = json.loads((vectors / "v4-flash-config.json").read_text()) | change
    with pytest.raises(ArtefactError) as caught:
        parse_any_config(raw)
    assert fragment in caught.value.message


def test_all_bad_fields_are_reported_at_once(vectors):
    raw = json.loads((vectors / "v4-flash-config.json").read_text())
    del raw["head_dim"], raw["q_lora_rank"]
    raw["index_topk"] = 1.5
    with pytest.raises(CheckpointError) as caught:
        parse_any_config(raw)
    assert len(caught.value.problems) == 3


def test_duplicate_keys_and_nan_in_a_config_are_refused(vectors, tmp_path):
    text = (vectors / "v4-flash-config.json").read_text()
    for bad, fragment in (
        (text.replace('"head_dim": 512', '"head_dim": 512, "head_dim": 256'), "key 'head_dim' appears twice"),
        (text.replace('"rope_theta": 10000', '"rope_theta": NaN'), "NaN is not a JSON number"),
        ("[]", "expected a JSON object"),
        ("<!DOCTYPE html><html></html>", "an HTML page"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    ):
        (tmp_path / "config.json").write_text(bad)
        with pytest.raises(ArtefactError, match=fragment):
            load_any_config(tmp_path)
