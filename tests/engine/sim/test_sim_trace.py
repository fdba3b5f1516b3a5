"""Traces: both formats, what is refused with file and line, and cached tokens against a slow count."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.sim.trace import (
    Trace,
    TraceRequest,
    assumed_hits,
    describe,
    hit_cap,
    prefix_hits,
    read_trace,
    synthetic_agents,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(**changes):
    return json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1], **changes}) + "\n"


def test_azure_csv(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(AZURE + "2023-11-16 18:17:03.9799600,4808,10\n\n2023-11-16 18:17:05.4799600,7,1\n")
    trace = read_trace(path)
    assert [(round(r.arrival_s, 3), r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 4808, 10), (1.5, 7, 1),
    ]  # fmt: skip
    assert not trace.has_prefixes
    assert len(read_trace(path, limit=1).requests) == 1


def test_mooncake_lines_are_sorted_by_arrival(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(mooncake(timestamp=5000) + "\n" + mooncake(timestamp=2000, hash_ids=[7]))
    trace = read_trace(path)
    assert [(r.arrival_s, r.blocks) for r in trace.requests] == [(0.0, (7,)), (3.0, (0, 1))]
    assert trace.has_prefixes


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("t.csv", "time,in,out\n", "t.csv:1: columns are"),
        ("t.csv", AZURE, "holds no requests"),
        ("t.csv", AZURE + "2023-11-16 18:17:03,5\n", "t.csv:2: 2 columns, expected 3"),
        ("t.csv", AZURE + "yesterday,5,5\n", "t.csv:2: 'yesterday' is not a time"),
        ("t.csv", AZURE + "2023-11-16 18:17:03,5,-1\n", "length '-1', expected an integer of 1 or more"),
        ("t.csv", AZURE + "2023-11-16 18:17:03,0,1\n", "length 0, expected"),
        ("t.jsonl", "", "holds no requests"),
        ("t.jsonl", mooncake() + "{\n", "t.jsonl:2: not JSON"),
        ("t.jsonl", "[1]\n", "expected an object with timestamp"),
        ("t.jsonl", mooncake(timestamp="soon"), "timestamp is 'soon', expected milliseconds"),
        ("t.jsonl", mooncake(input_length=2.5), "length 2.5, expected an integer"),
        ("t.jsonl", mooncake(output_length=True), "length True, expected an integer"),
        ("t.jsonl", mooncake(hash_ids=["a"]), "hash_ids is not a list of integers"),
        ("t.jsonl", mooncake(hash_ids=[0, 1, 2]), "3 blocks of 512 for 1000 tokens"),
    ],
)
def test_broken_traces_are_refused_with_the_line(tmp_path, name, text, part):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ArtefactError) as caught:
        read_trace(path)
    assert part in caught.value.message and caught.value.exit_code == 4


def test_absent_binary_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(ArtefactError, match="no such file"):
        read_trace(tmp_path / "absent.csv")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtefactError, match="cannot be read"):
        read_trace(tmp_path / "b.jsonl")
    with pytest.raises(UsageError, match=r"Azure \.csv or a Mooncake \.jsonl"):
        read_trace(tmp_path / "t.parquet")


def test_scaling_moves_arrivals_only():
    trace = Trace("t", (TraceRequest(0, 5, 6), TraceRequest(10.0, 7, 8, (1,))), True)
    faster = trace.scaled(4)
    assert [r.arrival_s for r in faster.requests] == [0, 2.5] and faster.requests[1].blocks == (1,)
    for rate in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError):
            trace.scaled(rate)


# ----------------------------------------------------------------------- hits


@given(st.integers(1, 100_000))
def test_cap_leaves_window_and_rollback(tokens):
    cap = hit_cap(tokens, window=128, slack=6)
    assert cap % 128 == 0 and (cap == 0 or tokens - cap >= 134)
    assert tokens - cap - 128 < 134 or (cap == 0 and tokens < 262)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.lists(st.integers(0, 6), max_size=6)), min_size=1, max_size=12),
    st.sampled_from([math.inf, 10.0]),
)
def test_hits_are_the_contiguous_run_of_blocks_used_before(items, ttl):
    items = sorted(items, key=lambda i: i[0])
    requests = tuple(TraceRequest(at, max(1, 512 * len(ids)) + 200, 1, tuple(ids)) for at, ids in items)
    found = prefix_hits(Trace("t", requests, True), window=128, slack=6, ttl_s=ttl)
    for i, request in enumerate(requests):
        run = 0
        for block in request.blocks:
            uses = [r.arrival_s for r in requests[:i] if block in r.blocks]
            if not uses or request.arrival_s - max(uses) > ttl:
                break
            run += 1
        limit = hit_cap(request.input_tokens, window=128, slack=6)
        assert found[i] == min(run * 512, limit)


def test_last_block_of_a_prompt_may_be_shorter_than_a_block():
    request = TraceRequest(0, 700, 1, (1, 2))
    again = TraceRequest(1, 700, 1, (1, 2))
    hits = prefix_hits(Trace("t", (request, again), True), window=128, slack=6)
    assert hits.tolist() == [0, 512]  # cap of 700: (700 - 134) // 128 * 128


def test_assumed_hits_are_whole_blocks_under_the_cap():
    trace = Trace("t", (TraceRequest(0, 1000, 1), TraceRequest(0, 100, 1)), False)
    assert assumed_hits(trace, 0.5, window=128, slack=6).tolist() == [384, 0]
    assert assumed_hits(trace, 1.0, window=128, slack=6).tolist() == [768, 0]
    with pytest.raises(UsageError):
        assumed_hits(trace, 1.5, window=128, slack=6)


# -------------------------------------------------------------------- samples


def test_shared_mooncake_trace_has_the_hits_that_were_counted_elsewhere(shared_dir):
    trace = read_trace(shared_dir / "data" / "traces" / "mooncake_fast25" / "conversation_trace.jsonl")
    about = describe(trace.requests)
    assert about["requests"] == 12_031 and round(about["seconds"]) == pytest.approx(3537, abs=8)
    assert about["input_mean"] == pytest.approx(12_035, abs=1)
    hits = prefix_hits(trace, window=128, slack=6)
    share = hits.sum() / sum(r.input_tokens for r in trace.requests)
    assert share == pytest.approx(0.374, abs=0.002)  # 37.4 % of tokens with an unlimited cache


def test_shared_azure_traces_are_complete(shared_dir):
    for name, count, mean in (("code", 8819, 2048), ("conv", 19_366, 1155)):
        trace = read_trace(shared_dir / "data" / "traces" / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv")
        about = describe(trace.requests)
        assert (about["requests"], round(about["input_mean"])) == (count, mean)


# ------------------------------------------------------------------ synthetic


def test_synthetic_sessions_repeat_with_their_seed_and_hit_as_published():
    one, two, other = (synthetic_agents("agent-64k", requests=3000, sessions_per_s=0.5, seed=s) for s in (1, 1, 2))
    assert one == two and one != other and "synthetic" in one.name
    assert len(one.requests) == 3000
    assert max(r.input_tokens for r in one.requests) <= 65_536
    assert all(a.arrival_s <= b.arrival_s for a, b in zip(one.requests, one.requests[1:], strict=False))
    hits = prefix_hits(one, window=128, slack=6)
    share = hits.sum() / sum(r.input_tokens for r in one.requests)
    assert 0.95 < share < 0.99  # context / (context + append), less what does not fill a block
    assert np.mean([r.output_tokens for r in one.requests]) == pytest.approx(176, rel=0.1)


@pytest.mark.parametrize(("name", "rate"), [("agent-1k", 1.0), ("agent-32k", 0.0), ("agent-32k", math.inf)])
def test_unknown_synthetic_traces_are_refused(name, rate):
    with pytest.raises(UsageError):
        synthetic_agents(name, requests=10, sessions_per_s=rate, seed=0)
