"""Global keys: what a kv source writes for every token of the step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer_engine.config.model import LayerPlan, ModelConfig
from deepinfer_engine.model.step import Rope, Step
from deepinfer_engine.model.weights import Compressor


def write_source(config: ModelConfig, plan: LayerPlan, weights: Compressor, x: Tensor, step: Step) -> None:
    """Compress x [T, H] of a source layer into its global rows and index keys and store them.

    Ratio 1: one entry per token. Ratio 2: an entry appears with its odd token; the even partner comes from this step
    or from the pair ring. A global row is rotated at the first position of its group; the index key derives from the
    latent before rotation. Entries of tokens whose block slot is PAD are dropped by the store.
    """
    ops, kv, batch = step.ops, step.kv, step.batch
    kv.arrive(plan.layer)  # this layer is the first that reads entries of this source
    slots, rope = batch.block_slot_T, step.rope[True]
    if plan.ratio == 1:
        latent = ops.linear(x, weights.wkv)
    else:
        latent, rope, slots = _pooled(plan, weights, x, step)
        if latent.shape[0] == 0:
            return
    angles = (config.rms_norm_eps, rope.cos, rope.sin)
    z = ops.store_entries(latent, weights.norm, *angles, kv.entry_store(plan.layer), slots, "global")
    ops.store_entries(ops.linear(z, weights.wk), weights.k_norm, *angles, kv.key_store(plan.layer), slots, "index")


def _pooled(plan: LayerPlan, weights: Compressor, x: Tensor, step: Step) -> tuple[Tensor, Rope, Tensor]:
    """(pooled latents [n, D] before the norm, their rotary angles, their slots)."""
    ops: Any = step.ops
    kv, batch, pairs = step.kv, step.batch, step.pairs
    assert weights.wgate is not None
    value, gate = ops.linear(x, weights.wkv), ops.linear(x, weights.wgate)
    ring = kv.pair_store(plan.layer)
    # read before this step's rows overwrite the ring
    older = ring if pairs.any_ring else None
    pooled = ops.pool_cached(value, gate, older, pairs.odd, pairs.partner, pairs.ring_slot, pairs.from_ring)
    ops.store_pairs(ring, batch.pair_slot_T, value, gate)
    return pooled, step.pair_rope, pairs.entry_slot
