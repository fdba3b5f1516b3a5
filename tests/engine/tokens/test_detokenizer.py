"""Streaming and batch decoding agree for any ids, and nothing but an unfinished character is held back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.errors import UsageError
from deepinfer_engine.tokens.detokenizer import IncrementalDetokenizer
from deepinfer_engine.tokens.tokenizer import Tokenizer


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte: the worst grouping of a text."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([b])] for b in data]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_batch_decoding_of_any_ids(tokenizer: Tokenizer, library, data) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = IncrementalDetokenizer(tokenizer)
    streamed = "".join(map(stream.push, ids)) + stream.finish()
    assert streamed == library.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_byte_by_byte_only_whole_characters_come_out(tokenizer: Tokenizer, text: str) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    for character in text:
        *first, last = byte_ids(tokenizer, character.encode())
        assert [stream.push(i) for i in first] == [""] * len(first)
        assert stream.push(last) == character
        assert not stream.pending
    assert stream.finish() == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_never_completed_becomes_a_replacement(tokenizer: Tokenizer, library, cut: int) -> None:
    ids = byte_ids(tokenizer, b"a" + "😀".encode()[:cut])
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.pending
    assert stream.finish() == "\ufffd"
    assert library.decode(ids) == "a\ufffd"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xc0\xaf", b"\xe2\x28\xa1", b"\xed\xa0\x80", b"\xf4\x90\x80\x80x", b"\x80a"]
)
def test_invalid_bytes_become_what_batch_decoding_makes_of_them(tokenizer: Tokenizer, library, data: bytes) -> None:
    ids = byte_ids(tokenizer, data)
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == library.decode(ids)


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="outside the vocabulary"):
        IncrementalDetokenizer(tokenizer).push(tokenizer.vocab_size)


def test_time_is_linear_in_the_output(tokenizer: Tokenizer) -> None:
    """Late tokens cost what early ones cost; a stream that re-decodes its history would be 50 times slower late."""
    ids = tokenizer.encode_text("a long answer, 你好 ") * 4000
    stream = IncrementalDetokenizer(tokenizer)
    tenth = len(ids) // 10
    best = []
    for part in (ids[:tenth], ids[-tenth:]):
        shortest = float("inf")
        for at in range(0, tenth, tenth // 5):
            start = time.perf_counter()
            for token_id in part[at : at + tenth // 5]:
                stream.push(token_id)
            shortest = min(shortest, time.perf_counter() - start)
        best.append(shortest)
        for token_id in ids[tenth:-tenth]:
            stream.push(token_id)
    assert best[1] < 5 * best[0]
