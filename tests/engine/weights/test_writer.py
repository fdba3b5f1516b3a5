"""Writer and mapped reader: the official format survives a round trip, wrong sources are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from deepinfer_engine.errors import ArtefactError, CheckpointError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.writer import write_checkpoint
from deepinfer_kernels.reference import quantise as q

ALL = ("backbone", "engram", "draft", "vision")


def _values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The f32 numbers that a stored weight means."""
    spec = checkpoint.plan[name]
    stored = checkpoint.tensor(name)
    if spec.kind == "plain":
        return stored.float()
    scale = checkpoint.tensor(name.removesuffix(".weight") + ".scale")
    if spec.kind == "fp8":
        return q.dequantise_fp8_tiles(stored, scale, checkpoint.config.weight_block)
    return q.dequantise_mxfp4(stored, scale) if spec.kind == "fp4" else q.dequantise_rows(stored, scale)


def test_round_trip_stays_within_the_step_of_each_format(tiny, tmp_path):
    raw = tiny.raw_config()
    weights = tiny.weights(raw)
    write_checkpoint(tmp_path / "m", raw, weights)
    checkpoint = Checkpoint.open(tmp_path / "m", groups=ALL)
    # half a step relative to the largest value that shares the scale: E4M3 2^-4, E2M1 1/6 of the range above 4
    bound = {"fp8": 2**-4, "table": 2**-4, "fp4": 1 / 3, "plain": 2**-8}
    for name, value in weights.items():
        got = _values(checkpoint, name)
        assert (got - value).abs().max() <= bound[checkpoint.plan[name].kind] * value.abs().max(), name


def test_values_on_the_grid_are_kept_exactly(golden, tmp_path):
    source = Checkpoint.open(golden, groups=ALL)
    write_checkpoint(tmp_path / "m", source.raw_config, lambda spec: _values(source, spec.name))
    copy = Checkpoint.open(tmp_path / "m", groups=ALL)
    assert copy.raw_config == source.raw_config
    for name, spec in source.plan.items():
        if not spec.is_scale:
            assert torch.equal(_values(copy, name), _values(source, name)), name


def test_files_are_what_the_safetensors_library_reads(checkpoint_dir):
    checkpoint = Checkpoint.open(checkpoint_dir)
    seen = 0
    for file in checkpoint.headers:
        with safe_open(checkpoint_dir / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                theirs = shard.get_tensor(name)
                ours = checkpoint.tensor(name)
                assert theirs.shape == ours.shape
                assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))
                assert bytes(checkpoint.raw(name)) == ours.contiguous().view(torch.uint8).numpy().tobytes()
                seen += 1
    assert seen == len(checkpoint.plan)


def test_shards_and_index_follow_the_official_layout(checkpoint_dir):
    checkpoint = Checkpoint.open(checkpoint_dir)
    index = json.loads((checkpoint_dir / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(s.nbytes for s in checkpoint.plan.values())
    shard_of = {name: checkpoint.plan[name].shard for name in index["weight_map"]}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-00013.safetensors" for i in range(1, 14)]
    for file in files:
        assert len({shard_of[n] for n, f in index["weight_map"].items() if f == file}) == 1
    assert checkpoint.warnings == ()
    assert sorted(p.name for p in checkpoint_dir.iterdir()) == ["config.json", *files, "model.safetensors.index.json"]


def test_stored_tensors_are_views_in_raw_form(checkpoint_dir):
    checkpoint = Checkpoint.open(checkpoint_dir)
    name = "layers.0.ffn.experts.3.w1"
    assert checkpoint.tensor(f"{name}.weight").dtype == torch.int8
    assert checkpoint.tensor(f"{name}.scale").dtype == torch.uint8
    assert checkpoint.tensor("layers.0.attn.wq_a.weight").dtype == torch.float8_e4m3fn
    assert checkpoint.tensor("embed.weight").dtype == torch.bfloat16
    assert checkpoint.tensor("layers.0.attn.attn_sink").dtype == torch.float32
    first, again = checkpoint.tensor("embed.weight"), checkpoint.tensor("embed.weight")
    assert first.data_ptr() == again.data_ptr()
    before = (checkpoint.file_of("embed.weight")).read_bytes()
    first.zero_()  # copy on write: the file must not follow
    assert checkpoint.file_of("embed.weight").read_bytes() == before
    with pytest.raises(ArtefactError, match=r"holds no tensor layers\.99"):
        checkpoint.tensor("layers.99.attn_norm.weight")


def test_groups_and_shard_limit(tiny, tmp_path):
    raw = tiny.raw_config()
    weights = tiny.weights(raw)
    text = {n: w for n, w in weights.items() if not n.startswith(("mtp.", "vision.", "aligner.", "image_"))}
    write_checkpoint(tmp_path / "m", raw, text, groups=("backbone", "engram"), max_shard_bytes=48_000)
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert checkpoint.groups_present == {"backbone", "engram"}
    assert all(h.file_bytes - h.payload_begin <= 48_000 for h in checkpoint.headers.values())
    assert not checkpoint.has("mtp.0.attn_norm.weight") and checkpoint.has("layers.1.engram.embed.scale")
    with pytest.raises(CheckpointError, match="draft weights are absent: 0 of 1"):
        Checkpoint.open(tmp_path / "m", groups=("backbone", "engram", "draft"))
    with pytest.raises(ArtefactError, match=r"aligner\.w1\.weight alone has 8192 bytes, max_shard_bytes is 8000"):
        write_checkpoint(tmp_path / "n", raw, weights, max_shard_bytes=8000)
    with pytest.raises(ArtefactError, match="backbone is not optional"):
        write_checkpoint(tmp_path / "n", raw, weights, groups=("engram",))


def test_wrong_sources_are_refused_by_name_all_at_once(tiny, tmp_path):
    raw = tiny.raw_config()
    weights = tiny.weights(raw)
    del weights["layers.0.attn.wq_a.weight"]
    weights["layers.0.attn.wkv.weight"] = torch.zeros(3, 4)
    weights["lm_head.weight"] = torch.zeros(1)
    weights["layers.0.attn.wkv.scale"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "m", raw, weights)
    assert set(caught.value.problems) == {
        "missing source layers.0.attn.wq_a.weight [32, 64]",
        "source layers.0.attn.wkv.weight: expected [32, 64], found [3, 4]",
        "unexpected source lm_head.weight",
        "unexpected source layers.0.attn.wkv.scale",
    }
    assert list(tmp_path.iterdir()) == []


def test_bad_values_from_a_function_leave_nothing_behind(tiny, tmp_path):
    raw = tiny.raw_config()

    def source(spec):
        value = tiny.value(spec)
        if spec.name == "layers.2.attn.wq_b.weight":
            value[0, 0] = float("nan")
        if spec.name == "layers.5.ffn.experts.7.w2.weight":
            return value[:-1]
        return value.long() if spec.name == "head.weight" else value

    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "m", raw, source)
    assert set(caught.value.problems) == {
        "source layers.2.attn.wq_b.weight: holds NaN or infinity",
        "source layers.5.ffn.experts.7.w2.weight: expected [64, 32], found [63, 32]",
        "source head.weight: torch.int64 cannot become BF16",
    }
    assert list(tmp_path.iterdir()) == []


def test_extra_files_are_copied_and_may_not_escape(tiny, tmp_path):
    raw = tiny.raw_config()
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    extra = {"tokenizer.json": tmp_path / "tokenizer.json", "encoding/a.txt": b"x"}
    write_checkpoint(tmp_path / "m", raw, tiny.value, extra_files=extra)
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == b"{}"
    assert (tmp_path / "m" / "encoding" / "a.txt").read_bytes() == b"x"
    for name in ("../x", "/etc/x", "a/../../x", "config.json", "y.safetensors"):
        with pytest.raises(CheckpointError, match="extra file"):
            write_checkpoint(tmp_path / "n", raw, tiny.value, extra_files={name: b""})
    with pytest.raises(ArtefactError, match="exists and is not empty"):
        write_checkpoint(tmp_path / "m", raw, tiny.value)


def test_digest_tells_weights_apart_that_have_the_same_shapes(tiny, tmp_path):
    raw = tiny.raw_config()
    weights = tiny.weights(raw)
    write_checkpoint(tmp_path / "a", raw, weights)
    write_checkpoint(tmp_path / "b", raw, weights)
    weights["layers.3.ffn_norm.weight"] = weights["layers.3.ffn_norm.weight"] + 1
    write_checkpoint(tmp_path / "c", raw, weights)
    a, b, c = (Checkpoint.open(tmp_path / d).digest for d in "abc")
    assert a == b != c


def test_single_file_without_index(tiny, tmp_path):
    from deepinfer_engine.weights.writer import Payload, write_shard

    raw = tiny.raw_config()
    write_checkpoint(tmp_path / "m", raw, tiny.value)
    source = Checkpoint.open(tmp_path / "m", groups=ALL)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text(json.dumps(raw))
    everything = [Payload(n, s.dtype, s.shape, source.raw(n)) for n, s in source.plan.items()]
    write_shard(tmp_path / "one" / "model.safetensors", everything)
    one = Checkpoint.open(tmp_path / "one", groups=ALL)
    assert one.groups_present == set(ALL)
    assert torch.equal(one.tensor("embed.weight"), source.tensor("embed.weight"))
