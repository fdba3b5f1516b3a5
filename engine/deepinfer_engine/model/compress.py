"""Global keys: what a kv source writes for every token of the step."""

from __future__ import annotations

from typing import Any

import torch
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
        z = ops.rms_norm(ops.linear(x, weights.wkv), weights.norm, config.rms_norm_eps)
    else:
        z, rope, slots = _pooled(config, plan, weights, x, step)
        if z.shape[0] == 0:
            return
    keys = ops.rms_norm(ops.linear(z, weights.wk), weights.k_norm, config.rms_norm_eps)
    kv.write_entries(plan.layer, slots, ops.rope(z, rope.cos, rope.sin), ops.rope(keys, rope.cos, rope.sin))


def _pooled(
    config: ModelConfig, plan: LayerPlan, weights: Compressor, x: Tensor, step: Step
) -> tuple[Tensor, Rope, Tensor]:
    ops: Any = step.ops
    kv, batch, pairs = step.kv, step.batch, step.pairs
    assert weights.wgate is not None
    value, gate = ops.linear(x, weights.wkv), ops.linear(x, weights.wgate)
    first = (value[pairs.partner], gate[pairs.partner])
    if pairs.any_ring:  # read before this step's rows overwrite the ring
        old = kv.pairs(plan.layer, pairs.ring_slot)
        from_ring = pairs.from_ring.unsqueeze(1)
        first = (torch.where(from_ring, old[0], first[0]), torch.where(from_ring, old[1], first[1]))
    kv.write_pairs(plan.layer, batch.pair_slot_T, value, gate)
    pooled = ops.pool_pairs(first, (value[pairs.odd], gate[pairs.odd]))
    z = ops.rms_norm(pooled, weights.norm, config.rms_norm_eps)
    # rotated at the even position: the angle of the group's first token
    cos, sin = ops.rope_angles(batch.pos_T[pairs.odd] - 1, step.frequencies[True])
    slots = batch.block_slot_T[pairs.odd]
    slots = torch.where(batch.pos_T[pairs.odd] % 2 == 1, slots, -1)
    return z, Rope(cos, sin), torch.where(slots < 0, -1, slots // 2)
