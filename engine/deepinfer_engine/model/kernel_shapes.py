"""Which shapes the kernels of a model have on one process of a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.schema import Profile

if TYPE_CHECKING:
    from deepinfer_kernels.reference.linear import Kind
    from deepinfer_kernels.shapes import Shapes


def kernel_shapes(config: ModelConfig, profile: Profile) -> Shapes:
    """Sizes of ``config``'s operations, with the expert slots of as many ranks as share a device of the profile."""
    from deepinfer_kernels.shapes import Shapes

    c = config
    shared = -(-profile.ranks // max(1, profile.hardware.gpus))
    slots = shared * profile.slots_per_rank(c.n_routed_experts)
    routers = [(c.n_routed_experts, c.num_experts_per_tok, slots, c.moe_intermediate_size)]
    if c.num_nextn_predict_layers:
        experts = c.dspark_n_routed_experts or c.n_routed_experts
        choices = c.dspark_num_experts_per_tok or c.num_experts_per_tok
        local = shared * -(-experts // profile.ranks)  # draft experts have no redundant copies
        routers.append((experts, choices, local, c.moe_intermediate_size))
    H, D, ql, ih, Di = c.hidden_size, c.head_dim, c.q_lora_rank, c.index_n_heads, c.index_head_dim
    products: list[tuple[int, int, Kind]] = [
        (ql, H, "fp8"),
        (c.num_attention_heads * D, ql, "fp8"),
        (D, H, "fp8"),
        (H, c.o_groups * c.o_lora_rank, "fp8"),
        (H, c.moe_intermediate_size, "fp8"),
        (ih * Di, ql, "fp8"),
        (ih, H, "bf16"),
        (D, H, "bf16"),
        (Di, D, "bf16"),
    ]
    memory = None
    if c.engram_layer_ids:
        products.extend([(H * (c.hc_mult + 1), c.engram_columns * c.engram_head_dim, "fp8")])
        memory = (c.engram_max_ngram_size, c.engram_n_heads, c.engram_head_dim)
    heads, tables = [(c.vocab_size, H)], [H]
    if c.num_nextn_predict_layers:
        taps, rank = len(c.dspark_target_layer_ids), c.dspark_markov_rank
        products.extend([(H, taps * H, "fp8")])
        heads += [(c.vocab_size, rank), (1, H + rank)]
        tables.append(rank)
    return Shapes(
        H=H,
        N=c.num_attention_heads,
        D=D,
        Dr=c.qk_rope_head_dim,
        groups=c.o_groups,
        group_out=c.o_lora_rank,
        C=c.hc_mult,
        sinkhorn=c.hc_sinkhorn_iters,
        index_heads=ih,
        Di=Di,
        routers=tuple(routers),
        all_slots=tuple(slots // shared * profile.ranks for _, _, slots, _ in routers),
        normalise=c.norm_topk_prob,
        products=tuple(dict.fromkeys(products)),
        rows=(H, ql, D, Di),
        V=c.vocab_size,
        hash=memory,
        heads=tuple(heads),
        tables=tuple(tables),
        choice=(c.index_topk, c.candidate_block_size, c.candidate_topk_blocks),
        drafts=c.dspark_block_size if c.num_nextn_predict_layers else 0,
    )
