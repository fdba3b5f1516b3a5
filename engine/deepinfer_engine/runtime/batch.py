"""``Batch``: one step's rows as tensors. The only place where plans become tensors.

Rows are ragged and concatenated; a row is ``count`` tokens of one sequence from position ``start``. What Python needs
to know about shapes is kept as integers (``rows``), so that building and running a step never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.cache.layout import PAD, KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_kernels.reference.speculate import StepRows


class RowInput(NamedTuple):
    """One row to run.

    ``token_ids``: all known tokens of the sequence up to start + count; with ``newest_unknown`` the last one is still
    being drawn and comes later (a placeholder stands for it). ``slot`` / ``block_ids``: where its KV lives.
    ``floor_encoder`` / ``floor_decoder``: lowest visible window position up to and after the cut.
    ``keep_blocks_below``: rows before this position leave block KV alone (PAD). ``tail``: rows that continue past the
    cut (None = all). ``logits``: which rows' logits are wanted.

    ``floating``: a verify row whose start only the device knows. ``start`` is then the highest it can be, ``limit`` the
    position from which on nothing is kept, ``order`` its place when drafts are shared out; it has no tokens of its own.
    Floating rows come first.
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
    newest_unknown: bool = False
    floating: bool = False
    limit: int = 0
    order: int = 0


class RowSpan(NamedTuple):
    """Host view of a row: first token index in the step, count, start position, rows past the cut, window floors.

    Of a floating row ``start`` is an upper bound, and with a budget so is ``count`` (then ``first`` means nothing).
    """

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
class Floating:
    """The first F rows of a step: verify rows of ``tokens`` tokens altogether. int64 [F], filled by ``settle``.

    ``slot_F``: ring slot; ``limit_F``: positions from it on are not kept. ``cap_F``: most drafts of a row, ``order_F``
    breaks ties when ``budget`` of them are shared out (None: every row has all of its). ``start_F``, ``first_F``,
    ``count_F``: where each row starts, its first token in the step, how many it has.
    """

    rows: int
    tokens: int
    slot_F: Tensor
    limit_F: Tensor
    start_F: Tensor
    first_F: Tensor
    count_F: Tensor
    cap_F: Tensor
    order_F: Tensor
    budget: int | None


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
    floating: Floating | None = None


def build_batch(
    rows: Sequence[RowInput], layout: KVLayout, *, ngram: int, device: str = "cpu", budget: int | None = None
) -> Batch:
    """Concatenate rows into a ``Batch``. ``ngram``: the largest n-gram order of the hash memory (history per token).

    ``budget``: drafts that the floating rows verify altogether, shared out on the device; None: every row all of its.
    """
    floating = [r for r in rows if r.floating]
    assert all(r.floating for r in rows[: len(floating)]), "floating rows come first"
    if budget is not None and floating:
        rows = _shared_out(rows, len(floating), budget)
    spans, history, origin, tails, wanted = _spans(rows, ngram)
    if budget is not None:
        spans = tuple(s._replace(count=r.count) for s, r in zip(spans, floating, strict=False)) + spans[len(floating) :]
    B = len(rows)
    start_B, count_B, slot_B, keep_B = np.array(
        [(r.start, r.count, r.slot, r.keep_blocks_below) for r in rows], dtype=np.int64
    ).T
    first_B = np.cumsum(count_B) - count_B
    row = np.repeat(np.arange(B), count_B)
    pos = np.arange(len(row)) - (first_B - start_B)[row]
    end, slot = (start_B + count_B)[row], slot_B[row]
    # history holds each row's tokens from up to ngram - 1 before its start; origin is where position 0 would be
    known = np.array(history, dtype=np.int64)
    at = np.array(origin, dtype=np.int64)[row] + pos
    lag = np.arange(ngram)
    lags = np.where(pos[:, None] >= lag, known[np.maximum(at[:, None] - lag, 0)], -1)
    table = np.zeros((B, max(len(r.block_ids) for r in rows)), dtype=np.int64)
    for b, r in enumerate(rows):
        table[b, : len(r.block_ids)] = r.block_ids
    last = table.shape[1] - 1
    slots = table[row, np.minimum(pos // BLOCK_TOKENS, last)] * BLOCK_TOKENS + pos % BLOCK_TOKENS

    moved = _Moved(device)
    parts = {
        "ids_T": moved.add(known[at]),
        "pos_T": moved.add(pos),
        "row_T": moved.add(row),
        "lag_ids_TN": moved.add(lags),
        "ring_slot_T": moved.add(_ring(pos, end, slot, layout.ring)),
        "pair_slot_T": moved.add(_ring(pos, end, slot, layout.pair_ring)),
        "ring_slot_B": moved.add(slot_B),
        "block_slot_T": moved.add(np.where(pos >= keep_B[row], slots, PAD)),
        "block_table_BP": moved.add(table),
        "logits_T": moved.add(np.array(wanted, dtype=np.int64)),
    }
    if tails is not None:
        parts["tail_T"] = moved.add(tails)
    verify = _floating(rows, floating)
    places = {name: moved.add(values) for name, values in verify.items()}
    there = moved.all()
    return Batch(
        rows=spans,
        **({"tail_T": None} | {name: there[i] for name, i in parts.items()}),  # pyright: ignore[reportArgumentType]
        floating=None
        if not floating
        else Floating(
            rows=len(floating),
            tokens=int(verify["count_F"].sum()),
            budget=budget,
            **{name: there[i] for name, i in places.items()},
        ),
    )


class _Moved:
    """Arrays of one step that reach the device in one copy: a copy of its own for each would cost a launch."""

    def __init__(self, device: str):
        self.device = device
        self.arrays: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> int:
        """Take an int64 array; its number in ``all``."""
        self.arrays.append(values)
        return len(self.arrays) - 1

    def all(self) -> list[Tensor]:
        """The arrays as tensors on the device, without waiting; there they share one storage and no element."""
        if self.device == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in self.arrays]
        # each begins on 16 bytes: for other addresses Triton compiles another kernel, at the first step that has them
        starts = np.cumsum([0, *(a.size + a.size % 2 for a in self.arrays)])
        flat = np.zeros(starts[-1], dtype=np.int64)
        for a, at in zip(self.arrays, starts[:-1], strict=True):
            flat[at : at + a.size] = a.reshape(-1)
        there = torch.from_numpy(flat).to(self.device, non_blocking=True)
        return [there[at : at + a.size].view(a.shape) for a, at in zip(self.arrays, starts[:-1], strict=True)]


def _shared_out(rows: Sequence[RowInput], floating: int, budget: int) -> list[RowInput]:
    """Rows with ``budget`` drafts given to the first floating rows: only their number matters before ``settle``."""
    out = list(rows)
    for b in range(floating):
        drafts = min(budget, rows[b].count - 1)
        out[b] = rows[b]._replace(count=1 + drafts)
        budget -= drafts
    assert budget == 0, "a budget above what the rows can take"
    return out


def _floating(rows: Sequence[RowInput], floating: Sequence[RowInput]) -> dict[str, np.ndarray]:
    """The arrays of ``Floating``; none without floating rows."""
    if not floating:
        return {}
    count = np.array([r.count for r in rows[: len(floating)]], dtype=np.int64)
    start, slot, limit, cap, order = np.array(
        [(r.start, r.slot, r.limit, r.count - 1, r.order) for r in floating], dtype=np.int64
    ).T
    return {
        "slot_F": slot,
        "limit_F": limit,
        "start_F": start,
        "first_F": np.cumsum(count) - count,
        "count_F": count,
        "cap_F": cap,
        "order_F": order,
    }


def settle(
    batch: Batch, layout: KVLayout, recent: Tensor, drafts: Tensor, length: Tensor, shares: Tensor | None, ops: Any
) -> None:
    """Put the device's truth into the floating rows of a batch, in place and without waiting.

    By ring slot S: recent [S, nmax]: newest token (the anchor) and those before it, −1 before the start; drafts [S, J];
    length [S] tokens committed, the anchor included. shares [F]: drafts of each row, whose sum is the budget (None: as
    built).
    """
    f = batch.floating
    assert f is not None
    rows = StepRows(
        f.slot_F,
        f.limit_F,
        f.start_F,
        f.first_F,
        f.count_F,
        batch.block_table_BP,
        batch.ids_T,
        batch.pos_T,
        batch.row_T,
        batch.lag_ids_TN,
        batch.ring_slot_T,
        batch.pair_slot_T,
        batch.block_slot_T,
    )
    sizes = {"tokens": f.tokens, "ring": layout.ring, "pair_ring": layout.pair_ring, "block_tokens": BLOCK_TOKENS}
    ops.settle_rows(rows, recent, drafts, length, shares, **sizes)


def _spans(
    rows: Sequence[RowInput], ngram: int
) -> tuple[tuple[RowSpan, ...], list[int], list[int], np.ndarray | None, list[int]]:
    """(spans, tokens of all rows with their history, per row the index of position 0 in them, tail, wanted logits)."""
    spans: list[RowSpan] = []
    history: list[int] = []
    origin: list[int] = []
    tails: list[np.ndarray] = []
    wanted: list[int] = []
    first = kept = 0
    for r in rows:
        end = r.start + r.count
        tail = r.count if r.tail is None else min(r.tail, r.count)
        assert tail == r.count or r.floor_decoder >= end - tail, "trimmed rows must lie below the decoder's floor"
        spans.append(RowSpan(first, r.count, r.start, tail, r.floor_encoder, r.floor_decoder))
        before = max(0, r.start - ngram + 1)
        origin.append(len(history) - before)
        if r.floating:
            history += [0] * (end - before)
        else:
            history += r.token_ids[before : end - r.newest_unknown]
        if r.newest_unknown:
            history.append(0)
        assert len(history) == origin[-1] + end, "a row needs all its tokens"
        tails.append(np.arange(first + r.count - tail, first + r.count))
        if r.logits == "all":
            wanted += range(kept, kept + tail)
        elif r.logits == "last":
            wanted.append(kept + tail - 1)
        first += r.count
        kept += tail
    return tuple(spans), history, origin, None if kept == first else np.concatenate(tails), wanted


def _ring(positions: np.ndarray, end: np.ndarray, slot: np.ndarray, size: int) -> np.ndarray:
    """Ring slots of the last ``size`` positions; earlier ones would be overwritten within the chunk, so PAD."""
    return np.where(positions >= end - size, slot * size + positions % size, PAD)
