"""Per-step geometry shared by all layers: which keys each query sees, and how queries are grouped for scoring.

Three phases run on a batch: up to the cut, the cut layer, after the cut. They differ in which tokens query (all, or
the tail that continues past the cut), which tokens write window rows, and the window floor. Without trimming and with
equal floors the three are one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.dist.replica import route_key
from deepinfer_engine.runtime.batch import Batch, RowSpan
from deepinfer_kernels.reference.norm import rope_frequencies


@dataclass(frozen=True)
class Rope:
    """cos and sin [T, Dr/2] of one table at the tokens' positions."""

    cos: Tensor
    sin: Tensor

    def take(self, index: Tensor | None) -> Rope:
        return self if index is None else Rope(self.cos[index], self.sin[index])


@dataclass(frozen=True)
class WindowPlan:
    """Where the window rows of each query are, as ``attend_cached`` reads them.

    ``rows`` [T, Wₑ] int64 with Wₑ ≤ W (no wider than the longest history): r ≥ 0 row r of this step, −1 hidden,
    r ≤ −2 ring slot −2 − r. ``any_ring`` is known on the host.
    """

    rows: Tensor
    any_ring: bool


@dataclass(frozen=True)
class QueryGroup:
    """Rows scored together: token indices [B, C] (padding repeats the last), batch rows [B].

    ``whole``: its tokens are all queries of the phase, in their order.
    """

    tokens: Tensor
    rows: Tensor
    last_position: int
    whole: bool

    def of(self, values: Tensor) -> Tensor:
        """What belongs to its tokens [B, C, ...] of values [T, ...]."""
        return values.unflatten(0, self.tokens.shape) if self.whole else values[self.tokens]


class Phase:
    """Queries of one phase: positions, rotary tables, window plan, scoring groups."""

    def __init__(
        self,
        batch: Batch,
        layout: KVLayout,
        ropes: dict[bool, Rope],
        ops: Any,
        *,
        query: Tensor | None,
        query_spans: tuple[RowSpan, ...],
        local_spans: tuple[RowSpan, ...],
        after_cut: bool,
    ):
        self.batch = batch
        self.layout = layout
        self.ops = ops
        self.query = query
        self.spans = query_spans
        self.local_spans = local_spans
        self.after_cut = after_cut
        self.pos = batch.pos_T if query is None else batch.pos_T[query]
        self.row = batch.row_T if query is None else batch.row_T[query]
        self.rope = {yarn: r.take(query) for yarn, r in ropes.items()}
        self._visible: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def key(self) -> Tensor:
        """What chooses among replicas of an expert, int64 per query."""
        ids = self.batch.ids_T if self.query is None else self.batch.ids_T[self.query]
        return route_key(self.pos, ids)

    @cached_property
    def window(self) -> WindowPlan:
        device = self.pos.device
        width = min(self.layout.window, max(s.end for s in self.spans))
        floors = [s.floor_decoder if self.after_cut else s.floor_encoder for s in self.spans]
        per_row = torch.tensor(
            [[max(0, floor), s.start, s.first] for floor, s in zip(floors, self.local_spans, strict=True)],
            dtype=torch.int64,
        ).to(device, non_blocking=True)
        if (f := self.batch.floating) is not None:
            per_row[: f.rows, 1] = f.start_F
            per_row[: f.rows, 2] = f.first_F
        any_ring = any(s.start > max(0, f) for s, f in zip(self.local_spans, floors, strict=True))
        rings = self.batch.ring_slot_B if any_ring else None
        rows = self.ops.window_places(self.pos, self.row, per_row, rings, width=width, ring=self.layout.ring)
        return WindowPlan(rows, any_ring)

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        """Short rows (decode, verify) padded together, every long row by itself."""
        short = [b for b, s in enumerate(self.spans) if 0 < s.count <= self.layout.pair_ring]
        groups = [[b] for b, s in enumerate(self.spans) if s.count > self.layout.pair_ring]
        if short:
            groups.append(short)
        return tuple(self._group(g) for g in groups)

    def _group(self, rows: list[int]) -> QueryGroup:
        spans = [self.spans[b] for b in rows]
        device = self.pos.device
        which, first, count = (
            torch.tensor(column).to(device, non_blocking=True)
            for column in (rows, [s.first for s in spans], [s.count for s in spans])
        )
        # floating rows are short and come first, in a group as in the step
        if (f := self.batch.floating) is not None and rows[0] == 0 and len(rows) >= f.rows:
            first[: f.rows], count[: f.rows] = f.first_F, f.count_F
        along = torch.arange(max(s.count for s in spans), device=device)
        last = (count - 1).unsqueeze(1)
        tokens = first.unsqueeze(1) + torch.minimum(along, last)
        budgeted = f is not None and f.budget is not None  # only the device knows how many tokens a row has
        even = len({s.count for s in spans}) == 1 and rows == list(range(len(self.spans)))
        return QueryGroup(tokens, which, max(s.end for s in spans) - 1, whole=even and not budgeted)

    def entry_slots(self, entries: Tensor | int, rows: Tensor, ratio: int) -> Tensor:
        """Flat entry slots of entries [n, K] (−1 stays −1; a number: as many from 0 on) of batch rows [n].

        A floating row's last position is an upper bound, which may lie beyond the blocks it was given.
        """
        given, count = (None, entries) if isinstance(entries, int) else (entries, entries.shape[1])
        table = self.batch.block_table_BP
        return self.ops.entry_slots(given, rows, table, per_block=BLOCK_TOKENS // ratio, count=count)

    def visible(self, group: QueryGroup, ratio: int) -> Tensor:
        """How many entries each query of a group may see, int64 [B, C]."""
        key = (id(group), ratio)
        if key not in self._visible:
            self._visible[key] = (group.of(self.pos) + 1) // ratio
        return self._visible[key]


@dataclass(frozen=True)
class PairPlan:
    """``odd``: step indices of odd positions [n]; ``partner``: step index of the previous token (itself when that is
    in the ring); ``ring_slot``: pair slot of the previous position; ``from_ring`` [n] bool. ``position`` and
    ``entry_slot``: of the pair, that is its first position and its global entry (PAD: not kept).

    Every token of a floating row is among ``odd``: only the device knows which are, and even ones store nothing."""

    odd: Tensor
    partner: Tensor
    ring_slot: Tensor
    from_ring: Tensor
    any_ring: bool
    position: Tensor
    entry_slot: Tensor


class Step:
    """One forward pass: its batch, its phases, and what index sources have published so far.

    ``selected`` [T, K]: entries each query of the current phase attends to (−1 padded, ascending). ``candidates``:
    per group, the published blocks [B, C, blocks], or None where the filter cannot bite.
    """

    def __init__(self, frequencies: dict[bool, Tensor], batch: Batch, kv: Any, ops: Any, mesh: Any, probe: Any = None):
        self.batch = batch
        self.frequencies = frequencies
        self.probing = probe is not None
        self.probe = probe if probe is not None else _ignore
        self.image: Tensor | None = None
        self.engram_ids: dict[int, Tensor] = {}
        self.taps: list[Tensor] = []
        self._chosen: list[Tensor] = []
        self._slots: tuple[Tensor, int, Tensor] | None = None
        self.kv = kv
        self.ops = ops
        self.mesh = mesh
        self.layout: KVLayout = kv.layout
        self.selected: Tensor | None = None
        self.candidates: list[Tensor | None] = []
        ropes = {yarn: Rope(*ops.rope_angles(batch.pos_T, f)) for yarn, f in frequencies.items()}
        self.rope = ropes
        trimmed = batch.tail_T is not None
        floors = any(s.floor_encoder != s.floor_decoder for s in batch.rows)
        tail_spans = _tail_spans(batch) if trimmed else batch.rows

        def phase(query: Tensor | None, spans: tuple[RowSpan, ...], local: tuple[RowSpan, ...], after: bool) -> Phase:
            return Phase(
                batch, self.layout, ropes, ops, query=query, query_spans=spans, local_spans=local, after_cut=after
            )

        self.before = phase(None, batch.rows, batch.rows, False)
        self.at_cut = phase(batch.tail_T, tail_spans, batch.rows, False) if trimmed else self.before
        self.after = phase(batch.tail_T, tail_spans, tail_spans, True) if trimmed or floors else self.before

    @property
    def ends_at_cut(self) -> bool:
        """Whether no token of the step goes past the cut."""
        return not any(s.tail for s in self.batch.rows)

    def count_experts(self, experts: Tensor) -> None:
        """Take one layer's chosen logical experts [T, K] for ``load``."""
        self._chosen.append(experts)

    def load(self, total: int) -> Tensor:
        """Tokens per logical expert int64 [layers so far, total]."""
        # layers with the same number of tokens are counted together: one launch instead of some for each
        runs = [list(run) for _, run in groupby(self._chosen, key=lambda experts: experts.shape)]
        counts = [self.ops.count_choices(torch.stack(run), total) for run in runs]
        return counts[0] if len(counts) == 1 else torch.cat(counts)

    def selected_slots(self, phase: Phase, ratio: int) -> Tensor:
        """Entry slots [T, K] of what is selected; the layers that share a selection find them once."""
        assert self.selected is not None
        if self._slots is None or self._slots[0] is not self.selected or self._slots[1] != ratio:
            self._slots = (self.selected, ratio, phase.entry_slots(self.selected, phase.row, ratio))
        return self._slots[2]

    @cached_property
    def pair_rope(self) -> Rope:
        """Angles of the pairs' first positions, in the table of compressed layers."""
        return Rope(*self.ops.rope_angles(self.pairs.position, self.frequencies[True]))

    @cached_property
    def pairs(self) -> PairPlan:
        """Odd-position tokens of the step and where their even partners are."""
        floating = self.batch.floating
        skip = 0 if floating is None else floating.rows
        odd = list(range(0 if floating is None else floating.tokens))
        from_ring = [False] * len(odd)
        for s in self.batch.rows[skip:]:
            start = s.start + (s.start + 1) % 2  # first odd position of the row
            for_row = range(start, s.end, 2)
            odd.extend(s.first + p - s.start for p in for_row)
            from_ring.extend(p == s.start for p in for_row)
        device = self.batch.pos_T.device
        index = torch.tensor(odd, dtype=torch.int64).to(device, non_blocking=True)
        ring = torch.tensor(from_ring, dtype=torch.bool).to(device, non_blocking=True)
        if floating is not None:
            ring.index_fill_(0, floating.first_F, True)
        b, any_ring = self.batch, floating is not None or any(from_ring)
        partner, slot, position, entry = self.ops.pair_places(
            index, ring, b.pos_T, b.row_T, b.ring_slot_B, b.block_slot_T, ring=self.layout.pair_ring
        )
        return PairPlan(index, partner, slot, ring, any_ring, position, entry)


def _ignore(name: str, layer: int, value: Tensor) -> None:
    """The probe of a run nobody watches."""


def _tail_spans(batch: Batch) -> tuple[RowSpan, ...]:
    spans = []
    first = 0
    floating = 0 if batch.floating is None else batch.floating.rows
    for b, s in enumerate(batch.rows):
        if b < floating:  # whole, whatever the device makes of its start and count
            spans.append(s._replace(first=first))
        else:
            spans.append(RowSpan(first, s.tail, s.end - s.tail, s.tail, s.floor_encoder, s.floor_decoder))
        first += s.tail
    return tuple(spans)


def frequency_tables(config: ModelConfig, device: str) -> dict[bool, Tensor]:
    """Inverse frequencies of the two rotary tables: False = plain (ratio 0), True = compressed layers with YaRN."""
    scaling = config.rope_scaling
    yarn = None
    if scaling is not None:
        yarn = (scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings)
    return {
        False: rope_frequencies(config.qk_rope_head_dim, config.rope_theta).to(device),
        True: rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, yarn).to(device),
    }
