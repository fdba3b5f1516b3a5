"""The statistics file: exact round trip, and every kind of bad or hostile content named before it can hurt."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest

from deepinfer_engine.eplb import stats
from deepinfer_engine.errors import ArtefactError


def example(**more) -> stats.ExpertStats:
    counts = np.arange(2 * 3 * 4, dtype=np.int64).reshape(2, 3, 4)
    fields: dict[str, Any] = dict(
        layer_ids=(3, 4, 9),
        tokens_M=np.array([50, 60]),
        layer_kinds=("moe",) * 3,
        top_k=2,
        ep=2,
        config_digest="c",
        weights_digest="w",
        tool_version="t",
    )
    return stats.ExpertStats(counts, **(fields | more))


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_round_trip(tmp_path):
    a, path = example(), tmp_path / "s.npz"
    stats.write_stats(a, path)
    b = stats.read_stats(path)
    assert (b.counts_MLE == a.counts_MLE).all() and (b.tokens_M == a.tokens_M).all() and b.digest == a.digest
    for name in ("layer_ids", "layer_kinds", "top_k", "ep", "config_digest", "weights_digest", "tool_version"):
        assert getattr(a, name) == getattr(b, name)
    assert [p.name for p in tmp_path.iterdir()] == ["s.npz"]
    with np.load(path, allow_pickle=False) as z:
        assert z["counts"].dtype == np.int64 and z["tokens"].tolist() == [50, 60]


def test_counts_alone_are_enough(tmp_path):
    s = stats.read_stats(saved(tmp_path / "s.npz", counts=np.ones((2, 3, 4), np.uint16)))
    assert s.layer_ids == (0, 1, 2) and s.ep is None and s.tokens_M is None and s.counts_MLE.dtype == np.int64


def test_digest_follows_content_not_file(tmp_path):
    assert example().digest != example(layer_ids=(3, 4, 8)).digest != example(config_digest="d").digest


def test_idle_steps_are_found():
    counts = np.array([[[0, 0]], [[1, 2]], [[0, 0]]])
    kept, idle = stats.ExpertStats(counts, (0,), tokens_M=np.array([0, 3, 0])).without_idle()
    assert idle == 2 and kept.steps == 1 and kept.tokens_M is not None and kept.tokens_M.tolist() == [3]


NAN = np.ones((2, 2, 3))
NAN[1, 0, 2] = np.nan
HALF = np.ones((2, 2, 3))
HALF[0, 1, 1] = 2.5
NEGATIVE = np.ones((2, 2, 3), np.int32)
NEGATIVE[1, 1, 0] = -4
GOOD = np.ones((2, 2, 3), np.int64)

BAD = {
    "nan": (dict(counts=NAN), "counts at step 1, layer 0, expert 2 is nan: not a finite number", "0"),
    "infinite": (dict(counts=NAN * np.inf), "not a finite number", "0"),
    "fraction": (dict(counts=HALF), "counts at step 0, layer 1, expert 1 is 2.5: not a whole number", "value: 2"),
    "negative": (dict(counts=NEGATIVE), "counts at step 1, layer 1, expert 0 is -4: negative", "value: 0"),
    "negative float": (dict(counts=-HALF), "negative", "value: 0"),
    "huge": (dict(counts=GOOD.astype(np.uint64) * 2**63), "too large", str(2**62 - 1)),
    "huge together": (dict(counts=np.full_like(GOOD, 2**55)), "layer 0 has .* tokens in the window", "shorter window"),
    "empty": (dict(counts=np.ones((0, 2, 3))), "counts is empty: \\[0, 2, 3\\]", None),
    "flat": (dict(counts=np.ones(5, int)), "counts has 1 dimensions \\[5\\], expected 3", None),
    "deep": (dict(counts=np.ones((1, 1, 1, 1), int)), "counts has 4 dimensions", None),
    "text": (dict(counts=np.array([[["a"]]])), "counts holds str", None),
    "missing": (dict(tokens=np.ones(2, int)), "array 'counts' is missing", "int64"),
    "unknown": (dict(counts=GOOD, layer_id=np.ones(2, int)), "unknown array 'layer_id'", "did you mean layer_ids"),
    "tokens": (dict(counts=GOOD, tokens=np.ones(3, int)), "tokens is int64 \\[3\\], expected \\[2\\]", None),
    "negative tokens": (dict(counts=GOOD, tokens=np.array([1, -1])), "tokens of step 1 is -1", None),
    "too many": (
        dict(counts=GOOD, tokens=np.array([1, 2]), top_k=np.int64(2)),
        "step 0 routed 3 tokens, tokens x top_k allows 2",
        None,
    ),
    "ids": (dict(counts=GOOD, layer_ids=np.array([1, 1])), "layer_ids must be different", None),
    "short ids": (dict(counts=GOOD, layer_ids=np.array([1])), "layer_ids is int64 \\[1\\], expected \\[2\\]", None),
    "kinds": (dict(counts=GOOD, layer_kinds=np.array(["a"])), "layer_kinds", None),
    "ep": (dict(counts=GOOD, ep=np.array([1, 2])), "ep is int64 \\[2\\], expected one value", None),
    "negative ep": (dict(counts=GOOD, ep=np.int64(-3)), "s.npz: ep is -3, expected 1..65536", None),
    "digest": (dict(counts=GOOD, config_digest=np.int64(3)), "config_digest is int64", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_content_names_the_field_and_the_nearest_legal_value(tmp_path, name):
    arrays, text, hint = BAD[name]
    with pytest.raises(ArtefactError, match=text) as e:
        stats.read_stats(saved(tmp_path / "s.npz", **arrays))
    assert e.value.exit_code == 4 and (hint is None or hint in (e.value.hint or ""))


def test_whole_floats_are_accepted(tmp_path):
    s = stats.read_stats(saved(tmp_path / "s.npz", counts=GOOD.astype(np.float32) * 7))
    assert (s.counts_MLE == 7).all()


def header(shape: str, descr: str = "'<i8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def zipped(path, **members: bytes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(f"{name}.npy", data)
    return path


HOSTILE = {
    "lying header": (header("(1000000, 1000000, 1000)") + b"\0" * 64, "says 8000000000000000 bytes"),
    "pickle": (header("(1,)", "'|O'") + b"\x80\x04N.", "a pickle"),
    "negative size": (header("(-1, 2, 3)"), "damaged array header"),
    "not a literal": (header("__import__('os').system('true')"), "damaged array header"),
    "structured": (header("(1,)", "[('a', '<i8')]") + b"\0" * 8, "expected integers or text"),
    "not an array": (b"hello", "not a NumPy array"),
    "huge header": (b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"x", "an array header of 2147483648 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused(tmp_path, name):
    data, text = HOSTILE[name]
    with pytest.raises(ArtefactError, match=text):
        stats.read_stats(zipped(tmp_path / "s.npz", counts=data))


def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    size = 64 << 20
    path = zipped(tmp_path / "s.npz", counts=header(f"(1, 1, {size // 8})") + b"\0" * size)
    assert path.stat().st_size < 200_000
    with pytest.raises(ArtefactError, match="at most 1048576 are read") as e:
        stats.read_stats(path, limit=1 << 20)
    assert e.value.hint == "record a shorter window"


def test_truncated_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "s.npz"
    stats.write_stats(example(), path)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"PK\x03\x04 nonsense"):
        path.write_bytes(data)
        with pytest.raises(ArtefactError, match="damaged or not a NumPy"):
            stats.read_stats(path)
    with pytest.raises(ArtefactError, match="cannot read"):
        stats.read_stats(tmp_path / "absent.npz")


def test_flipped_bits_are_noticed(tmp_path):
    path = tmp_path / "s.npz"
    np.savez_compressed(path, counts=np.random.default_rng(0).integers(0, 99, (20, 4, 8)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(ArtefactError):
        stats.read_stats(path)


def test_members_outside_the_expected_form_are_refused(tmp_path):
    path = tmp_path / "s.npz"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("../evil.npy", header("(1,)") + b"\0" * 8)
    with pytest.raises(ArtefactError, match=r"member '\.\./evil\.npy'"):
        stats.read_stats(path)


def test_plain_array_files(tmp_path):
    path = tmp_path / "c.npy"
    np.save(path, GOOD)
    assert (stats.read_npy(path) == GOOD).all()
    path.write_bytes(header("(4, 4, 4)") + b"\0" * 8)
    with pytest.raises(ArtefactError, match="says 512 bytes"):
        stats.read_npy(path)
    out = io.BytesIO()
    np.save(out, np.array([{}], object), allow_pickle=True)
    path.write_bytes(out.getvalue())
    with pytest.raises(ArtefactError, match="a pickle"):
        stats.read_npy(path)
