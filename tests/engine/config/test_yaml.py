"""Strict YAML: scalars of the YAML 1.2 core schema, places, and no input that ends in anything but ProfileError."""

from __future__ import annotations

import random
import time

import pytest

from deepinfer_engine.config.profile import load_profile_text, render_yaml
from deepinfer_engine.config.resources import profile_names, profile_path
from deepinfer_engine.config.yaml import format_scalar, parse_scalar, parse_yaml
from deepinfer_engine.errors import ProfileError, UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("TRUE", True), ("yes", "yes"), ("on", "on"), ("off", "off"), ("n", "n"),
        ("null", None), ("~", None), ("Null", None), ("0", 0), ("-7", -7), ("+7", 7), ("010", 10), ("0o17", 15),
        ("0x1F", 31), ("1_000", "1_000"), ("0b11", "0b11"), ("1:30", "1:30"), ("1.5", 1.5), (".5", 0.5), ("5.", 5.0),
        ("1e5", 100000.0), ("-1E-2", -0.01), ("1e", "1e"), (".", "."), ("2026-01-01", "2026-01-01"), ("'true'", "true"),
        ('"1"', "1"), ("[1, a]", [1, "a"]), ("a b", "a b"), ("0o9", "0o9"), ("-0x1", "-0x1"), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_follow_the_core_schema(text, value):
    result = parse_scalar(text, where="x")
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    "value", [None, True, False, 0, -5, 2**60, 1.5, 1e-05, 1e22, "a", "off", "1", "", "a: b", "é\n\t\x00", [1, "x"], {}]
)
def test_written_scalars_read_back(value):
    assert parse_scalar(format_scalar(value), where="x") == value


def test_every_key_and_value_has_its_place():
    doc = parse_yaml("a: 1\nb:\n  - x\n  - {c: 2}  # why\n", where="f")
    assert doc.value == {"a": 1, "b": ["x", {"c": 2}]}
    assert doc.at_key(("b",)) == "f:2:1"
    assert doc.at_value(("b", 0)) == "f:3:5"
    assert doc.at_value(("b", 1, "c")) == "f:4:9"
    assert doc.at_value(("b", 7)) == "f:3:3", "an absent path is placed at what encloses it"


def test_bom_and_crlf_are_ordinary_text():
    assert parse_yaml("\ufeffa: 1\r\nb: 2\r\n".encode(), where="f").value == {"a": 1, "b": 2}


def test_recipes_can_ask_for_their_own_error_class():
    with pytest.raises(UsageError, match="f: is empty"):
        parse_yaml("", where="f")


_TOKENS = [
    b"&a ", b"*a", b"!!str ", b"---\n", b"...\n", b"? ", b"- ", b": ", b"{", b"}", b"[", b"]", b"\t", b"\n", b"  ",
    b'"', b"|\n", b">2-\n", b"#", b"%YAML 9.9\n", b"<<: ", b"\\U0011ffff", b"\xff", b"\x00", b"\xef\xbb\xbf", b"null",
    b"true", b".inf", b"1e999", b"0x", b"99999999999999999999999999", b"-1", b"\xe2\x80\xa8", b"[[[[[[[[[[[[[[[[[[[[",
    b"{a: {a: {a: ",
]  # fmt: skip


def _mutate(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + rng.choice(_TOKENS) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + rng.randrange(1, 12) :]
        elif kind == 3:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            data = b"\n".join(lines)
        elif kind == 4:
            data = data[:at]
        else:
            start = rng.randrange(len(data) + 1)
            data = data[:at] + data[start : start + 20] + data[at:]
    return data


_FUZZED = b"""schema_version: 1
name: mine
role: decode
hardware: {platform: sm90, gpus: 8, gpus_per_node: 8, hbm_gib: 139}
parallel:
  ep: 8
  dp: 8
cache: {prefix: true, tenant: "t\\n"}
spec:
  confidence_temperatures: [1.0, 1, 2, 3, 4]
"""


def test_ten_thousand_mutations_never_escape_as_anything_but_a_profile_error():
    rng = random.Random(20)
    seeds = [_FUZZED, b"schema_version: 1\nname: a\nsched:\n  overlap: true\n", b"extends: cpu-nano\n" + _FUZZED[:29]]
    accepted = slowest = 0
    for _ in range(10_000):
        data = _mutate(rng, rng.choice(seeds))
        start = time.perf_counter()
        try:
            loaded = load_profile_text(data, where="f.yaml")
        except ProfileError as exc:
            assert "f.yaml" in exc.message or "cpu-nano" in exc.message
            str(exc).encode()
        else:
            accepted += 1
            if accepted % 20 == 0:  # what is accepted means exactly what it says it means
                text = render_yaml(loaded, [k for k in loaded.origins if k != "extends"], {})
                assert load_profile_text(text, where="g.yaml").digest == loaded.digest
        slowest = max(slowest, time.perf_counter() - start)
    assert 300 < accepted < 9_000, "the mutations must reach both outcomes"
    assert slowest < 5, "no input hangs the parser"


def test_mutations_of_the_shipped_files_are_refused_or_loaded():
    rng = random.Random(21)
    for name in profile_names():
        data = profile_path(name).read_bytes()
        for _ in range(15):
            try:
                load_profile_text(_mutate(rng, data), where="f.yaml")
            except ProfileError as exc:
                assert exc.exit_code == 2
