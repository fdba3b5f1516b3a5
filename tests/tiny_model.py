"""A tiny random V4.1 checkpoint with a byte-level BPE of its own, for tests that run the whole engine.

Every mechanism is on: both ratios, candidates, hash memory, eight experts. Contexts go up to 1,024 tokens.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepinfer_engine.config.model import parse_model_config
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.classes import token_classes
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.tensor_spec import TensorSpec
from deepinfer_engine.weights.writer import write_checkpoint

_CONFIG = Path(__file__).resolve().parent / "vectors" / "v41-flash-config.json"
_FIRST = [spelling.BOS, spelling.EOS, spelling.PAD]
_LAST = [
    spelling.SYSTEM,
    spelling.USER,
    spelling.ASSISTANT,
    spelling.THINK_START,
    spelling.THINK_END,
    spelling.DSML,
    spelling.IMAGE,
    "<｜latest_reminder｜>",
]
_SENTENCES = [
    "The quick brown fox asks: what is 12+30? It is 42. true false null",
    '{"name": "Ada", "age": 36, "tags": ["x", "y"]} calls invoke name parameter string',
    "Größe, héllo wörld, 你好世界, 😀 and so on",
] * 8


def tokenizer_json() -> str:
    """A trained ``tokenizer.json`` of 400 ids and the control tokens."""
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_FIRST,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_SENTENCES, trainer)
    library.add_special_tokens(_LAST)
    return library.to_str()


def write_tiny_model(directory: Path, **text: Any) -> Path:
    """Write the checkpoint into ``directory`` (new or empty); keyword arguments replace text_config keys."""
    spelled = tokenizer_json()
    tokenizer = Tokenizer(spelled, where="tiny")
    _, classes = token_classes(tokenizer)
    raw = copy.deepcopy(json.loads(_CONFIG.read_text()))
    raw |= {
        "image_token_id": tokenizer.control_id(spelling.IMAGE),
        "pad_token_id": tokenizer.control_id(spelling.PAD),
        "bos_token_id": tokenizer.control_id(spelling.BOS),
        "eos_token_id": tokenizer.control_id(spelling.EOS),
    }
    raw["text_config"] |= {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6,
        "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_lora_rank": 32,
        "o_groups": 2, "hc_sinkhorn_iters": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 12,
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 5, "candidate_block_size": 4,
        "engram_layer_ids": [1, 3], "engram_num_embeddings": [240, 306], "engram_max_ngram_size": 3,
        "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": classes,
        "engram_pad_token_id": tokenizer.control_id(spelling.PAD),
        "num_nextn_predict_layers": 2, "dspark_target_layer_ids": [4, 5], "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
        "dspark_noise_token_id": tokenizer.control_id("<｜latest_reminder｜>"),
        "max_position_embeddings": 1024,
    } | text  # fmt: skip
    raw["vision_config"] |= {
        "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 2,
        "downsample_ratio": 2,
    }  # fmt: skip
    weights = {n: _value(s) for n, s in tensor_plan(parse_model_config(raw)).items() if not s.is_scale}
    write_checkpoint(directory, raw, weights, extra_files={"tokenizer.json": spelled.encode()})
    return directory


def _value(spec: TensorSpec) -> torch.Tensor:
    """Random by name, large enough that greedy answers vary, norms near one."""
    generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(spec.name, 1)))
    value = torch.randn(spec.value_shape, generator=generator)
    if "norm" in spec.name:
        return 1 + 0.1 * value
    return value * (1.0 if spec.name.startswith(("embed", "head")) else 0.2)
