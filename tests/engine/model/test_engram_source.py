"""A table gathered from its shard gives what the table in memory gives."""

from __future__ import annotations

import torch

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.model.engram import MappedEngramSource
from deepinfer_engine.model.load import load_model
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve


def test_mapped_and_held_tables_give_the_same_rows(variants):
    checkpoint = Checkpoint.open(variants["base"])
    tokenizer, ops = Tokenizer.from_dir(variants["base"]), resolve("reference", "cpu")
    held = load_model(checkpoint, tokenizer, ops, load_profile("cpu-nano").profile)
    mapped = load_model(checkpoint, tokenizer, ops, load_profile("cpu-nano", ["cache.engram_placement=mmap"]).profile)
    assert sum(s.useful_bytes for s in mapped.shards) < sum(s.useful_bytes for s in held.shards)
    for layer, rows in zip(checkpoint.config.engram_layer_ids, checkpoint.config.engram_num_embeddings, strict=True):
        source = mapped.model.sources[layer]
        assert isinstance(source, MappedEngramSource)
        ids = torch.randint(0, rows, (7, checkpoint.config.engram_columns), generator=torch.Generator().manual_seed(1))
        source.prefetch(ids)
        assert torch.equal(source.lookup(ids), held.model.sources[layer].lookup(ids))
