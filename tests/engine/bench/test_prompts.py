"""Loads of real texts: which lines are sent, how they are rendered, what is refused, and that the counts add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_engine.bench.endpoint_target import EndpointTarget
from deepinfer_engine.bench.engine_target import EngineTarget
from deepinfer_engine.bench.prompts import with_tokens
from deepinfer_engine.bench.recipe import load_recipe
from deepinfer_engine.bench.run import run_bench
from deepinfer_engine.bench.workload import load_workload
from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.errors import ArtefactError, CapacityError, UsageError
from deepinfer_engine.remote.client import Endpoint
from deepinfer_engine.tokens.protocol import ChatCodec
from tests.engine.bench.scripted_stream import Turn, serving

LOAD = "{kind: prompts, file: p.jsonl, output_tokens: 48}"
SHUFFLED = "{kind: prompts, file: p.jsonl, output_tokens: 48, shuffle: true}"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


FIVE = [
    {"id": "sum", "messages": user("17+25?")},
    {"id": 2, "prompt": "31+4?", "thinking": False},
    {"id": "ids", "token_ids": [0, 300, 301, 302]},
    {"custom_id": "b", "body": {"messages": user("5+6?"), "max_tokens": 3}},
    {"custom_id": "c", "body": {"prompt": "one two three"}},
]


@pytest.fixture
def prompts(tmp_path: Path):
    """Writes p.jsonl, where the recipe of a test looks for it."""

    def write(*lines: Any) -> None:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "p.jsonl").write_text("".join(f"{text}\n" for text in texts))

    return write


def keys(requests) -> list[Any]:
    return [r.text.key for r in requests]


def test_lines_go_round_in_order_and_the_warmup_takes_the_next(workload_of, prompts):
    prompts(*FIVE)
    w = workload_of("requests=7", "warmup.requests=2", load=LOAD)
    assert keys(w.requests) == ["sum", 2, "ids", "b", "c", "sum", 2] and keys(w.warmup) == ["ids", "b"]
    assert [r.output_tokens for r in w.requests[:5]] == [48, 48, 48, 3, 48]
    assert len(workload_of("requests=null", load=LOAD).requests) == 5
    assert not w.sampling.ignore_eos and w.recipe["sampling"]["ignore_eos"] is False


def test_a_seed_shuffles_and_the_contents_are_part_of_the_digest(workload_of, prompts):
    prompts(*({"id": i, "prompt": f"{i}+1?"} for i in range(40)))
    one, same, other = (workload_of("requests=40", f"seed={s}", load=SHUFFLED) for s in (1, 1, 2))
    assert keys(one.requests) == keys(same.requests) != keys(other.requests)
    assert sorted(keys(one.requests)) == sorted(keys(other.requests)) == list(range(40))
    assert keys(one.requests) != list(range(40))
    prompts(*({"id": i, "prompt": f"{i}+2?"} for i in range(40)))
    changed = workload_of("requests=40", "seed=1", load=SHUFFLED)
    assert changed.digest != one.digest and keys(changed.requests) == keys(one.requests)


def test_the_new_key_leaves_the_digests_of_older_workloads_alone():
    """What rows of earlier versions were recorded with."""
    assert load_recipe("cpu-nano-quick").digest == "8649ded2861b6656bb1d555e71826bb6f9fa9bc1ba1645c9e32c5f746e6cd44d"


def test_texts_are_rendered_as_run_renders_them_and_share_what_they_share(workload_of, prompts):
    prompts(*FIVE, {"id": "again", "messages": user("17+25?")}, {"id": "near", "messages": user("17+26?")})
    directory = model_dir("nano")
    config = load_model_config(directory)
    w = with_tokens(workload_of("requests=null", load=LOAD), directory, config)
    codec = ChatCodec(directory, config)
    first = codec.render_request({"model": "m", "messages": user("17+25?")}).token_ids
    quiet = codec.render_request({"model": "m", "messages": user("31+4?"), "thinking": {"type": "disabled"}}).token_ids
    assert w.requests[0].ids == first and w.requests[1].ids == quiet
    assert w.requests[2].ids == (0, 300, 301, 302) and w.requests[2].input_tokens == 4
    assert w.requests[4].ids == (config.bos_token_id, *codec.tokenizer.encode_text("one two three"))
    assert (w.requests[0].seen_tokens, w.requests[5].seen_tokens) == (0, len(first))
    near, brute = w.requests[6].ids, 0
    assert near is not None
    for earlier in w.requests[:6]:
        assert earlier.ids is not None
        same = [a == b for a, b in zip(near, earlier.ids, strict=False)]
        brute = max(brute, (*same, False).index(False))
    assert w.requests[6].seen_tokens == brute > 0
    assert w.seen_rate is not None and 0 < w.seen_rate < 1


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (('{"id": 1, "prompt": "a"}', "{"), "line 2: "),
        (({"id": 1, "prompt": ""}, {"id": 2}), "line 2: expected exactly one of prompt, messages, token_ids"),
        (({"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}), "line 2: id 1 is already on line 1"),
        (({"id": 1, "promt": "a"},), "line 1: unknown key promt; nearest is 'prompt'"),
        (({"id": 1, "prompt": "a", "n": 2},), "line 1: n is 2"),
        (({"id": 1, "prompt": "a", "ignore_eos": True},), "line 1: ignore_eos is true"),
        ((), "no requests in it"),
    ],
)
def test_bad_lines_are_refused_by_number(workload_of, prompts, lines, part):
    prompts(*lines)
    with pytest.raises(UsageError, match=part):
        workload_of(load=LOAD)


def test_what_only_a_tokenizer_sees_is_refused_by_number_too(workload_of, prompts):
    prompts({"id": 1, "prompt": "a"}, {"id": 2, "token_ids": [5, 10**6]}, {"id": 3, "messages": [{"role": "nobody"}]})
    directory = model_dir("nano")
    with pytest.raises(UsageError, match=r"(?s)line 2: token 1000000 is outside.*line 3: "):
        with_tokens(workload_of(load=LOAD), directory, load_model_config(directory))


@pytest.mark.parametrize(
    ("sets", "load", "part"),
    [
        (("sampling.ignore_eos=true",), LOAD, "sampling.ignore_eos is true"),
        (("load.input_tokens=4",), LOAD, "load.input_tokens goes with kind fixed, random, agent"),
        ((), "{kind: prompts, file: p.jsonl}", "load.output_tokens is needed by kind prompts"),
        ((), "{kind: prompts, output_tokens: 4}", "load.file is needed by kind prompts"),
        ((), "{kind: fixed, input_tokens: 4, output_tokens: 4, shuffle: true}", "load.shuffle goes with kind prompts"),
        (("arrivals.mode=trace", "arrivals.concurrency=null"), LOAD, "arrivals.mode trace needs a trace"),
    ],
)
def test_keys_that_do_not_fit_are_refused(workload_of, prompts, sets, load, part):
    prompts(*FIVE)
    with pytest.raises(UsageError, match=part):
        workload_of(*sets, load=load)


def test_a_missing_file_is_no_usage_error(workload_of):
    with pytest.raises(ArtefactError, match=r"p\.jsonl: no such file"):
        workload_of(load=LOAD)


# ------------------------------------------------------------------- our engine


@pytest.fixture(scope="module")
def target():
    sets = ("sched.max_rows_per_rank=4", "cache.hbm_tokens_per_rank=8192", "sched.max_context_tokens=512")
    opened = EngineTarget.open("cpu-nano", sets)
    yield opened
    opened.close()


def test_answers_end_where_the_model_ends_them_and_the_counts_add_up(workload_of, prompts, target):
    prompts(*FIVE)
    result = run_bench(workload_of("requests=12", "warmup.requests=1", load=LOAD), target)
    s: dict[str, Any] = dict(result.summary)
    assert s["completed"] + s["failed"] + s["cancelled"] + s["unsent"] == s["requests"] == 12 == s["completed"]
    assert s["input_tokens"] == sum(r.planned_input_tokens for r in result.requests if r.planned_input_tokens)
    assert s["output_tokens"] == sum(n or 0 for r in result.requests for _, n in r.chunks)
    by_reason = {r.index: (r.finish_reason, r.output_tokens) for r in result.requests}
    assert by_reason[3] == by_reason[8] == ("length", 3)
    ended = [n for reason, n in by_reason.values() if reason == "stop"]
    assert ended and all(n is not None and n < 48 for n in ended)
    assert s["shorter_than_planned"] == len(ended)
    assert by_reason[0] == by_reason[5] == by_reason[10] == ("stop", by_reason[0][1])  # greedy: the same answer
    assert 0 < s["prompt_seen_share"] < 1
    assert s["cache_found_tokens"] + s["cache_replayed_tokens"] + s["cache_computed_tokens"] == s["input_tokens"]


def test_what_cannot_run_is_refused_before_anything_is_sent(workload_of, prompts, target):
    prompts({"id": 1, "prompt": "one two three four " * 400})
    with pytest.raises(CapacityError, match="its longest request needs"):
        run_bench(workload_of(load=LOAD), target)
    prompts(*FIVE)
    with pytest.raises(UsageError, match="a salt cannot change them"):
        run_bench(workload_of(load=LOAD), target, salt=3)


# ------------------------------------------------------------------- an endpoint


def measure(server, workload, **options):
    target = EndpointTarget(Endpoint(server.url, "scripted", timeout_s=5.0), **options)
    try:
        return run_bench(workload, target)
    finally:
        target.close()


def test_conversations_reach_an_endpoint_as_they_are(workload_of, prompts):
    prompts(
        {"id": 1, "messages": [{"role": "system", "content": "s"}, *user("17+25?")], "stop": ["."], "top_p": 0.5},
        {"id": 2, "prompt": "31+4?", "thinking": False, "max_tokens": 9},
        {"custom_id": "3", "body": {"model": "scripted", "messages": user("5+6?"), "temperature": 0.25}},
    )
    turns = {0: Turn(tokens=5, finish="stop"), 1: Turn(tokens=9), 2: Turn(status=500), 3: Turn(tokens=0, finish="stop")}
    with serving(lambda n, body: turns[n]) as server:
        result = measure(server, workload_of("requests=4", "arrivals.concurrency=1", load=LOAD))
    assert all(path.endswith("/v1/chat/completions") for path in server.paths)
    one, two, three, four = server.bodies
    assert one["messages"] == [{"role": "system", "content": "s"}, *user("17+25?")] == four["messages"]
    assert (one["max_tokens"], one["stop"], one["top_p"], one["temperature"]) == (48, ["."], 0.5, 0.0)
    assert (two["messages"], two["max_tokens"]) == (user("31+4?"), 9)
    assert two["thinking"] == {"type": "disabled"} and "thinking" not in one
    assert three["temperature"] == 0.25
    assert not any("ignore_eos" in body or "seed" in body for body in server.bodies)
    s: dict[str, Any] = dict(result.summary)
    assert (s["requests"], s["completed"], s["failed"], s["output_tokens"]) == (4, 3, 1, 14)
    assert result.failures == {"http_500": 1} and s["shorter_than_planned"] == 2
    assert s["prompt_seen_share"] is None and "not known" in result.undefined["prompt_seen_share"]
    assert all(r.planned_input_tokens is None for r in result.requests)


def test_raw_texts_and_ids_go_to_completions(workload_of, prompts):
    prompts({"id": 1, "prompt": "once upon"}, {"id": 2, "token_ids": [5, 6, 7]})
    with serving(lambda n, body: Turn()) as server:
        measure(server, workload_of("requests=2", "arrivals.concurrency=1", load=LOAD), interface="completions")
    assert [b["prompt"] for b in server.bodies] == ["once upon", [5, 6, 7]]
    assert all("messages" not in b for b in server.bodies)


@pytest.mark.parametrize(
    ("line", "interface", "part"),
    [
        ({"id": 1, "token_ids": [5]}, "chat", "line 1: token_ids cannot be sent as a conversation"),
        ({"custom_id": "1", "body": {"prompt": "a"}}, "chat", "line 1: prompt cannot be sent as a conversation"),
        ({"id": 1, "messages": user("a")}, "completions", "line 1: is a conversation"),
        ({"id": 1, "prompt": "a", "regex": "b"}, "chat", "line 1: json_schema, regex and ebnf are our engine's"),
        ({"custom_id": "1", "body": {"model": "x", "messages": user("a")}}, "chat", "line 1: model is 'x'"),
    ],
)
def test_what_an_interface_cannot_carry_is_refused_unsent(workload_of, prompts, line, interface, part):
    prompts(line)
    with serving(lambda n, body: Turn()) as server:
        with pytest.raises(UsageError, match=part):
            measure(server, workload_of(load=LOAD), interface=interface)
        assert not server.bodies


def test_the_shipped_texts_fit_the_embedded_model():
    directory = model_dir("nano")
    w = with_tokens(load_workload("nano-tasks"), directory, load_model_config(directory))
    assert len(w.requests) == 288 and w.longest() < 600
    assert len({r.ids for r in w.requests}) > 270
