"""Text never becomes a control token, round trips hold, and a defect of tokenizer.json is refused by name."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.tokenizer import Tokenizer

CONTROL = [
    spelling.BOS,
    spelling.EOS,
    spelling.PAD,
    spelling.SYSTEM,
    spelling.USER,
    spelling.ASSISTANT,
    spelling.THINK_START,
    spelling.THINK_END,
    spelling.DSML,
    spelling.IMAGE,
    "<｜latest_reminder｜>",
]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
hostile = st.lists(st.one_of(st.sampled_from(CONTROL), texts, st.sampled_from(["<", "｜", "▁", "think", ">"]))).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(text=hostile)
def test_text_that_spells_control_tokens_stays_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert not tokenizer.added_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


def test_the_library_alone_would_have_made_control_tokens(tokenizer: Tokenizer, library) -> None:
    """Guards the test above: the same text through the plain library call does become control tokens."""
    text = "".join(CONTROL)
    assert library.encode(text, add_special_tokens=False).ids == [tokenizer.added[c] for c in CONTROL]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_decode_equals_the_library_for_any_ids(tokenizer: Tokenizer, library, data) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_control_ids_and_bytes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.control_id(c) for c in (spelling.BOS, spelling.EOS, spelling.PAD)] == [0, 1, 2]
    for content in CONTROL:
        assert tokenizer.token_bytes(tokenizer.control_id(content)) == content.encode()
    with pytest.raises(ArtefactError, match="<｜nothing｜>"):
        tokenizer.control_id("<｜nothing｜>")


def test_all_256_bytes_have_a_token(tokenizer: Tokenizer) -> None:
    found = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= found


@pytest.mark.parametrize("offset", [0, 1, 10**12])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, offset: int) -> None:
    with pytest.raises(UsageError, match="outside the vocabulary"):
        tokenizer.decode([5, tokenizer.vocab_size + offset])
    with pytest.raises(UsageError, match="outside the vocabulary"):
        tokenizer.token_bytes(-1 - offset)


def test_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+DC80 at character 2"):
        tokenizer.encode_text("ab\udc80")


# ------------------------------------------------------------- malformed files


def _drop_byte(raw: dict[str, Any]) -> None:
    del raw["model"]["vocab"]["!"]


def _hole(raw: dict[str, Any]) -> None:
    raw["added_tokens"][-1]["id"] += 3


def _shared_id(raw: dict[str, Any]) -> None:
    raw["added_tokens"][-1]["id"] = 7


def _merge_builds_control(raw: dict[str, Any]) -> None:
    model = raw["model"]
    base = len(model["vocab"])
    for n, string in enumerate(("<t", "<th", "<thi", "<thin", "<think", "<think>")):
        model["vocab"].setdefault(string, 10_000 + n)
        model["merges"].append([string[:-1], string[-1]])
    _renumber(raw, base)


def _whole_word_control(raw: dict[str, Any]) -> None:
    raw["model"]["vocab"]["<think>"] = next(a["id"] for a in raw["added_tokens"] if a["content"] == "<think>")
    raw["model"]["ignore_merges"] = True


def _single_byte_control(raw: dict[str, Any]) -> None:
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": raw["model"]["vocab"]["!"], "content": "!"})


def _renumber(raw: dict[str, Any], base: int) -> None:
    """Make ids dense again: vocabulary in order, added tokens not in it behind."""
    vocab = raw["model"]["vocab"]
    for number, string in enumerate(vocab):
        vocab[string] = number
    number = len(vocab)
    for entry in raw["added_tokens"]:
        if entry["content"] in vocab:
            entry["id"] = vocab[entry["content"]]
        else:
            entry["id"] = number
            number += 1


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            raw = raw[name]
        raw[last] = value

    return edit


DAMAGE = {
    "byte without token": (_drop_byte, "0x21"),
    "hole": (_hole, "without holes"),
    "two tokens, one id": (_shared_id, "share id 7|two ids"),
    "merge builds a control token": (_merge_builds_control, "could become the added token '<think>'"),
    "whole words skip merges": (_whole_word_control, "could become the added token '<think>'"),
    "a byte is a control token": (_single_byte_control, "could become the added token '!'"),
    "unigram": (_set("model.type", "Unigram"), "Unigram"),
    "dropout": (_set("model.dropout", 0.1), "dropout"),
    "unknown token": (_set("model.unk_token", spelling.PAD), "unk_token"),
    "no decoder": (_set("decoder", None), "decoder"),
    "lower-casing normaliser": (_set("normalizer", {"type": "Lowercase"}), "does not survive"),
    "prefix space": (
        _set("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        "does not survive",
    ),
    "splitter that drops": (_set("pre_tokenizer", {"type": "Whitespace"}), "does not survive"),
    "unknown splitter": (_set("pre_tokenizer", {"type": "Nonsense"}), "not a usable tokenizer"),
    "negative id": (_set("model.vocab.!", -1), "has id -1"),
    "huge id": (_set("model.vocab.!", 2**40), "expected 0.."),
    "boolean id": (_set("model.vocab.!", True), "has id True"),
    "merge of strangers": (_set("model.merges", [["zzzz", "a"]]), "merge 0"),
    "merge without result": (_set("model.merges", [["\u0100", "\u0100"]]), "has no id"),
    "merges no list": (_set("model.merges", {}), "merges"),
    "added tokens no list": (_set("added_tokens", {}), "added_tokens"),
    "added token no object": (_set("added_tokens", ["x"]), "added_tokens"),
    "model no object": (_set("model", []), "model"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tokenizer_is_refused_and_named(raw_tokenizer: dict[str, Any], tmp_path: Path, case: str) -> None:
    edit, message = DAMAGE[case]
    raw = copy.deepcopy(raw_tokenizer)
    edit(raw)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ArtefactError, match=message) as caught:
        Tokenizer.from_file(path)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model": {}}', b"null"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="no such file"):
        Tokenizer.from_dir(tmp_path)


def test_random_byte_damage_never_escapes_the_error_tree(model_dir: Path, tmp_path: Path) -> None:
    """A flipped byte either leaves a usable tokenizer or raises ``ArtefactError``; nothing else comes out."""
    content = (model_dir / "tokenizer.json").read_bytes()
    draw = random.Random(5)
    path = tmp_path / "tokenizer.json"
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            Tokenizer.from_file(path)
        except ArtefactError:
            refused += 1
    assert refused > 30


def test_the_empty_normaliser_of_the_release_is_accepted(raw_tokenizer: dict[str, Any], tmp_path: Path) -> None:
    raw = {**raw_tokenizer, "normalizer": {"type": "Sequence", "normalizers": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).vocab_size > 256


def test_golden_tokenizer_loads_and_round_trips(golden_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(golden_dir / "checkpoint")
    assert tokenizer.vocab_size == 368
    text = "What is 17+25? <｜▁pad▁｜> 你好 😀"
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_the_package_does_not_import_torch() -> None:
    names = ("tokenizer", "detokenizer", "classes", "protocol")
    code = "import sys\n" + "\n".join(f"import deepinfer_engine.tokens.{n}" for n in names)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code += "\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
