"""Which tensors a config implies: name, stored dtype, shape, storage kind, load group and shard. No torch here.

The single source of truth for validator, reader, writer and ``inspect``. Names are those of the official
checkpoints, which have neither a ``model.`` prefix nor ``lm_head``. The order is the official one: vision tower |
embedding | one shard per layer (without its Engram) | head | one per draft stage | one per Engram layer.

For the released V4.1-Flash config: 96,085 tensors, 510,286,023,000 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.weights.tensor_spec import Family, FamilyBuilder, Group, TensorSpec


def tensor_plan(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a complete checkpoint of this config holds, by name, in official order."""
    return {spec.name: spec for family in tensor_families(config) for spec in family.expand()}


def tensor_families(config: ModelConfig) -> tuple[Family, ...]:
    """The same plan with the experts of a layer folded into one ``Family`` (about 1,000 specs, not 96,085)."""
    return tuple(_v41_families(config))


@dataclass(frozen=True)
class ParameterSummary:
    """Totals of a plan. Bytes are payload bytes (headers excluded); parameters do not count scales."""

    tensors: int
    nbytes: int
    parameters: int
    elements_by_dtype: dict[str, int]
    bytes_by_group: dict[str, int]
    bytes_by_component: dict[str, int]
    parameters_by_component: dict[str, int]


def parameter_summary(config: ModelConfig, *, groups: tuple[Group, ...] | None = None) -> ParameterSummary:
    """Sum the plan of ``config`` over ``groups`` (all of them by default)."""
    elements: Counter[str] = Counter()
    group_bytes: Counter[str] = Counter()
    component_bytes: Counter[str] = Counter()
    component_parameters: Counter[str] = Counter()
    tensors = 0
    for family in tensor_families(config):
        group = family.specs[0].group
        if groups is not None and group not in groups:
            continue
        tensors += family.tensors
        group_bytes[group] += family.nbytes
        component_bytes[family.component] += family.nbytes
        component_parameters[family.component] += family.parameters
        for spec in family.specs:
            elements[spec.dtype] += spec.numel * family.count
    return ParameterSummary(
        tensors=tensors,
        nbytes=sum(group_bytes.values()),
        parameters=sum(component_parameters.values()),
        elements_by_dtype=dict(elements),
        bytes_by_group=dict(group_bytes),
        bytes_by_component=dict(component_bytes),
        parameters_by_component=dict(component_parameters),
    )


# ----------------------------------------------------------------------- V4.1


def _v41_families(c: ModelConfig) -> Iterator[Family]:
    if c.vision is not None:
        yield from _vision(c)
    yield (
        FamilyBuilder("embedding", "", "embed.", "backbone", "embed")
        .plain("weight", c.vocab_size, c.hidden_size)
        .build()
    )
    for layer in range(c.num_hidden_layers):
        yield from _block(c, str(layer), f"layers.{layer}.", "backbone", f"layers.{layer}", c.n_routed_experts)
        yield from _sources(c, layer)
    head = FamilyBuilder("head", "", "", "backbone", "head")
    head.plain("head.weight", c.vocab_size, c.hidden_size).plain("norm.weight", c.hidden_size)
    yield head.build()
    for stage in range(c.num_nextn_predict_layers):
        yield from _draft_stage(c, stage)
    for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True):
        yield from _engram(c, layer, rows)


def _block(c: ModelConfig, place: str, prefix: str, group: Group, shard: str, experts: int) -> Iterator[Family]:
    """The 36 name patterns that every backbone layer and every draft stage has."""
    H, inner, rows = c.hidden_size, c.moe_intermediate_size, c.hc_rows

    def family(component: str) -> FamilyBuilder:
        name = component if group == "backbone" else f"draft {component}"
        return FamilyBuilder(name, place, prefix, group, shard, block=c.weight_block)

    heads, grouped = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    yield family("norms").plain("attn_norm.weight", H).plain("ffn_norm.weight", H).build()
    attn = family("attention").fp8("attn.wq_a", c.q_lora_rank, H).plain("attn.q_norm.weight", c.q_lora_rank)
    attn.fp8("attn.wq_b", heads, c.q_lora_rank).fp8("attn.wkv", c.head_dim, H)
    attn.plain("attn.kv_norm.weight", c.head_dim).plain("attn.attn_sink", c.num_attention_heads, dtype="F32")
    yield attn.fp8("attn.wo_a", grouped, heads // c.o_groups).fp8("attn.wo_b", H, grouped).build()
    hyper = family("hyper-connections")
    for side in ("attn", "ffn"):
        hyper.plain(f"hc_{side}_fn", rows, c.hc_mult * H, dtype="F32").plain(f"hc_{side}_base", rows, dtype="F32")
        hyper.plain(f"hc_{side}_scale", 3, dtype="F32")  # one each for pre, post and combine
    yield hyper.build()
    gate = family("router").plain("ffn.gate.weight", experts, H).plain("ffn.gate.bias", experts, dtype="F32")
    yield gate.plain("ffn.gate.bias_vl", experts, dtype="F32").build()
    shared = family("shared expert").fp8("ffn.shared_experts.w1", inner, H).fp8("ffn.shared_experts.w3", inner, H)
    yield shared.fp8("ffn.shared_experts.w2", H, inner).build()
    routed = family("routed experts").fp4("ffn.experts.{e}.w1", inner, H).fp4("ffn.experts.{e}.w3", inner, H)
    yield routed.fp4("ffn.experts.{e}.w2", H, inner).build(experts)


def _sources(c: ModelConfig, layer: int) -> Iterator[Family]:
    """Compressor, index keys and index queries; only on the layers that own them."""
    plan = c.layer_plan[layer]
    place, prefix, shard = str(layer), f"layers.{layer}.attn.", f"layers.{layer}"
    if plan.owns_index:
        index = FamilyBuilder("indexer", place, prefix, "backbone", shard, block=c.weight_block)
        index.fp8("indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        index.plain("indexer.weights_proj.weight", c.index_n_heads, c.hidden_size)
        if plan.owns_kv:  # keys are made from the compressor's latent, so only the owner has them
            index.plain("indexer.wk.weight", c.index_head_dim, c.head_dim)
            index.plain("indexer.k_norm.weight", c.index_head_dim)
        yield index.build()
    if plan.owns_kv:
        compressor = FamilyBuilder("compressor", place, prefix, "backbone", shard)
        compressor.plain("compressor.wkv.weight", c.head_dim, c.hidden_size)
        compressor.plain("compressor.norm.weight", c.head_dim)
        if plan.ratio > 1:  # a single token needs no pooling gate
            compressor.plain("compressor.wgate.weight", c.head_dim, c.hidden_size)
        yield compressor.build()


def _draft_stage(c: ModelConfig, stage: int) -> Iterator[Family]:
    place = prefix = f"mtp.{stage}"
    yield from _block(c, place, f"{prefix}.", "draft", place, c.dspark_n_routed_experts)
    extra = FamilyBuilder("draft heads", place, f"{prefix}.", "draft", place, block=c.weight_block)
    if stage == 0:
        extra.fp8("main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
        extra.plain("main_norm.weight", c.hidden_size)
    if stage == c.num_nextn_predict_layers - 1:
        extra.plain("norm.weight", c.hidden_size)
        extra.plain("markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
        extra.plain("markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
        extra.plain("confidence_head.proj.weight", 1, c.hidden_size + c.dspark_markov_rank)
    if extra.specs:
        yield extra.build()


def _engram(c: ModelConfig, layer: int, rows: int) -> Iterator[Family]:
    place, prefix, shard = str(layer), f"layers.{layer}.engram.", f"layers.{layer}.engram"
    yield FamilyBuilder("engram tables", place, prefix, "engram", shard).table("embed", rows, c.engram_head_dim).build()
    proj = FamilyBuilder("engram projections", place, prefix, "engram", shard, block=c.weight_block)
    proj.fp8("wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim)
    proj.plain("q_weight", c.hc_mult, c.hidden_size).plain("k_weight", c.hc_mult, c.hidden_size)
    yield proj.build()


def _vision(c: ModelConfig) -> Iterator[Family]:
    v = c.vision
    assert v is not None
    D, H = v.hidden_size, c.hidden_size
    tower = FamilyBuilder("vision", "", "", "vision", "vision")
    for name in ("image_start", "image_newline", "image_end"):
        tower.plain(name, H)
    patch = 3 * v.patch_size * v.patch_size  # a linear over RGB patches, not a convolution
    tower.plain("vision.patch_embed.proj.weight", D, patch).plain("vision.patch_embed.proj.bias", D)
    for i in range(v.num_hidden_layers):
        block = f"vision.blocks.{i}."
        tower.plain(f"{block}norm1.weight", D).plain(f"{block}norm2.weight", D)
        tower.plain(f"{block}attn.wqkv.weight", 3 * D, D).plain(f"{block}attn.wqkv.bias", 3 * D)
        tower.plain(f"{block}attn.wo.weight", D, D).plain(f"{block}attn.wo.bias", D)
        tower.plain(f"{block}mlp.w1.weight", 2 * v.intermediate_size, D)
        tower.plain(f"{block}mlp.w2.weight", D, v.intermediate_size)
    tower.plain("vision.norm.weight", D)
    tower.plain("aligner.w1.weight", H, D * v.downsample_ratio**2).plain("aligner.w1.bias", H)
    yield tower.plain("aligner.w2.weight", H, H).plain("aligner.w2.bias", H).build()
