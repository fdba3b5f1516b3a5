"""The draft blocks for training: many blocks per sequence at once, differentiable, official formats in the loop.

Written from the model description, independently of the engine's blocks; a test compares the two. Shapes: B sequences,
T tokens, A anchors per sequence, J slots per block, H hidden, V vocabulary. Context comes from the frozen backbone as
taps [B, T, taps, H].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from deepinfer_engine.config.model import ModelConfig
from recipes.nano import experts, formats, mixing
from recipes.nano.attention import rope_table, rotate
from recipes.nano.parameters import kind_of as backbone_kind

Params = Mapping[str, Tensor]


def kind_of(name: str) -> str:
    """How the official checkpoint stores a parameter of the draft blocks."""
    return "fp8" if name == "mtp.0.main_proj.weight" else backbone_kind(name)


def initial_parameters(c: ModelConfig, backbone: Params, *, seed: int) -> dict[str, Tensor]:
    """f32 start values: every block a window-only copy of one of the last backbone layers with its first experts.

    ``backbone`` holds official names. The context starts as the mean of the taps, the heads as no-ops.
    """
    generator = torch.Generator().manual_seed(seed)
    stages, rank = c.num_nextn_predict_layers, c.dspark_markov_rank
    out: dict[str, Tensor] = {}
    for stage in range(stages):
        layer = c.num_hidden_layers - stages + stage
        for part in _block_names():
            out[f"mtp.{stage}.{part}"] = backbone[f"layers.{layer}.{part}"].float().clone()
        for part in ("gate.weight", "gate.bias", "gate.bias_vl"):
            name = f"mtp.{stage}.ffn.{part}"
            out[name] = backbone[f"layers.{layer}.ffn.{part}"][: c.dspark_n_routed_experts].float().clone()
        for w in ("w1", "w3", "w2"):
            stack = [backbone[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for e in range(c.dspark_n_routed_experts)]
            out[f"mtp.{stage}.ffn.experts.{w}"] = torch.stack(stack).float()
    taps = len(c.dspark_target_layer_ids)
    mean = torch.eye(c.hidden_size).repeat(1, taps) / taps
    out["mtp.0.main_proj.weight"] = mean + 0.01 * torch.randn(mean.shape, generator=generator)
    out["mtp.0.main_norm.weight"] = torch.ones(c.hidden_size)
    last = f"mtp.{stages - 1}."
    out[f"{last}norm.weight"] = backbone["norm.weight"].float().clone()
    out[f"{last}markov_head.embed.weight"] = torch.randn((c.vocab_size, rank), generator=generator) * rank**-0.5
    out[f"{last}markov_head.head.weight"] = torch.zeros(c.vocab_size, rank)
    out[f"{last}confidence_head.proj.weight"] = torch.zeros(1, c.hidden_size + rank)
    return out


def _block_names() -> list[str]:
    attn = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight", "attn_sink", "wo_a.weight",
            "wo_b.weight")  # fmt: skip
    names = ["attn_norm.weight", "ffn_norm.weight", *(f"attn.{n}" for n in attn)]
    names += [f"hc_{side}_{part}" for side in ("attn", "ffn") for part in ("fn", "base", "scale")]
    return names + [f"ffn.shared_experts.{w}.weight" for w in ("w1", "w3", "w2")]


def stored(params: Params) -> dict[str, Tensor]:
    """The values that the official formats hold, straight-through for the gradient."""
    names: dict[str, list[str]] = {"fp8": [], "fp4": [], "bf16": [], "f32": []}
    for name in params:
        names[kind_of(name)].append(name)
    out = dict(params)
    out |= zip(names["fp8"], formats.fp8_tiles([params[n] for n in names["fp8"]]), strict=True)
    fp4 = formats.grouped_weights([params[n] for n in names["fp4"]], formats.fp4_values)
    out |= zip(names["fp4"], fp4, strict=True)
    out |= {n: params[n] + (params[n].bfloat16().float() - params[n]).detach() for n in names["bf16"]}
    return out


@dataclass(frozen=True)
class Frozen:
    """What the blocks share with the backbone: embedding and head [V, H], f32."""

    embed: Tensor
    head: Tensor


@dataclass(frozen=True)
class Drafted:
    """logits f32 [B, A, J, V] with the sequential bias; confidence f32 [B, A, J], raw."""

    logits: Tensor
    confidence: Tensor


class DraftBlocks:
    """Forward pass of one config; parameters are passed in."""

    def __init__(self, config: ModelConfig, frozen: Frozen, dtype: torch.dtype):
        self.config = config
        self.frozen = frozen
        self.dtype = dtype

    def __call__(self, w: Params, taps: Tensor, ids: Tensor, anchors: Tensor) -> Drafted:
        """taps [B, T, taps, H], ids int64 [B, T], anchors int64 [B, A]: positions of the newest tokens.

        The tokens before every slot are the sequence's own (teacher forcing); positions past its end repeat the last.
        """
        c, eps = self.config, self.config.rms_norm_eps
        J, last = c.dspark_block_size, f"mtp.{c.num_nextn_predict_layers - 1}."
        B, T = ids.shape
        A = anchors.shape[1]
        main = self._linear(self._act(taps.to(self.dtype).flatten(2)), w["mtp.0.main_proj.weight"])
        main = mixing.rms(main, w["mtp.0.main_norm.weight"], eps)
        cos, sin = rope_table(c.qk_rope_head_dim, c.rope_theta, T + J, None, ids.device)
        position = (anchors.unsqueeze(2) + torch.arange(J, device=ids.device)).flatten(1)  # [B, A·J]
        before = ids.gather(1, position.clamp(max=T - 1)).view(B, A, J)
        block = torch.full_like(before, c.dspark_noise_token_id)
        block[:, :, 0] = before[:, :, 0]
        x = embedding(block.flatten(), self.frozen.embed).to(self.dtype)
        X = x.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(len(x), c.hc_mult, device=x.device)
        pre[:, 0] = 1
        keys = torch.arange(T, device=ids.device)
        reach = anchors.unsqueeze(2)
        seen = (keys < reach) & (keys >= reach - c.sliding_window)  # [B, A, T]
        for stage in range(c.num_nextn_predict_layers):
            p = f"mtp.{stage}."
            pre_a, post, comb = self._mix(w, p + "hc_attn", X)
            h = mixing.collapse(X, pre, w[p + "attn_norm.weight"], eps)
            y = self._attention(w, p + "attn.", h.view(B, A * J, -1), main, (cos, sin), position, seen)
            X = mixing.expand(X, y.flatten(0, 1), post, comb)
            pre, post, comb = self._mix(w, p + "hc_ffn", X)
            h = mixing.collapse(X, pre_a, w[p + "ffn_norm.weight"], eps)
            X = mixing.expand(X, self._experts(w, p + "ffn.", h), post, comb)
        hidden = (pre.unsqueeze(-1) * X.float()).sum(1).to(self.dtype)
        base = linear(mixing.rms(hidden, w[f"{last}norm.weight"], eps).float(), self.frozen.head)
        state = embedding(before.flatten(), w[f"{last}markov_head.embed.weight"])
        logits = base + state @ w[f"{last}markov_head.head.weight"].t()
        scored = torch.cat((hidden.float(), state), 1) @ w[f"{last}confidence_head.proj.weight"].t()
        return Drafted(logits.view(B, A, J, -1), scored.view(B, A, J))

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight.to(x.dtype))

    def _act(self, x: Tensor) -> Tensor:
        """The input of an FP8 product takes the format's values."""
        return formats.through(x, formats.fp8_values, 32)

    def _mix(self, w: Params, name: str, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        pre, post, comb = mixing.coefficients(
            X, w[name + "_fn"], w[name + "_base"], w[name + "_scale"], c.rms_norm_eps, c.hc_eps
        )
        return pre, post, mixing.balance(comb, c.hc_sinkhorn_iters - 1, c.hc_eps)

    def _row(self, w: Params, p: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        row = mixing.rms(self._linear(self._act(x), w[p + "wkv.weight"]), w[p + "kv_norm.weight"], self._eps)
        return self._act(rotate(row, cos, sin))

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _attention(
        self,
        w: Params,
        p: str,
        x: Tensor,
        main: Tensor,
        table: tuple[Tensor, Tensor],
        position: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """[B, A·J, H]: queries of a block over the context before its anchor and all slots of the block."""
        c, J = self.config, self.config.dspark_block_size
        B, Q, _ = x.shape
        A, T = Q // J, main.shape[1]
        cos, sin = (t[position] for t in table)  # [B, Q, Dr/2]
        context = self._row(w, p, main, table[0][:T], table[1][:T])
        local = self._row(w, p, x, cos, sin).view(B, A, J, -1)
        qr = mixing.rms(self._linear(self._act(x), w[p + "wq_a.weight"]), w[p + "q_norm.weight"], self._eps)
        q = self._linear(self._act(qr), w[p + "wq_b.weight"]).view(B, Q, c.num_attention_heads, c.head_dim)
        q = rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)).view(B, A, J, c.num_attention_heads, c.head_dim)
        scale = c.head_dim**-0.5
        far = torch.einsum("bajnd,btd->bajnt", q, context).float() * scale
        far = far.masked_fill(~seen.view(B, A, 1, 1, T), -torch.inf)
        near = torch.einsum("bajnd,bakd->bajnk", q, local).float() * scale
        sink = w[p + "attn_sink"].float().view(1, 1, 1, -1, 1).expand(B, A, J, -1, 1)
        probs = torch.softmax(torch.cat((far, near, sink), -1), -1).to(x.dtype)
        o = torch.einsum("bajnt,btd->bajnd", probs[..., :T], context)
        o = o + torch.einsum("bajnk,bakd->bajnd", probs[..., T : T + J], local)
        o = rotate(o.reshape(B, Q, c.num_attention_heads, c.head_dim), cos.unsqueeze(2), -sin.unsqueeze(2))
        wo_a = w[p + "wo_a.weight"].to(o.dtype).unflatten(0, (c.o_groups, -1))
        y = torch.einsum("bqgi,goi->bqgo", o.reshape(B, Q, c.o_groups, -1), wo_a).flatten(2)
        return self._linear(self._act(y), w[p + "wo_b.weight"])

    def _experts(self, w: Params, p: str, x: Tensor) -> Tensor:
        c = self.config
        ids, weights, _ = experts.route(
            x,
            w[p + "gate.weight"],
            w[p + "gate.bias"],
            k=c.dspark_num_experts_per_tok,
            temperature=c.gate_temp,
            norm=c.norm_topk_prob,
            scaling=c.routed_scaling_factor,
        )
        xq = self._act(x)
        routed = (w[p + f"experts.{n}"].to(x.dtype) for n in ("w1", "w3", "w2"))
        y = experts.dense_experts(xq, ids, weights, *routed, limit=c.swiglu_limit, act=self._act)
        s = p + "shared_experts."
        hidden = experts.gated(
            self._linear(xq, w[s + "w1.weight"]), self._linear(xq, w[s + "w3.weight"]), c.swiglu_limit
        )
        return (y + self._linear(self._act(hidden.to(x.dtype)), w[s + "w2.weight"]).float()).to(x.dtype)
