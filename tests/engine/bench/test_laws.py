"""Laws of the numbers: counts add up, times and gaps agree, undefined is null with a reason, always."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.bench.metrics import RequestRow, RunFacts, Status, summarise
from deepinfer_engine.bench.recipe import Limits
from deepinfer_engine.bench.result import BenchResult, Meta
from deepinfer_engine.bench.writers import inferencex_document, request_objects, vllm_document

STATUSES: tuple[Status, ...] = ("completed", "failed", "cancelled", "unsent")
#: what a clock can tell: whole nanoseconds
SECONDS = st.integers(0, 100_000_000_000).map(lambda ns: ns / 1e9)
GAPS = st.integers(0, 5_000_000_000).map(lambda ns: ns / 1e9)


@st.composite
def request_rows(draw: st.DrawFn) -> list[RequestRow]:
    rows = []
    for index in range(draw(st.integers(0, 8))):
        status = draw(st.sampled_from(STATUSES))
        planned = draw(st.integers(1, 12))
        if status == "unsent":
            rows.append(RequestRow(index, "unsent", 5, planned))
            continue
        start = draw(SECONDS)
        sizes = draw(st.lists(st.integers(1, 4), max_size=6))
        gaps = draw(st.lists(GAPS, min_size=len(sizes) + 1, max_size=len(sizes) + 1))
        at, chunks = start, []
        for gap, size in zip(gaps, sizes, strict=False):
            at += gap
            chunks.append((at, size))
        prompt = draw(st.integers(1, 100))
        cached = draw(st.integers(0, prompt))
        rows.append(
            RequestRow(
                index, status, prompt, planned, submitted_s=start, ended_s=at + gaps[-1], chunks=tuple(chunks),
                input_tokens=prompt, output_tokens=sum(sizes), cached_tokens=cached,
                replayed_tokens=draw(st.integers(0, cached)), drafted_tokens=4, accepted_tokens=2,
                error_group=draw(st.sampled_from(["timeout", "http_500"])) if status == "failed" else None,
            )
        )  # fmt: skip
    return rows


limits = st.builds(
    Limits,
    ttft_ms=st.none() | st.floats(1, 5000),
    tpot_ms=st.none() | st.floats(1, 5000),
    e2e_ms=st.none() | st.floats(1, 5000),
)


def values_of(rows: list[RequestRow], facts: RunFacts) -> dict[str, Any]:
    return dict(summarise(rows, facts).values)


def result_of(rows: list[RequestRow], facts: RunFacts) -> BenchResult:
    meta = Meta(
        "measured", "w", "d", 0, 0, {"kind": "engine"}, "p", "d", {}, {"name": "x"}, None, "2026-01-01T00:00:00+00:00"
    )
    s = summarise(rows, facts)
    return BenchResult(s.values, rows, meta, s.undefined)


@given(request_rows(), limits, st.none() | st.integers(1, 4), st.none() | st.integers(1, 8), st.booleans())
def test_counts_add_up_and_nothing_is_nan(rows, given_limits, concurrency, gpus, closed):
    result = result_of(rows, RunFacts(concurrency, given_limits, gpus, closed=closed))
    s: dict[str, Any] = dict(result.summary)
    assert s["completed"] + s["failed"] + s["cancelled"] + s["unsent"] == s["requests"] == len(rows)
    assert sum(result.failures.values()) == s["failed"]
    done = [r for r in rows if r.status == "completed"]
    assert s["output_tokens"] == sum(r.output_tokens for r in done)
    if done:
        sources = s["cache_found_tokens"] + s["cache_replayed_tokens"] + s["cache_computed_tokens"]
        assert sources == s["input_tokens"] == sum(r.input_tokens for r in done)
    if given_limits.given:
        ended = s["completed"] + s["failed"]
        assert s["goodput_met"] + s["goodput_missed"] + s["goodput_undefined"] == ended
    assert {k for k, v in s.items() if v is None} == set(result.undefined)
    assert all(math.isfinite(v) for v in s.values() if isinstance(v, float))
    for document in (vllm_document(result, detailed=True), inferencex_document(result), result.to_row()):
        json.dumps(document, allow_nan=False)
    assert len(request_objects(result)) == len(rows)


@settings(max_examples=40)
@given(request_rows())
def test_rates_times_duration_are_the_tokens(rows):
    s = values_of(rows, RunFacts(2))
    if s["output_tok_s"] is not None:
        assert s["output_tok_s"] * s["duration_s"] == pytest.approx(s["output_tokens"])
        assert s["total_tok_s"] == pytest.approx(s["input_tok_s"] + s["output_tok_s"])
        assert s["request_rate_s"] * s["duration_s"] == pytest.approx(s["completed"])


@settings(max_examples=40)
@given(request_rows())
def test_first_token_and_gaps_make_up_the_time_to_the_last_token(rows):
    for row in rows:
        if len(row.chunks) >= 2 and row.output_tokens - row.chunks[0][1] > 0:
            rest = row.output_tokens - row.chunks[0][1]
            assert row.ttft_s + row.tpot_s * rest == pytest.approx(row.chunks[-1][0] - row.submitted_s, abs=1e-9)
        assert row.tpot_s is None or row.output_tokens >= 2


@settings(max_examples=40)
@given(request_rows(), st.integers(1, 4))
def test_a_percentile_lies_between_the_extremes_and_grows(rows, concurrency):
    s = values_of(rows, RunFacts(concurrency))
    for name in ("ttft", "tpot", "itl_chunk", "e2e"):
        if s[f"{name}_mean_ms"] is not None:
            order = [s[f"{name}_{p}_ms"] for p in ("min", "median", "p75", "p90", "p95", "p99", "max")]
            assert all(a <= b * (1 + 1e-12) + 1e-9 for a, b in pairwise(order))


def row(index: int, submitted: float, first: float, last: float, tokens: int) -> RequestRow:
    """A completed request with evenly spread tokens of one chunk each."""
    gap = (last - first) / (tokens - 1) if tokens > 1 else 0.0
    chunks = tuple((first + i * gap, 1) for i in range(tokens))
    return RequestRow(
        index, "completed", 10, tokens, submitted_s=submitted, ended_s=last, chunks=chunks, input_tokens=10,
        output_tokens=tokens,
    )  # fmt: skip


def test_worked_example():
    """Two at a time, four requests of 1 + 10 tokens: TTFT 1 s, then a token a second."""
    rows = [row(i, start, start + 1, start + 11, 11) for i, start in enumerate((0.0, 0.0, 11.0, 11.0))]
    s = values_of(rows, RunFacts(2, gpus=4))
    assert s["ttft_mean_ms"] == 1000 and s["tpot_mean_ms"] == 1000 and s["output_tok_s_user"] == 1
    assert s["duration_s"] == 22 and s["output_tok_s"] == 2 and s["output_tok_s_gpu"] == 0.5
    assert s["mean_in_flight"] == 2
    # the window runs from 1 s (both have begun) to 11 s (the last are submitted): 10 tokens of each of the first two
    assert s["steady_s"] == 10 and s["steady_output_tok_s"] == 2


def test_a_run_without_a_second_round_has_no_steady_window():
    s = summarise([row(i, 0.0, 1.0, 2.0, 2) for i in range(3)], RunFacts(4))
    assert s.values["steady_output_tok_s"] is None and "ramp and tail" in s.undefined["steady_s"]


def test_goodput_counts_a_one_token_answer_neither_way_under_a_tpot_limit():
    rows = [row(0, 0, 1, 1, 1), row(1, 0, 1, 2, 11), row(2, 0, 1, 21, 11)]
    rows.append(RequestRow(3, "failed", 10, 1, submitted_s=0.0, ended_s=1.0, error_group="timeout"))
    s = values_of(rows, RunFacts(4, Limits(tpot_ms=500.0)))
    assert (s["goodput_met"], s["goodput_missed"], s["goodput_undefined"]) == (1, 2, 1)
    assert s["goodput_share"] == pytest.approx(1 / 3)
