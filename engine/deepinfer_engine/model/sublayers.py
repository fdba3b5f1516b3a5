"""What backbone layers and draft blocks share: hyper-connection coefficients and the expert sublayer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.dist.mesh import Dispatched
from deepinfer_engine.model.weights import Hyper, MoE


def mixes(config: ModelConfig, ops: Any, X: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, C], post [T, C], comb [T, C, C]) of one sublayer from the streams X [T, C, H] before it."""
    c = config
    return ops.mhc_mixes(
        X, hyper.fn, hyper.base, hyper.scale, rms_eps=c.rms_norm_eps, hc_eps=c.hc_eps, iters=c.hc_sinkhorn_iters
    )


def route(config: ModelConfig, ops: Any, x: Tensor, ffn: MoE, bias: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """(expert ids [T, K], weights [T, K]) of x [T, H] with a selection bias [E] or [T, E]."""
    return ops.gate_topk(
        x,
        ffn.gate,
        bias,
        k=choices,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        temperature=config.gate_temp,
    )


def run_experts(
    config: ModelConfig,
    ops: Any,
    mesh: Any,
    place: int,
    x: Tensor,
    ffn: MoE,
    chosen: tuple[Tensor, Tensor],
    key: Tensor,
) -> Tensor:
    """Routed and shared experts [T, H] for x [T, H]; ``place``: its row of the placement, key [T]: of replicas."""
    sent = mesh.dispatch(ops, place, x, *chosen, key)
    y = experts_of(config, ops, ffn, sent)
    shared = ops.shared_expert(x, ffn.shared_w1, ffn.shared_w3, ffn.shared_w2, config.swiglu_limit)
    return mesh.combine(ops, y, sent, shared)


def experts_of(config: ModelConfig, ops: Any, ffn: MoE, sent: Dispatched) -> Tensor:
    """Expert outputs [M, H] of the rows that came to this process; there may be none."""
    if not sent.rows.shape[0]:
        return sent.rows
    return ops.moe_experts(sent.rows, sent.counts, ffn.bank, sent.weight, config.swiglu_limit)
