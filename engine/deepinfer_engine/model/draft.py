"""DSpark draft blocks: γ proposals per round from the backbone's own hidden states.

*Context.* The streams entering the tapped layers, averaged over the C copies, are projected once to H; every block
makes its window row of a position from that vector. A row exists for every token that ran through all layers, so a
position is written when it is verified and written again when it was rejected: nothing is ever undone.

*Round.* γ query slots per sequence: the embedding of the newest token (the anchor, which has not run yet) and γ − 1
times that of the noise token, at positions P .. P + γ − 1. A query sees the last W context rows before P and all γ
slots of its block, without a causal mask. The head is the backbone's.

*Heads.* Slot by slot, a low-rank bias that depends on the token chosen before is added to the logits (Markov head),
and one linear scores the collapsed stream beside that token's embedding (confidence head): the probability that the
slot is accepted, given that those before it are. It never sees the token it scores.

Source: DSpark (arXiv 2607.05147), DeepSeek-V4.1-Flash reference model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.model.attention import window_rows
from deepinfer_engine.model.step import Rope, frequency_tables
from deepinfer_engine.model.sublayers import mixes, route, run_experts
from deepinfer_engine.model.weights import DraftWeights, Layer
from deepinfer_kernels.reference.linear import Weight

#: choose(slot, logits [B, V]) → token ids [B]: draws the slot's proposal
Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Anchors:
    """Where B rounds start (int64 [B]): newest token, its position, ring slot, first position with a context row."""

    token: Tensor
    position: Tensor
    ring_slot: Tensor
    floor: Tensor


@dataclass(frozen=True)
class Proposals:
    """tokens int64 [B, J]; confidence f32 [B, J], raw logits; logits f32 [B, J, V] the tokens were drawn from.

    ``hidden`` [B, γ, H] is the collapsed stream before the norm.
    """

    tokens: Tensor
    confidence: Tensor
    logits: Tensor
    hidden: Tensor


class DraftModel:
    """Stateless over prepared weights, like the backbone: rows live in the windows after the backbone's."""

    def __init__(
        self, config: ModelConfig, weights: DraftWeights, embed: Tensor, head: Weight, mesh: Any, device: str = "cpu"
    ):
        """``embed`` and ``head`` are the backbone's; ``mesh`` places the draft experts, one row per block."""
        self.config = config
        self.weights = weights
        self.embed = embed
        self.head = head
        self.mesh = mesh
        self.frequencies = frequency_tables(config, device)[False]
        self._behind = torch.arange(config.sliding_window, 0, -1, device=device)
        self._slots = torch.arange(config.dspark_block_size, device=device)

    def context(self, taps: Tensor, ops: Any) -> Tensor:
        """Context vectors [T, H] of taps [T, taps, H]."""
        x = ops.linear(taps.flatten(1), self.weights.main_proj)
        return ops.rms_norm(x, self.weights.main_norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def write_context(self, taps: Tensor, position: Tensor, ring_slot: Tensor, kv: Any, ops: Any) -> None:
        """Write every block's window rows of T tokens: taps [T, taps, H], flat ring slots [T] (PAD: not kept)."""
        main = self.context(taps, ops)
        rope = Rope(*ops.rope_angles(position, self.frequencies))
        for layer in self.weights.layers:
            _, packed = window_rows(self.config, layer.attn, main, rope, ops)
            kv.write_window(layer.plan.layer, ring_slot, packed)

    @torch.inference_mode()
    def propose(self, anchors: Anchors, kv: Any, ops: Any, choose: Choose, tokens: int | None = None) -> Proposals:
        """Draft ``tokens`` ≤ γ (None: γ) positions of every row. The block is γ wide whatever is asked for."""
        hidden, base = self.run_block(anchors, kv, ops)
        B, J = anchors.token.shape[0], self.config.dspark_block_size if tokens is None else tokens
        before = anchors.token
        chosen, confidence, logits = [], [], []
        for slot in range(J):
            state = ops.embed(before, self.weights.markov_embed)
            logits.append(base[:, slot] + ops.head_logits(state, self.weights.markov_head))
            scored = torch.cat((hidden[:, slot], state), 1)
            confidence.append(ops.head_logits(scored, self.weights.confidence))
            before = choose(slot, logits[-1])
            chosen.append(before)
        return Proposals(torch.stack(chosen, 1), torch.cat(confidence, 1).view(B, J), torch.stack(logits, 1), hidden)

    def run_block(self, anchors: Anchors, kv: Any, ops: Any) -> tuple[Tensor, Tensor]:
        """(collapsed stream [B, γ, H], logits without the sequential bias f32 [B, γ, V])."""
        c = self.config
        B, J = anchors.token.shape[0], c.dspark_block_size
        ids = anchors.token.new_full((B, J), c.dspark_noise_token_id)
        ids[:, 0] = anchors.token
        position = (anchors.position.unsqueeze(1) + self._slots).flatten()
        rope = Rope(*ops.rope_angles(position, self.frequencies))
        seen = anchors.position.unsqueeze(1) - self._behind
        mask = seen >= anchors.floor.clamp(min=0).unsqueeze(1)
        rows = anchors.ring_slot.unsqueeze(1) * kv.layout.ring + seen.clamp(min=0) % kv.layout.ring
        # as ``attend_cached`` reads them: context rows of the ring, then every slot of the row's own block
        own = torch.arange(B * J, device=rows.device).view(B, J)
        places = torch.cat((torch.where(mask, -2 - rows, -1), own), 1).repeat_interleave(J, 0)
        X, pre = ops.embed_streams(ids.flatten(), self.embed, c.hc_mult)
        for stage, layer in enumerate(self.weights.layers):
            X, pre = self._block(stage, layer, X, pre, position, rope, places, kv, ops)
        hidden = ops.mhc_collapse(X, pre)
        base = ops.head_logits(ops.rms_norm(hidden, self.weights.norm, c.rms_norm_eps), self.head)
        return hidden.view(B, J, -1), base.view(B, J, -1)

    def _block(
        self,
        stage: int,
        layer: Layer,
        X: Tensor,
        pre: Tensor,
        position: Tensor,
        rope: Rope,
        places: Tensor,
        kv: Any,
        ops: Any,
    ) -> tuple[Tensor, Tensor]:
        """One draft block on X [B·γ, C, H]; ``places`` [B·γ, W + γ]: the window rows of every query."""
        c, eps = self.config, self.config.rms_norm_eps
        pre_a, post, comb = mixes(c, ops, X, layer.hc_attn)
        x = ops.mhc_collapse_norm(X, pre, layer.attn.norm, eps)
        y = self._attention(layer, x, rope, places, kv, ops)
        X = ops.mhc_expand(X, y, post, comb)
        pre_f, post, comb = mixes(c, ops, X, layer.hc_ffn)
        x = ops.mhc_collapse_norm(X, pre_a, layer.ffn.norm, eps)
        chosen = route(c, ops, x, layer.ffn, layer.ffn.bias, c.dspark_num_experts_per_tok)
        y = run_experts(c, ops, self.mesh, stage, x, layer.ffn, chosen, position)
        return ops.mhc_expand(X, y, post, comb), pre_f

    def _attention(self, layer: Layer, x: Tensor, rope: Rope, places: Tensor, kv: Any, ops: Any) -> Tensor:
        c, attn = self.config, layer.attn
        local, _ = window_rows(c, attn, x, rope, ops)
        qr = ops.rms_norm(ops.linear(x, attn.wq_a), attn.q_norm, c.rms_norm_eps)
        q = ops.linear(qr, attn.wq_b).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = ops.rope(q, rope.cos, rope.sin)
        ring = kv.window_store(layer.plan.layer)
        o = ops.attend_cached(q, local, places, ring, None, None, attn.sink, c.head_dim**-0.5)
        o = ops.rope(o, rope.cos, rope.sin, inverse=True)
        y = ops.linear_grouped(o.flatten(1).unflatten(1, (c.o_groups, -1)), attn.wo_a)
        return ops.linear(y.flatten(1), attn.wo_b)
