"""A tiny V4.1 checkpoint with every mechanism on, shared by the tests of this folder."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_engine.config.model import parse_model_config
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.tensor_spec import TensorSpec
from deepinfer_engine.weights.writer import write_checkpoint

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
V4_TINY = Path(__file__).resolve().parents[4] / "shared" / "golden" / "v4-tiny"


def tiny_raw_config(**text: Any) -> dict[str, Any]:
    """The release config shrunk to 6 layers, 8 experts and H 64; keyword arguments replace text_config keys."""
    raw = copy.deepcopy(json.loads((VECTORS / "v41-flash-config.json").read_text()))
    raw |= {"image_token_id": 60, "pad_token_id": 2}
    raw["text_config"] |= {
        "vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6,
        "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_lora_rank": 32,
        "o_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 4, "candidate_block_size": 2,
        "engram_layer_ids": [1, 3], "engram_num_embeddings": [240, 306], "engram_max_ngram_size": 3,
        "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 60,
        "num_nextn_predict_layers": 2, "dspark_target_layer_ids": [4, 5], "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, "dspark_noise_token_id": 61,
        "max_position_embeddings": 256,
    }  # fmt: skip
    raw["text_config"] |= text
    raw["vision_config"] |= {
        "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 2,
        "downsample_ratio": 2,
    }  # fmt: skip
    return raw


def random_value(spec: TensorSpec) -> torch.Tensor:
    """Values that depend on the name only; never all equal."""
    generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(spec.name, 1)))
    return torch.randn(spec.value_shape, generator=generator) * 0.1


def random_weights(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    plan = tensor_plan(parse_model_config(raw))
    return {name: random_value(spec) for name, spec in plan.items() if not spec.is_scale}


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Makers: ``raw_config(**text)``, ``value(spec)``, ``weights(raw)``."""
    return SimpleNamespace(raw_config=tiny_raw_config, value=random_value, weights=random_weights)


@pytest.fixture(scope="session")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("weights") / "tiny"
    raw = tiny_raw_config()
    write_checkpoint(target, raw, random_weights(raw))
    return target


@pytest.fixture
def checkpoint_dir(_written: Path, tmp_path: Path) -> Path:
    """A private copy of the tiny checkpoint, free to be damaged."""
    return shutil.copytree(_written, tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def vectors() -> Path:
    return VECTORS


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden V4.1 checkpoint."""
    return VECTORS / "v41-tiny-a" / "checkpoint"


@pytest.fixture(scope="session")
def golden_v4() -> Path:
    """The golden V4 checkpoint, which is not in this repository; skips where it is not beside it."""
    if not V4_TINY.is_dir():
        pytest.skip("no V4 checkpoint shared/golden/v4-tiny beside the repository")
    return V4_TINY / "checkpoint"
