"""The client against a scripted server: everything that goes wrong is counted once, under its own name."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from deepinfer_engine.bench.endpoint_target import EndpointTarget
from deepinfer_engine.bench.run import run_bench
from deepinfer_engine.bench.writers import inferencex_document, request_objects, vllm_document
from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.remote.client import Endpoint
from tests.engine.bench.scripted_stream import Turn, event, serving


def measure(server, workload, **options):
    target = EndpointTarget(Endpoint(server.url, "scripted", timeout_s=options.pop("timeout_s", 5.0)), **options)
    try:
        return run_bench(workload, target)
    finally:
        target.close()


def test_counts_and_times_of_whole_answers(workload_of):
    turn = Turn(tokens=4, wait_s=0.05, gap_s=0.02, cached_tokens=3)
    with serving(lambda n, body: turn) as server:
        result = measure(server, workload_of())
    s: dict[str, Any] = dict(result.summary)
    assert (s["requests"], s["completed"], s["failed"]) == (6, 6, 0)
    assert (s["input_tokens"], s["output_tokens"]) == (42, 24)
    assert s["ttft_min_ms"] >= 50 and s["itl_chunk_min_ms"] >= 10
    assert s["tpot_mean_ms"] == pytest.approx(s["itl_chunk_mean_ms"])  # as many gaps in every answer
    assert s["tokens_per_chunk"] == 1 and s["itl_token_mean_ms"] == pytest.approx(s["itl_chunk_mean_ms"])
    assert s["cache_hit_share"] == pytest.approx(3 / 7)
    assert server.most_in_flight == 2


def test_bodies_ask_for_the_planned_lengths_and_for_usage(workload_of):
    with serving(lambda n, body: Turn()) as server:
        measure(server, workload_of(), extra={"top_k": 3, "ignore_eos": None})
    for body in server.bodies:
        assert body["max_tokens"] == 4 and body["stream"] and body["stream_options"] == {"include_usage": True}
        assert len(body["messages"][0]["content"].split()) == 8
        assert body["top_k"] == 3 and "ignore_eos" not in body
    assert len({b["messages"][0]["content"] for b in server.bodies}) == 6


def test_completions_send_token_ids_of_the_range(workload_of):
    with serving(lambda n, body: Turn()) as server:
        result = measure(server, workload_of(), interface="completions", id_range=(50, 60))
    assert result.summary["completed"] == 6
    assert all(path.endswith("/v1/completions") for path in server.paths)
    assert all(len(b["prompt"]) == 8 and set(b["prompt"]) <= set(range(50, 60)) for b in server.bodies)


FAILURES = {
    "http_500": Turn(status=500),
    "http_429": Turn(status=429),
    "stream_cut": Turn(cut_after=2),
    "not_a_stream": Turn(content_type="application/json"),
    "malformed_stream": Turn(raw=b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}\n\n'),
    "error_in_stream": Turn(raw=event({"error": {"message": "out of memory"}})),
    "empty_answer": Turn(tokens=0),
    "timeout": Turn(wait_s=20.0),
}


def test_every_failure_is_counted_under_its_name(workload_of):
    kinds = list(FAILURES)
    script = lambda n, body: FAILURES[kinds[n]] if n < len(kinds) else Turn()  # noqa: E731
    with serving(script) as server:
        result = measure(server, workload_of("requests=10", "arrivals.concurrency=1"), timeout_s=1.5)
    s: dict[str, Any] = dict(result.summary)
    assert result.failures == dict.fromkeys(kinds, 1)
    assert (s["completed"], s["failed"], s["cancelled"], s["unsent"]) == (2, 8, 0, 0)
    assert s["lost_output_tokens"] == 2  # of the stream that was cut
    assert all(r.error for r in result.requests if r.status == "failed")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\n\n",
        b"data: [1, 2]\n\n",
        b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        b'data: {"choices": [{}, {}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": 3}]}\n\n',
        b"data: " + b"[" * 20_000 + b"\n\n",
        b"data: NaN\n\n",
    ],
)
def test_hostile_streams_fail_alone(workload_of, raw):
    with serving(lambda n, body: Turn(raw=raw) if n == 1 else Turn()) as server:
        result = measure(server, workload_of("requests=3", "arrivals.concurrency=1"))
    assert result.failures == {"malformed_stream": 1} and result.summary["completed"] == 2


def test_zero_completions_are_undefined_everywhere_and_strict_json(workload_of):
    with serving(lambda n, body: Turn(status=503)) as server:
        result = measure(server, workload_of())
    s: dict[str, Any] = dict(result.summary)
    assert (s["completed"], s["failed"]) == (0, 6)
    for key in ("ttft_mean_ms", "tpot_p99_ms", "output_tok_s", "request_rate_s", "output_tok_s_user"):
        assert s[key] is None and result.undefined[key] == "no request completed"
    for document in (vllm_document(result, detailed=True), inferencex_document(result), *request_objects(result)):
        json.dumps(document, allow_nan=False)


def test_one_token_answers_have_no_tpot_and_no_interactivity(workload_of):
    with serving(lambda n, body: Turn(tokens=1)) as server:
        result = measure(server, workload_of(load="{kind: fixed, input_tokens: 8, output_tokens: 1}"))
    s: dict[str, Any] = dict(result.summary)
    assert s["completed"] == 6 and s["ttft_mean_ms"] > 0
    assert s["tpot_mean_ms"] is None and s["output_tok_s_user"] is None and s["itl_chunk_mean_ms"] is None
    assert inferencex_document(result)["mean_intvty"] is None
    assert "two tokens" in result.undefined["tpot_mean_ms"]


def test_several_tokens_in_a_chunk_are_told_apart_from_the_chunk(workload_of):
    turn = Turn(tokens=9, per_chunk=3, gap_s=0.03, running=True)
    with serving(lambda n, body: turn) as server:
        result = measure(server, workload_of(load="{kind: fixed, input_tokens: 8, output_tokens: 9}"))
    s: dict[str, Any] = dict(result.summary)
    assert s["tokens_per_chunk"] == 3
    assert s["itl_token_mean_ms"] == pytest.approx(s["itl_chunk_mean_ms"] / 3)
    assert s["tpot_mean_ms"] == pytest.approx(s["itl_chunk_mean_ms"] / 3)  # six tokens came after the first chunk


def test_chunks_of_unknown_size_leave_the_token_gap_undefined(workload_of):
    with serving(lambda n, body: Turn(tokens=9, per_chunk=3)) as server:
        result = measure(server, workload_of(load="{kind: fixed, input_tokens: 8, output_tokens: 9}"))
    assert result.summary["itl_token_mean_ms"] is None and result.summary["itl_chunk_mean_ms"] is not None
    assert "how many tokens a chunk holds" in result.undefined["itl_token_mean_ms"]


def test_without_usage_tokens_are_unknown_not_guessed(workload_of):
    with serving(lambda n, body: Turn(usage=False)) as server:
        result = measure(server, workload_of())
    s: dict[str, Any] = dict(result.summary)
    assert s["completed"] == 6
    assert s["output_tokens"] is None and s["input_tokens"] is None and s["output_tok_s"] is None
    assert s["tpot_mean_ms"] is None


def test_an_early_end_is_complete_and_counted_as_shorter(workload_of):
    with serving(lambda n, body: Turn(tokens=2, finish="stop")) as server:
        result = measure(server, workload_of("sampling.ignore_eos=false"))
    assert result.summary["completed"] == 6 and result.summary["shorter_than_planned"] == 6
    assert "ignore_eos" not in server.bodies[0]


def test_nobody_listening_ends_the_run(workload_of):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = EndpointTarget(Endpoint(f"http://127.0.0.1:{port}/v1", "m"))
    with pytest.raises(NotReadyError, match="cannot connect"):
        run_bench(workload_of(), target)


def test_a_wrong_key_ends_the_run_but_not_after_an_answer(workload_of):
    with serving(lambda n, body: Turn(status=401)) as server, pytest.raises(NotReadyError, match="401"):
        measure(server, workload_of())
    with serving(lambda n, body: Turn(status=401) if n == 3 else Turn()) as server:
        result = measure(server, workload_of("arrivals.concurrency=1"))
    assert result.failures == {"http_401": 1}


def test_warm_fills_with_the_prompts_and_cold_warmup_does_not(workload_of):
    with serving(lambda n, body: Turn()) as server:
        measure(server, workload_of("cache=warm", "requests=3"))
    texts = [b["messages"][0]["content"] for b in server.bodies]
    assert sorted(texts[:3]) == sorted(texts[3:]) and [b["max_tokens"] for b in server.bodies] == [1, 1, 1, 4, 4, 4]
    with serving(lambda n, body: Turn()) as server:
        measure(server, workload_of("warmup.requests=3", "requests=3"))
    texts = [b["messages"][0]["content"] for b in server.bodies]
    assert len(texts) == 6 and not set(texts[:3]) & set(texts[3:])


def test_two_runs_share_no_prompt_unless_the_salt_is_given(workload_of):
    with serving(lambda n, body: Turn()) as server:
        target = EndpointTarget(Endpoint(server.url, "scripted"))
        first, second = run_bench(workload_of(), target), run_bench(workload_of(), target)
        assert first.meta.salt != second.meta.salt
        run_bench(workload_of(), target, salt=first.meta.salt)
    texts = [b["messages"][0]["content"] for b in server.bodies]
    assert not set(texts[:6]) & set(texts[6:12]) and set(texts[:6]) == set(texts[12:])


def test_interrupt_keeps_what_ended_and_marks_the_rest(workload_of):
    import os
    import signal

    hang = Turn(wait_s=20.0)
    with serving(lambda n, body: Turn() if n < 2 else hang) as server:

        def interrupt() -> None:
            while len(server.bodies) < 3:
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        began = time.monotonic()
        result = measure(server, workload_of("arrivals.concurrency=1"))
    s: dict[str, Any] = dict(result.summary)
    assert result.status == "interrupted" and time.monotonic() - began < 10
    assert (s["completed"], s["cancelled"], s["unsent"], s["failed"]) == (2, 1, 3, 0)


def test_open_loop_does_not_wait_for_answers(workload_of):
    sets = ("arrivals.mode=open", "arrivals.rate_per_s=200", "arrivals.concurrency=null")

    def script(number, body):
        if number == 5:
            server.released.set()  # the last one lets all of them answer
        return Turn(wait_s=20.0)

    with serving(script) as server:
        result = measure(server, workload_of(*sets), timeout_s=30.0)
    assert server.most_in_flight == 6 and result.summary["max_submit_delay_ms"] is not None
