"""``Runner``: executes step plans on one device. It contains no policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_engine.cache.layout import PAD
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.model.ced import CedModel
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.types import Sequence, StepPlan


@dataclass(frozen=True)
class StepOutput:
    """Drawn token of every sampled row (PAD where the logits were not finite), and tokens per expert int64 [L, E]."""

    tokens: dict[str, int]
    load_LE: torch.Tensor


class Runner:
    """Model, KV and mesh of one process."""

    def __init__(self, model: CedModel, kv: KVState, ops: Any, mesh: Any, device: str):
        self.model = model
        self.kv = kv
        self.ops = ops
        self.mesh = mesh
        self.device = device

    def run(self, plan: StepPlan, sequences: Mapping[str, Sequence]) -> StepOutput:
        """Forward every planned row, then draw one token for each row that asks for it."""
        rows = []
        for row in plan.rows:
            seq = sequences[row.seq_id]
            rows.append(
                RowInput(
                    token_ids=seq.token_ids,
                    start=row.start,
                    count=row.count,
                    slot=seq.slot,
                    block_ids=seq.block_ids,
                    logits="last" if row.sample else "none",
                )
            )
        batch = build_batch(rows, self.kv.layout, ngram=self.model.config.engram_max_ngram_size, device=self.device)
        out = self.model.forward(batch, self.kv, self.ops, self.mesh)
        sampled = [sequences[row.seq_id] for row in plan.rows if row.sample]
        drawn = self._draw(out.logits, sampled) if sampled else []
        return StepOutput({s.request.id: t for s, t in zip(sampled, drawn, strict=True)}, out.load_LE)

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """One id per row of logits [B, V]; the noise of a row depends on its seed and position only."""
        params = [s.request.sampling for s in sequences]
        greedy = all(p.temperature == 0 for p in params)

        def column(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)

        ids = self.ops.sample(
            logits,
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=column([_signed(s.seed) for s in sequences], torch.int64),
            position=column([len(s.token_ids) for s in sequences], torch.int64),
            all_greedy=greedy,
        )
        finite = torch.isfinite(logits).all(-1)
        return torch.where(finite, ids, PAD).tolist()


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as int64."""
    return seed - 2**64 if seed >= 2**63 else seed
