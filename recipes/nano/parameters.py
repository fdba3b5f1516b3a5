"""Parameters of the training model under the checkpoint's own names, their start values and storage kinds.

The routed experts of a layer are one tensor each, ``layers.{l}.ffn.experts.{w1,w3,w2}`` with a leading expert dim;
``to_official`` splits them into the checkpoint's ``…experts.{e}.w1.weight`` names and nothing else is renamed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from deepinfer_engine.config.model import LayerPlan, ModelConfig

Kind = Literal["fp8", "fp4", "rows", "bf16", "f32"]

_FP8 = re.compile(r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|engram\.wkv)\.weight$")
_F32 = re.compile(r"(hc_(attn|ffn)_(fn|base|scale)|attn_sink|gate\.bias(_vl)?)$")
_EXPERT = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")


def kind_of(name: str) -> Kind:
    """How the official checkpoint stores a parameter."""
    if ".ffn.experts." in name:
        return "fp4"
    if _FP8.search(name):
        return "fp8"
    if name.endswith("engram.embed.weight"):
        return "rows"
    return "f32" if _F32.search(name) else "bf16"


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the backbone with its shape."""
    out: dict[str, tuple[int, ...]] = {
        "embed.weight": (c.vocab_size, c.hidden_size),
        "head.weight": (c.vocab_size, c.hidden_size),
        "norm.weight": (c.hidden_size,),
    }
    for plan in c.layer_plan:
        prefix = f"layers.{plan.layer}."
        for name, shape in (_attention(c, plan) | _mixing_and_experts(c) | _engram(c, plan)).items():
            out[prefix + name] = shape
    return out


def _attention(c: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    heads = c.num_attention_heads * c.head_dim
    out: dict[str, tuple[int, ...]] = {
        "attn.wq_a.weight": (c.q_lora_rank, c.hidden_size),
        "attn.q_norm.weight": (c.q_lora_rank,),
        "attn.wq_b.weight": (heads, c.q_lora_rank),
        "attn.wkv.weight": (c.head_dim, c.hidden_size),
        "attn.kv_norm.weight": (c.head_dim,),
        "attn.attn_sink": (c.num_attention_heads,),
        "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, heads // c.o_groups),
        "attn.wo_b.weight": (c.hidden_size, c.o_groups * c.o_lora_rank),
    }
    if plan.owns_kv:
        out["attn.compressor.wkv.weight"] = (c.head_dim, c.hidden_size)
        out["attn.compressor.norm.weight"] = (c.head_dim,)
        out["attn.indexer.wk.weight"] = (c.index_head_dim, c.head_dim)
        out["attn.indexer.k_norm.weight"] = (c.index_head_dim,)
        if plan.ratio == 2:
            out["attn.compressor.wgate.weight"] = (c.head_dim, c.hidden_size)
    if plan.owns_index:
        out["attn.indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        out["attn.indexer.weights_proj.weight"] = (c.index_n_heads, c.hidden_size)
    return out


def _mixing_and_experts(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"attn_norm.weight": (c.hidden_size,), "ffn_norm.weight": (c.hidden_size,)}
    for sub in ("attn", "ffn"):
        out[f"hc_{sub}_fn"] = (c.hc_rows, c.hc_mult * c.hidden_size)
        out[f"hc_{sub}_base"] = (c.hc_rows,)
        out[f"hc_{sub}_scale"] = (3,)
    experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    out["ffn.gate.weight"] = (experts, hidden)
    out["ffn.gate.bias"] = out["ffn.gate.bias_vl"] = (experts,)
    for w, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
        out[f"ffn.experts.{w}"] = (experts, *shape)
        out[f"ffn.shared_experts.{w}.weight"] = shape
    return out


def _engram(c: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    if not plan.engram:
        return {}
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(plan.layer)]
    return {
        "engram.embed.weight": (rows, c.engram_head_dim),
        "engram.wkv.weight": ((c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim),
        "engram.q_weight": (c.hc_mult, c.hidden_size),
        "engram.k_weight": (c.hc_mult, c.hidden_size),
    }


def is_trained(name: str) -> bool:
    """Router biases are moved by the balance rule, not by the optimiser."""
    return ".gate.bias" not in name


def initial_parameters(c: ModelConfig, *, seed: int, device: torch.device) -> dict[str, Tensor]:
    """f32 start values; projections that write into the residual are scaled down by sqrt(2 L)."""
    generator = torch.Generator().manual_seed(seed)
    into_residual = 1 / math.sqrt(2 * c.num_hidden_layers)
    out: dict[str, Tensor] = {}
    for name, shape in shapes(c).items():
        value = _start(c, name, shape, generator)
        if name.endswith(("wo_b.weight", "experts.w2", "shared_experts.w2.weight")):
            value *= into_residual
        out[name] = value.to(device).requires_grad_(is_trained(name))
    return out


def _start(c: ModelConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight") or name.endswith(("engram.q_weight", "engram.k_weight")):
        return torch.ones(shape)
    if "gate.bias" in name or name.endswith("attn_sink"):
        return torch.zeros(shape)
    if "hc_" in name:
        return _start_mixing(c, name, shape, generator)
    if name == "embed.weight":
        std = 0.5  # of the order of a sublayer's output, so that both matter from the first step
    elif name == "head.weight" or name.endswith(("ffn.gate.weight", "compressor.wgate.weight")):
        std = 0.02  # near-uniform first predictions, routes and pair weights
    elif name.endswith("engram.embed.weight"):
        std = 0.1
    else:
        std = 1 / math.sqrt(shape[-1])
    return torch.randn(shape, generator=generator) * std


def _start_mixing(c: ModelConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each sublayer first reads mostly one stream, in turn; all streams receive; streams mix little."""
    if name.endswith("_fn"):
        return torch.randn(shape, generator=generator) * 0.02
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    streams = c.hc_mult
    sublayer = 2 * int(name.split(".")[1]) + int("hc_ffn" in name)
    base = torch.zeros(shape)
    base[:streams] = -2.0
    base[sublayer % streams] = 2.0
    base[streams : 2 * streams] = torch.randn(streams, generator=generator) * 0.2
    base[2 * streams :] = (4.0 * torch.eye(streams)).flatten()
    return base


def to_official(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official names; expert stacks are split."""
    out: dict[str, Tensor] = {}
    for name, value in params.items():
        head, _, w = name.rpartition(".")
        if head.endswith(".ffn.experts"):
            for expert, weight in enumerate(value):
                out[f"{head}.{expert}.{w}.weight"] = weight
        else:
            out[name] = value
    return out


def from_official(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``to_official``: stacks the experts, drops draft and vision tensors."""
    out: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        match = _EXPERT.match(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
        elif name.split(".")[0] in ("embed", "head", "norm", "layers"):
            out[name] = value
    for name, experts in stacks.items():
        out[name] = torch.stack([experts[e] for e in range(len(experts))])
    return out
