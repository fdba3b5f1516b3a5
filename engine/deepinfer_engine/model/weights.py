"""Official tensors to prepared weights, one frozen record per module.

Nothing is allocated before it is read, so no parameter can be left at an initial value. Expert weights are stacked by
physical slot: slot p of a layer holds the expert that the placement puts there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.config.model import LayerPlan, ModelConfig
from deepinfer_engine.weights.read_plan import ReadPlan
from deepinfer_engine.weights.reader import Loaded
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Hyper:
    """mHC parameters of one sublayer: fn [C(C+2), C·H], base [C(C+2)], scale [3]; all f32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Compressor:
    """Projection of a kv source: value (and gate at ratio 2), latent norm, index-key projection and its norm."""

    wkv: Weight
    wgate: Weight | None
    norm: Tensor
    wk: Weight
    k_norm: Tensor


@dataclass(frozen=True)
class Indexer:
    """Query side of an index source."""

    wq_b: Weight
    weights_proj: Weight


@dataclass(frozen=True)
class Attention:
    """One attention sublayer; ``compressor`` on kv sources, ``indexer`` on index sources."""

    norm: Tensor
    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    sink: Tensor
    wo_a: Weight
    wo_b: Weight
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True)
class MoE:
    """Router, slots of routed experts, shared expert."""

    norm: Tensor
    gate: Tensor
    bias: Tensor
    bias_vl: Tensor
    bank: ExpertBank
    shared_w1: Weight
    shared_w3: Weight
    shared_w2: Weight


@dataclass(frozen=True)
class EngramWeights:
    """Projection and gate weights of a hash memory; the table itself is an ``EngramSource``."""

    wkv: Weight
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True)
class Layer:
    """Everything of one backbone layer."""

    plan: LayerPlan
    hc_attn: Hyper
    hc_ffn: Hyper
    attn: Attention
    ffn: MoE
    engram: EngramWeights | None


@dataclass(frozen=True)
class ModelWeights:
    """The backbone."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight


@dataclass(frozen=True)
class DraftWeights:
    """The draft blocks and their heads; embedding and output head are the backbone's.

    ``main_proj`` [H, taps·H] and ``main_norm`` make the context from the taps; ``norm`` precedes the shared head.
    markov_embed and markov_head [V, r]; confidence [1, H + r].
    """

    main_proj: Weight
    main_norm: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Weight
    confidence: Weight


class WeightReader:
    """Prepared weights on one device, made from the raw bytes that a read plan brought in."""

    def __init__(self, plan: ReadPlan, loaded: Loaded, ops: Any, device: str):
        self.plan = plan
        self.loaded = loaded
        self.ops = ops
        self.device = device

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor as stored, or converted to ``dtype``. E8M0 scales stay raw bytes."""
        place = self.plan.destinations[name]
        t = torch.frombuffer(self.loaded.buffers[name], dtype=_DTYPES[place.dtype]).view(place.shape).to(self.device)
        return t if dtype is None else t.to(dtype)

    def weight(self, name: str, kind: str) -> Weight:
        """Prepared ``<name>.weight`` (with its ``.scale`` for quantised kinds)."""
        scale = self.plain(f"{name}.scale") if kind in ("fp8", "fp4") else None
        return self.ops.prepare_weight(self.plain(f"{name}.weight"), scale, kind)


def load_weights(reader: WeightReader, config: ModelConfig) -> ModelWeights:
    """The backbone; expert stacks follow the slot table that the read plan was made with."""
    return ModelWeights(
        embed=reader.plain("embed.weight"),
        layers=tuple(_layer(reader, config, plan, f"layers.{plan.layer}.") for plan in config.layer_plan),
        norm=reader.plain("norm.weight"),
        head=reader.weight("head", "bf16"),
    )


def load_draft(reader: WeightReader, config: ModelConfig) -> DraftWeights:
    """The draft blocks, one group of its own in the checkpoint."""
    first, last = "mtp.0.", f"mtp.{config.num_nextn_predict_layers - 1}."
    return DraftWeights(
        main_proj=reader.weight(f"{first}main_proj", "fp8"),
        main_norm=reader.plain(f"{first}main_norm.weight"),
        layers=tuple(_layer(reader, config, plan, f"mtp.{i}.") for i, plan in enumerate(config.draft_plan)),
        norm=reader.plain(f"{last}norm.weight"),
        markov_embed=reader.plain(f"{last}markov_head.embed.weight"),
        markov_head=reader.weight(f"{last}markov_head.head", "bf16"),
        confidence=reader.weight(f"{last}confidence_head.proj", "bf16"),
    )


def _layer(read: WeightReader, config: ModelConfig, plan: LayerPlan, at: str) -> Layer:
    engram = None
    if plan.engram:
        engram = EngramWeights(
            wkv=read.weight(f"{at}engram.wkv", "fp8"),
            q_weight=read.plain(f"{at}engram.q_weight"),
            k_weight=read.plain(f"{at}engram.k_weight"),
        )
    return Layer(
        plan=plan,
        hc_attn=_hyper(read, f"{at}hc_attn"),
        hc_ffn=_hyper(read, f"{at}hc_ffn"),
        attn=_attention(read, config, plan, at),
        ffn=_moe(read, at),
        engram=engram,
    )


def _hyper(read: WeightReader, at: str) -> Hyper:
    return Hyper(fn=read.plain(f"{at}_fn"), base=read.plain(f"{at}_base"), scale=read.plain(f"{at}_scale"))


def _attention(read: WeightReader, config: ModelConfig, plan: LayerPlan, at: str) -> Attention:
    a = f"{at}attn."
    compressor = indexer = None
    if plan.owns_kv:
        pooled = plan.ratio == 2  # the release widens the pooled projection to f32, the plain one stays bf16
        compressor = Compressor(
            wkv=read.weight(f"{a}compressor.wkv", "f32" if pooled else "bf16"),
            wgate=read.weight(f"{a}compressor.wgate", "f32") if pooled else None,
            norm=read.plain(f"{a}compressor.norm.weight"),
            wk=read.weight(f"{a}indexer.wk", "bf16"),
            k_norm=read.plain(f"{a}indexer.k_norm.weight"),
        )
    if plan.owns_index:
        indexer = Indexer(
            wq_b=read.weight(f"{a}indexer.wq_b", "fp8"),
            weights_proj=read.weight(f"{a}indexer.weights_proj", "bf16"),
        )
    wo_a = read.weight(f"{a}wo_a", "fp8")
    return Attention(
        norm=read.plain(f"{at}attn_norm.weight"),
        wq_a=read.weight(f"{a}wq_a", "fp8"),
        q_norm=read.plain(f"{a}q_norm.weight"),
        wq_b=read.weight(f"{a}wq_b", "fp8"),
        wkv=read.weight(f"{a}wkv", "fp8"),
        kv_norm=read.plain(f"{a}kv_norm.weight"),
        sink=read.plain(f"{a}attn_sink"),
        wo_a=wo_a.grouped(config.o_groups),
        wo_b=read.weight(f"{a}wo_b", "fp8"),
        compressor=compressor,
        indexer=indexer,
    )


def _moe(read: WeightReader, at: str) -> MoE:
    f = f"{at}ffn."
    return MoE(
        norm=read.plain(f"{at}ffn_norm.weight"),
        gate=read.plain(f"{f}gate.weight", torch.float32),
        bias=read.plain(f"{f}gate.bias"),
        bias_vl=read.plain(f"{f}gate.bias_vl"),
        bank=ExpertBank(*(read.weight(f"{f}experts.{part}", "fp4") for part in ("w1", "w3", "w2"))),
        shared_w1=read.weight(f"{f}shared_experts.w1", "fp8"),
        shared_w3=read.weight(f"{f}shared_experts.w3", "fp8"),
        shared_w2=read.weight(f"{f}shared_experts.w2", "fp8"),
    )
