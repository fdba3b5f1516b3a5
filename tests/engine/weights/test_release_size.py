"""The 510 GB checkpoint as sparse files: real headers, index and sizes, no payload. What only shows at full size."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.engram_table import EngramTable
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.read_plan import plan_read
from deepinfer_engine.weights.summary import components
from deepinfer_engine.weights.tensor_spec import ITEM_BYTES, TensorSpec

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def release(vectors, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    shutil.copy(vectors / "v41-flash-config.json", folder / "config.json")
    plan = tensor_plan(load_model_config(folder))
    shards: dict[str, list[TensorSpec]] = {}
    for spec in plan.values():
        shards.setdefault(spec.shard, []).append(spec)
    weight_map = {}
    for number, specs in enumerate(shards.values(), 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for s in sorted(specs, key=lambda s: -ITEM_BYTES[s.dtype]):
            header[s.name] = {"dtype": s.dtype, "shape": s.shape, "data_offsets": [at, at + s.nbytes]}
            at += s.nbytes
        text = json.dumps(header).encode()
        try:
            with (folder / name).open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + at)
            if (folder / name).stat().st_blocks * 512 > 16_000_000:
                raise OSError("holes take room")
        except OSError as exc:
            shutil.rmtree(folder)
            pytest.skip(f"this file system has no sparse files of {at} bytes ({exc})")
        weight_map |= dict.fromkeys(header, name)
    total = sum(s.nbytes for s in plan.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def test_every_load_can_afford_the_validation(release: Path):
    start = time.process_time()
    checkpoint = Checkpoint.open(release, groups=("backbone", "engram", "draft", "vision"))
    assert time.process_time() - start < 5.0  # about 0.9 s on two cores; the bound only catches a change of order
    assert (len(checkpoint.plan), len(checkpoint.headers), checkpoint.warnings) == (96_085, 48, ())


def test_one_missing_byte_in_510_gb_is_found(release: Path, tmp_path: Path):
    for path in release.iterdir():
        (tmp_path / path.name).symlink_to(path)
    victim = tmp_path / "model-00048-of-00048.safetensors"
    size = victim.stat().st_size
    victim.unlink()
    with (release / victim.name).open("rb") as whole, victim.open("wb") as file:
        file.write(whole.read(4096))
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=f"{victim.name} truncated: expected {size} bytes, have {size - 1}"):
        Checkpoint.open(tmp_path)


def test_read_lists_add_up_to_what_inspect_says(release: Path):
    checkpoint = Checkpoint.open(release)
    rows = components(checkpoint.config, 16)
    plan = plan_read(checkpoint, ep=16, rank=0, groups=("backbone", "engram", "draft"))
    tables_and_vision = sum(r.rank_bytes for r in rows if r.name == "engram tables" or r.group == "vision")
    assert plan.useful_bytes == sum(r.rank_bytes for r in rows) - tables_and_vision
    assert plan.read_bytes == plan.useful_bytes  # real tensors are large: no gap is worth bridging
    assert len(plan.spans) < 600


def test_a_101_gb_table_is_mapped_not_read(release: Path):
    checkpoint = Checkpoint.open(release)
    table = EngramTable(checkpoint, 14)
    weight, scale = table.gather(np.array([0, table.rows - 1]))
    assert table.rows == 384_016_682 and weight.shape == (2, 256) and scale.shape == (2, 8)
