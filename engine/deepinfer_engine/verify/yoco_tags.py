"""The engine's step metadata run on tags instead of tensors: every row, entry and pair is the name of its token.

``build_batch`` and ``Step`` are the production ones; only the layers are missing. What a query would read is then a
list of names, and one wrong slot, floor, mask or write order shows as a wrong name. A rejected draft gets a new
version, so that a stale row has a wrong name too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.model.step import Phase, Step
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_kernels.registry import resolve

Ints = NDArray[np.int64]
#: layer classes: below the cut, the cut layer, above it
CLASSES = ("encoder", "cut", "decoder")
_VERSION, _SEQUENCE = 1 << 32, 1 << 48
#: what nobody wrote; −1 is what a mask hides
_UNSET = -2


@dataclass
class Tagged:
    """Names of one sequence: its number, slot, blocks and the version of every position."""

    number: int
    slot: int
    blocks: list[int]
    versions: Ints

    def names(self, positions: Ints) -> Ints:
        """Current names of positions; negative positions get −1."""
        at = np.maximum(positions, 0)
        return np.where(positions < 0, -1, self.number * _SEQUENCE + self.versions[at] * _VERSION + at)


@dataclass
class Seen:
    """What one row of a step read and wrote, by layer class or ratio.

    ``queries``: positions that query. ``windows``: per query, names of visible window rows (−1: masked), oldest first.
    ``entries``: names of all entries the longest query may score. ``visible``: entries visible to each query.
    ``partners``: names of the even halves of the pairs pooled.
    ``block_slots``: ratio-1 entry slot of each position, −1 for PAD.
    """

    queries: dict[str, Ints] = field(default_factory=dict)
    windows: dict[str, Ints] = field(default_factory=dict)
    entries: dict[int, Ints] = field(default_factory=dict)
    visible: dict[int, Ints] = field(default_factory=dict)
    partners: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    block_slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


class TagMachine:
    """Caches of names. ``ratios`` are those of the model's kv sources."""

    def __init__(self, layout: KVLayout, *, slots: int, blocks: int):
        self.layout = layout
        self.ops = resolve("float", "cpu")
        self.ratios = sorted({s.ratio for s in layout.sources})
        self.rings = {name: np.full((slots + 1) * layout.ring, _UNSET, np.int64) for name in CLASSES}
        self.pairs = np.full((slots + 1) * layout.pair_ring, _UNSET, np.int64)
        self.entries = {r: np.full((blocks + 1) * BLOCK_TOKENS // r, _UNSET, np.int64) for r in self.ratios}

    def load_blocks(self, seq: Tagged, end: int) -> None:
        """Cached block KV of positions below ``end``."""
        for ratio, store in self.entries.items():
            entry = np.arange(end // ratio)
            store[self._entry_slots(seq, entry, ratio)] = seq.names(entry * ratio + ratio - 1)

    def load_windows(self, seq: Tagged, end: int, classes: Sequence[str]) -> None:
        """Window KV of the W positions before ``end``."""
        positions = np.arange(max(0, end - self.layout.window), end)
        for name in classes:
            self.rings[name][seq.slot * self.layout.ring + positions % self.layout.ring] = seq.names(positions)

    def window_names(self, name: str, seq: Tagged, end: int) -> Ints:
        """What a copy of the W positions before ``end`` would hold."""
        positions = np.arange(max(0, end - self.layout.window), end)
        return self.rings[name][seq.slot * self.layout.ring + positions % self.layout.ring]

    def _entry_slots(self, seq: Tagged, entry: Ints, ratio: int) -> Ints:
        per_block = BLOCK_TOKENS // ratio
        return np.array(seq.blocks)[entry // per_block] * per_block + entry % per_block

    def run(self, rows: Sequence[tuple[Tagged, RowInput]]) -> list[Seen]:
        """Execute one step; what each row read and wrote, in order."""
        batch = build_batch([row for _, row in rows], self.layout, ngram=2)
        step = Step({}, batch, SimpleNamespace(layout=self.layout), self.ops, None)
        spans = batch.rows
        names = np.concatenate([seq.names(np.arange(s.start, s.end)) for (seq, _), s in zip(rows, spans, strict=True)])
        seen = [Seen() for _ in rows]
        slots = batch.block_slot_T.numpy()
        for one, s in zip(seen, spans, strict=True):
            one.block_slots = slots[s.first : s.first + s.count]
        self._write_pairs(step, names, seen)
        for ratio, store in self.entries.items():
            self._write_entries(step, names, ratio, store)
        kept = np.arange(len(names)) if batch.tail_T is None else batch.tail_T.numpy()
        for name, phase, local in (
            ("encoder", step.before, names),
            ("cut", step.at_cut, names),
            ("decoder", step.after, names[kept]),
        ):
            if len(phase.pos):
                self._read(name, phase, local, seen)
            written = batch.ring_slot_T.numpy()
            if name == "decoder":
                written = written[kept]
            keep = written >= 0
            self.rings[name][written[keep]] = local[keep]
        return seen

    def _write_pairs(self, step: Step, names: Ints, seen: list[Seen]) -> None:
        plan = step.pairs
        odd = plan.odd.numpy()
        partner = np.where(plan.from_ring.numpy(), self.pairs[plan.ring_slot.numpy()], names[plan.partner.numpy()])
        row_of = step.batch.row_T.numpy()[odd]
        for b, one in enumerate(seen):
            one.partners = partner[row_of == b]
        slots = step.batch.pair_slot_T.numpy()
        self.pairs[slots[slots >= 0]] = names[slots >= 0]

    def _write_entries(self, step: Step, names: Ints, ratio: int, store: Ints) -> None:
        slots = step.batch.block_slot_T.numpy()
        if ratio == 2:
            odd = step.pairs.odd.numpy()
            slots, names = slots[odd] // 2, np.where(slots[odd] < 0, -1, names[odd])
        keep = (slots >= 0) & (names >= 0)
        store[slots[keep]] = names[keep]

    def _read(self, name: str, phase: Phase, local: Ints, seen: list[Seen]) -> None:
        rows = phase.window.rows.numpy()
        keys = np.where(rows < -1, self.rings[name][np.maximum(-2 - rows, 0)], local[np.maximum(rows, 0)])
        keys = np.where(rows == -1, -1, keys)
        row_of, pos = phase.row.numpy(), phase.pos.numpy()
        for b, one in enumerate(seen):
            one.queries[name] = pos[row_of == b]
            one.windows[name] = keys[row_of == b]
        for group in phase.groups:
            for ratio in self.ratios:
                slots = phase.entry_slots((group.last_position + 1) // ratio, group.rows, ratio).numpy()
                for i, b in enumerate(group.rows.tolist()):
                    last = int(seen[b].queries[name].max()) + 1
                    # a shorter row of the group is masked beyond its own entries
                    seen[b].entries[ratio] = self.entries[ratio][slots[i]][: last // ratio]
                    seen[b].visible[ratio] = (seen[b].queries[name] + 1) // ratio
