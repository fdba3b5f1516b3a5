"""10,000 mutations of headers, indexes and configs: refused with our own error, or accepted rightly; nothing else.

Any other exception fails the test. Oracles of "rightly": for a header the safetensors library, for an index and a
config the unmutated checkpoint.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.header import scan_header
from deepinfer_engine.weights.writer import write_checkpoint

INDEX = "model.safetensors.index.json"
ODD = (None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, "", "x", "../x", "\x00", "\x1b[2J",
       "\ud800", "model-00001-of-00010.safetensors", [], [[]], {}, {"a": 1}, [0, 0], "F8_E4M3", "a" * 500)  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory) -> Path:
    """A checkpoint small enough to be opened thousands of times: 3 layers, 2 experts, no draft, no vision."""
    raw = tiny.raw_config(
        num_hidden_layers=3, compress_ratios=[0, 0, 1], kv_source_layer_ids=[2], index_source_layer_ids=[2],
        candidate_source_layer_id=2, engram_layer_ids=[1], engram_num_embeddings=[240], n_routed_experts=2,
        num_experts_per_tok=1, num_nextn_predict_layers=0, dspark_target_layer_ids=[],
    )  # fmt: skip
    del raw["vision_config"]
    target = tmp_path_factory.mktemp("fuzz") / "small"
    write_checkpoint(target, raw, tiny.value)
    return target


def overwrite(path: Path, data: bytes) -> None:
    """New content without truncating to nothing first, which makes some file systems flush: slow 10,000 times."""
    path.touch()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def mutated_bytes(rng: random.Random, data: bytes, head: int) -> bytes:
    """``data`` with one to three small injuries, most of them within the first ``head`` bytes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(head, len(out)) or 1) if rng.random() < 0.95 else rng.randrange(len(out) or 1)
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.choice(b'0123456789{}[]",:-.eEtfn \\\x00\xff')
        elif kind == 2:
            del out[at : at + rng.randint(1, 9)]
        elif kind == 3:
            out[at:at] = rng.choice((b"9", b"-", b'"', b"{", b"}", b"[", b"1e9", b"null", b"NaN", b" ", b"\xc3\x28"))
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 30)]
        elif kind == 5:
            del out[rng.randrange(len(out) + 1) :]
        else:
            out += rng.randbytes(rng.randint(1, 9))
    return bytes(out)


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from nodes(tree[key])


def mutated_tree(rng: random.Random, tree: Any, places: int) -> Any:
    """A copy of ``tree`` with one node replaced, removed, renamed or swapped with another."""
    out = copy.deepcopy(tree)
    spots = list(nodes(out))
    container, key = spots[rng.randrange(places) % len(spots)] if rng.random() < 0.5 else rng.choice(spots)
    kind = rng.randrange(4)
    if kind == 0:
        container[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == 1:
        del container[key]
    elif kind == 2 and isinstance(container, dict):
        container[rng.choice([f"{key}x", key.upper(), key[:-1], "\ud800", "__metadata__"])] = container.pop(key)
    else:
        other, where = rng.choice(spots)
        container[key] = copy.deepcopy(other[where] if where in other or isinstance(other, list) else None)
    return out


def test_mutated_headers(small: Path, tmp_path: Path):
    rng = random.Random(1)
    shards = [p.read_bytes() for p in sorted(small.glob("*.safetensors"))]
    target = tmp_path / "shard.safetensors"
    refused = accepted = 0
    for step in range(6000):
        data = min(shards, key=len) if step % 4 else rng.choice(shards)
        length = int.from_bytes(data[:8], "little")
        if step % 2:
            header = mutated_tree(rng, json.loads(data[8 : 8 + length]), 12)
            text = json.dumps(header).encode()
            data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        else:
            data = mutated_bytes(rng, data, 8 + length)
        overwrite(target, data)
        problems: list[str] = []
        header = scan_header(target, problems)
        if problems:
            assert all(problem.isprintable() for problem in problems)
            refused += 1
            continue
        assert header is not None
        accepted += 1
        with safe_open(target, "pt") as shard:
            names = set(shard.keys())
            assert names == set(header.tensors)
            for name in names:
                part = shard.get_slice(name)
                assert (part.get_dtype(), tuple(part.get_shape())) == header.tensors[name][:2]
        assert max((t.end for t in header.tensors.values()), default=header.payload_begin) == len(data)
    assert refused > 3000 and accepted > 50  # mutations of metadata, names and spaces are legal headers


def test_mutated_indexes(small: Path, tmp_path: Path):
    rng = random.Random(2)
    for file in small.iterdir():
        (tmp_path / file.name).symlink_to(file)
    original = (small / INDEX).read_bytes()
    tree = json.loads(original)
    (tmp_path / INDEX).unlink()
    refused = 0
    for step in range(2000):
        data = (
            mutated_bytes(rng, original, len(original))
            if step % 2
            else json.dumps(mutated_tree(rng, tree, 4)).encode("utf-8", "surrogatepass")
        )
        overwrite(tmp_path / INDEX, data)
        try:
            Checkpoint.open(tmp_path)
        except ArtefactError as exc:
            assert exc.exit_code == 4 and exc.message.replace("\n", "").isprintable()
            refused += 1
        else:
            assert json.loads(data)["weight_map"] == tree["weight_map"]
    assert refused > 1000


def test_mutated_configs(small: Path, tmp_path: Path):
    rng = random.Random(3)
    for file in small.iterdir():
        (tmp_path / file.name).symlink_to(file)
    original = (small / "config.json").read_bytes()
    tree = json.loads(original)
    plan = Checkpoint.open(small).plan
    (tmp_path / "config.json").unlink()
    refused = 0
    for step in range(2000):
        data = (
            mutated_bytes(rng, original, len(original))
            if step % 2
            else json.dumps(mutated_tree(rng, tree, 60)).encode("utf-8", "surrogatepass")
        )
        overwrite(tmp_path / "config.json", data)
        try:
            checkpoint = Checkpoint.open(tmp_path)
        except ArtefactError as exc:
            assert exc.exit_code == 4
            refused += 1
        else:
            assert checkpoint.plan == plan
    assert refused > 1000
