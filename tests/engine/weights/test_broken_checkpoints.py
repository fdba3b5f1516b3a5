"""A corpus of damaged checkpoints: each is refused with exit code 4 and a message that names the damage."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.weights.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
EMBED = "model-00002-of-00013.safetensors"  # embed.weight alone
LAYER0 = "model-00003-of-00013.safetensors"
HEAD = "model-00009-of-00013.safetensors"  # head.weight and norm.weight
MTP0, MTP1 = "model-00010-of-00013.safetensors", "model-00011-of-00013.safetensors"
ENGRAM1 = "model-00012-of-00013.safetensors"
VISION = "model-00001-of-00013.safetensors"
WKV = "layers.0.attn.wkv"
ALL = ("backbone", "engram", "draft", "vision")

Damage = Callable[[Path], None]
CORPUS: dict[str, tuple[Damage, str]] = {}


def broken(fragment: str) -> Callable[[Damage], Damage]:
    """Register a damage under its function name with a fragment of the expected message."""

    def register(damage: Damage) -> Damage:
        CORPUS[damage.__name__] = (damage, fragment)
        return damage

    return register


def edit_index(d: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((d / INDEX).read_text())
    change(index)
    (d / INDEX).write_text(json.dumps(index))


def edit_header(d: Path, file: str, change: Callable[[dict[str, Any]], Any], *, payload: bytes | None = None) -> None:
    """Rewrite the header of a shard; ``payload`` replaces what follows it."""
    data = (d / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    new = change(header)
    text = new if isinstance(new, bytes) else json.dumps(header if new is None else new).encode()
    text += b" " * (-len(text) % 8)
    body = data[8 + length :] if payload is None else payload
    (d / file).write_bytes(len(text).to_bytes(8, "little") + text + body)


def edit_config(d: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((d / "config.json").read_text())
    change(config)
    (d / "config.json").write_text(json.dumps(config))


def edit_bytes(d: Path, file: str, change: Callable[[bytes], bytes]) -> None:
    (d / file).write_bytes(change((d / file).read_bytes()))


def move(d: Path, name: str, target: str) -> None:
    edit_index(d, lambda i: i["weight_map"].__setitem__(name, target))


def rename(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


# ------------------------------------------------------------------ whole files


@broken("not a directory")
def no_directory(d: Path) -> None:
    d.rename(d.with_name("elsewhere"))


@broken("config.json: no such file")
def no_config(d: Path) -> None:
    (d / "config.json").unlink()


@broken(f"no {INDEX} and no model.safetensors")
def no_index(d: Path) -> None:
    (d / INDEX).unlink()


@broken(f"shard {LAYER0} missing (the index puts 78 tensors there)")
def shard_missing(d: Path) -> None:
    (d / LAYER0).unlink()


@broken(f"shard {LAYER0} missing")
def shard_renamed_by_case(d: Path) -> None:
    (d / LAYER0).rename(d / LAYER0.replace("model", "Model"))


@broken(f"shard {EMBED}: not a regular file")
def shard_is_directory(d: Path) -> None:
    (d / EMBED).unlink()
    (d / EMBED).mkdir()


@broken(f"shard {EMBED}: not a regular file")
def shard_is_fifo(d: Path) -> None:
    (d / EMBED).unlink()
    os.mkfifo(d / EMBED)


@broken(f"shard {EMBED} missing")
def shard_is_dangling_link(d: Path) -> None:
    (d / EMBED).unlink()
    (d / EMBED).symlink_to(d / "nowhere")


@broken(f"shard {EMBED}: empty file")
def shard_empty(d: Path) -> None:
    (d / EMBED).write_bytes(b"")


@broken(f"shard {EMBED}: this is a Git LFS pointer, not the file itself")
def shard_lfs_pointer(d: Path) -> None:
    (d / EMBED).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8192\n")


@broken(f"shard {EMBED}: this is an HTML page, not the file itself")
def shard_html(d: Path) -> None:
    (d / EMBED).write_text("\n<!DOCTYPE html><html><body>404</body></html>")


@broken(f"shard {EMBED}: this is a ZIP archive")
def shard_zip(d: Path) -> None:
    (d / EMBED).write_bytes(b"PK\x03\x04" + bytes(100))


@broken(f"shard {EMBED}: 5 bytes, too short for a safetensors file")
def shard_five_bytes(d: Path) -> None:
    (d / EMBED).write_bytes(b"12345")


@broken(f"shard {EMBED} truncated: expected 8304 bytes, have 8303")
def truncated_by_one_byte(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: b[:-1])


@broken("truncated: expected 8304 bytes, have 4096")
def truncated_to_a_page(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: b[:4096])


@broken(f"shard {EMBED}: truncated inside its header: expected at least 112 bytes, have 50")
def truncated_in_header(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: b[:50])


@broken(f"shard {EMBED}: 1 bytes after the last tensor: expected 8304 bytes, have 8305")
def one_byte_too_many(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: b + b"\0")


# ---------------------------------------------------------------------- headers


@broken("bad safetensors header (it claims 18446744073709551615 bytes, the format allows 100000000)")
def header_length_all_ones(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: b"\xff" * 8 + b[8:])


@broken("truncated inside its header: expected at least 90000008 bytes")
def header_length_beyond_file(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: (90_000_000).to_bytes(8, "little") + b[8:])


@broken("bad safetensors header (it does not begin with '{')")
def header_length_zero(d: Path) -> None:
    edit_bytes(d, EMBED, lambda b: bytes(8) + b[8:])


@broken("bad safetensors header (it does not begin with '{')")
def header_is_a_list(d: Path) -> None:
    edit_header(d, EMBED, lambda h: b"[1, 2, 3]")


@broken("bad safetensors header (Expecting ',' delimiter at line 1")
def header_cut_json(d: Path) -> None:
    edit_header(d, EMBED, lambda h: json.dumps(h).encode()[:-3])


@broken("bad safetensors header (not UTF-8 at byte 2)")
def header_not_utf8(d: Path) -> None:
    edit_header(d, EMBED, lambda h: b'{"\xff\xfe": 1}')


@broken("bad safetensors header (nested too deeply)")
def header_nested_deeply(d: Path) -> None:
    edit_header(d, EMBED, lambda h: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


@broken("key 'embed.weight' appears twice")
def header_duplicate_key(d: Path) -> None:
    edit_header(d, EMBED, lambda h: json.dumps(h)[:-1].encode() + b', "embed.weight": {}}')


@broken("bad safetensors header (__metadata__ must map strings to strings)")
def header_bad_metadata(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h.__setitem__("__metadata__", {"format": 1}))


@broken("(tensor embed.weight: not an object)")
def header_entry_is_null(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h.__setitem__("embed.weight", None))


@broken("(tensor embed.weight: expected dtype, shape and data_offsets, found data_offsets, shape)")
def header_entry_without_dtype(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].pop("dtype") and None)


@broken("(tensor embed.weight: dtype 'F4' is not one this engine reads)")
def header_unknown_dtype(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("dtype", "F4"))


@broken("(tensor embed.weight: shape [64, -64] is not a list of sizes)")
def header_negative_size(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("shape", [64, -64]))


@broken("(tensor embed.weight: shape [True, 64] is not a list of sizes)")
def header_boolean_size(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("shape", [True, 64]))


@broken("(tensor embed.weight: data_offsets [8192, 0] is not a range)")
def header_reversed_offsets(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("data_offsets", [8192, 0]))


@broken("(tensor embed.weight: data_offsets [-8, 8184] is not a range)")
def header_negative_offset(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("data_offsets", [-8, 8184]))


@broken("(tensor embed.weight: data_offsets [0.0, 8192] is not a pair of integers)")
def header_float_offset(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("data_offsets", [0.0, 8192]))


@broken("truncated: expected 16512 bytes, have 8320")
def header_offsets_past_the_end(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("data_offsets", [8192, 16384]))


@broken("tensors head.weight and norm.weight overlap at byte")
def header_overlap(d: Path) -> None:
    edit_header(d, HEAD, lambda h: h["norm.weight"].__setitem__("data_offsets", [8064, 8192]))


@broken("before tensor norm.weight belong to no tensor")
def header_hole(d: Path) -> None:
    data = (d / HEAD).read_bytes()
    payload = data[8 + int.from_bytes(data[:8], "little") :]
    edit_header(
        d,
        HEAD,
        lambda h: h["norm.weight"].__setitem__("data_offsets", [8200, 8328]),
        payload=payload[:8192] + bytes(8) + payload[8192:],
    )


@broken("tensor embed.weight: length mismatch in shard")
def header_length_mismatch(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("shape", [64, 63]))


@broken("length mismatch")
def header_astronomic_shape(d: Path) -> None:
    edit_header(d, EMBED, lambda h: h["embed.weight"].__setitem__("shape", [2**47] * 8))


# ------------------------------------------------------------------------ index


@broken(f"{INDEX}: this is a Git LFS pointer")
def index_lfs_pointer(d: Path) -> None:
    (d / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n")


@broken(f"{INDEX}: not valid JSON")
def index_cut(d: Path) -> None:
    edit_bytes(d, INDEX, lambda b: b[: len(b) // 2])


@broken(f"{INDEX}: expected a JSON object, found list")
def index_list(d: Path) -> None:
    (d / INDEX).write_text("[]")


@broken("weight_map is missing, empty or not an object")
def index_without_map(d: Path) -> None:
    edit_index(d, lambda i: i.pop("weight_map"))


@broken("weight_map is missing, empty or not an object")
def index_empty_map(d: Path) -> None:
    edit_index(d, lambda i: i.__setitem__("weight_map", {}))


@broken("key 'embed.weight' appears twice")
def index_duplicate_key(d: Path) -> None:
    edit_bytes(d, INDEX, lambda b: b.replace(b'"embed.weight":', b'"embed.weight": "x.safetensors", "embed.weight":'))


@broken("tensor embed.weight maps to '../secret.safetensors', expected the plain name")
def index_path_escape(d: Path) -> None:
    (d.parent / "secret.safetensors").write_bytes((d / EMBED).read_bytes())
    move(d, "embed.weight", "../secret.safetensors")


@broken("maps to '/etc/passwd', expected the plain name")
def index_absolute_path(d: Path) -> None:
    move(d, "embed.weight", "/etc/passwd")


@broken("maps to 'C:\\\\x.safetensors', expected the plain name")
def index_windows_path(d: Path) -> None:
    move(d, "embed.weight", "C:\\x.safetensors")


@broken("maps to 'model.bin', expected the plain name")
def index_other_format(d: Path) -> None:
    move(d, "embed.weight", "model.bin")


@broken("maps to 7, expected the plain name")
def index_number(d: Path) -> None:
    edit_index(d, lambda i: i["weight_map"].__setitem__("embed.weight", 7))


@broken("expected the plain name")
def index_terminal_escape(d: Path) -> None:
    move(d, "embed.weight", "\x1b[2J.safetensors")


@broken("differ only in case")
def index_files_differ_in_case(d: Path) -> None:
    (d / EMBED.upper().replace("SAFETENSORS", "safetensors")).write_bytes((d / HEAD).read_bytes())
    move(d, "norm.weight", EMBED.upper().replace("SAFETENSORS", "safetensors"))


@broken(f"tensor norm.weight: index says {EMBED}, found in {HEAD}")
def index_names_wrong_shard(d: Path) -> None:
    move(d, "norm.weight", EMBED)


@broken(f"tensor norm.weight: found in {HEAD}, the index does not name it")
def index_lacks_a_tensor(d: Path) -> None:
    edit_index(d, lambda i: i["weight_map"].pop("norm.weight"))


@broken(f"tensor ghost.weight: index says {HEAD}, which does not hold it")
def index_names_a_ghost(d: Path) -> None:
    move(d, "ghost.weight", HEAD)


@broken("shard model-00014-of-00013.safetensors missing (the index puts 1 tensors there)")
def index_ghost_in_missing_shard(d: Path) -> None:
    move(d, "ghost.weight", "model-00014-of-00013.safetensors")


# --------------------------------------------------------------- tensors / model


@broken(f"unexpected tensor layers.0.extra.weight in {LAYER0}")
def unexpected_tensor(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: rename(h, f"{WKV}.weight", "layers.0.extra.weight"))
    edit_index(d, lambda i: rename(i["weight_map"], f"{WKV}.weight", "layers.0.extra.weight"))


@broken(f"missing tensor {WKV}.weight (F8_E4M3[32, 64] expected); scale/weight pair incomplete, {WKV}.scale is there")
def weight_without_scale(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: rename(h, f"{WKV}.weight", "layers.0.extra.weight"))
    edit_index(d, lambda i: rename(i["weight_map"], f"{WKV}.weight", "layers.0.extra.weight"))


@broken("missing tensor layers.0.ffn.experts.3.w1.scale (F8_E8M0[32, 2] expected); scale/weight pair incomplete")
def scale_missing(d: Path) -> None:
    name = "layers.0.ffn.experts.3.w1.scale"
    edit_header(d, LAYER0, lambda h: rename(h, name, "x"))
    edit_index(d, lambda i: rename(i["weight_map"], name, "x"))


@broken("differs only in case from embed.weight")
def tensor_differs_in_case(d: Path) -> None:
    edit_header(d, EMBED, lambda h: rename(h, "embed.weight", "Embed.weight"))
    edit_index(d, lambda i: rename(i["weight_map"], "embed.weight", "Embed.weight"))


@broken("missing tensor embed.weight (BF16[64, 64] expected)")
def hub_style_names(d: Path) -> None:
    edit_header(d, EMBED, lambda h: rename(h, "embed.weight", "model.embed_tokens.weight"))
    edit_index(d, lambda i: rename(i["weight_map"], "embed.weight", "model.embed_tokens.weight"))


@broken(f"tensor {WKV}.weight: expected F8_E4M3[32, 64], found I8[32, 64] in {LAYER0}")
def wrong_dtype(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: h[f"{WKV}.weight"].__setitem__("dtype", "I8"))


@broken("tensor layers.0.ffn.experts.0.w1.weight: expected I8[32, 32], found U8[32, 32]")
def unsigned_experts(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: h["layers.0.ffn.experts.0.w1.weight"].__setitem__("dtype", "U8"))


@broken(f"tensor {WKV}.weight: expected F8_E4M3[32, 64], found F8_E4M3[64, 32]")
def transposed_weight(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: h[f"{WKV}.weight"].__setitem__("shape", [64, 32]))


@broken(f"tensor {WKV}.scale: grid [2, 1], expected [1, 2] (one scale per 32 x 32 block)")
def wrong_scale_grid(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: h[f"{WKV}.scale"].__setitem__("shape", [2, 1]))


@broken(f"tensor {WKV}.scale: expected F8_E8M0[1, 2], found U8[1, 2]")
def scale_as_u8(d: Path) -> None:
    edit_header(d, LAYER0, lambda h: h[f"{WKV}.scale"].__setitem__("dtype", "U8"))


def _second_copy(d: Path, change: Callable[[bytes], bytes]) -> None:
    """Store norm.weight a second time, in the embedding's shard."""
    head = (d / HEAD).read_bytes()
    length = int.from_bytes(head[:8], "little")
    begin, end = json.loads(head[8 : 8 + length])["norm.weight"]["data_offsets"]
    copy = change(head[8 + length :][begin:end])
    data = (d / EMBED).read_bytes()
    payload = data[8 + int.from_bytes(data[:8], "little") :] + copy
    entry = {"dtype": "BF16", "shape": [64], "data_offsets": [8192, 8320]}
    edit_header(d, EMBED, lambda h: h.__setitem__("norm.weight", entry), payload=payload)


@broken(f"tensor norm.weight: stored 2 times, in {EMBED} and {HEAD}, with equal bytes")
def duplicate_equal(d: Path) -> None:
    _second_copy(d, lambda b: b)


@broken(f"tensor norm.weight: stored 2 times, in {EMBED} and {HEAD}, with different bytes")
def duplicate_unequal(d: Path) -> None:
    _second_copy(d, lambda b: bytes(len(b)))


@broken("engram weights are absent: 0 of 12 tensors present")
def engram_absent(d: Path) -> None:
    edit_index(
        d, lambda i: i.__setitem__("weight_map", {n: f for n, f in i["weight_map"].items() if ".engram." not in n})
    )


@broken(f"shard {ENGRAM1} missing (the index puts 6 tensors there)")
def engram_shard_missing(d: Path) -> None:
    (d / ENGRAM1).unlink()


@broken("draft weights are partly absent:")
def draft_partly_absent(d: Path) -> None:
    (d / MTP1).unlink()


@broken(f"shard {MTP1} missing")
def draft_shard_missing(d: Path) -> None:
    (d / MTP1).unlink()


@broken("vision weights are partly absent: 17 of 18 tensors present")
def vision_partly_absent(d: Path) -> None:
    edit_header(d, VISION, lambda h: rename(h, "image_end", "x"))
    edit_index(d, lambda i: rename(i["weight_map"], "image_end", "x"))


# ----------------------------------------------------------------------- config


@broken("config.json: this is an HTML page")
def config_html(d: Path) -> None:
    (d / "config.json").write_text("<html>")


@broken("key 'model_type' appears twice")
def config_duplicate_key(d: Path) -> None:
    edit_bytes(d, "config.json", lambda b: b.replace(b"{", b'{"model_type": "deepseek_v41",', 1))


@broken("config.json: not a regular file")
def config_is_fifo(d: Path) -> None:
    (d / "config.json").unlink()
    os.mkfifo(d / "config.json")


@broken("model_type is 'llama', expected 'deepseek_v41'")
def config_of_another_model(d: Path) -> None:
    edit_config(d, lambda c: c.__setitem__("model_type", "llama"))


@broken("missing tensor layers.0.ffn.experts.8.w1.weight (I8[32, 32] expected)")
def config_expects_more_experts(d: Path) -> None:
    edit_config(d, lambda c: c["text_config"].__setitem__("n_routed_experts", 9))


@broken("unexpected tensor vision.norm.weight")
def config_without_vision(d: Path) -> None:
    edit_config(d, lambda c: c.pop("vision_config"))


def test_corpus_is_large_enough():
    assert len(CORPUS) >= 60


@pytest.mark.parametrize("name", CORPUS)
def test_damage_is_refused_by_name(checkpoint_dir: Path, name: str):
    damage, fragment = CORPUS[name]
    damage(checkpoint_dir)
    with pytest.raises(DeepInferError) as caught:
        Checkpoint.open(checkpoint_dir)
    assert caught.value.exit_code == 4
    everything = "\n".join([caught.value.message, *getattr(caught.value, "problems", ())])
    assert fragment in everything, everything
    assert everything.replace("\n", "").isprintable()


def test_every_problem_is_counted_and_the_list_is_capped(checkpoint_dir: Path):
    edit_config(checkpoint_dir, lambda c: c["text_config"].__setitem__("n_routed_experts", 16))
    truncated_by_one_byte(checkpoint_dir)
    with pytest.raises(DeepInferError) as caught:
        Checkpoint.open(checkpoint_dir)
    problems = getattr(caught.value, "problems", ())
    # 6 layers: 8 experts x 6 tensors are missing, router weight and two biases have the wrong shape; one shard is cut
    assert len(problems) == 6 * (8 * 6 + 3) + 1
    lines = caught.value.message.splitlines()
    assert len(lines) == 22 and lines[0].endswith(f"{len(problems)} problems")
    assert lines[-1] == f"  … and {len(problems) - 20} more"


def test_optional_groups_may_be_wholly_absent(checkpoint_dir: Path):
    for file in (MTP0, MTP1, VISION):  # index still names them: a partial download by group
        (checkpoint_dir / file).unlink()
    checkpoint = Checkpoint.open(checkpoint_dir)
    assert checkpoint.groups_present == {"backbone", "engram"}
    with pytest.raises(DeepInferError, match="draft weights are absent"):
        Checkpoint.open(checkpoint_dir, groups=("backbone", "engram", "draft"))


def test_total_size_and_stray_files_are_warnings(checkpoint_dir: Path):
    edit_index(checkpoint_dir, lambda i: i["metadata"].__setitem__("total_size", 1))
    (checkpoint_dir / "consolidated.safetensors").write_bytes(b"x")
    first, second = Checkpoint.open(checkpoint_dir).warnings
    assert first == "consolidated.safetensors is not named by the index and was not read"
    assert second.startswith(f"{INDEX}: total_size is 1, the shards hold ")


def test_value_checks_refuse_nan_scales(checkpoint_dir: Path):
    stored = Checkpoint.open(checkpoint_dir).stored(f"{WKV}.scale")
    edit_bytes(checkpoint_dir, LAYER0, lambda b: b[: stored.begin] + b"\xff" + b[stored.begin + 1 :])
    with pytest.raises(DeepInferError, match=rf"tensor {WKV}\.scale in {LAYER0}: scale byte 255 is not a number"):
        Checkpoint.open(checkpoint_dir).tensor(f"{WKV}.scale")


def test_value_checks_refuse_foreign_experts(golden_v4: Path, tmp_path: Path):
    v4 = shutil.copytree(golden_v4, tmp_path / "v4")
    checkpoint = Checkpoint.open(v4)
    where, file = checkpoint.stored("layers.1.ffn.gate.tid2eid"), checkpoint.file_of("layers.1.ffn.gate.tid2eid").name
    edit_bytes(v4, file, lambda b: b[: where.begin] + (8).to_bytes(8, "little") + b[where.begin + 8 :])
    with pytest.raises(DeepInferError, match=r"tid2eid in .*: names experts outside 0\.\.7"):
        Checkpoint.open(v4).tensor("layers.1.ffn.gate.tid2eid")
