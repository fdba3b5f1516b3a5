"""One attention sublayer: window rows and selected global rows in one softmax."""

from __future__ import annotations

from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.model.compress import write_source
from deepinfer_engine.model.indexer import publish_selection
from deepinfer_engine.model.step import Phase, Step
from deepinfer_engine.model.weights import Attention, Layer


def attention(config: ModelConfig, layer: Layer, x: Tensor, phase: Phase, step: Step) -> Tensor:
    """Sublayer output [Tq, H] for x [T, H] (normed input of every token of the step that reaches this layer).

    All tokens write their window row and, on a source, their global entry; only the phase's queries are answered.
    """
    plan, weights, ops = layer.plan, layer.attn, step.ops
    yarn = plan.ratio > 0
    # up to the cut every token of the step is here; after it, the tail only, whose tables are the phase's
    rope_all = phase.rope[yarn] if phase.after_cut else step.rope[yarn]
    local, packed = window_rows(config, weights, x, rope_all, ops)
    if weights.compressor is not None:
        write_source(config, plan, weights.compressor, x, step)
    if phase.query is not None and not phase.after_cut:
        x = x[phase.query]
    rope = phase.rope[yarn]
    qr = ops.rms_norm(ops.linear(x, weights.wq_a), weights.q_norm, config.rms_norm_eps)
    q = ops.linear(qr, weights.wq_b).unflatten(-1, (config.num_attention_heads, config.head_dim))
    q = ops.rope(q, rope.cos, rope.sin)
    if weights.indexer is not None:
        publish_selection(config, plan, weights.indexer, x, qr, phase, step)
    o = _attend(config, layer, q, local, phase, step)
    slots = step.batch.ring_slot_T
    if phase.after_cut and phase.query is not None:
        slots = slots[phase.query]
    step.kv.write_window(plan.layer, slots, packed)
    step.probe("window_rows", plan.layer, local)
    o = ops.rope(o, rope.cos, rope.sin, inverse=True)
    y = ops.linear_grouped(o.flatten(1).unflatten(1, (config.o_groups, -1)), weights.wo_a)
    return ops.linear(y.flatten(1), weights.wo_b)


def write_kv(config: ModelConfig, layer: Layer, x: Tensor, step: Step) -> None:
    """What ``attention`` writes up to the cut, without its answers: for steps in which no token goes past the cut."""
    plan, ops = layer.plan, step.ops
    local, packed = window_rows(config, layer.attn, x, step.rope[plan.ratio > 0], ops)
    if layer.attn.compressor is not None:
        write_source(config, plan, layer.attn.compressor, x, step)
    step.kv.write_window(plan.layer, step.batch.ring_slot_T, packed)
    step.probe("window_rows", plan.layer, local)


def window_rows(config: ModelConfig, weights: Attention, x: Tensor, rope, ops) -> tuple[Tensor, Tensor]:
    """(values as every reader sees them [T, D], packed rows as stored)."""
    return ops.window_rows(ops.linear(x, weights.wkv), weights.kv_norm, config.rms_norm_eps, rope.cos, rope.sin)


def _attend(config: ModelConfig, layer: Layer, q: Tensor, local: Tensor, phase: Phase, step: Step) -> Tensor:
    plan, kv = layer.plan, step.kv
    ring = kv.window_store(plan.layer) if phase.window.any_ring else None
    entries = slots = None
    if plan.ratio > 0 and step.selected is not None and step.selected.shape[1]:
        entries = kv.entry_store(plan.kv_source)
        slots = step.selected_slots(phase, plan.ratio)
    return step.ops.attend_cached(
        q, local, phase.window.rows, ring, slots, entries, layer.attn.sink, config.head_dim**-0.5
    )
