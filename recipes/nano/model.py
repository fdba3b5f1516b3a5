"""The V4.1 text model for training: whole sequences, differentiable, every mechanism, no cache.

Written from the model description, independently of the engine, and checked against the same golden logits. With
``Numerics.official`` the activations in front of quantised products, window rows, global rows and index rows take the
values of the official formats (straight-through); without it the maths is plain.

Parameters are a flat dict under the checkpoint's names (see ``parameters``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_engine.config.model import LayerPlan, ModelConfig
from recipes.nano import attention, engram, experts, formats, mixing
from recipes.nano.parameters import kind_of

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Numerics:
    """``dtype`` of activations and products; ``official``: roundings of the release on activations and cache rows."""

    dtype: torch.dtype = torch.float32
    official: bool = False


@dataclass
class Ops:
    """The functions that dominate memory traffic; ``compiled`` replaces them by fused versions."""

    coefficients: Callable[..., tuple[Tensor, Tensor, Tensor]] = mixing.coefficients
    balance: Callable[..., Tensor] = mixing.balance
    collapse: Callable[..., Tensor] = mixing.collapse
    expand: Callable[..., Tensor] = mixing.expand
    window_softmax: Callable[..., Tensor] = attention.window_softmax
    joint_softmax: Callable[..., tuple[Tensor, Tensor]] = attention.joint_softmax
    head_sum: Callable[..., Tensor] = attention.head_sum
    rotate: Callable[..., Tensor] = attention.rotate
    weighted: Callable[..., Tensor] = experts.weighted
    fp8_values: Callable[[Tensor], Tensor] = formats.fp8_values
    fp4_values: Callable[[Tensor], Tensor] = formats.fp4_values
    fp4_global_values: Callable[[Tensor], Tensor] = formats.fp4_global_values
    #: Sinkhorn rounds per call of ``balance``: short pieces compile in seconds
    balance_piece: int = 64
    routed: Callable[..., Tensor] = experts.dense_experts

    def compiled(self) -> Ops:
        """The same functions through the compiler."""
        fixed = (
            "coefficients",
            "balance",
            "collapse",
            "expand",
            "window_softmax",
            "joint_softmax",
            "head_sum",
            "rotate",
            "weighted",
        )
        sized = ("fp8_values", "fp4_values", "fp4_global_values")  # called with many group counts
        fused = {n: torch.compile(getattr(self, n), dynamic=False) for n in fixed}
        fused |= {n: torch.compile(getattr(self, n), dynamic=True) for n in sized}
        return Ops(**fused, balance_piece=5, routed=self.routed)  # pyright: ignore[reportArgumentType]


@dataclass
class Layout:
    """Where packed chats stand: ``start`` int64 [B, T] is the first position of every token's chat.

    ``queries`` int64 [B, Q] are the positions that teach the indexer (None: every position); ``select`` restricts
    attention to the entries that the indexer chooses, as at inference, else all visible entries are attended to.
    """

    start: Tensor
    queries: Tensor | None = None
    select: bool = True


@dataclass
class Trace:
    """What a forward pass reports besides logits; losses are means over the layers that have them."""

    loads_LE: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    index: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    selected: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Shared:
    """What a layer hands to later ones: global rows, index keys, selection and candidates of the current sources."""

    rows: Tensor | None = None
    index_keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None
    scores: Tensor | None = None
    seen: Tensor | None = None


def stored(params: Params, *, weights: bool) -> dict[str, Tensor]:
    """The weights that the forward pass uses: official values (straight-through) or the float ones as they are."""
    out = dict(params)
    if weights:
        names: dict[str, list[str]] = {"fp8": [], "fp4": [], "rows": [], "bf16": [], "f32": []}
        for name in params:
            names[kind_of(name)].append(name)
        out |= zip(names["fp8"], formats.fp8_tiles([params[n] for n in names["fp8"]]), strict=True)
        for kind, values in (("fp4", formats.fp4_values), ("rows", formats.fp8_values)):
            out |= zip(names[kind], formats.grouped_weights([params[n] for n in names[kind]], values), strict=True)
    return out


class Model:
    """Forward pass of one config; holds tables only, parameters are passed in."""

    def __init__(
        self,
        config: ModelConfig,
        token_classes: Tensor,
        *,
        numerics: Numerics | None = None,
        ops: Ops | None = None,
    ):
        self.config = config
        self.numerics = numerics or Numerics()
        self.ops = ops or Ops()
        self.classes = token_classes
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        c = config
        self._primes = engram.bucket_primes(c.engram_vocab_size, len(c.engram_layer_ids), c.engram_columns)
        self._mults = [
            engram.multipliers(layer, c.engram_max_ngram_size, c.engram_compressed_vocab_size)
            for layer in c.engram_layer_ids
        ]

    # -------------------------------------------------------------- whole model

    def hidden(self, w: Params, ids_BT: Tensor, trace: Trace | None = None, layout: Layout | None = None) -> Tensor:
        """[B, T, H]: the normed last hidden state of sequences that start at position 0, or of packed chats."""
        c, dtype = self.config, self.numerics.dtype
        b, t = ids_BT.shape
        layout = layout or Layout(torch.zeros_like(ids_BT))
        embedded = engram.table_rows(w["embed.weight"], ids_BT).to(dtype)
        x = embedded.flatten(0, 1).unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(b * t, c.hc_mult, device=x.device)
        pre[:, 0] = 1
        shared = _Shared()
        classes = self.classes[ids_BT]
        for plan in c.layer_plan:
            p = f"layers.{plan.layer}."
            if plan.engram:
                x = self._engram(w, p, plan, x, classes, layout.start)
            pre_a, post, comb = self._mix(w, p + "hc_attn", x)
            h = self.ops.collapse(x, pre, w[p + "attn_norm.weight"], c.rms_norm_eps)
            y = self._attention(w, p + "attn.", plan, h.view(b, t, -1), shared, trace, layout).flatten(0, 1)
            x = self.ops.expand(x, y, post, comb)
            pre, post, comb = self._mix(w, p + "hc_ffn", x)
            h = self.ops.collapse(x, pre_a, w[p + "ffn_norm.weight"], c.rms_norm_eps)
            x = self.ops.expand(x, self._moe(w, p + "ffn.", h, trace), post, comb)
        return self.ops.collapse(x, pre, w["norm.weight"], c.rms_norm_eps).view(b, t, -1)

    def logits(self, w: Params, hidden: Tensor) -> Tensor:
        """f32 [..., V]."""
        return self._linear(hidden, w["head.weight"]).float()

    def _mix(self, w: Params, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        pre, post, comb = self.ops.coefficients(
            x, w[name + "_fn"], w[name + "_base"], w[name + "_scale"], c.rms_norm_eps, c.hc_eps
        )
        rounds = c.hc_sinkhorn_iters - 1
        while rounds > 0:
            piece = min(rounds, self.ops.balance_piece)
            comb = self.ops.balance(comb, piece, c.hc_eps)
            rounds -= piece
        return pre, post, comb

    # ---------------------------------------------------------------- sublayers

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight.to(x.dtype))

    def _act(self, x: Tensor) -> Tensor:
        """The input of an FP8 product."""
        return formats.through(x, self.ops.fp8_values, 32) if self.numerics.official else x

    def _table(self, ratio: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the layers with ratio 0, or of all others (YaRN)."""
        key = (min(ratio, 1), length)
        if key not in self._tables:
            c = self.config
            s = c.rope_scaling if ratio else None
            scaling = s and (s.factor, s.beta_fast, s.beta_slow, s.original_max_position_embeddings)
            theta = c.compress_rope_theta if ratio else c.rope_theta
            self._tables[key] = attention.rope_table(c.qk_rope_head_dim, theta, length, scaling, device)
        return self._tables[key]

    def _attention(
        self, w: Params, p: str, plan: LayerPlan, x: Tensor, shared: _Shared, trace: Trace | None, layout: Layout
    ) -> Tensor:
        c, eps = self.config, self.config.rms_norm_eps
        b, t, _ = x.shape
        cos, sin = self._table(plan.ratio, t, x.device)
        cos_q, sin_q = cos.unsqueeze(1), sin.unsqueeze(1)
        xq = self._act(x)
        qr = mixing.rms(self._linear(xq, w[p + "wq_a.weight"]), w[p + "q_norm.weight"], eps)
        qr_q = self._act(qr)
        q = self._linear(qr_q, w[p + "wq_b.weight"]).view(b, t, c.num_attention_heads, c.head_dim)
        q = self.ops.rotate(q, cos_q, sin_q)
        window = mixing.rms(self._linear(xq, w[p + "wkv.weight"]), w[p + "kv_norm.weight"], eps)
        window = self._act(attention.rotate(window, cos, sin))
        sink, scale = w[p + "attn_sink"], c.head_dim**-0.5
        near = attention.window_logits(q, window, c.sliding_window)
        if not plan.ratio:
            probs = self.ops.window_softmax(near, layout.start, sink, c.sliding_window, scale).to(q.dtype)
            o = attention.window_values(probs, window, c.sliding_window)
        else:
            self._global_entries(w, p, plan, x, (cos, sin), shared)
            if plan.owns_index:
                self._select(w, p, plan, x, qr_q, (cos_q, sin_q), shared, trace, layout)
            assert shared.rows is not None
            far = torch.bmm(q.reshape(b, -1, c.head_dim), shared.rows.transpose(1, 2))
            far = far.view(b, t, c.num_attention_heads, -1)
            probs, far_probs = self.ops.joint_softmax(
                near, far, layout.start, shared.selected, sink, c.sliding_window, plan.ratio, scale
            )
            o = attention.window_values(probs, window, c.sliding_window)
            o = o + torch.bmm(far_probs.flatten(1, 2), shared.rows).view_as(o)
            if plan.owns_index and trace is not None:
                assert shared.scores is not None and shared.seen is not None
                taught = attention.pick(far_probs, layout.queries)
                trace.index.append(attention.index_divergence(shared.scores, shared.seen, taught))
        o = self.ops.rotate(o, cos_q, -sin_q).view(b, t, c.o_groups, -1)
        wo_a = w[p + "wo_a.weight"].to(o.dtype).unflatten(0, (c.o_groups, -1))
        y = torch.einsum("btgi,goi->btgo", o, wo_a).flatten(2)
        return self._linear(self._act(y), w[p + "wo_b.weight"])

    def _global_entries(
        self, w: Params, p: str, plan: LayerPlan, x: Tensor, table: tuple[Tensor, Tensor], shared: _Shared
    ) -> None:
        """On a kv source: the global rows and index keys of the sequence."""
        if not plan.owns_kv:
            return
        eps = self.config.rms_norm_eps
        count = x.shape[1] // plan.ratio
        cos, sin = (v[:: plan.ratio][:count] for v in table)  # an entry turns with its first token
        if plan.ratio == 2:
            u = linear(x.float(), w[p + "compressor.wkv.weight"].float())
            g = linear(x.float(), w[p + "compressor.wgate.weight"].float())
            pooled = attention.pool_pairs(u, g).to(x.dtype)
        else:
            pooled = self._linear(x, w[p + "compressor.wkv.weight"])
        z = mixing.rms(pooled, w[p + "compressor.norm.weight"], eps)
        rows = attention.rotate(z, cos, sin)
        # the indexer learns from its own loss only, so it reads detached inputs
        key = mixing.rms(self._linear(z.detach(), w[p + "indexer.wk.weight"]), w[p + "indexer.k_norm.weight"], eps)
        key = attention.rotate(key, cos, sin)
        if self.numerics.official:
            rows = formats.through(rows, self.ops.fp4_global_values, 16)
            key = formats.through(key, self.ops.fp4_values, 32)
        shared.rows, shared.index_keys = rows, key

    def _select(
        self,
        w: Params,
        p: str,
        plan: LayerPlan,
        x: Tensor,
        qr: Tensor,
        table: tuple[Tensor, Tensor],
        shared: _Shared,
        trace: Trace | None,
        layout: Layout,
    ) -> None:
        """On an index source: scores of the teaching queries and, if selecting, candidates and selected entries.

        ``shared.seen`` are the entries among which the teaching queries compare; ``shared.selected`` stays None while
        all visible entries are attended to.
        """
        c = self.config
        b, t, _ = x.shape
        iq = self._linear(qr.detach(), w[p + "indexer.wq_b.weight"]).view(b, t, c.index_n_heads, c.index_head_dim)
        iq = self.ops.rotate(iq, *table)
        if self.numerics.official:
            iq = formats.through(iq, self.ops.fp4_values, 32)
        iw = self._linear(x.detach(), w[p + "indexer.weights_proj.weight"])
        iw = iw * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        assert shared.index_keys is not None
        keys = shared.index_keys
        if trace is not None:
            shared.scores = attention.index_scores(
                attention.pick(iq, layout.queries), attention.pick(iw, layout.queries), keys, self.ops.head_sum
            )
        if not layout.select:
            if trace is not None:
                seen = attention.visible_entries(layout.start, plan.ratio, keys.shape[1])
                shared.seen = attention.pick(seen, layout.queries)
            return
        with torch.no_grad():
            allowed = attention.visible_entries(layout.start, plan.ratio, keys.shape[1])
            scores = attention.index_scores(iq, iw, keys, self.ops.head_sum)
            if plan.candidates == "publish":
                shared.candidates = attention.candidate_entries(
                    scores, allowed, c.candidate_block_size, c.candidate_topk_blocks
                )
            elif plan.candidates == "restrict":
                assert shared.candidates is not None
                allowed = allowed & shared.candidates
            shared.selected = attention.best_entries(scores, allowed, c.index_topk)
        shared.seen = attention.pick(shared.selected, layout.queries)
        if trace is not None:
            trace.selected[plan.layer] = shared.selected

    def _moe(self, w: Params, p: str, x: Tensor, trace: Trace | None) -> Tensor:
        c = self.config
        ids, weights, scores = experts.route(
            x,
            w[p + "gate.weight"],
            w[p + "gate.bias"],
            k=c.num_experts_per_tok,
            temperature=c.gate_temp,
            norm=c.norm_topk_prob,
            scaling=c.routed_scaling_factor,
        )
        if trace is not None:
            loads = experts.expert_loads(ids, c.n_routed_experts)
            trace.loads_LE.append(loads)
            trace.balance.append(experts.balance_loss(scores, loads))
            trace.experts.append(ids.detach())
        xq = self._act(x)
        routed = (w[p + f"experts.{n}"].to(x.dtype) for n in ("w1", "w3", "w2"))
        y = self.ops.routed(
            xq, ids, weights, *routed, limit=c.swiglu_limit, act=self._act, hidden_rows=self.ops.weighted
        )
        s = p + "shared_experts."
        hidden = experts.gated(
            self._linear(xq, w[s + "w1.weight"]), self._linear(xq, w[s + "w3.weight"]), c.swiglu_limit
        )
        own = self._linear(self._act(hidden.to(x.dtype)), w[s + "w2.weight"])
        return (y + own.float()).to(x.dtype)

    def _engram(self, w: Params, p: str, plan: LayerPlan, x: Tensor, classes: Tensor, start: Tensor) -> Tensor:
        """Streams [N, C, H] with the gated n-gram memory added."""
        c = self.config
        slot = c.engram_layer_ids.index(plan.layer)
        rows = engram.row_ids(
            classes,
            pad_class=int(self._pad_class),
            mults=self._mults[slot],
            primes=self._primes[slot],
            heads=c.engram_n_heads,
            start_BT=start,
        )
        e = engram.table_rows(w[p + "engram.embed.weight"], rows.flatten(0, 1)).flatten(1).to(x.dtype)
        kv = self._linear(e, w[p + "engram.wkv.weight"])
        keys, value = kv[:, : -c.hidden_size].unflatten(1, (c.hc_mult, -1)).float(), kv[:, -c.hidden_size :].float()
        h = x.float()
        shape = w[p + "engram.q_weight"].float() * w[p + "engram.k_weight"].float()
        eps = c.rms_norm_eps
        dot = (h * shape * keys).sum(-1) * c.hidden_size**-0.5
        dot = dot * torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
        root = torch.sqrt(dot.abs().clamp(min=1e-6))
        gate = torch.sigmoid(torch.where(dot < 0, -root, root))
        return (h + gate.unsqueeze(-1) * value.unsqueeze(1)).to(x.dtype)

    @property
    def _pad_class(self) -> int:
        if not hasattr(self, "_pad"):
            self._pad = int(self.classes[self.config.engram_pad_token_id])  # one wait, at the first call
        return self._pad
