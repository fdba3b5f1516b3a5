"""Stop strings against a search in the whole text: same cut whatever the tokens, nothing shown too early or late."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.sample.stops import StopScanner

pieces = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "é", "😀", ""]), max_size=14)
stop_sets = st.lists(st.text("abé😀", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def tokens_of(texts: list[str], split: list[bool]) -> list[bytes]:
    """Bytes of tokens; where ``split`` says so, a token is cut inside, characters included."""
    out = []
    for text, cut in zip(texts, split, strict=False):
        data = text.encode()
        if cut and len(data) > 1:
            out += [data[:1], data[1:]]
        else:
            out.append(data)
    return out


@settings(max_examples=400)
@given(pieces, st.lists(st.booleans(), min_size=14, max_size=14), stop_sets)
def test_scanner_is_the_search_in_the_whole_text(texts: list[str], split: list[bool], stops: list[str]):
    tokens = tokens_of(texts, split)
    scanner: StopScanner[int] = StopScanner(stops)
    shown: list[int] = []
    seen = b""
    encoded = [s.encode() for s in stops]
    for i, data in enumerate(tokens):
        seen += data
        released, cut = scanner.push(i, data)
        shown += released
        ends = [seen.find(s) for s in encoded if s in seen]
        assert (cut is not None) == bool(ends), "the stop is found with the token that completes it"
        if cut is not None:
            at = min(ends)
            text = b"".join(tokens[j] for j in shown) + cut.tail
            assert text == seen[:at]
            assert seen[at:].startswith(cut.stop.encode())
            assert len(cut.stop.encode()) == max(len(s) for s in encoded if seen[at:].startswith(s))
            return
        # what could still become a stop: the longest proper beginning at the end
        open_ = max((n for s in encoded for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        held = b"".join(tokens[len(shown) : i + 1])
        assert len(held) >= open_, "nothing that may belong to a stop is shown"
        if held and len(shown) <= i:
            assert len(held) - len(tokens[len(shown)]) < open_, "nothing else is held back"
    assert shown + scanner.flush() == list(range(len(tokens)))


def test_worked_example():
    scanner: StopScanner[str] = StopScanner(["END"])
    steps = [scanner.push(t, t.encode()) for t in ("a", "E", "x", "EN")]
    assert [released for released, _ in steps] == [["a"], [], ["E", "x"], []]
    released, cut = scanner.push("Dz", b"Dz")
    assert (released, cut.stop, cut.tail) == ([], "END", b"")


def test_stop_inside_a_token_keeps_what_precedes_it():
    scanner: StopScanner[str] = StopScanner(["\n\n", "Question:"])
    assert scanner.push("x", b"is 42.\n") == ([], None)
    released, cut = scanner.push("y", b"\nQ")
    assert released == [] and cut.stop == "\n\n" and cut.tail == b"is 42."
