"""Arithmetic and traffic of one token, from the config alone. A multiply-add counts 2.

For the release: 35.5 GFLOP per decoded token without index scans, 17.3 GFLOP per prompt token when only the last
window runs through the decoder half, 11.3 GB of weights per decoded token at batch 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_engine.config.model import ModelConfig


@dataclass(frozen=True)
class TokenWork:
    """FLOPs of a token: ``flat`` whatever its context, ``per_context`` for each earlier token (full index scans)."""

    flat: int
    per_context: int


def layer_flops(config: ModelConfig, layer: int) -> TokenWork:
    """One backbone layer with full window and selection; a reindex layer's scan counts at its largest."""
    c, plan = config, config.layer_plan[layer]
    heads = c.num_attention_heads * c.head_dim
    projections = (
        c.q_lora_rank * c.hidden_size
        + heads * c.q_lora_rank
        + c.head_dim * c.hidden_size
        + c.o_groups * c.o_lora_rank * (heads // c.o_groups)
        + c.hidden_size * c.o_groups * c.o_lora_rank
    )
    keys = c.sliding_window + (c.index_topk if plan.ratio else 0)
    core = 4 * heads * keys
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    moe = 2 * (c.num_experts_per_tok + c.n_shared_experts) * expert + 2 * c.n_routed_experts * c.hidden_size
    hyper = 2 * 2 * c.hc_rows * c.hc_mult * c.hidden_size
    flat, scan = 2 * projections + core + moe + hyper, 0
    if plan.owns_index:
        per_key = 2 * c.index_n_heads * c.index_head_dim
        flat += 2 * (c.index_n_heads * c.index_head_dim * c.q_lora_rank + c.index_n_heads * c.hidden_size)
        if plan.owns_kv:
            scan = per_key // plan.ratio
        else:
            flat += per_key * c.candidate_topk_blocks * c.candidate_block_size
    if plan.owns_kv:
        flat += 2 * c.head_dim * c.hidden_size * (2 if plan.ratio > 1 else 1) + 2 * c.index_head_dim * c.head_dim
    if plan.engram:
        width = c.engram_columns * c.engram_head_dim
        flat += 2 * c.hidden_size * (c.hc_mult + 1) * width
    return TokenWork(flat, scan)


def _sum(parts: list[TokenWork], extra: int = 0) -> TokenWork:
    return TokenWork(sum(p.flat for p in parts) + extra, sum(p.per_context for p in parts))


def decode_flops(config: ModelConfig) -> TokenWork:
    """A generated token: all layers and the output head."""
    head = 2 * config.vocab_size * config.hidden_size
    return _sum([layer_flops(config, layer) for layer in range(config.num_hidden_layers)], head)


def prefill_flops(config: ModelConfig, *, decoder_replay: bool) -> TokenWork:
    """A prompt token far from the end of its prompt: all layers, or the encoder half and the boundary layer's keys."""
    if not decoder_replay:
        return _sum([layer_flops(config, layer) for layer in range(config.num_hidden_layers)])
    c = config
    boundary = 2 * c.head_dim * c.hidden_size * 2 + 2 * c.index_head_dim * c.head_dim  # window rows and global rows
    return _sum([layer_flops(config, layer) for layer in range(config.cut)], boundary)


def prompt_flops(config: ModelConfig, length: int, *, start: int = 0, pivot: int = 0) -> int:
    """FLOPs of one prefill as planned: rows from ``start`` up to the cut, from ``pivot`` on above it, one head row.

    Row p sees min(W, p + 1) window keys, the selected of its (p + 1) // ratio entries, and scans those of its source.
    The cut layer writes its keys for every row and answers those from ``pivot`` on.
    """
    c = config
    heads = c.num_attention_heads * c.head_dim
    keys_at_cut = 2 * c.head_dim * c.hidden_size * 2 + 2 * c.index_head_dim * c.head_dim
    total = 2 * c.vocab_size * c.hidden_size
    for layer, plan in enumerate(c.layer_plan):
        first = start if layer < c.cut else max(start, pivot)
        seen = np.arange(first + 1, length + 1, dtype=np.int64)
        selected, scanned = np.zeros_like(seen), np.zeros_like(seen)
        if plan.ratio:
            selected = np.minimum(seen // plan.ratio, c.index_topk)
        if plan.owns_index and plan.owns_kv:
            scanned = seen // plan.ratio
        elif plan.owns_index:
            scanned = np.minimum(seen // plan.ratio, c.candidate_topk_blocks * c.candidate_block_size)
        work, most = layer_flops(c, layer), c.sliding_window + (c.index_topk if plan.ratio else 0)
        flat = work.flat - 4 * heads * most
        if plan.owns_index and not plan.owns_kv:
            flat -= 2 * c.index_n_heads * c.index_head_dim * c.candidate_topk_blocks * c.candidate_block_size
        attended = int((np.minimum(seen, c.sliding_window) + selected).sum())
        scan = 2 * c.index_n_heads * c.index_head_dim * int(scanned.sum())
        total += flat * len(seen) + 4 * heads * attended + scan
        if layer == c.cut:
            total += keys_at_cut * (first - start)
    return total


def index_bytes_per_context(config: ModelConfig) -> float:
    """Index-key bytes that one decoded row reads for each token of its context (170 for the release)."""
    row = config.index_head_dim // 2 + config.index_head_dim // 32
    return sum(row / config.compress_ratios[source] for source in config.kv_source_layer_ids)
