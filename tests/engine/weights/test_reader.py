"""Reader: a rank reads its own experts and nothing of the others', every destination is filled, and says how fast."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.errors import CheckpointError, UsageError
from deepinfer_engine.weights import read_plan as rp
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.engram_table import EngramTable
from deepinfer_engine.weights.reader import execute, measure_disk

ALL = ("backbone", "engram", "draft", "vision")


def expert_of(name: str) -> tuple[str, int] | None:
    if ".ffn.experts." not in name:
        return None
    place, rest = name.split(".ffn.experts.")
    return place, int(rest.split(".")[0])


def place(d: rp.Destination, buffer: memoryview) -> np.ndarray:
    item = d.nbytes // max(1, int(np.prod(d.shape)))
    return np.frombuffer(buffer, dtype=np.uint8).reshape(*d.shape[:-1], d.shape[-1] * item)


def raw(checkpoint: Checkpoint, name: str) -> np.ndarray:
    spec = checkpoint.plan[name]
    return np.frombuffer(checkpoint.raw(name), dtype=np.uint8).reshape(spec.shape[0], -1)


@pytest.mark.parametrize("ep", [1, 2, 3, 4, 8, 16])
def test_no_rank_reads_a_byte_of_experts_it_does_not_own(checkpoint_dir: Path, ep: int, monkeypatch):
    """Judged by the system calls themselves, for even and uneven EP sizes and for more ranks than experts."""
    checkpoint = Checkpoint.open(checkpoint_dir, groups=ALL)
    calls: list[tuple[str, int, int]] = []
    real = os.preadv

    def recorded(fd, views, offset):
        got = real(fd, views, offset)
        calls.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), offset, got))
        return got

    monkeypatch.setattr(os, "preadv", recorded)
    seen: dict[tuple[str, int], int] = {}
    for rank in range(ep):
        calls.clear()
        plan = rp.plan_read(checkpoint, ep=ep, rank=rank, groups=ALL)
        execute(checkpoint, plan)
        for name in checkpoint.plan:
            expert = expert_of(name)
            if expert is None:
                continue
            total = 4 if expert[0].startswith("mtp") else 8
            where, file = checkpoint.stored(name), checkpoint.file_of(name).name
            touched = any(f == file and o < where.end and o + n > where.begin for f, o, n in calls)
            assert touched == (expert[1] * ep // total == rank), (rank, name)
            if touched:
                seen[expert] = rank
    assert len(seen) == 6 * 8 + 2 * 4


def test_fused_destinations_hold_the_stored_bytes(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir, groups=ALL)
    plan = rp.plan_read(checkpoint, ep=4, rank=2, groups=ALL, engram="whole")
    loaded = execute(checkpoint, plan)

    def got(name: str) -> np.ndarray:
        return place(plan.destinations[name], loaded.buffers[name])

    for leaf in ("weight", "scale"):
        fused = got(f"layers.3.ffn.experts.w13.{leaf}")
        down = got(f"layers.3.ffn.experts.w2.{leaf}")
        assert fused.shape[0] == down.shape[0] == 2
        for slot, expert in enumerate((4, 5)):
            parts = [raw(checkpoint, f"layers.3.ffn.experts.{expert}.w{w}.{leaf}") for w in (1, 3)]
            assert np.array_equal(fused[slot], np.concatenate(parts))
            assert np.array_equal(down[slot], raw(checkpoint, f"layers.3.ffn.experts.{expert}.w2.{leaf}"))
        both = [raw(checkpoint, f"layers.0.attn.{m}.{leaf}") for m in ("wq_a", "wkv")]
        assert np.array_equal(got(f"layers.0.attn.wq_a_wkv.{leaf}"), np.concatenate(both))
        shared = [raw(checkpoint, f"mtp.1.ffn.shared_experts.{m}.{leaf}") for m in ("w1", "w3")]
        assert np.array_equal(got(f"mtp.1.ffn.shared_experts.w13.{leaf}"), np.concatenate(shared))
    pooled = [raw(checkpoint, f"layers.2.attn.compressor.{m}.weight") for m in ("wkv", "wgate")]
    assert np.array_equal(got("layers.2.attn.compressor.wkv_wgate.weight"), np.concatenate(pooled))
    assert "layers.4.attn.compressor.wkv.weight" in plan.destinations  # ratio 1 has no gate to fuse with
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "vision.norm.weight"):
        assert bytes(loaded.buffers[name]) == bytes(checkpoint.raw(name))


def test_unfused_single_rank_load_is_the_checkpoint(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir, groups=ALL)
    plan = rp.plan_read(checkpoint, groups=ALL, engram="whole", fuse=False)
    loaded = execute(checkpoint, plan)
    assert plan.useful_bytes == plan.read_bytes == sum(s.nbytes for s in checkpoint.plan.values())
    assert sum(s.useful_bytes for s in loaded.shards) == plan.useful_bytes
    for name in checkpoint.plan:
        if expert_of(name) is None:
            assert bytes(loaded.buffers[name]) == bytes(checkpoint.raw(name))


@pytest.mark.parametrize("poison", [0x00, 0xA5, 0xFF])
@pytest.mark.parametrize("rank", [0, 3])
def test_no_parameter_keeps_its_initial_value(checkpoint_dir: Path, poison: int, rank: int):
    """Every piece of every destination must differ from what the memory held before, whatever that was."""
    checkpoint = Checkpoint.open(checkpoint_dir, groups=ALL)
    plan = rp.plan_read(checkpoint, ep=4, rank=rank, groups=ALL, engram="shard")
    loaded = execute(checkpoint, plan, allocate=lambda d: memoryview(bytearray([poison]) * d.nbytes))
    for piece in plan.pieces:
        view = loaded.buffers[piece.destination][piece.at : piece.at + piece.nbytes]
        assert bytes(view) != bytes([poison]) * piece.nbytes, piece
        assert bytes(view) == bytes(checkpoint.raw(piece.tensor))[: piece.nbytes] or ".engram.embed." in piece.tensor


def test_slot_table_with_replicas_and_empty_slots(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    table = [[7, 0, 7, -1]] * 6
    plan = rp.plan_read(checkpoint, ep=4, rank=1, slots=table, groups=("backbone",))
    loaded = execute(checkpoint, plan, allocate=lambda d: memoryview(bytearray(b"\xa5") * d.nbytes))
    name = "layers.2.ffn.experts.w2.weight"
    got = place(plan.destinations[name], loaded.buffers[name])
    for slot, expert in ((0, 7), (1, 0), (2, 7)):
        assert np.array_equal(got[slot], raw(checkpoint, f"layers.2.ffn.experts.{expert}.w2.weight"))
    assert not got[3].any()  # empty slots are zero, not leftovers
    assert len(plan.copies) == 6 * 6
    assert not any(t.endswith((".experts.1.w1.weight",)) for t in (p.tensor for p in plan.pieces))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"ep": 4, "rank": 4}, "rank 4 of ep 4 does not exist"),
        ({"slots": [[0]]}, "the slot table has 1 layers, the model has 6"),
        ({"slots": [[0]] * 5 + [[8]]}, "names expert 8 in layer 5, the model has 0..7"),
    ],
)
def test_impossible_requests_are_refused(checkpoint_dir: Path, arguments, fragment):
    with pytest.raises(UsageError, match=fragment):
        rp.plan_read(Checkpoint.open(checkpoint_dir), **arguments)


def test_absent_group_is_refused_by_name(checkpoint_dir: Path):
    (checkpoint_dir / "model-00010-of-00013.safetensors").unlink()
    (checkpoint_dir / "model-00011-of-00013.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no draft weights"):
        rp.plan_read(Checkpoint.open(checkpoint_dir), groups=ALL)


def test_engram_shards_tile_the_table_by_whole_heads(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    for ep in (1, 3, 4, 8):
        rows = 0
        for rank in range(ep):
            mine = rp.engram_rows(checkpoint.config, 3, ep, rank)
            assert mine.start == rows
            rows = mine.stop
            plan = rp.plan_read(checkpoint, ep=ep, rank=rank, engram="shard", groups=("backbone", "engram"))
            loaded = execute(checkpoint, plan)
            for leaf in ("weight", "scale"):
                name = f"layers.3.engram.embed.{leaf}"
                assert plan.destinations[name].row0 == mine.start
                whole = raw(checkpoint, name)[mine.start : mine.stop]
                assert bytes(loaded.buffers[name]) == whole.tobytes()
        assert rows == checkpoint.plan["layers.3.engram.embed.weight"].shape[0] == 306


def test_engram_table_gathers_from_the_shard(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    table = EngramTable(checkpoint, 1)
    ids = np.array([[0, 239], [17, 17], [1, 100]])
    assert table.prefetch(ids) >= 1
    weight, scale = table.gather(ids)
    assert weight.shape == (3, 2, 32) and scale.shape == (3, 2, 1)
    assert np.array_equal(weight, raw(checkpoint, "layers.1.engram.embed.weight")[ids])
    assert np.array_equal(scale, raw(checkpoint, "layers.1.engram.embed.scale")[ids])
    with pytest.raises(AssertionError):
        table.gather(np.array([-1]))
    assert not any(p.tensor.endswith("engram.embed.weight") for p in rp.plan_read(checkpoint).pieces)


def test_spans_are_sorted_coalesced_and_bridge_only_small_harmless_gaps(checkpoint_dir: Path, monkeypatch):
    checkpoint = Checkpoint.open(checkpoint_dir, groups=ALL)
    whole = rp.plan_read(checkpoint, groups=ALL, engram="whole")
    assert len(whole.spans) == 13  # one per shard: nothing lies between the pieces
    text = rp.plan_read(checkpoint, groups=("backbone", "engram"))  # leaves the tables out
    engram = [s for s in text.spans if s.file == "model-00012-of-00013.safetensors"]
    assert len(engram) == 1 and engram[0].nbytes > sum(p.nbytes for p in engram[0].pieces)
    loaded = execute(checkpoint, text)
    assert bytes(loaded.buffers["layers.1.engram.wkv.scale"]) == bytes(checkpoint.raw("layers.1.engram.wkv.scale"))
    monkeypatch.setattr(rp, "COALESCE_GAP", 1)
    exact = rp.plan_read(checkpoint, groups=("backbone", "engram"))
    assert exact.read_bytes == exact.useful_bytes == text.useful_bytes < text.read_bytes
    keys = [(s.file, s.offset) for s in exact.spans]
    assert keys == sorted(keys)


def test_short_reads_and_small_batches_change_nothing(checkpoint_dir: Path, monkeypatch):
    from deepinfer_engine.weights import reader

    checkpoint = Checkpoint.open(checkpoint_dir)
    plan = rp.plan_read(checkpoint, ep=2, rank=1)
    expected = {n: bytes(b) for n, b in execute(checkpoint, plan).buffers.items()}
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:777]], offset))
    monkeypatch.setattr(reader, "BATCH_BYTES", 5000)
    assert {n: bytes(b) for n, b in execute(checkpoint, plan).buffers.items()} == expected


def test_file_that_shrinks_after_the_check_is_named(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    plan = rp.plan_read(checkpoint)
    file = checkpoint.file_of("norm.weight")
    os.truncate(file, checkpoint.stored("norm.weight").begin + 4)
    with pytest.raises(CheckpointError) as caught:
        execute(checkpoint, plan)
    assert f"shard {file.name} truncated" in caught.value.message
    assert "parameter norm.weight incomplete: missing source norm.weight" in caught.value.message


def test_nan_scale_is_found_while_loading(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    name = "layers.4.ffn.experts.6.w2.scale"
    with checkpoint.file_of(name).open("r+b") as file:
        file.seek(checkpoint.stored(name).begin + 3)
        file.write(b"\xff")
    execute(checkpoint, rp.plan_read(checkpoint, ep=4, rank=0))
    with pytest.raises(CheckpointError, match=r"layers\.4\.ffn\.experts\.6\.w2\.scale in .*: scale byte 255"):
        execute(checkpoint, rp.plan_read(checkpoint, ep=4, rank=3))


def test_rates_are_reported_per_shard(checkpoint_dir: Path):
    checkpoint = Checkpoint.open(checkpoint_dir)
    plan = rp.plan_read(checkpoint)
    seen: dict[str, int] = {}
    loaded = execute(checkpoint, plan, progress=lambda file, n: seen.__setitem__(file, seen.get(file, 0) + n))
    assert seen == {s.file: s.read_bytes for s in loaded.shards}
    assert all(s.mb_s > 0 for s in loaded.shards) and loaded.mb_s > 0
    assert measure_disk(checkpoint, plan, loaded.shards[0].file) > 0
