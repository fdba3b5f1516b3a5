"""Index sources: score the global entries, filter by candidates, publish the selection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_engine.config.model import BLOCK_TOKENS, LayerPlan, ModelConfig
from deepinfer_engine.model.step import Phase, QueryGroup, Step
from deepinfer_engine.model.weights import Indexer

#: scores per pass; bounds the memory of a long prefill chunk (queries × entries)
_TILE = 1 << 24


def publish_selection(
    config: ModelConfig, plan: LayerPlan, weights: Indexer, x: Tensor, qr: Tensor, phase: Phase, step: Step
) -> None:
    """Set ``step.selected`` [T, K'] (and ``step.candidates`` at the candidate source) for the phase's queries.

    x [T, H] is the sublayer input, qr [T, ql] the query latent. K' is the largest min(K, visible) of any group.
    Where every visible entry is selected anyway, scoring is skipped: the set is the same.
    """
    ops = step.ops
    iq = ops.linear(qr, weights.wq_b).unflatten(-1, (config.index_n_heads, config.index_head_dim))
    rope = phase.rope[True]
    iq = ops.quantise_index_query(ops.rope(iq, rope.cos, rope.sin))
    iw = ops.index_weights(ops.linear(x, weights.weights_proj), config.index_head_dim)
    publishing = plan.candidates == "publish"
    if publishing:
        step.candidates = []
    parts: list[tuple[QueryGroup, Tensor]] = []
    for i, group in enumerate(phase.groups):
        visible = phase.visible(group, plan.ratio)
        longest = (group.last_position + 1) // plan.ratio
        restrict = step.candidates[i] if plan.candidates == "restrict" else None
        if longest <= config.index_topk and restrict is None and not step.probing:
            entry = torch.arange(longest, device=x.device)
            chosen = torch.where(entry < visible.unsqueeze(-1), entry, -1)
            if publishing:
                step.candidates.append(None)
        else:
            chosen, blocks = _score(config, plan, iq, iw, visible, longest, restrict, group, phase, step)
            if publishing:
                step.candidates.append(blocks)
        parts.append((group, chosen))
    width = max(c.shape[-1] for _, c in parts)
    whole = len(parts) == 1 and parts[0][0].whole
    selected = parts[0][1].flatten(0, 1) if whole else x.new_full((x.shape[0], width), -1, dtype=torch.int64)
    for group, chosen in () if whole else parts:
        if chosen.shape[-1]:
            flat = torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1).flatten(0, 1)
            # padded queries repeat the row's last token, so writing them again writes the same values
            selected[group.tokens.flatten()] = flat
    step.selected = selected
    step.probe("selected", plan.layer, selected)


def _score(
    config: ModelConfig,
    plan: LayerPlan,
    iq: Tensor,
    iw: Tensor,
    visible: Tensor,
    longest: int,
    restrict: Tensor | None,
    group: QueryGroup,
    phase: Phase,
    step: Step,
) -> tuple[Tensor, Tensor | None]:
    """Selection [B, C, K'] of one group, and its candidate blocks where this layer publishes them and they can bite."""
    ops = step.ops
    rows, queries = group.tokens.shape
    keys = (step.kv.key_store(plan.kv_source), group.rows, step.batch.block_table_BP)
    extent = {"per_block": BLOCK_TOKENS // plan.ratio, "count": longest}
    bites = plan.candidates == "publish" and longest > config.candidate_topk_blocks * config.candidate_block_size
    per_pass = max(1, _TILE // max(1, rows * longest))
    chosen, blocks, raw = [], [], []
    for start in range(0, queries, per_pass):
        part = slice(start, start + per_pass)
        seen = visible[:, part]
        scores = ops.index_scores_cached(group.of(iq)[:, part], group.of(iw)[:, part], *keys, seen, **extent)
        raw.append(scores)
        if bites:
            blocks.append(
                ops.candidate_blocks(scores, seen, block=config.candidate_block_size, keep=config.candidate_topk_blocks)
            )
        if restrict is not None:
            scores = ops.restrict_to_candidates(scores, restrict[:, part], block=config.candidate_block_size)
        chosen.append(ops.select_topk(scores, k=config.index_topk))
    if step.probing:
        step.probe("index_score", plan.layer, torch.cat(raw, 1))
        if blocks:
            step.probe("candidates", plan.layer, torch.cat(blocks, 1))
    return _joined(chosen), _joined(blocks) if blocks else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
