"""``Batch``: one step's rows as tensors. The only place where plans become tensors.

Rows are ragged and concatenated; a row is ``count`` tokens of one sequence from position ``start``. What Python needs
to know about shapes is kept as integers (``rows``), so that building and running a step never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.cache.layout import PAD, KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS


@dataclass(frozen=True)
class RowInput:
    """One row to run.

    ``token_ids``: all known tokens of the sequence up to start + count. ``slot`` / ``block_ids``: where its KV lives.
    ``floor_encoder`` / ``floor_decoder``: lowest visible window position up to and after the cut.
    ``keep_blocks_below``: rows before this position leave block KV alone (PAD). ``tail``: rows that continue past the
    cut (None = all). ``logits``: which rows' logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    count: int
    slot: int
    block_ids: Sequence[int]
    floor_encoder: int = 0
    floor_decoder: int = 0
    keep_blocks_below: int = 0
    tail: int | None = None
    logits: Literal["last", "all", "none"] = "last"


@dataclass(frozen=True)
class RowSpan:
    """Host view of a row: first token index in the step, count, start position, rows past the cut, window floors."""

    first: int
    count: int
    start: int
    tail: int
    floor_encoder: int
    floor_decoder: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Batch:
    """Tensors of one step (int64 unless said). T tokens, B rows, P blocks of the longest table.

    ``lag_ids_TN``: token at lag 0..nmax−1, −1 before the start. ``ring_slot_T`` / ``pair_slot_T``: PAD for rows that a
    later row of the same chunk overwrites. ``block_slot_T``: ratio-1 entry slot or PAD. ``tail_T``: tokens that
    continue past the cut, None = all. ``logits_T``: indices into those tokens.
    """

    rows: tuple[RowSpan, ...]
    ids_T: Tensor
    pos_T: Tensor
    row_T: Tensor
    lag_ids_TN: Tensor
    ring_slot_T: Tensor
    pair_slot_T: Tensor
    ring_slot_B: Tensor
    block_slot_T: Tensor
    block_table_BP: Tensor
    tail_T: Tensor | None
    logits_T: Tensor


def build_batch(rows: Sequence[RowInput], layout: KVLayout, *, ngram: int, device: str = "cpu") -> Batch:
    """Concatenate rows into a ``Batch``. ``ngram``: the largest n-gram order of the hash memory (history per token)."""
    spans: list[RowSpan] = []
    ids, pos, row_of, lags, ring, pair, block, tails, wanted = ([] for _ in range(9))
    first = kept = 0
    width = max(len(r.block_ids) for r in rows)
    table = np.zeros((len(rows), width), dtype=np.int64)
    for b, r in enumerate(rows):
        end = r.start + r.count
        tail = r.count if r.tail is None else min(r.tail, r.count)
        assert tail == r.count or r.floor_decoder >= end - tail, "trimmed rows must lie below the decoder's floor"
        positions = np.arange(r.start, end, dtype=np.int64)
        spans.append(RowSpan(first, r.count, r.start, tail, r.floor_encoder, r.floor_decoder))
        history = np.full(ngram - 1 + r.count, -1, dtype=np.int64)
        known = min(ngram - 1, r.start)
        history[ngram - 1 - known :] = r.token_ids[r.start - known : end]
        ids.append(history[ngram - 1 :])
        lags.append(np.lib.stride_tricks.sliding_window_view(history, ngram)[:, ::-1])
        pos.append(positions)
        row_of.append(np.full(r.count, b, dtype=np.int64))
        ring.append(_ring(positions, end, r.slot, layout.ring))
        pair.append(_ring(positions, end, r.slot, layout.pair_ring))
        table[b, : len(r.block_ids)] = r.block_ids
        slots = table[b, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        block.append(np.where(positions >= r.keep_blocks_below, slots, PAD))
        tails.append(np.arange(first + r.count - tail, first + r.count, dtype=np.int64))
        if r.logits == "all":
            wanted.append(np.arange(kept, kept + tail, dtype=np.int64))
        elif r.logits == "last":
            wanted.append(np.array([kept + tail - 1], dtype=np.int64))
        first += r.count
        kept += tail

    def tensor(parts: list[np.ndarray]) -> Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(np.ascontiguousarray(joined)).to(device, non_blocking=True)

    return Batch(
        rows=tuple(spans),
        ids_T=tensor(ids),
        pos_T=tensor(pos),
        row_T=tensor(row_of),
        lag_ids_TN=tensor(lags),
        ring_slot_T=tensor(ring),
        pair_slot_T=tensor(pair),
        ring_slot_B=tensor([np.array([r.slot for r in rows], dtype=np.int64)]),
        block_slot_T=tensor(block),
        block_table_BP=torch.from_numpy(table).to(device, non_blocking=True),
        tail_T=None if kept == first else tensor(tails),
        logits_T=tensor(wanted),
    )


def _ring(positions: np.ndarray, end: int, slot: int, size: int) -> np.ndarray:
    """Ring slots of the last ``size`` positions; earlier ones would be overwritten within the chunk, so PAD."""
    return np.where(positions >= end - size, slot * size + positions % size, PAD)
