"""Per-step inputs of the sampling operations, from the settings and tokens of each row.

What a row draws depends on its logits, its settings, its own tokens, its seed and the position: nothing of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.spec.accept import NO_TOKEN, VerifyInputs
from deepinfer_engine.types import Sequence
from deepinfer_kernels.reference.sample import NON_FINITE as NON_FINITE
from deepinfer_kernels.reference.sample import NOTHING_ALLOWED as NOTHING_ALLOWED


@dataclass(frozen=True)
class Draws:
    """Of B rows: ids int64 [B] (negative where a row failed); log-probabilities of the rows that want them.

    ``wanted`` [W] are those rows' numbers; logprob f32 [W], top_ids int64 and top_values f32 [W, top].
    """

    ids: Tensor
    wanted: Tensor | None = None
    logprob: Tensor | None = None
    top_ids: Tensor | None = None
    top_values: Tensor | None = None


def token_bits(vocab: int, ids: tuple[int, ...] | None, banned: tuple[int, ...]) -> np.ndarray:
    """int32 [ceil(V/32)] bit set of the allowed tokens: ``ids`` (None = all) without ``banned``."""
    allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    if ids is None:
        allowed[:vocab] = 1
    else:
        allowed[list(ids)] = 1
    allowed[list(banned)] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class DrawInputs:
    """What a step's drawing needs beside the logits, on the device. None: no row needs that part."""

    filters: dict[str, Tensor] | None
    adjust: dict[str, Tensor] | None
    wanted: Tensor | None
    top: int


class Sampler:
    """Prepares the drawing of a step on the host and launches it with the operations in ``ops``."""

    def __init__(self, ops: Any, vocab: int, device: str):
        self.ops = ops
        self.vocab = vocab
        self.device = device
        self._counts: dict[int, tuple[int, Counter[int]]] = {}  # uid → (tokens counted, answer tokens)

    def prepare(self, rows: Rows[Sequence], masks: Mapping[int, np.ndarray]) -> DrawInputs:
        """Inputs for one id per row; ``masks``: uid → int32 words of the tokens a grammar allows now."""
        params = [s.request.sampling for s in rows]
        which = [i for i, p in enumerate(params) if p.logprobs]
        return DrawInputs(
            filters=self._filters(rows),
            adjust=self._adjust(rows, masks),
            wanted=self._column(which, torch.int64) if which else None,
            top=max((p.top_logprobs for p in params), default=0),
        )

    def prepare_verify(
        self,
        rows: Rows[Sequence],
        masks: Mapping[int, np.ndarray],
        *,
        places: int,
        stops: Rows[tuple[int, ...]],
        room: Rows[int],
    ) -> VerifyInputs:
        """Inputs for up to ``places`` = J + 1 ids per row; ``masks``: uid → int32 [J+1, words], one mask per place.

        ``stops`` are the ids that end each row, ``room`` how many tokens it may still emit.
        """
        width = max((len(ids) for ids in stops), default=0)
        padded = [[*ids, *[NO_TOKEN] * (width - len(ids))] for ids in stops]
        return VerifyInputs(
            filters=self._filters(rows),
            adjust=self._adjust_verify(rows, masks, places),
            stop=torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width).to(self.device, non_blocking=True),
            room=self._column(list(room), torch.int64),
        )

    @torch.inference_mode()
    def draw(self, logits: Tensor, inputs: DrawInputs) -> Draws:
        """One id per row of logits f32 [B, V]. Waits for nothing."""
        adjusted = None if inputs.adjust is None else self.ops.adjust_logits(logits, **inputs.adjust)
        ids = self.ops.next_tokens(logits, adjusted, inputs.filters)
        if inputs.wanted is None:
            return Draws(ids)
        chosen = ids[inputs.wanted].clamp(min=0)
        logprob, best, values = self.ops.token_logprobs(logits[inputs.wanted], chosen, top=inputs.top)
        return Draws(ids, inputs.wanted, logprob, best, values)

    def forget(self, uid: int) -> None:
        """Drop what is kept for a finished sequence."""
        self._counts.pop(uid, None)

    def _filters(self, rows: Rows[Sequence]) -> dict[str, Tensor] | None:
        """Settings, seed and position of the next token per row; None when every row is greedy."""
        params = [s.request.sampling for s in rows]
        if not any(p.temperature for p in params):
            return None
        return {
            "temperature": self._column([p.temperature for p in params], torch.float32),
            "top_k": self._column([p.top_k for p in params], torch.int64),
            "top_p": self._column([p.top_p for p in params], torch.float32),
            "min_p": self._column([p.min_p for p in params], torch.float32),
            "seed": self._column([_signed(s.seed) for s in rows], torch.int64),
            "position": self._column([len(s.token_ids) for s in rows], torch.int64),
        }

    def _adjust_verify(
        self, rows: Rows[Sequence], masks: Mapping[int, np.ndarray], places: int
    ) -> dict[str, Tensor] | None:
        if not masks and not any(s.request.sampling.adjusts_logits for s in rows):
            return None
        pairs, biases, bits = _Pairs(), [], []
        for b, seq in enumerate(rows):
            p = seq.request.sampling
            if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
                pairs.add(b, seq, self._answer_counts(seq), whole=p.repetition_penalty != 1.0)
            biases += [(b, token, value) for token, value in p.logit_bias]
            words = masks.get(seq.uid)
            if p.allowed_token_ids is not None or p.banned_token_ids:
                own = np.tile(token_bits(self.vocab, p.allowed_token_ids, p.banned_token_ids), (places, 1))
                words = own if words is None else words & own
            if words is not None:
                bits.append((b, words))
        params = [s.request.sampling for s in rows]
        none = np.zeros((0, places, 1), dtype=np.int32)
        return {
            "row": self._column(pairs.row, torch.int64),
            "token": self._column(pairs.token, torch.int64),
            "count": self._column(pairs.count, torch.float32),
            "presence": self._column([p.presence_penalty for p in params], torch.float32),
            "frequency": self._column([p.frequency_penalty for p in params], torch.float32),
            "repetition": self._column([p.repetition_penalty for p in params], torch.float32),
            "bias_row": self._column([b for b, _, _ in biases], torch.int64),
            "bias_token": self._column([t for _, t, _ in biases], torch.int64),
            "bias": self._column([v for _, _, v in biases], torch.float32),
            "mask_row": self._column([b for b, _ in bits], torch.int64),
            "mask": self._array(np.stack([w for _, w in bits]) if bits else none),
        }

    def _adjust(self, rows: Rows[Sequence], masks: Mapping[int, np.ndarray]) -> dict[str, Tensor] | None:
        if not masks and not any(s.request.sampling.adjusts_logits for s in rows):
            return None
        pairs, scales, biases, bits = _Pairs(), [], [], []
        for b, seq in enumerate(rows):
            p = seq.request.sampling
            if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
                size = pairs.add(b, seq, self._answer_counts(seq), whole=p.repetition_penalty != 1.0)
                scales.append((size, p.presence_penalty, p.frequency_penalty, p.repetition_penalty))
            biases += [(b, token, value) for token, value in p.logit_bias]
            words = masks.get(seq.uid)
            if p.allowed_token_ids is not None or p.banned_token_ids:
                own = token_bits(self.vocab, p.allowed_token_ids, p.banned_token_ids)
                words = own if words is None else words & own
            if words is not None:
                bits.append((b, words))

        def penalty(which: int) -> Tensor:
            parts = [np.full(s[0], s[which], dtype=np.float32) for s in scales]
            return self._array(np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32))

        return {
            "row": self._column(pairs.row, torch.int64),
            "token": self._column(pairs.token, torch.int64),
            "count": self._column(pairs.count, torch.float32),
            "presence": penalty(1),
            "frequency": penalty(2),
            "repetition": penalty(3),
            "bias_row": self._column([b for b, _, _ in biases], torch.int64),
            "bias_token": self._column([t for _, t, _ in biases], torch.int64),
            "bias": self._column([v for _, _, v in biases], torch.float32),
            "mask_row": self._column([b for b, _ in bits], torch.int64),
            "mask": self._array(np.stack([w for _, w in bits]) if bits else np.zeros((0, 1), dtype=np.int32)),
        }

    def _answer_counts(self, seq: Sequence) -> Counter[int]:
        """Answer tokens so far, counted on from the last call."""
        done, counts = self._counts.get(seq.uid, (seq.num_prompt, Counter()))
        counts.update(seq.token_ids[done:])
        self._counts[seq.uid] = (len(seq.token_ids), counts)
        return counts

    def _column(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def _array(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


class _Pairs:
    """(row, token, count in the answer) of the rows with penalties."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.token: list[int] = []
        self.count: list[int] = []

    def add(self, b: int, seq: Sequence, counts: Counter[int], *, whole: bool) -> int:
        """Pairs of one row; ``whole`` adds the prompt's tokens, with count 0. Returns how many."""
        tokens = list(counts)
        if whole:
            tokens += [t for t in set(seq.token_ids[: seq.num_prompt]) if t not in counts]
        self.row += [b] * len(tokens)
        self.token += tokens
        self.count += [counts.get(t, 0) for t in tokens]
        return len(tokens)


def choice_seed(seed: int, index: int) -> int:
    """Seed of the i-th choice: the request's own for choice 0, then a 64-bit mix of (seed, i) (SplitMix64)."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as int64."""
    return seed - 2**64 if seed >= 2**63 else seed
