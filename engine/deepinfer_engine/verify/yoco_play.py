"""One forced sequence through the model under a plan: prompt in chunks, then verify steps with wrong drafts.

``Stage`` is the loaded model and its caches; ``play`` runs a sequence as the engine would under a subject's decisions;
``oracle`` runs it without any of the machinery that is judged: an unwrapped ring, private blocks, the prompt in one
piece and the forced tokens in another, floors from the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.replay import ReplaySpan, RowLimits
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.verify.yoco_oracle import Expected
from deepinfer_engine.verify.yoco_subject import Subject


@dataclass
class Place:
    """Where a sequence lives: ring slot and blocks of one cache."""

    kv: KVState
    slot: int
    blocks: list[int]


@dataclass(frozen=True)
class Played:
    """Log-probabilities f32 [C, V] at positions L − 1 … L + C − 2, each predicting the next forced token."""

    logprobs: Tensor
    span: ReplaySpan | None = None
    pivots: tuple[int, ...] = ()


@dataclass
class Stage:
    """A loaded model; ``forward`` runs one row of one sequence."""

    config: ModelConfig
    model: Any
    mesh: Any
    ops: Any
    device: str = "cpu"

    def layout(self, subject: Subject) -> KVLayout:
        return subject.layout(self.config, self.ops.numerics.records)

    def unwrapped(self, tokens: int) -> KVLayout:
        """A layout whose rings never wrap below ``tokens`` positions."""
        plain = KVLayout.of(self.config, records=self.ops.numerics.records)
        return replace(plain, ring=tokens, pair_ring=tokens)

    def cache(self, layout: KVLayout, *, slots: int, blocks: int) -> KVState:
        return KVState(layout, self.ops, slots=slots, blocks=blocks, device=self.device)

    def forward(
        self, at: Place, ids: Sequence[int], start: int, count: int, limits: RowLimits, *, wanted: str = "all"
    ) -> Tensor:
        """Logits [rows, V] of the rows that go past the cut; ``wanted`` as in ``RowInput``."""
        kind: Any = wanted if limits.tail else "none"
        row = RowInput(ids, start, count, at.slot, at.blocks, logits=kind, **vars(limits))
        batch = build_batch([row], at.kv.layout, ngram=self.config.engram_max_ngram_size, device=self.device)
        return self.model.forward(batch, at.kv, self.ops, self.mesh).logits.float().cpu()

    def wrong(self, token: int) -> int:
        """Another token that may stand anywhere."""
        other = (token + 7) % self.config.vocab_size
        return other if other != self.config.image_token_id else other + 1


def play(
    stage: Stage,
    subject: Subject,
    at: Place,
    ids: Sequence[int],
    span: ReplaySpan,
    *,
    budget: int = 0,
    stop: int = 0,
    on_pivot: Callable[[int], None] | None = None,
) -> Played:
    """Prefill ``span`` of ``ids`` in chunks (0: one), then force the rest through verify steps.

    ``stop``: a chunk ends there. ``on_pivot(p)`` is called when the windows before p are to be copied.
    """
    out, start, pivots = [], span.start, []
    while start < span.length:
        chunk = subject.chunk(span, start, budget or span.length)
        assert chunk is not None, (span, start, budget)
        count = min(chunk.count, stop - start) if start < stop else chunk.count
        last = start + count == span.length
        logits = stage.forward(
            at, ids, start, count, subject.limits(span, start, count), wanted="last" if last else "none"
        )
        start += count
        if last:
            out.append(logits[-1:])
    drafts, turn = stage.config.dspark_block_size, 0
    while start + 1 < len(ids):
        accepted = _accepted(start, len(ids), drafts, turn)
        turn += 1
        count = min(drafts + 1, at.kv.layout.blocks_for(len(ids)) * BLOCK_TOKENS - start)
        row = [*ids[: start + accepted], *(stage.wrong(t) for t in ids[start + accepted : start + count])]
        row += [stage.wrong(0)] * (start + count - len(row))
        logits = stage.forward(at, row, start, count, subject.limits(span, start, count))
        out.append(logits[:accepted])
        pivot = subject.pivot(start, start + accepted)
        start += accepted
        if pivot is not None:
            pivots.append(pivot)
            if on_pivot is not None:
                on_pivot(pivot)
    return Played(torch.log_softmax(torch.cat(out), -1), span, tuple(pivots))


def _accepted(start: int, end: int, drafts: int, turn: int) -> int:
    """Accepted rows of a verify step: a fixed pattern that also stops one short of a pivot and crosses it by one.

    That is the worst case of a ring: all drafts beyond the pivot are written when its copy is made.
    """
    wanted = min((1, 1, drafts + 1, 3, 2)[turn % 5], drafts + 1, end - 1 - start)
    before = (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS - 1
    if start == before:
        return 1
    return min(wanted, before - start) if start < before else wanted


def oracle(stage: Stage, at: Place, ids: Sequence[int], length: int, want: Expected) -> Played:
    """The definition: see the module's text. ``at.kv`` needs an unwrapped layout and, for a hit, the cached blocks."""

    def limits(start: int, count: int) -> RowLimits:
        tail = min(count, max(0, start + count - want.pivot))
        return RowLimits(want.low_encoder, want.low_decoder, want.reused, tail)

    count, forced = length - want.start, len(ids) - 1 - length
    out = [stage.forward(at, ids, want.start, count, limits(want.start, count), wanted="last")]
    out.append(stage.forward(at, ids, length, forced, limits(length, forced)))
    return Played(torch.log_softmax(torch.cat(out), -1))


def block_rows(at: Place, begin: int, end: int) -> dict[str, Tensor]:
    """Block KV of positions [begin, end) as every reader sees it, by source."""
    out = {}
    for s in at.kv.layout.sources:
        per = s.entries_per_block
        entry = torch.arange(begin // s.ratio, end // s.ratio)
        slots = torch.tensor(at.blocks)[entry // per] * per + entry % per
        out[f"source {s.layer} rows"] = at.kv.entries(s.layer, slots)
        out[f"source {s.layer} index keys"] = at.kv.index_keys(s.layer, slots)
    return out


def window_rows(at: Place, end: int, layers: range) -> dict[str, Tensor]:
    """Window KV of the W positions before ``end`` as every reader sees it, by layer."""
    positions = torch.arange(max(0, end - at.kv.layout.window), end)
    slots = at.slot * at.kv.layout.ring + positions % at.kv.layout.ring
    return {f"layer {layer} window": at.kv.window(layer, slots) for layer in layers}
