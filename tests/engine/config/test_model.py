"""The V4.1 config: derived facts, and one sentence per broken invariant."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from deepinfer_engine.config.model import load_model_config, parse_model_config
from deepinfer_engine.errors import ArtefactError, CheckpointError

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
RELEASE = json.loads((VECTORS / "v41-flash-config.json").read_text())
TINY = json.loads((VECTORS / "v41-tiny-a" / "checkpoint" / "config.json").read_text())


def test_the_release_has_its_published_layer_plan():
    plan = load_model_config(VECTORS / "v41-flash-config.json").layer_plan
    modes = {p.layer: p.mode for p in plan}
    assert [layer for layer, m in modes.items() if m == "window"] == [0, 1]
    assert [layer for layer, m in modes.items() if m == "full"] == [2, 8, 14, 20]
    assert [layer for layer, m in modes.items() if m == "reindex"] == [24, 28, 32, 36]
    assert [(p.kv_source, p.index_source) for p in plan if p.layer in (7, 13, 19, 23, 27, 39)] == [
        (2, 2), (8, 8), (14, 14), (20, 20), (20, 24), (20, 36)
    ]  # fmt: skip
    assert [p.layer for p in plan if p.engram] == [1, 14]
    assert [p.layer for p in plan if p.tap] == [37, 38, 39]
    assert [p.candidates for p in plan if p.owns_index] == ["none"] * 3 + ["publish"] + ["restrict"] * 4


def test_the_release_has_its_published_derived_sizes():
    c = load_model_config(VECTORS / "v41-flash-config.json")
    assert (c.cut, c.ring, c.rollback_slack, c.pair_ring, c.hc_rows) == (20, 134, 6, 7, 24)
    first, second = c.engram_primes
    assert first[:3] == (16000057, 16000079, 16000081) and sum(first) == 384006168
    assert second[0] == 16000477 and sum(second) == 384016682
    assert c.engram_multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


def test_the_digest_follows_the_shapes():
    a, b = copy.deepcopy(TINY), copy.deepcopy(TINY)
    b["text_config"]["index_topk"] = 11
    assert parse_model_config(a).digest == parse_model_config(copy.deepcopy(TINY)).digest
    assert parse_model_config(a).digest != parse_model_config(b).digest


TEXT = [
    ("num_hidden_layers", 0, "num_hidden_layers is 0, it must be positive"),
    ("num_hidden_layers", "9", "expected an integer, found '9'"),
    ("num_hidden_layers", True, "expected an integer, found True"),
    ("rms_norm_eps", "x", "expected a number"),
    ("norm_topk_prob", 1, "expected true or false"),
    ("hidden_act", "gelu", "only 'silu' is implemented"),
    ("num_key_value_heads", 2, "only 1 is implemented"),
    ("scoring_func", "softmax", "only 'sqrtsoftplus' is implemented"),
    ("num_hash_layers", 3, "only 0 is implemented"),
    ("tie_word_embeddings", True, "only False is implemented"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2}, "rope_type 'linear' is not implemented"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2}, "missing keys"),
    ("compress_ratios", [0, 0], "compress_ratios has 2 entries for 9 layers"),
    ("compress_ratios", [0, 0, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0], "may hold 0, 1 and 2 only, found [3]"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0], "draft blocks"),
    ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0], "layer 4 has ratio 1, its kv source 3 has 2"),
    ("kv_source_layer_ids", [], "kv_source_layer_ids is empty"),
    ("kv_source_layer_ids", [3, 2, 5], "must be strictly increasing"),
    ("kv_source_layer_ids", [2, 3, 6], "kv source 6 is not an index source"),
    ("kv_source_layer_ids", [1, 2, 3, 5], "layer 1 is a source but its compress ratio is 0"),
    ("kv_source_layer_ids", [2, 3, 99], "names layers [99], the model has 0..8"),
    ("index_source_layer_ids", [3, 5, 7], "layer 2 has ratio 2 but no index source at or below it"),
    ("candidate_source_layer_id", 6, "candidate_source_layer_id 6 is not an index source"),
    ("candidate_source_layer_id", 2, "comes after candidate source 2 but reads another kv source"),
    ("candidate_topk_blocks", 2, "may hold fewer than index_topk 12 visible entries"),
    ("hidden_size", 100, "hidden_size is 100; quantised widths must be multiples of 32"),
    ("o_groups", 3, "4 heads cannot be split into o_groups 3"),
    ("qk_rope_head_dim", 128, "must be even and at most head_dim and index_head_dim"),
    ("num_experts_per_tok", 17, "num_experts_per_tok 17 exceeds n_routed_experts 16"),
    ("n_shared_experts", 2, "V4.1 checkpoints store exactly one"),
    ("engram_num_embeddings", [1552], "engram_num_embeddings has 1 entries for 2 layers"),
    ("engram_num_embeddings", [1552, 1753], "its bucket primes sum to 1752"),
    ("engram_max_ngram_size", 1, "the smallest n-gram order is 2"),
    ("engram_layer_ids", [1, 6], "engram layer 6 lies at or after the cut 5"),
    ("engram_pad_token_id", 368, "the vocabulary has ids 0..367"),
    ("dspark_target_layer_ids", [], "dspark_target_layer_ids is empty but the model has draft blocks"),
    ("dspark_num_experts_per_tok", 9, "dspark_num_experts_per_tok exceeds dspark_n_routed_experts"),
    ("dspark_noise_token_id", 400, "outside the vocabulary"),
    ("unheard_of", 1, "text_config.unheard_of is not a field this engine knows"),
    ("hidden_size", None, "expected an integer, found None"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), TEXT, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(TEXT)])
def test_a_broken_field_or_invariant_is_one_sentence_with_exit_4(field, value, sentence):
    raw = copy.deepcopy(TINY)
    raw["text_config"][field] = value
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(raw, where="c.json")
    assert sentence in caught.value.message
    assert caught.value.exit_code == 4
    assert caught.value.message.startswith("c.json: ")


def test_a_missing_field_is_named():
    raw = copy.deepcopy(TINY)
    del raw["text_config"]["hidden_size"], raw["text_config"]["index_topk"]
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(raw)
    assert caught.value.problems == ("text_config.hidden_size is missing", "text_config.index_topk is missing")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.pop("text_config"), "text_config is missing"),
        (lambda r: r.update(model_type="llama"), "model_type is 'llama'"),
        (lambda r: r.pop("quantization_config"), "quantization_config is missing"),
        (lambda r: r["quantization_config"].update(expert_dtype="fp8"), "expert_dtype is 'fp8'"),
        (lambda r: r["quantization_config"].update(weight_block_size=[128, 128]), "V4.1 uses [32, 32]"),
        (lambda r: r.update(eos_token_id="1"), "eos_token_id: expected an integer"),
        (lambda r: r["vision_config"].pop("patch_size"), "vision_config: missing keys ['patch_size']"),
        (lambda r: r["vision_config"].update(depth=3), "vision_config: unknown keys ['depth']"),
    ],
)
def test_top_level_problems_are_named(change, sentence):
    raw = copy.deepcopy(TINY)
    change(raw)
    with pytest.raises(ArtefactError) as caught:
        parse_model_config(raw)
    assert sentence in caught.value.message and caught.value.exit_code == 4


def test_several_problems_are_reported_at_once():
    raw = copy.deepcopy(TINY)
    raw["text_config"].update(hidden_size=100, n_shared_experts=2, engram_num_embeddings=[1, 2])
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(raw)
    assert len(caught.value.problems) == 4
