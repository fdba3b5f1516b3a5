"""Bytes of one rank, item by item: weights, KV, working space, allowances. Integers, from the config and the mesh.

Weights stay in their stored formats unless ``weight_bytes`` says how wide an element is held (2 for the torch
reference under ``fast``). Attention is data parallel, so every rank holds the dense weights; a rank holds its expert
slots; n-gram tables lie in device memory (sharded over the ranks), in host memory (one copy per host) or in the
page cache. The largest step decides the working space: a full prompt chunk, or every row verifying its drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.cost.figure import Source
from deepinfer_engine.weights.plan import tensor_families
from deepinfer_engine.weights.tensor_spec import SCALE_GROUP, Family, Group

GIB = 2**30

#: Index scores of a chunk are computed in row tiles, so that a long context does not multiply the working space.
_SCORE_TILE_BYTES = GIB
#: Launch state of one captured batch size; captured graphs share one pool of working space.
_GRAPH_BYTES = 16 * 2**20
#: Device context, collective buffers and fragmentation of the allocator.
_RUNTIME_BYTES = 2 * GIB

Placement = Literal["device", "host", "mmap"]


@dataclass(frozen=True)
class Deployment:
    """What decides the bytes of a rank. ``kv_tokens`` is block KV capacity, ``drafts`` is 0 without speculation.

    ``weight_bytes`` 0 keeps the stored formats; 2 or 4 holds every linear dense, but routed experts where they are
    ``packed_experts``. ``records`` False keeps cache rows in f32. ``replicas`` counts window copies per row that are
    kept for the pool. ``graphs`` is the number of captured batch sizes. ``fused`` False materialises the keys that
    attention gathers, as the torch reference does.
    """

    ranks: int
    slots_per_rank: int
    ranks_per_host: int
    rows: int
    kv_tokens: int
    context: int
    chunk: int
    drafts: int = 0
    engram: Placement = "host"
    weight_bytes: int = 0
    packed_experts: bool = False
    records: bool = True
    replicas: int = 0
    graphs: int = 0
    fused: bool = True
    runtime: bool = True
    host_kv_bytes: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True)
class Item:
    """One line of a memory plan; ``nbytes`` are per rank on the device, per host for a host item."""

    name: str
    where: Literal["device", "host"]
    nbytes: int
    source: Source
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Every item of one rank and of the host it runs on."""

    items: tuple[Item, ...]

    @property
    def device_bytes(self) -> int:
        return sum(i.nbytes for i in self.items if i.where == "device")

    @property
    def host_bytes(self) -> int:
        return sum(i.nbytes for i in self.items if i.where == "host")

    def of(self, name: str) -> int:
        """Bytes of all items of a name."""
        return sum(i.nbytes for i in self.items if i.name == name)


def plan_memory(config: ModelConfig, d: Deployment) -> MemoryPlan:
    """The memory plan of one rank of a deployment."""
    return MemoryPlan((*_weights(config, d), *_kv(config, d), *_working_space(config, d), *_allowances(d)))


# -------------------------------------------------------------------- weights


def expert_bytes(config: ModelConfig, weight_bytes: int = 0) -> int:
    """One routed expert of one layer: 18.8 MB as stored in the release."""
    parameters = 3 * config.hidden_size * config.moe_intermediate_size
    return parameters * weight_bytes if weight_bytes else parameters // 2 + parameters // SCALE_GROUP


@lru_cache(maxsize=64)  # the searches for what fits ask thousands of times
def dense_bytes(config: ModelConfig, *, groups: tuple[Group, ...], weight_bytes: int = 0) -> int:
    """Everything of the groups that every rank holds: all but routed experts and n-gram tables."""
    families = [f for f in tensor_families(config) if f.specs[0].group in groups]
    return sum(_held(f, weight_bytes) for f in families if not _is_expert(f) and f.component != "engram tables")


@lru_cache(maxsize=16)
def _table_bytes(config: ModelConfig) -> int:
    return sum(f.nbytes for f in tensor_families(config) if f.component == "engram tables")


def _is_expert(family: Family) -> bool:
    return family.component.endswith("routed experts")


def _held(family: Family, weight_bytes: int) -> int:
    """Bytes of a family as it is held; scales vanish where a weight is held dense."""
    if not weight_bytes:
        return family.nbytes
    total = 0
    for spec in family.specs:
        if spec.kind in ("fp8", "fp4"):
            total += spec.parameters * weight_bytes
        elif spec.kind == "plain":
            total += spec.nbytes if spec.dtype == "F32" else spec.parameters * weight_bytes
        elif spec.kind in ("table", "table_scale"):
            total += spec.nbytes
    return total * family.count


def _weights(config: ModelConfig, d: Deployment) -> list[Item]:
    c, wide = config, d.weight_bytes
    per_slot = expert_bytes(c, 0 if d.packed_experts else wide)
    items = [
        Item("dense weights", "device", dense_bytes(c, groups=("backbone",), weight_bytes=wide), "computed"),
        Item("routed experts", "device", d.slots_per_rank * per_slot * c.num_hidden_layers, "computed",
             f"{d.slots_per_rank} slots x {c.num_hidden_layers} layers"),
        Item("n-gram projections", "device", dense_bytes(c, groups=("engram",), weight_bytes=wide), "computed"),
    ]  # fmt: skip
    if d.drafts and c.num_nextn_predict_layers:
        own = -(-c.dspark_n_routed_experts // d.ranks)
        draft = dense_bytes(c, groups=("draft",), weight_bytes=wide)
        draft += own * per_slot * c.num_nextn_predict_layers
        items.append(Item("draft blocks", "device", draft, "computed", f"{own} experts x {c.num_nextn_predict_layers}"))
    tables = _table_bytes(c)
    if d.engram == "device":
        items.append(
            Item(
                "n-gram tables",
                "device",
                -(-tables // d.ranks),
                "computed",
                f"1/{d.ranks} of the rows" if d.ranks > 1 else "",
            )
        )
    else:
        note = "one copy per host" if d.engram == "host" else "page cache of the checkpoint files"
        items.append(Item("n-gram tables", "host", tables, "computed", note))
    return items


# ------------------------------------------------------------------------- KV


def _kv(config: ModelConfig, d: Deployment) -> list[Item]:
    layout = KVLayout.of(config, records=d.records, draft=d.drafts > 0)
    items = [
        Item("block KV", "device", layout.blocks_for(d.kv_tokens) * layout.block_bytes, "computed",
             f"{d.kv_tokens:,} tokens"),
        Item("window KV", "device", d.rows * layout.slot_bytes, "computed", f"{d.rows} rows"),
    ]  # fmt: skip
    if d.replicas:
        encoder = config.cut * layout.window * layout.window_row_bytes
        note = f"{d.replicas} per row"
        items.append(Item("window replicas", "device", d.rows * d.replicas * encoder, "computed", note))
    per_host = d.ranks_per_host
    if d.host_kv_bytes:
        items.append(Item("block KV, host tier", "host", d.host_kv_bytes * per_host, "computed"))
    if d.pool_bytes:
        items.append(Item("window pool", "host", d.pool_bytes * per_host, "computed"))
    return items


# -------------------------------------------------------------- working space


def step_tokens(d: Deployment) -> int:
    """Tokens of the largest step: a chunk beside every decode row with its drafts, or those rows alone."""
    return max(d.chunk, d.rows * (1 + d.drafts))


def _working_space(config: ModelConfig, d: Deployment) -> list[Item]:
    c, T = config, step_tokens(d)
    act = 2 if d.records else 4  # bytes of an activation: bf16, or f32 under float numerics
    H, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    streams = T * 2 * c.hc_mult * H * act  # residual streams in and out
    attention = T * (2 * heads + c.q_lora_rank + c.head_dim + c.o_groups * c.o_lora_rank) * act
    if not d.fused:
        attention += T * (c.sliding_window + c.index_topk) * c.head_dim * act
    scores = min(4 * T * d.context, _SCORE_TILE_BYTES) + T * c.index_topk * 4
    choices = min(c.num_experts_per_tok, d.ranks * d.slots_per_rank)
    # per expert row: FP8 input and scales, gate and up, FP8 inner row, output
    row = H + H // 32 + 2 * c.moe_intermediate_size * act + c.moe_intermediate_size + H * act
    moe = T * choices * row
    engram = T * (c.engram_columns * (c.engram_head_dim + c.engram_head_dim // 32) + (c.hc_mult + 1) * H * act)
    logits = d.rows * (1 + d.drafts) * c.vocab_size * 4
    exchange = T * min(choices, d.ranks) * H * 3 if d.ranks > 1 else 0  # FP8 rows out, bf16 rows back
    note = f"{T:,} tokens in the largest step"
    # residual streams live through the layer; attention and experts run one after the other
    peak = streams + max(attention + scores, moe, engram if c.engram_layer_ids else 0)
    items = [
        Item("activations", "device", peak, "computed", note),
        Item("logits", "device", logits, "computed", f"{d.rows * (1 + d.drafts):,} rows"),
    ]
    if exchange:
        items.append(Item("exchange buffers", "device", exchange, "computed", "dispatch and combine"))
    return items


def _allowances(d: Deployment) -> list[Item]:
    items = []
    if d.graphs:
        items.append(Item("graphs", "device", d.graphs * _GRAPH_BYTES, "assumed", f"{d.graphs} batch sizes"))
    if d.runtime:
        items.append(Item("runtime", "device", _RUNTIME_BYTES, "assumed", "context, collectives, fragmentation"))
    return items


# ------------------------------------------------------------------ what fits


def max_rows(config: ModelConfig, d: Deployment, have_bytes: int, context: int, *, limit: int = 65_536) -> int:
    """Most rows per rank (up to ``limit``) whose full contexts fit beside everything else; 0 when not one does."""

    def fits(rows: int) -> bool:
        tokens = rows * -(-context // BLOCK_TOKENS) * BLOCK_TOKENS
        return plan_memory(config, replace(d, rows=rows, kv_tokens=tokens, context=context)).device_bytes <= have_bytes

    return _largest(fits, limit)


def max_rows_beside_kv(config: ModelConfig, d: Deployment, have_bytes: int, *, limit: int = 65_536) -> int:
    """Most rows per rank (up to ``limit``) beside the configured block KV, which they share; 0 when not one fits."""
    return _largest(lambda rows: plan_memory(config, replace(d, rows=rows)).device_bytes <= have_bytes, limit)


def max_chunk(config: ModelConfig, d: Deployment, have_bytes: int) -> int:
    """Largest prompt chunk, up to the configured one and in whole blocks, that fits beside everything else."""

    def fits(blocks: int) -> bool:
        return plan_memory(config, replace(d, chunk=blocks * BLOCK_TOKENS)).device_bytes <= have_bytes

    return _largest(fits, d.chunk // BLOCK_TOKENS) * BLOCK_TOKENS


def max_context(config: ModelConfig, d: Deployment, have_bytes: int, rows: int) -> int:
    """Longest context, in whole blocks up to the model's limit, that ``rows`` rows can all have; 0 when none fits."""

    def fits(blocks: int) -> bool:
        tokens = blocks * BLOCK_TOKENS
        full = replace(d, rows=rows, kv_tokens=rows * tokens, context=tokens)
        return plan_memory(config, full).device_bytes <= have_bytes

    return _largest(fits, config.max_position_embeddings // BLOCK_TOKENS) * BLOCK_TOKENS


def max_kv_tokens(config: ModelConfig, d: Deployment, have_bytes: int) -> int:
    """Block KV tokens, in whole blocks, that the memory holds beside everything else; 0 when nothing is left."""
    free = have_bytes - plan_memory(config, replace(d, kv_tokens=0)).device_bytes
    layout = KVLayout.of(config, records=d.records)
    return max(free, 0) // layout.block_bytes * BLOCK_TOKENS


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Largest n in 0..limit with fits(n), for a monotone ``fits``; n = 0 is never asked."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
