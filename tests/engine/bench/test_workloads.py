"""Workloads: the seed decides everything, prompts share what they say, arrivals and the schedule keep their laws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.bench.recipe import load_recipe
from deepinfer_engine.bench.schedule import Schedule
from deepinfer_engine.bench.workload import PlannedRequest, Segment, Workload, arrival_times, load_workload
from deepinfer_engine.errors import ArtefactError, UsageError

IDS = np.arange(100, 200)


def shared_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def prompts(workload: Workload, **options) -> list[tuple[int, ...]]:
    return [workload.token_ids(r, np.arange(50_000), **options) for r in workload.requests]


def test_a_seed_decides_lengths_contents_and_times(workload_of):
    load = "{kind: random, input_tokens: 100, output_tokens: 20, spread: 0.5}"
    sets = ("arrivals.mode=open", "arrivals.rate_per_s=3", "requests=20")
    a, b, c = (workload_of(*sets, f"seed={s}", load=load) for s in (1, 1, 2))
    assert a.requests == b.requests and prompts(a) == prompts(b)
    assert a.requests != c.requests and prompts(a) != prompts(c)
    assert {50, 150} >= {min(a.input_tokens) // 50 * 50} and a.input_tokens.max() <= 150 and a.output_tokens.min() >= 10
    assert prompts(a) != prompts(a, salt=1)


def test_prompts_share_the_prefix_and_nothing_more(workload_of):
    w = workload_of(load="{kind: fixed, input_tokens: 40, output_tokens: 4, shared_prefix_tokens: 30}")
    first, second, third = prompts(w)[:3]
    assert shared_prefix(first, second) == shared_prefix(second, third) == 30
    assert [r.seen_tokens for r in w.requests] == [0, 30, 30, 30, 30, 30]


@pytest.mark.parametrize("name", ["agent-77k", "agent-small"])
def test_agent_sessions_have_the_asked_mean_and_hit_rate(name):
    w = load_workload(name)
    load = load_recipe(name).recipe.load
    assert load.turns and load.hit_rate
    sessions = len(w.requests) // load.turns
    assert w.input_tokens.mean() == pytest.approx(load.input_tokens, rel=0.03)
    # the first system prompt is new to everybody
    seen = sum(r.seen_tokens for r in w.requests) + load.shared_prefix_tokens
    assert seen / w.input_tokens.sum() == pytest.approx(load.hit_rate, rel=0.01)
    assert sum(r.after is None for r in w.requests) == sessions
    for r in w.requests:
        if r.after is not None:
            before = w.requests[r.after]
            assert r.input_tokens > before.input_tokens + before.output_tokens - 1
            assert r.seen_tokens == before.input_tokens


def test_a_turn_contains_the_turn_before_token_by_token():
    w = load_workload("agent-small")
    one, two = (w.token_ids(w.requests[i], IDS) for i in (3, 4))
    assert two[: len(one)] == one


def test_impossible_sessions_are_refused_with_the_numbers(workload_of):
    for sets, part in ((("load.turns=3",), "adds"), (("load.turns=200",), "first prompt would have")):
        with pytest.raises(UsageError, match=part):
            load_workload("agent-77k", sets)


def test_mooncake_blocks_become_shared_tokens(workload_of, tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1300, "output_length": 6, "hash_ids": [1, 2, 9]},
        {"timestamp": 900, "input_length": 9000, "output_length": 6, "hash_ids": [1]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = "{kind: mooncake, file: t.jsonl, max_input_tokens: 2000}"
    w = workload_of(
        "requests=null", "arrivals.mode=trace", "arrivals.concurrency=null", "arrivals.speed=2.0", load=load
    )
    assert (len(w.requests), w.skipped) == (2, 1)
    a, b = prompts(w)
    assert (len(a), len(b)) == (1100, 1300) and shared_prefix(a, b) == 1024 == w.requests[1].seen_tokens
    assert [r.arrival_s for r in w.requests] == [0, 0.25]
    scaled = workload_of("requests=null", load="{kind: mooncake, file: t.jsonl, scale: 0.1}")
    assert shared_prefix(*prompts(scaled)[:2]) == 2 * 51


def test_files_of_lengths_by_column(workload_of, tmp_path):
    (tmp_path / "l.csv").write_text("a,b,c\n10,2,x\n30,4,x\n20,3,x\n")
    load = "{kind: file, file: l.csv, input_column: a, output_column: b, max_input_tokens: 25}"
    w = workload_of("requests=null", load=load)
    assert w.input_tokens.tolist() == [10, 20] and w.output_tokens.tolist() == [2, 3] and w.skipped == 1
    with pytest.raises(UsageError, match="holds 2 that fit"):
        workload_of("requests=3", load=load)
    with pytest.raises(ArtefactError, match=r"l\.csv:2: has no column 'input_tokens'; it has a, b, c"):
        workload_of(load="{kind: file, file: l.csv}")
    (tmp_path / "l.jsonl").write_text('{"input_tokens": 0, "output_tokens": 2}\n')
    with pytest.raises(ArtefactError, match="input_tokens is 0"):
        workload_of(load="{kind: file, file: l.jsonl}")
    with pytest.raises(ArtefactError, match="no such file"):
        workload_of(load="{kind: azure, file: none.csv}")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_the_burstiness(burstiness):
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness, 3))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def planned(index: int, arrival: float | None, after: int | None) -> PlannedRequest:
    return PlannedRequest(index, 1, 1, (Segment(1, 0, 1),), arrival, after, 0.5 if after is not None else 0.0)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 12), st.none() | st.integers(1, 4), st.booleans())
def test_the_schedule_sends_everything_once_within_its_bounds(data, count, limit, closed):
    requests, free = [], []
    for i in range(count):
        after = data.draw(st.sampled_from([None, *free])) if free else None
        if after is not None:
            free.remove(after)
        arrival = None if closed or after is not None else data.draw(st.floats(0, 5))
        requests.append(planned(i, arrival, after))
        free.append(i)
    schedule, now, started, ended = Schedule(requests, limit), 0.0, {}, {}
    for _ in range(10 * count + 50):
        for r in schedule.due(now):
            assert r.index not in started and now >= (r.arrival_s or 0.0)
            assert r.after is None or now >= ended[r.after] + r.pause_s
            started[r.index] = now
        assert len(schedule.flying) <= (limit or count)
        if schedule.over:
            break
        if schedule.flying and data.draw(st.booleans()):
            index = data.draw(st.sampled_from(sorted(schedule.flying)))
            schedule.ended(index, now)
            ended[index] = now
        else:
            wait = schedule.wait_s(now)
            now += 0.1 if wait is None else max(wait, 0.01)
    else:
        for index in sorted(schedule.flying):
            schedule.ended(index, now)
    assert schedule.flying.isdisjoint(schedule.unsent)
    assert len(started) + len(schedule.unsent) == count


def test_closed_sessions_finish_before_new_ones_begin():
    requests = [planned(0, None, None), planned(1, None, 0), planned(2, None, None), planned(3, None, 2)]
    schedule = Schedule([PlannedRequest(**{**vars(r), "pause_s": 0.0}) for r in requests], 1)
    order = []
    for now in range(4):
        (r,) = schedule.due(float(now))
        order.append(r.index)
        schedule.ended(r.index, float(now))
    assert order == [0, 1, 2, 3]
