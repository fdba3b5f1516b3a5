"""Tensor families of the V4 releases: 69,187 tensors for V4-Flash, 72,317 for its DSpark variants. No torch here.

Differences from V4.1: 128 x 128 FP8 tiles, a compressor with position bias on every layer with a ratio, hash-routed
first layers, a learned collapse of the hyper-connections (``hc_head_*``), no Engram, no vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_engine.config.model_v4 import V4Config
from deepinfer_engine.weights.tensor_spec import Family, FamilyBuilder, Group


def v4_families(c: V4Config) -> Iterator[Family]:
    """Families in the official order: embedding | layers | head | draft stages."""
    yield _builder(c, "embedding", "", "embed.", "embed").plain("weight", c.vocab_size, c.hidden_size).build()
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(c, str(layer), prefix, "backbone", f"layers.{layer}", hashed=layer < c.num_hash_layers)
        yield from _compressed(c, layer, prefix)
    head = _builder(c, "head", "", "", "head").plain("head.weight", c.vocab_size, c.hidden_size)
    yield _collapse(c, head.plain("norm.weight", c.hidden_size)).build()
    for stage in range(c.draft_stages):
        place = f"mtp.{stage}"
        yield from _block(c, place, f"{place}.", "draft", place, hashed=False)
        extra = FamilyBuilder("draft heads", place, f"{place}.", "draft", place, block=c.weight_block,
                              quantised=c.quantised)  # fmt: skip
        (_mtp_extra if c.draft == "mtp" else _dspark_extra)(c, stage, extra)
        if extra.specs:
            yield extra.build()


def _builder(c: V4Config, component: str, place: str, prefix: str, shard: str) -> FamilyBuilder:
    return FamilyBuilder(component, place, prefix, "backbone", shard, block=c.weight_block, quantised=c.quantised)


def _block(c: V4Config, place: str, prefix: str, group: Group, shard: str, *, hashed: bool) -> Iterator[Family]:
    H, inner, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts

    def family(component: str) -> FamilyBuilder:
        name = component if group == "backbone" else f"draft {component}"
        return FamilyBuilder(name, place, prefix, group, shard, block=c.weight_block, quantised=c.quantised)

    heads, grouped = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    yield family("norms").plain("attn_norm.weight", H).plain("ffn_norm.weight", H).build()
    attn = family("attention").fp8("attn.wq_a", c.q_lora_rank, H).plain("attn.q_norm.weight", c.q_lora_rank)
    attn.fp8("attn.wq_b", heads, c.q_lora_rank).fp8("attn.wkv", c.head_dim, H)
    attn.plain("attn.kv_norm.weight", c.head_dim).plain("attn.attn_sink", c.num_attention_heads, dtype="F32")
    yield attn.fp8("attn.wo_a", grouped, heads // c.o_groups).fp8("attn.wo_b", H, grouped).build()
    hyper = family("hyper-connections")
    for side in ("attn", "ffn"):
        hyper.plain(f"hc_{side}_fn", c.hc_rows, c.hc_mult * H, dtype="F32")
        hyper.plain(f"hc_{side}_base", c.hc_rows, dtype="F32").plain(f"hc_{side}_scale", 3, dtype="F32")
    yield hyper.build()
    gate = family("router").plain("ffn.gate.weight", experts, H)
    if hashed:  # the token id alone picks the experts
        gate.plain("ffn.gate.tid2eid", c.vocab_size, c.num_experts_per_tok, dtype="I64")
    else:
        gate.plain("ffn.gate.bias", experts, dtype="F32")
    yield gate.build()
    shared = family("shared expert").fp8("ffn.shared_experts.w1", inner, H).fp8("ffn.shared_experts.w3", inner, H)
    yield shared.fp8("ffn.shared_experts.w2", H, inner).build()
    routed = family("routed experts").fp4("ffn.experts.{e}.w1", inner, H).fp4("ffn.experts.{e}.w3", inner, H)
    yield routed.fp4("ffn.experts.{e}.w2", H, inner).build(experts)


def _compressed(c: V4Config, layer: int, prefix: str) -> Iterator[Family]:
    ratio = c.compress_ratios[layer]
    if ratio == 0:
        return
    compressor = _builder(c, "compressor", str(layer), f"{prefix}attn.compressor.", f"layers.{layer}")
    yield _pooling(compressor, ratio, c.head_dim, c.hidden_size).build()
    if ratio == 4:  # ratio-128 layers attend to every entry and need no index
        index = _builder(c, "indexer", str(layer), f"{prefix}attn.indexer.", f"layers.{layer}")
        index.fp8("wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        index.plain("weights_proj.weight", c.index_n_heads, c.hidden_size)
        index.prefix += "compressor."
        yield _pooling(index, ratio, c.index_head_dim, c.hidden_size).build()


def _pooling(builder: FamilyBuilder, ratio: int, width: int, hidden: int) -> FamilyBuilder:
    """Gate, values and position bias of one compressor; ratio 4 pools two overlapping series, hence twice as wide."""
    series = 2 * width if ratio == 4 else width
    builder.plain("ape", ratio, series, dtype="F32").plain("wkv.weight", series, hidden)
    return builder.plain("wgate.weight", series, hidden).plain("norm.weight", width)


def _collapse(c: V4Config, builder: FamilyBuilder) -> FamilyBuilder:
    builder.plain("hc_head_fn", c.hc_mult, c.hc_mult * c.hidden_size, dtype="F32")
    return builder.plain("hc_head_base", c.hc_mult, dtype="F32").plain("hc_head_scale", 1, dtype="F32")


def _mtp_extra(c: V4Config, stage: int, extra: FamilyBuilder) -> None:
    H = c.hidden_size
    extra.fp8("e_proj", H, H).fp8("h_proj", H, H)
    extra.plain("enorm.weight", H).plain("hnorm.weight", H).plain("norm.weight", H)
    _collapse(c, extra)


def _dspark_extra(c: V4Config, stage: int, extra: FamilyBuilder) -> None:
    H = c.hidden_size
    if stage == 0:
        extra.fp8("main_proj", H, c.draft_stages * H).plain("main_norm.weight", H)
    if stage == c.draft_stages - 1:
        _collapse(c, extra.plain("norm.weight", H))
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            extra.plain(name, c.vocab_size, c.dspark_markov_rank)
        extra.plain("confidence_head.proj.weight", 1, H + c.dspark_markov_rank)
