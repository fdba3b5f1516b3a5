"""A small byte-level BPE with V4.1's control tokens, trained once per run, and a config that fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepinfer_engine.config.model import ModelConfig, RopeScaling
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.protocol import ChatCodec
from deepinfer_engine.tokens.tokenizer import Tokenizer

FIRST = [spelling.BOS, spelling.EOS, spelling.PAD]
LAST = [
    spelling.SYSTEM,
    spelling.USER,
    spelling.ASSISTANT,
    spelling.THINK_START,
    spelling.THINK_END,
    spelling.DSML,
    spelling.IMAGE,
    "<｜latest_reminder｜>",
]
SENTENCES = [
    "The quick brown fox asks: what is 12+30? It is 42.",
    "Größe, héllo wörld, 你好世界, العربية, 😀😀 and 👩‍👩‍👧",
    'calls invoke name="add" parameter string="true" think </think> <think>',
] * 8

GOLDEN = Path(__file__).resolve().parents[2] / "vectors" / "v41-tiny-a"


@pytest.fixture(scope="session")
def raw_tokenizer() -> dict[str, Any]:
    """The parsed ``tokenizer.json``; tests that damage it copy it first."""
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=FIRST,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    library.add_special_tokens(LAST)
    return json.loads(library.to_str())


@pytest.fixture(scope="session")
def model_dir(raw_tokenizer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(json.dumps(raw_tokenizer), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@pytest.fixture(scope="session")
def library(raw_tokenizer: dict[str, Any]) -> LibraryTokenizer:
    """The library's own object over the same file: the oracle of batch decoding."""
    return LibraryTokenizer.from_str(json.dumps(raw_tokenizer))


@pytest.fixture(scope="session")
def config(tokenizer: Tokenizer) -> ModelConfig:
    """Ids are the tokenizer's; the other sizes do not matter to the token code."""
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(16.0, 32.0, 1.0, 65536),
        sliding_window=16,
        compress_ratios=(1, 1),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        candidate_source_layer_id=-1,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_max_ngram_size=4,
        engram_vocab_size=240,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=tokenizer.control_id(spelling.PAD),
        engram_compressed_vocab_size=tokenizer.vocab_size,
        num_nextn_predict_layers=0,
        dspark_block_size=5,
        dspark_noise_token_id=tokenizer.control_id(spelling.SYSTEM),
        dspark_target_layer_ids=(),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        bos_token_id=tokenizer.control_id(spelling.BOS),
        eos_token_id=tokenizer.control_id(spelling.EOS),
        pad_token_id=tokenizer.control_id(spelling.PAD),
        image_token_id=tokenizer.control_id(spelling.IMAGE),
        weight_block=32,
        gate_temp=1.0,
        vision=None,
    )


@pytest.fixture(scope="session")
def codec(model_dir: Path, config: ModelConfig) -> ChatCodec:
    return ChatCodec(model_dir, config)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN
