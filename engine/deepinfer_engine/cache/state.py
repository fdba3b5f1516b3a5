"""``KVState``: the paged rows themselves. Policy-free: it writes and reads where it is told.

All slots are flat row numbers (see ``cache.layout``); −1 is PAD. Reads return values in the activation dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.cache.layout import KVLayout, SourceLayout
from deepinfer_engine.errors import UsageError
from deepinfer_engine.types import Arrival


class KVState:
    """Storage for ``slots`` sequences and ``blocks`` blocks (one more of each is allocated for PAD)."""

    def __init__(self, layout: KVLayout, ops: Any, *, slots: int, blocks: int, device: str = "cpu"):
        self.layout = layout
        self.ops = ops
        self.slots = slots
        self.blocks = blocks
        rows = (slots + 1) * layout.ring
        self._window = self._rows((layout.window_layers, rows), layout.window_row_bytes, device)
        self._global: dict[int, Tensor] = {}
        self._index: dict[int, Tensor] = {}
        self._pairs: dict[int, Tensor] = {}
        self._source = {s.layer: s for s in layout.sources}
        self._coming: dict[int, list[tuple[int, Arrival]]] = {}
        self._lost: set[int] = set()
        for s in layout.sources:
            entries = (blocks + 1) * s.entries_per_block
            self._global[s.layer] = self._rows((entries,), layout.global_row_bytes, device)
            self._index[s.layer] = self._rows((entries,), layout.index_row_bytes, device)
            if s.ratio == 2:
                shape = ((slots + 1) * layout.pair_ring, 2, layout.head_dim)
                self._pairs[s.layer] = _zeros(shape, torch.float32, device)

    def _rows(self, shape: tuple[int, ...], row_bytes: int, device: str) -> Tensor:
        if self.layout.records:
            return _zeros((*shape, row_bytes), torch.uint8, device)
        return _zeros((*shape, row_bytes // 4), torch.float32, device)

    # ---------------------------------------------------------------- windows

    def write_window(self, layer: int, slots: Tensor, packed: Tensor) -> None:
        """Packed window rows [T, bytes] of one layer to ring slots [T]."""
        self.ops.store_rows(self._window[layer], slots, packed)

    def window_store(self, layer: int) -> Tensor:
        """All window rows of one layer as stored [R, bytes], to be read in place."""
        return self._window[layer]

    def window(self, layer: int, slots: Tensor) -> Tensor:
        """Values [..., D] of ring slots [...]; slots the caller masks may hold anything finite."""
        return self.ops.load_rows(self._window[layer], slots, "window")

    # ----------------------------------------------------------------- blocks

    def write_entries(self, source: int, slots: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Global rows [T, D] and index keys [T, Di] of one source, packed here, to entry slots [T]."""
        self.ops.store_rows(self._global[source], slots, self.ops.pack_rows(rows, "global"))
        self.ops.store_rows(self._index[source], slots, self.ops.pack_rows(keys, "index"))

    def entry_store(self, source: int) -> Tensor:
        """All global rows of one source as stored [E, bytes], read and written in place."""
        return self._global[source]

    def key_store(self, source: int) -> Tensor:
        """All index keys of one source as stored [E, bytes], to be written in place."""
        return self._index[source]

    def entries(self, source: int, slots: Tensor) -> Tensor:
        """Global rows [..., D] of entry slots [...]."""
        return self.ops.load_rows(self._global[source], slots, "global")

    def index_keys(self, source: int, slots: Tensor) -> Tensor:
        """Index keys [..., Di] of entry slots [...]."""
        return self.ops.load_rows(self._index[source], slots, "index")

    # ------------------------------------------------------------------ pairs

    def pair_store(self, source: int) -> Tensor:
        """Pending (value, gate) f32 [R, 2, D] of a ratio-2 source by pair slot, read and written in place."""
        return self._pairs[source]

    # -------------------------------------------------------- export / import

    def export_blocks(self, blocks: Tensor) -> Tensor:
        """Payload uint8 [n, block_bytes] of blocks: per source layer, all global rows then all index keys."""
        self._need_records("exporting blocks")
        parts = []
        for s in self.layout.sources:
            slots = self._block_rows(blocks, s.entries_per_block)
            for store in (self._global[s.layer], self._index[s.layer]):
                parts.append(store.index_select(0, slots.flatten()).view(len(blocks), -1))
        return torch.cat(parts, 1)

    def import_blocks(self, blocks: Tensor, payload: Tensor) -> None:
        """Write payloads made by ``export_blocks`` (same layout) into ``blocks``."""
        self._need_records("importing blocks")
        if payload.shape != (len(blocks), self.layout.block_bytes) or payload.dtype != torch.uint8:
            raise UsageError(
                f"block payload is {tuple(payload.shape)} {payload.dtype}, "
                f"expected ({len(blocks)}, {self.layout.block_bytes}) uint8"
            )
        at = 0
        for s in self.layout.sources:
            size = s.entries_per_block * (self.layout.global_row_bytes + self.layout.index_row_bytes)
            self._import_source(s, blocks, payload[:, at : at + size])
            at += size

    def _import_source(self, source: SourceLayout, blocks: Tensor, payload: Tensor) -> None:
        """Write the sections [n, bytes] of one source: all global rows of a block, then all its index keys."""
        slots, at = self._block_rows(blocks, source.entries_per_block).flatten(), 0
        for store in (self._global[source.layer], self._index[source.layer]):
            size = source.entries_per_block * store.shape[1]
            part = payload[:, at : at + size].to(store.device)
            store.index_copy_(0, slots, part.reshape(-1, store.shape[1]))
            at += size

    def expect(self, arrival: Arrival) -> None:
        """Have blocks imported source by source, each when the next step comes to its layer (``arrive``)."""
        self._need_records("importing blocks")
        for i, layer in enumerate(arrival.sources):
            self._coming.setdefault(layer, []).append((i, arrival))

    def arrive(self, source: int) -> None:
        """Wait for what is expected of one source layer and import it; blocks that did not come are lost."""
        for i, arrival in self._coming.pop(source, ()):
            parts = dict(zip(arrival.blocks, arrival.take(i), strict=True))
            self._lost.update(block for block, part in parts.items() if part is None)
            came = {block: part for block, part in parts.items() if part is not None}
            if came:
                rows = torch.frombuffer(bytearray(b"".join(came.values())), dtype=torch.uint8).view(len(came), -1)
                blocks = torch.tensor(list(came), device=self._window.device)
                self._import_source(self._source[source], blocks, rows)

    def take_lost(self) -> frozenset[int]:
        """Blocks of which a section did not come, since the last call."""
        lost, self._lost = frozenset(self._lost), set()
        return lost

    def export_window(self, slot: int, end: int, layers: range) -> Tensor:
        """Records uint8 [layers, n, row_bytes] of positions max(0, end − W) .. end − 1 of one sequence."""
        self._need_records("exporting windows")
        slots = self._window_slots(slot, max(0, end - self.layout.window), end)
        return self._window[layers.start : layers.stop].index_select(1, slots)

    def import_window(self, slot: int, end: int, layers: range, rows: Tensor) -> None:
        """Write rows made by ``export_window`` with the same ``end`` into a sequence's rings."""
        self._need_records("importing windows")
        slots = self._window_slots(slot, end - rows.shape[1], end)
        if rows.shape != (len(layers), len(slots), self.layout.window_row_bytes) or rows.dtype != torch.uint8:
            raise UsageError(
                f"window payload is {tuple(rows.shape)} {rows.dtype}, expected "
                f"({len(layers)}, {len(slots)}, {self.layout.window_row_bytes}) uint8"
            )
        self._window[layers.start : layers.stop].index_copy_(1, slots, rows.to(self._window.device))

    def copy_window(self, source: int, target: int, end: int, layers: range) -> None:
        """Copy window rows of positions max(0, end − W) .. end − 1 from one ring slot to another, in any row format.

        On the device, in stream order: the copy of a pivot is due before the next step writes.
        """
        positions = torch.arange(max(0, end - self.layout.window), end, device=self._window.device)
        first = torch.arange(layers.start, layers.stop, device=self._window.device) * self._window.shape[1]
        at = (first.unsqueeze(1) + positions % self.layout.ring).flatten()
        store, ring = self._window.flatten(0, 1), self.layout.ring
        self.ops.copy_rows(store, at + target * ring, store, at + source * ring)

    def _window_slots(self, slot: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=self._window.device)
        return slot * self.layout.ring + positions % self.layout.ring

    def _block_rows(self, blocks: Tensor, entries: int) -> Tensor:
        return blocks.unsqueeze(1) * entries + torch.arange(entries, device=blocks.device)

    def _need_records(self, what: str) -> None:
        if not self.layout.records:
            raise UsageError(f"{what} needs official records; numerics 'float' keeps f32 rows that are never stored")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeroed storage. On the host its pages are not touched before they are written: pools are sized for the worst
    case, and numpy's calloc leaves the zeroing to the kernel where torch would write every page."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=np.uint8 if dtype == torch.uint8 else np.float32))
