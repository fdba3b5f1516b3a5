"""``Speculation``: drafts of every sequence on the device, from one step to the next.

A step verifies the drafts that the step before made, commits what was drawn, and drafts again. What was committed is
known on the device first: length, newest tokens and drafts of a sequence live in its slot, and the next step's rows
are put where they belong from there (``Batch.floating``). The host learns the same numbers from the record of a step,
one step later. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.model.draft import Anchors, Proposals
from deepinfer_engine.runtime.batch import Batch, settle
from deepinfer_engine.spec.accept import DraftBlock, Mode, VerifyInputs, draft_token, verify


class Drafter(Protocol):
    """Where drafts come from."""

    def write_context(self, taps: Tensor, position: Tensor, ring_slot: Tensor, kv: Any, ops: Any) -> None:
        """See the hidden states taps [T, taps, H] of verified tokens at position [T]."""
        ...

    def propose(
        self, anchors: Anchors, kv: Any, ops: Any, choose: Callable[[int, Tensor], Tensor], tokens: int | None = None
    ) -> Proposals:
        """Draft ``tokens`` positions after every anchor; ``choose(slot, logits)`` draws them."""
        ...


@dataclass(frozen=True)
class Record:
    """What one step did with B sampled rows: what was committed, and what was drafted after it.

    tokens int64 [B, J + 1], of which the first ``count`` [B] are committed, ``accepted`` [B] of them drafts out of
    ``verified`` [B]; the new drafts int64 [B, J] and their confidence f32 [B, J] (raw). Log-probabilities of the rows
    in ``wanted`` (host numbers): f32 [W·(J+1)], the best ids and values [W·(J+1), top].
    """

    tokens: Tensor
    count: Tensor
    accepted: Tensor
    verified: Tensor
    drafts: Tensor
    confidence: Tensor
    wanted: tuple[int, ...] = ()
    logprob: Tensor | None = None
    top_ids: Tensor | None = None
    top_values: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Record:
        """Every tensor through ``move``."""
        parts = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: move(value) for name, value in parts.items()})


@dataclass(frozen=True)
class RowMap:
    """Where B sampled rows are, int64 [B] on the device: which floating row (−1: a prompt's last token), and for
    those the row of the logits and the token in the step; ring slot; context floor; regime of its confidence."""

    floating: Tensor
    logits_row: Tensor
    token: Tensor
    slot: Tensor
    floor: Tensor
    regime: Tensor


class Speculation:
    """Device state by ring slot: length, newest tokens (anchor first), drafts, confidence."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        tokens: int,
        slots: int,
        ngram: int,
        vocab: int,
        mode: Mode,
        device: str,
        temperatures: np.ndarray,
    ):
        """``tokens`` J drafted per step; ``ngram``: newest tokens kept, the history a verify row needs;
        ``temperatures`` f32 [regimes, J] calibrate the confidence."""
        self.host_temperatures = temperatures
        self.temperatures = torch.from_numpy(temperatures).to(device)
        self.regime = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.drafter = drafter
        self.tokens = tokens
        self.mode: Mode = mode
        self.device = device
        self.length = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.recent = torch.full((slots + 1, ngram), -1, dtype=torch.int64, device=device)
        self.drafts = torch.zeros((slots + 1, tokens), dtype=torch.int64, device=device)
        self.confidence = torch.zeros((slots + 1, tokens), dtype=torch.float32, device=device)
        # what the drafts were drawn from: rejection needs it, coupled verification does not
        self.logprobs = torch.zeros((slots + 1, tokens, vocab), device=device) if mode == "rejection" else None

    @torch.inference_mode()
    def place(self, batch: Batch, layout: Any, ops: Any) -> None:
        """Put the floating rows of a step where their sequences are now, and share its budget out among them."""
        if (f := batch.floating) is None:
            return
        slot, shares = f.slot_F, None
        if f.budget is not None:
            confidence = ops.dspark_confidence(self.confidence[slot], self.temperatures, self.regime[slot])
            shares = ops.dspark_split(confidence, f.cap_F, f.order_F, torch.full_like(slot[0], f.budget))
        settle(batch, layout, self.recent, self.drafts, self.length, shares, ops)

    @torch.inference_mode()
    def see(self, batch: Batch, taps: Tensor, kv: Any, ops: Any) -> None:
        """Give the drafter the hidden states of a step's tokens."""
        if taps.shape[0]:
            at = slice(None) if batch.tail_T is None else batch.tail_T
            self.drafter.write_context(taps, batch.pos_T[at], batch.ring_slot_T[at], kv, ops)

    @torch.inference_mode()
    def judge(
        self,
        batch: Batch,
        logits: Tensor,
        where: RowMap,
        inputs: VerifyInputs,
        kv: Any,
        ops: Any,
        *,
        wanted: tuple[int, ...] = (),
        top: int = 0,
        draft: bool = True,
    ) -> Record:
        """Accept drafts by logits [T', V], commit what they leave, and (``draft``) draft after it.

        ``wanted``: rows whose log-probabilities are reported, with ``top`` alternatives.
        """
        first, length, token = self._rows(batch, where, ops)
        logprobs = None if self.logprobs is None else self.logprobs[where.slot]
        block = DraftBlock(self.drafts[where.slot], logprobs)
        verdict = verify(ops, logits, block, first, length, inputs, mode=self.mode)
        emitted = (verdict.tokens, verdict.count, token, where.slot, where.regime)
        ops.commit_rows(*emitted, batch.pos_T, batch.lag_ids_TN, self.length, self.recent, self.regime)
        if draft:
            self._draft(where, inputs, kv, ops)
        parts = {}
        if wanted:
            rows = torch.tensor(wanted).to(self.device, non_blocking=True)
            places = torch.arange(self.tokens + 1, device=self.device)
            at = (first[rows].unsqueeze(1) + places).clamp(max=logits.shape[0] - 1).flatten()
            chosen = verdict.tokens[rows].clamp(min=0).flatten()
            found = ops.token_logprobs(logits[at], chosen, top=top)
            parts = dict(zip(("logprob", "top_ids", "top_values"), found, strict=True))
        return Record(
            verdict.tokens,
            verdict.count,
            verdict.num_accepted,
            length,
            self.drafts[where.slot],
            self.confidence[where.slot],
            wanted,
            **parts,
        )

    def _rows(self, batch: Batch, where: RowMap, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(first row of the logits, drafts under test, first token in the step), int64 [B] each."""
        if (f := batch.floating) is None:
            return where.logits_row, torch.zeros_like(where.logits_row), where.token
        return ops.sampled_rows(where.floating, where.logits_row, where.token, f.first_F, f.count_F)

    def _draft(self, where: RowMap, inputs: VerifyInputs, kv: Any, ops: Any) -> None:
        slot = where.slot
        length = self.length[slot]
        filters = None if inputs.filters is None else inputs.filters | {"position": length}

        def choose(place: int, logits: Tensor) -> Tensor:
            ids, logprobs = draft_token(ops, logits, filters, place=place, mode=self.mode)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs[slot, place] = logprobs
            return ids

        anchors = Anchors(self.recent[slot, 0], length - 1, slot, where.floor)
        made = self.drafter.propose(anchors, kv, ops, choose, self.tokens)
        self.drafts.index_copy_(0, slot, made.tokens)
        self.confidence.index_copy_(0, slot, made.confidence)
