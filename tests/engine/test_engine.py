"""The façade over a tiny model: loops that agree, ends of answers, failures of single requests, no leaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine, lane_for
from deepinfer_engine.errors import UsageError
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.types import Completion, Request, SamplingParams, TokenEvent
from tests.tiny_model import write_tiny_model

BASE = (
    "sched.max_context_tokens=1024",
    "cache.hbm_tokens_per_rank=4096",
    "sched.max_rows_per_rank=6",
    "sched.prefill_chunk_tokens=96",
    "numerics.mode=float",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_engine(model: Path, *sets: str) -> Engine:
    chosen = dict(text.split("=", 1) for text in (*BASE, *sets))
    profile = load_profile("cpu-nano", [f"{key}={value}" for key, value in chosen.items()]).profile
    return Engine.open(profile, model, device="cpu", lane=ThreadLane())


@pytest.fixture(scope="module")
def engine(model: Path):
    with open_engine(model) as opened:
        yield opened


def requests(n: int, seed: int = 0, **sampling) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(3, 370) for _ in range(rng.randrange(1, 130))),
            SamplingParams(**{"max_tokens": rng.randrange(1, 24), "ignore_eos": True, "seed": i} | sampling),
        )
        for i in range(n)
    ]


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in done]


def idle(engine: Engine) -> bool:
    engine.scheduler.verify()
    pools = (*engine.scheduler.slots, *engine.scheduler.blocks)
    return not engine.busy and all(p.used == 0 for p in pools)


def test_overlap_draws_the_tokens_of_the_plain_loop(model: Path, engine: Engine):
    work = [*requests(6), *[Request(f"s{r.id}", r.token_ids, r.sampling) for r in requests(6, 1, temperature=0.8)]]
    plain = engine.generate(work)
    with open_engine(model, "sched.overlap=true") as overlapped:
        assert tokens(overlapped.generate(work)) == tokens(plain)
        assert idle(overlapped)
    assert idle(engine)
    assert all(c.finish_reason == "length" and c.usage.generated == len(c.token_ids) for c in plain)


@pytest.mark.parametrize(("processes", "device", "pipelined"), [(1, "cpu", False), (2, "cpu", True), (1, "cuda", True)])
def test_steps_are_planned_ahead_only_where_something_runs_beside(processes: int, device: str, pipelined: bool):
    profile = load_profile("cpu-nano", ["sched.overlap=true"]).profile
    assert lane_for(profile, device, processes=processes).beside == pipelined


def test_one_process_on_a_cpu_gives_its_results_at_once(model: Path):
    profile = load_profile("cpu-nano", [*BASE, "sched.overlap=true"]).profile
    with Engine.open(profile, model, device="cpu") as engine:
        engine.submit(Request("a", (5, 6, 7), SamplingParams(max_tokens=2, ignore_eos=True)))
        assert not engine.overlap
        assert [type(event) for event in engine.step()] == [TokenEvent]


def test_small_cache_preempts_and_changes_no_token(model: Path, engine: Engine):
    # two sequences start a third block at position 256, and there are four blocks
    work = [
        Request(f"p{i}", tuple(range(5 + i, 131 + i)), SamplingParams(max_tokens=132, ignore_eos=True))
        for i in range(2)
    ]
    calm = engine.generate(work)
    sets = ("cache.hbm_tokens_per_rank=512", "sched.max_context_tokens=512", "sched.overlap=true")
    with open_engine(model, *sets) as tight:
        got = tight.generate(work)
        assert [c.usage.preemptions for c in got] == [0, 1] and tight.scheduler.preemptions == 1
        assert tokens(got) == tokens(calm)
        assert idle(tight)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_stream_shows_what_completions_hold(model: Path, overlap: str):
    with open_engine(model, f"sched.overlap={overlap}") as engine:
        for request in requests(8, 3, logprobs=True, top_logprobs=2):
            engine.submit(request)
        shown: dict[str, list[TokenEvent]] = {}
        for event in engine.stream():
            if isinstance(event, TokenEvent):
                shown.setdefault(event.request_id, []).append(event)
                continue
            mine = shown[event.request_id]
            assert tuple(e.token_id for e in mine) == event.token_ids
            assert tuple(e.logprob for e in mine) == event.logprobs
            assert all(e.logprob and e.logprob.token_id == e.token_id and len(e.logprob.top) == 2 for e in mine)
            assert all(e.logprob and e.logprob.top[0][0] == e.token_id for e in mine), (
                "greedy draws the most likely token"
            )
        assert idle(engine)


def test_abort_in_every_state_is_idempotent(model: Path):
    with open_engine(model, "sched.overlap=true", "sched.max_rows_per_rank=2") as engine:
        for request in requests(6, 4, max_tokens=30):
            engine.submit(request)
        assert engine.abort("r5")[0].token_ids == ()  # never ran
        assert engine.abort("r5") == []
        for _ in range(6):
            engine.step()
        running = engine.abort("r0")
        assert running[0].finish_reason == "abort" and running[0].usage.generated > 0
        assert engine.abort("r0") == [] and engine.abort("nobody") == []
        rest = {e.request_id for e in engine.stream() if isinstance(e, Completion)}
        assert rest == {"r1", "r2", "r3", "r4"}
        assert idle(engine)


def test_choices_share_a_prompt_and_differ(engine: Engine):
    prompt = tuple(range(10, 40))
    sampling = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    done = engine.generate([Request("n", prompt, sampling)])
    assert [c.index for c in done] == [0, 1, 2]
    assert len(set(tokens(done))) == 3
    alone = SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    assert engine.generate([Request("one", prompt, alone)])[0].token_ids == done[0].token_ids


def test_stop_string_across_tokens_ends_the_answer(engine: Engine):
    prompt = tuple(range(50, 70))
    free = engine.generate([Request("free", prompt, SamplingParams(max_tokens=24, ignore_eos=True))])[0]
    pieces = [engine.tokenizer.token_bytes(t) for t in free.token_ids]
    at = next(i for i in range(8, 20) if all(len(p) > 1 and p.isascii() for p in pieces[i : i + 2]))
    stop = (pieces[at][1:] + pieces[at + 1][:1]).decode()
    assert stop not in b"".join(pieces[:at]).decode(errors="replace")
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop, "never seen"))
    engine.submit(Request("stopped", prompt, sampling))
    events = list(engine.stream())
    done = events[-1]
    assert isinstance(done, Completion)
    assert done.finish_reason == "stop" and done.stop_reason == stop
    assert done.token_ids == free.token_ids[:at]
    shown = [e for e in events[:-1] if isinstance(e, TokenEvent)]
    assert tuple(e.token_id for e in shown) == done.token_ids, "the start of the stop is never shown"
    assert done.tail == pieces[at][:1].decode()
    assert done.text == engine.tokenizer.decode(done.token_ids) + done.tail
    assert idle(engine)


def test_stop_string_inside_the_reasoning_is_text(engine: Engine):
    think = engine.tokenizer.control_id(spelling.THINK_START)
    prompt = (*range(50, 69), think)
    free = engine.generate([Request("free", prompt, SamplingParams(max_tokens=12, ignore_eos=True))])[0]
    stop = next(t for t in map(engine.tokenizer.token_bytes, free.token_ids[3:]) if t.isascii() and t).decode()
    kept = SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,))
    assert engine.generate([Request("kept", prompt, kept)])[0].token_ids == free.token_ids
    everywhere = SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,), stop_scope="all")
    assert engine.generate([Request("cut", prompt, everywhere)])[0].finish_reason == "stop"


def test_stop_token_and_bans_and_allowed(engine: Engine):
    prompt = tuple(range(80, 100))
    free = engine.generate([Request("f", prompt, SamplingParams(max_tokens=10, ignore_eos=True))])[0].token_ids
    stopped = engine.generate([Request("s", prompt, SamplingParams(max_tokens=10, stop_token_ids=(free[4],)))])[0]
    at = free.index(free[4])
    assert stopped.token_ids == free[:at] and stopped.stop_reason == free[4]
    banned = SamplingParams(max_tokens=10, ignore_eos=True, banned_token_ids=tuple(set(free)))
    assert not set(engine.generate([Request("b", prompt, banned)])[0].token_ids) & set(free)
    allowed = SamplingParams(max_tokens=10, allowed_token_ids=(40, 41, 42), temperature=1.0, seed=1)
    assert set(engine.generate([Request("a", prompt, allowed)])[0].token_ids) <= {40, 41, 42}


def test_eos_ends_and_is_not_part_of_the_answer(engine: Engine):
    eos = engine.config.eos_token_id
    sampling = SamplingParams(max_tokens=10, logit_bias=((eos, 100.0),))
    done = engine.generate([Request("e", (20, 21), sampling)])[0]
    assert (done.finish_reason, done.token_ids, done.usage.generated) == ("stop", (), 1)
    ignoring = SamplingParams(max_tokens=3, logit_bias=((eos, 100.0),), ignore_eos=True)
    assert engine.generate([Request("i", (20, 21), ignoring)])[0].token_ids == (eos,) * 3


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_bad_logits_end_that_request_only(model: Path, overlap: str):
    with open_engine(model, f"sched.overlap={overlap}") as engine:
        work = requests(5, 6, max_tokens=8)
        good = tokens(engine.generate(work))
        forward, calls = engine.runner.model.forward, []

        def poisoned(batch, *args, **named):
            out = forward(batch, *args, **named)
            calls.append(1)
            if len(calls) == 4 and len(out.logits) > 2:
                with torch.inference_mode():
                    out.logits[1] = torch.nan
            return out

        engine.runner.model.forward = poisoned
        done = engine.generate(work)
        bad = [c for c in done if c.finish_reason == "error"]
        assert len(bad) == 1 and bad[0].error == "non_finite_logits"
        for clean, c in zip(good, done, strict=True):
            assert c.token_ids == (clean if c is not bad[0] else clean[: len(c.token_ids)])
        assert idle(engine)


def test_a_failing_step_reaches_the_caller(model: Path):
    engine = open_engine(model, "sched.overlap=true")

    def broken(*args, **named):
        raise RuntimeError("device lost")

    engine.runner.model.forward = broken
    engine.submit(requests(1)[0])
    with pytest.raises(RuntimeError, match="device lost"):
        list(engine.stream())


def test_refusals_name_the_request(engine: Engine):
    with pytest.raises(UsageError, match=r"'x'.*token 9999 at position 1"):
        engine.submit(Request("x", (5, 9999)))
    with pytest.raises(UsageError, match=r"'x'.*True"):
        engine.submit(Request("x", (True,)))
    with pytest.raises(UsageError, match="image tokens"):
        engine.submit(Request("x", (engine.tokenizer.control_id(spelling.IMAGE),)))
    with pytest.raises(UsageError, match="stop_token_ids names token 9999"):
        engine.submit(Request("x", (5,), SamplingParams(stop_token_ids=(9999,))))
    with pytest.raises(UsageError, match="1000 prompt"):
        engine.submit(Request("x", tuple([5] * 1000), SamplingParams(max_tokens=100)))
    engine.submit(Request("x", (5,), SamplingParams(max_tokens=1)))
    with pytest.raises(UsageError, match="already in flight"):
        engine.submit(Request("x", (5,)))
    list(engine.stream())
    assert idle(engine)


def test_virtual_ranks_share_the_work_and_change_no_token(model: Path, engine: Engine):
    work = requests(12, 8, max_tokens=6)
    with open_engine(model, "parallel.ep=4", "parallel.dp=4", "sched.max_rows_per_rank=2") as spread:
        ranks = set()
        for request in work:
            spread.submit(request)
        done = {}
        while spread.busy:
            for event in spread.step():
                if isinstance(event, Completion):
                    done[event.request_id] = event.token_ids
            ranks |= {s.dp_rank for s in spread.scheduler.running.values()}
        assert ranks == {0, 1, 2, 3}
    assert [done[r.id] for r in work] == tokens(engine.generate(work))
