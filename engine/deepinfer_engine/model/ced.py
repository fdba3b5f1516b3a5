"""The V4.1 text model: causal encoder below the cut, decoder above, one forward pass for any ragged batch.

A layer is: hash memory (some layers), tap (some layers), attention sublayer, expert sublayer, each sublayer wrapped in
hyper-connections whose collapse uses the *previous* sublayer's pre-mix. Source: DeepSeek-V4.1-Flash reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.model.attention import attention, write_kv
from deepinfer_engine.model.engram import EngramHasher, EngramSource, inject
from deepinfer_engine.model.step import Phase, Step, frequency_tables
from deepinfer_engine.model.sublayers import experts_of, mixes, route, run_experts
from deepinfer_engine.model.weights import Layer, ModelWeights
from deepinfer_engine.runtime.batch import Batch

#: probe(name, layer, tensor): sees intermediate values; for verification, never for computing
Probe = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class Out:
    """Logits f32 [n, V] at the chosen rows; taps [Ttail, taps, H]; load int64 [L, E] tokens per logical expert.

    ``hidden`` [n, H] is the collapsed stream before the final norm.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor
    load_LE: Tensor


class CedModel:
    """Stateless forward pass over prepared weights; all state is in the ``KVState`` passed in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        sources: Mapping[int, EngramSource],
        token_class: np.ndarray,
        device: str = "cpu",
    ):
        self.config = config
        self.weights = weights
        self.sources = sources
        self.hasher = EngramHasher(config, token_class, device)
        self.frequencies = frequency_tables(config, device)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: Any, ops: Any, mesh: Any, probe: Probe | None = None, *, past_cut: bool = False
    ) -> Out:
        """Run the batch through every layer, writing its KV.

        Tokens outside ``batch.tail_T`` stop after the cut layer's KV writes. ``past_cut``: another process has tokens
        that go on, so that this one's experts are needed above the cut in any case. Raises nothing of its own.
        """
        step = self.begin(batch, kv, ops, mesh, probe)
        X, pre = self.embed(step)
        for layer in self.weights.layers:
            if layer.plan.layer == self.config.cut and step.ends_at_cut:
                out = self.end_at_cut(layer, X, pre, step)
                if past_cut:
                    self._serve(self.weights.layers[self.config.cut :], ops, mesh)
                return self._counted(out, mesh)
            X, pre = self.run_layer(layer, X, pre, step)
        return self._counted(self.finish(X, pre, step), mesh)

    @torch.inference_mode()
    def idle(self, ops: Any, mesh: Any, *, past_cut: bool) -> Out:
        """A step without rows of this process: its experts serve the others, up to the cut or in all layers."""
        layers = self.weights.layers
        self._serve(layers if past_cut else layers[: self.config.cut], ops, mesh)
        load_LE = self.weights.embed.new_zeros(
            (self.config.num_hidden_layers, self.config.n_routed_experts), dtype=torch.int64
        )
        return self._counted(self._no_rows(load_LE, torch.float32), mesh)

    def _serve(self, layers: tuple[Layer, ...], ops: Any, mesh: Any) -> None:
        """Take part in the exchanges of ``layers`` with no token of this process."""
        c, device = self.config, self.weights.embed.device
        x = ops.embed(torch.zeros(0, dtype=torch.int64, device=device), self.weights.embed)
        ids = torch.zeros((0, c.num_experts_per_tok), dtype=torch.int64, device=device)
        for layer in layers:
            sent = mesh.dispatch(ops, layer.plan.layer, x, ids, ids.float(), ids[:, 0])
            mesh.combine(ops, experts_of(c, ops, layer.ffn, sent), sent, x)

    def _counted(self, out: Out, mesh: Any) -> Out:
        """The result with the loads of all processes."""
        return replace(out, load_LE=mesh.total(out.load_LE))

    def begin(self, batch: Batch, kv: Any, ops: Any, mesh: Any, probe: Probe | None = None) -> Step:
        """Geometry of a step, and the hash ids of every Engram layer (they depend on token ids alone)."""
        step = Step(self.frequencies, batch, kv, ops, mesh, probe)
        step.engram_ids = self.hasher.ids(ops, batch.lag_ids_TN)
        for layer, ids in step.engram_ids.items():
            self.sources[layer].prefetch(ids)
        if self.config.image_token_id is not None:
            step.image = batch.ids_T == self.config.image_token_id
        return step

    def embed(self, step: Step) -> tuple[Tensor, Tensor]:
        """(streams [T, C, H]: C copies of the embedding, pre-mix [T, C]: the first stream only)."""
        return step.ops.embed_streams(step.batch.ids_T, self.weights.embed, self.config.hc_mult)

    def run_layer(self, layer: Layer, X: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """One layer on streams X [T, C, H] with the pre-mix handed over; at the cut, the tail only continues."""
        c, ops, plan = self.config, step.ops, layer.plan
        phase = step.before if plan.layer < c.cut else step.at_cut if plan.layer == c.cut else step.after
        if layer.engram is not None:
            source = self.sources[plan.layer]
            ids = step.engram_ids[plan.layer]
            X, gate = inject(ops, X, ids, step.image, source, layer.engram, c.rms_norm_eps)
            step.probe("engram_ids", plan.layer, ids)
            step.probe("engram_gate", plan.layer, gate)
            step.probe("x_engram", plan.layer, X)
        x = ops.mhc_collapse_norm(X, pre, layer.attn.norm, c.rms_norm_eps)
        step.probe("attn_in", plan.layer, x)
        if plan.layer == c.cut and phase.query is not None:
            X = X[phase.query]
        if plan.tap:
            kept = X if phase is not step.before or step.batch.tail_T is None else X[step.batch.tail_T]
            step.taps.append(ops.mhc_collapse(kept, torch.full(kept.shape[:2], 1.0 / c.hc_mult, device=X.device)))
        pre_a, post, comb = mixes(c, ops, X, layer.hc_attn)
        y = attention(c, layer, x, phase, step)
        step.probe("attn_out", plan.layer, y)
        X = ops.mhc_expand(X, y, post, comb)
        step.probe("x_mid", plan.layer, X)
        pre_f, post, comb = mixes(c, ops, X, layer.hc_ffn)
        x = ops.mhc_collapse_norm(X, pre_a, layer.ffn.norm, c.rms_norm_eps)
        step.probe("ffn_in", plan.layer, x)
        y = self._moe(layer, x, phase, step)
        step.probe("ffn_out", plan.layer, y)
        return ops.mhc_expand(X, y, post, comb), pre_f

    def finish(self, X: Tensor, pre: Tensor, step: Step) -> Out:
        """Collapse with the last pre-mix, norm, head at the chosen rows."""
        ops, chosen = step.ops, step.batch.logits_T
        hidden = ops.mhc_collapse(X[chosen], pre[chosen])
        normed = ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        logits = ops.head_logits(normed, self.weights.head)
        taps = torch.stack(step.taps, 1) if step.taps else hidden.new_zeros((X.shape[0], 0, X.shape[2]))
        return Out(logits, hidden, taps, step.load(self.config.n_routed_experts))

    def end_at_cut(self, layer: Layer, X: Tensor, pre: Tensor, step: Step) -> Out:
        """Write the cut layer's KV and stop: an earlier chunk of a trimmed prefill. The result has no rows."""
        c, ops = self.config, step.ops
        write_kv(c, layer, ops.mhc_collapse_norm(X, pre, layer.attn.norm, c.rms_norm_eps), step)
        load_LE = X.new_zeros((c.num_hidden_layers, c.n_routed_experts), dtype=torch.int64)
        if c.cut:
            load_LE[: c.cut] = step.load(c.n_routed_experts)
        return self._no_rows(load_LE, X.dtype)

    def _no_rows(self, load_LE: Tensor, dtype: torch.dtype) -> Out:
        c = self.config
        none = load_LE.new_zeros((0, c.hidden_size), dtype=dtype)
        taps = none.new_zeros((0, len(c.dspark_target_layer_ids), c.hidden_size))
        return Out(none.new_zeros((0, c.vocab_size), dtype=torch.float32), none, taps, load_LE)

    def _moe(self, layer: Layer, x: Tensor, phase: Phase, step: Step) -> Tensor:
        c, ops, ffn = self.config, step.ops, layer.ffn
        bias = ffn.bias
        if step.image is not None:
            image = step.image if phase.query is None else step.image[phase.query]
            bias = torch.where(image.unsqueeze(1), ffn.bias_vl, ffn.bias)
        chosen = route(c, ops, x, ffn, bias, c.num_experts_per_tok)
        step.probe("experts", layer.plan.layer, chosen[0])
        step.probe("route_weights", layer.plan.layer, chosen[1])
        step.count_experts(chosen[0])
        return run_experts(c, ops, step.mesh, layer.plan.layer, x, ffn, chosen, phase.key)
