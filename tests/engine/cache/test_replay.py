"""The replay planner against a brute force that knows only what the model needs, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.cache.pivots import Replica, due_pivot, in_ring
from deepinfer_engine.cache.replay import ReplayShape, explain, plan_prefill
from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.errors import UsageError

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
RELEASE = load_model_config(VECTORS / "v41-flash-config.json")
B = 128


def shape(decoder="bounded", encoder="bounded", window=128, slack=6, layers=40, cut=20):
    return ReplayShape(window, slack, layers, cut, decoder, encoder)


shapes = st.builds(
    ReplayShape,
    window=st.sampled_from([16, 32, 128, 256]),
    slack=st.integers(1, 9),
    layers=st.just(9),
    cut=st.integers(1, 8),
    decoder=st.sampled_from(["off", "exact", "bounded"]),
    encoder=st.sampled_from(["off", "bounded"]),
)


def receptive_field(window: int, layers_above_cut: int, length: int, wanted: int) -> int:
    """Lowest decoder row that the window KV or output of the last ``wanted`` rows of any layer depends on."""
    low = max(0, length - wanted)
    for _ in range(layers_above_cut):  # a row's output needs the window rows W − 1 below it at its own layer
        low = max(0, low - (window - 1))
    return low


@settings(max_examples=400)
@given(shapes, st.integers(1, 3000), st.integers(0, 24), st.booleans())
def test_every_field_is_what_brute_force_finds(shape, length, blocks, at_hand):
    W, G, hit = shape.window, shape.slack, blocks * B
    # the longest block-aligned prefix whose rest covers the decoder rows of this prefill plus the rollback rows
    decoder_low = {
        "off": max(0, length - W),
        "bounded": max(0, length - W),
        "exact": receptive_field(W, shape.layers - shape.cut - 1, length, W),
    }[shape.decoder]
    cap = max((c for c in range(0, length, B) if c == 0 or c + G <= decoder_low), default=0)
    reused = min(hit, cap)
    span = plan_prefill(shape, length, hit=hit, windows_at=frozenset({reused} if at_hand else ()))
    assert span.cap == cap
    if reused == 0:
        expected = ("cold", 0, 0)
    elif at_hand:
        expected = ("exact", reused, reused)
    elif shape.encoder == "off" or reused <= W:
        expected = ("cold", 0, 0)
    else:
        expected = ("replay", reused, reused - W)
    assert (span.mode, span.reused, span.start) == expected
    assert span.replayed == (W if expected[0] == "replay" else 0)
    assert span.floor_encoder == (span.start if expected[0] == "replay" else 0)
    if shape.decoder == "off":
        assert (span.pivot, span.floor_decoder) == (span.start, span.floor_encoder)
    else:
        assert span.pivot == span.floor_decoder == decoder_low
        if span.mode != "cold":
            assert span.pivot >= span.reused + G > span.start
    if span.mode != "cold":
        assert length - span.reused >= W + G
    assert span.lineage == ("replayed" if span.mode == "replay" else "exact")


@settings(max_examples=300)
@given(shapes, st.integers(1, 2500), st.integers(0, 20), st.data())
def test_chunks_cover_every_row_once_and_the_tail_is_the_pivots(shape, length, blocks, data):
    span = plan_prefill(shape, length, hit=blocks * B, windows_at=frozenset())
    at, chunks, waits = span.start, [], 0
    while at < length:
        low = 0 if waits < 3 else shape.min_chunk_tokens
        chunk = span.next_chunk(at, data.draw(st.integers(low, shape.min_chunk_tokens + 300)))
        if chunk is None:
            waits += 1
            continue
        assert chunk.start == at and chunk.count > 0
        assert chunk.tail == sum(at <= p < at + chunk.count for p in range(span.pivot, length))
        chunks.append(chunk)
        at += chunk.count
    assert at == length
    assert [c.last for c in chunks] == [False] * (len(chunks) - 1) + [True]
    if shape.decoder != "off":
        assert chunks[-1].count >= min(shape.final_rows, length - span.start)
    if shape.decoder == "bounded":
        assert [c.tail for c in chunks[:-1]] == [0] * (len(chunks) - 1)
        assert chunks[-1].tail == min(shape.window, length)
    assert sum(c.tail for c in chunks) == span.decoder_rows


@pytest.mark.parametrize("length", [1, 127, 128, 133, 134, 135, 261, 262, 263, 390, 1000, 4096, 77_056])
def test_budget_of_the_least_chunk_always_makes_progress(length):
    span = plan_prefill(shape(), length)
    assert sum(c.count for c in span.chunks(262)) == length
    with pytest.raises(UsageError, match=r"261 tokens is too small, replay needs 262 \(window 128 \+ rollback 6"):
        span.chunks(261)


def test_the_worked_example():
    cold = plan_prefill(shape(), 1000)
    hit = plan_prefill(shape(), 1000, hit=896, windows_at=frozenset({768}))
    replay = plan_prefill(shape(), 1000, hit=896, windows_at=frozenset({640, 896}))
    assert (cold.mode, cold.start, cold.pivot, cold.decoder_rows) == ("cold", 0, 872, 128)
    assert (hit.mode, hit.cap, hit.reused, hit.start, hit.window_end) == ("exact", 768, 768, 768, 768)
    assert (replay.mode, replay.reused, replay.start, replay.replayed) == ("replay", 768, 640, 128)
    assert (replay.floor_encoder, replay.floor_decoder) == (640, 872)
    assert cold.row_layers == 1000 * 20 + 128 * 20


def test_release_shape_and_the_exact_tail():
    exact = ReplayShape.of(RELEASE, decoder="exact", encoder="bounded")
    assert (exact.window, exact.slack, exact.layers, exact.cut) == (128, 6, 40, 20)
    assert exact.reach == 128 + 19 * 127 == 2541
    assert exact.snapshot_layers == range(21)
    assert ReplayShape.of(RELEASE).snapshot_layers == range(40)


@pytest.mark.parametrize("cut", [0, 40, 41, -1])
def test_a_cut_outside_the_model_is_refused_with_both_numbers(cut):
    with pytest.raises(UsageError, match=rf"0 < n_prefill_layer {cut} < n_layer 40"):
        shape(cut=cut)


def test_other_refusals_name_the_number():
    with pytest.raises(UsageError, match="window 96 and block 128"):
        shape(window=96)
    with pytest.raises(UsageError, match="found 100 tokens"):
        plan_prefill(shape(), 1000, hit=100)
    with pytest.raises(UsageError, match="found 0"):
        plan_prefill(shape(), 0)


def test_lineage_is_inherited_by_what_is_built_on_it():
    for approximate, expected in ((False, "exact"), (True, "replayed")):
        span = plan_prefill(shape(), 1000, hit=768, windows_at=frozenset({768}), approximate=approximate)
        assert span.lineage == expected
    assert plan_prefill(shape(), 100, approximate=True).lineage == "exact"  # nothing is reused


def test_every_field_is_explained_with_its_number():
    span = plan_prefill(shape(encoder="off"), 1000, hit=896)
    rows = {name: (value, reason) for name, value, reason in explain(span)}
    assert rows["cap"] == (768, "(1000 − window 128 − rollback 6) = 866, down to a block, at least 0")
    assert rows["mode"] == ("cold", "no window KV ends at 768 and replay.encoder is off")
    assert rows["pivot"] == (872, "max(0, 1000 − window 128): only the last window goes past the cut")
    assert all(reason for _, reason in rows.values())


@given(st.integers(1, 4000), st.lists(st.integers(1, 6), max_size=400), st.integers(0, 2**32))
def test_every_crossed_multiple_is_copied_while_the_ring_holds_it(prompt, accepted, _):
    window, drafts = 128, 5
    ring, length, due = window + drafts + 1, prompt, []
    for step in accepted:
        pivot = due_pivot(length, length + step)
        if pivot is not None:
            due.append(pivot)
            assert in_ring(pivot, length + drafts + 1, window=window, ring=ring)
            assert length + step - pivot <= drafts
        length += step
    assert due == [p for p in range(B, length + 1, B) if p > prompt]


def test_one_row_less_than_window_and_drafts_loses_a_pivot():
    written = 255 + 6  # committed 255, a verify step writes 255..260 and commits position 255
    assert in_ring(256, written, window=128, ring=133)
    assert not in_ring(256, written, window=128, ring=132)


def test_a_torn_copy_is_never_the_newest():
    replica = Replica()
    assert replica.newest() is None
    first = replica.begin(128)
    assert replica.newest() is None
    replica.finish(first)
    assert replica.newest() == (first, 128)
    second = replica.begin(256)
    assert second != first and replica.newest() == (first, 128)
    replica.finish(second)
    assert replica.newest() == (second, 256)
