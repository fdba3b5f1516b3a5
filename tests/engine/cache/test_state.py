"""Paged KV: sizes, PAD, export and import."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_engine.cache.layout import PAD, KVLayout
from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.types import Arrival
from deepinfer_kernels.registry import resolve

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
TINY = load_model_config(VECTORS / "v41-tiny-a" / "checkpoint")


def state(mode: str = "reference") -> KVState:
    ops = resolve(mode, "cpu")
    return KVState(KVLayout.of(TINY, records=ops.numerics.records), ops, slots=2, blocks=3)


def test_the_release_has_its_published_sizes():
    layout = KVLayout.of(load_model_config(VECTORS / "v41-flash-config.json"), records=True)
    assert (layout.window_row_bytes, layout.global_row_bytes, layout.index_row_bytes) == (528, 288, 68)
    assert layout.block_bytes == 113_920  # 111.25 KiB per 128 tokens, 890 bytes per token
    assert layout.ring == 134 and layout.pair_ring == 7


def test_padded_rows_are_not_written():
    kv = state()
    rows, keys = torch.full((2, TINY.head_dim), 6.0), torch.full((2, TINY.index_head_dim), 6.0)
    slots = torch.tensor([130, 131])
    kv.write_entries(5, slots, rows, keys)
    kv.write_entries(5, torch.tensor([PAD, 131]), 3 * rows, 3 * keys)
    assert kv.entries(5, slots)[:, 0].tolist() == [6.0, 18.0]


def test_blocks_and_windows_move_between_states_byte_for_byte():
    torch.manual_seed(0)
    a, b = state(), state()
    for s in a.layout.sources:
        slots = torch.arange(s.entries_per_block, 4 * s.entries_per_block)
        a.write_entries(s.layer, slots, torch.randn(len(slots), 64), torch.randn(len(slots), 32))
    blocks = torch.tensor([2, 1])
    payload = a.export_blocks(blocks)
    assert payload.shape == (2, a.layout.block_bytes) and payload.dtype == torch.uint8
    b.import_blocks(torch.tensor([3, 2]), payload)
    assert torch.equal(b.export_blocks(torch.tensor([3, 2])), payload)
    for s in a.layout.sources:
        mine = torch.arange(2 * s.entries_per_block, 3 * s.entries_per_block)
        assert torch.equal(a.entries(s.layer, mine), b.entries(s.layer, mine + s.entries_per_block))

    end = 30
    for layer in range(a.layout.window_layers):
        positions = torch.arange(end)
        kept = positions >= end - a.layout.ring
        slots = torch.where(kept, 1 * a.layout.ring + positions % a.layout.ring, PAD)
        a.write_window(layer, slots, a.ops.pack_rows(torch.randn(end, 64), "window"))
    layers = range(0, TINY.cut)
    rows = a.export_window(1, end, layers)
    assert rows.shape == (TINY.cut, TINY.sliding_window, a.layout.window_row_bytes)
    b.import_window(2, end, layers, rows)
    assert torch.equal(b.export_window(2, end, layers), rows)


def test_sections_that_arrive_by_layer_are_the_bytes_of_whole_blocks():
    torch.manual_seed(1)
    a, b = state(), state()
    payload = torch.randint(0, 256, (3, a.layout.block_bytes), dtype=torch.uint8)
    a.import_blocks(torch.tensor([3, 1]), payload[:2])
    sizes = [s.entries_per_block * (b.layout.global_row_bytes + b.layout.index_row_bytes) for s in b.layout.sources]
    sections, taken = payload.split(sizes, 1), []

    def take(index: int) -> list[bytes | None]:
        taken.append(index)
        parts = [row.numpy().tobytes() for row in sections[index]]
        return [parts[0], parts[1], None if index else parts[2]]

    layers = tuple(s.layer for s in b.layout.sources)
    b.expect(Arrival((3, 1, 2), layers, take))
    assert taken == [] and b.take_lost() == frozenset()
    for layer in range(TINY.num_hidden_layers):
        b.arrive(layer)
        assert taken == [i for i, source in enumerate(layers) if source <= layer]
    assert b.take_lost() == {2} and b.take_lost() == frozenset(), "of block 2 only the first section came"
    assert torch.equal(b.export_blocks(torch.tensor([3, 1])), a.export_blocks(torch.tensor([3, 1])))


def test_wrong_payloads_and_f32_rows_are_refused():
    kv = state()
    with pytest.raises(UsageError, match="block payload"):
        kv.import_blocks(torch.tensor([1]), torch.zeros(1, 5, dtype=torch.uint8))
    with pytest.raises(UsageError, match="window payload"):
        kv.import_window(1, 20, range(2), torch.zeros(2, 16, 5, dtype=torch.uint8))
    with pytest.raises(UsageError, match="never stored"):
        state("float").export_blocks(torch.tensor([1]))


def test_a_pool_never_hands_out_zero_and_never_more_than_it_has():
    pool = IdPool(3, "blocks")
    assert pool.take(2) == [1, 2]
    with pytest.raises(CapacityError, match="2 blocks needed, 1 of 3 free"):
        pool.take(2)
    assert pool.free == 1
    pool.give([1])
    pool.check()
    assert pool.take(2) == [1, 3]
    with pytest.raises(KeyError):
        pool.give([9])
