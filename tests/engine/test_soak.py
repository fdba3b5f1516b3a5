"""Many requests of every kind, arriving, failing and aborted at random, end with nothing held and nothing lost."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.types import Completion, GrammarSpec, Request, SamplingParams, TokenEvent
from tests.tiny_model import write_tiny_model

SETS = (
    "sched.max_context_tokens=512",
    "sched.max_rows_per_rank=6",
    "sched.prefill_chunk_tokens=128",
    "parallel.ep=2",
    "parallel.dp=2",
    "cache.hbm_tokens_per_rank=1024",
    "numerics.mode=float",
)
GRAMMARS = (
    GrammarSpec("regex", "[a-z]{1,6}"),
    GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3})),
    GrammarSpec("ebnf", 'root ::= "yes" | "no"'),
    GrammarSpec("ebnf", "root ::= missing"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def request(rng: random.Random, i: int, grammars: bool) -> Request:
    """One of: short or long, greedy or sampled, with stops, penalties, choices, a grammar; one in ten is bad."""
    length = rng.choice((1, 5, 5, 40, 40, 130, 200))
    ids = tuple(rng.randrange(3, 370) for _ in range(length))
    settings: dict = {"max_tokens": rng.choice((1, 4, 8, 16)), "temperature": rng.choice((0.0, 0.7, 1.5))}
    settings |= rng.choice(
        (
            {},
            {"stop": ("e", "10")},
            {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
            {"n": 3, "temperature": 1.0},
            {"logprobs": True, "top_logprobs": 3},
            {"banned_token_ids": (5, 6), "logit_bias": ((7, 3.0),)},
            {"ignore_eos": True},
        )
    )
    bad = rng.random()
    if bad < 0.04:
        ids = (*ids, 10**6)
    elif bad < 0.07:
        settings["max_tokens"] = 4000
    elif bad < 0.10:
        ids = ()
    grammar = None
    if grammars and "ignore_eos" not in settings and rng.random() < 0.15:
        grammar = rng.choice(GRAMMARS)
    return Request(f"q{i}", ids, SamplingParams(**settings), grammar=grammar)


def soak(model: Path, count: int, overlap: str, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    grammars = importlib.util.find_spec("xgrammar") is not None
    seen: Counter[str] = Counter()
    shown: Counter[tuple[str, int]] = Counter()
    expected: dict[str, int] = {}
    finished: Counter[str] = Counter()

    def note(done: Completion) -> None:
        seen[done.finish_reason] += 1
        finished[done.request_id] += 1
        assert done.finish_reason == "abort" or shown[done.request_id, done.index] == len(done.token_ids)

    profile = load_profile("cpu-nano", [*SETS, f"sched.overlap={overlap}"]).profile
    with Engine.open(profile, model, device="cpu", lane=ThreadLane()) as engine:
        submitted = 0
        while submitted < count or engine.busy:
            for _ in range(rng.randrange(4) if submitted < count else 0):
                one = request(rng, submitted, grammars)
                submitted += 1
                try:
                    engine.submit(one)
                    expected[one.id] = one.sampling.n
                except (UsageError, CapacityError):
                    seen["refused"] += 1
            if expected and rng.random() < 0.06:
                for done in engine.abort(rng.choice(list(expected))):
                    note(done)
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    shown[event.request_id, event.index] += 1
                else:
                    note(event)
            for pool in (*engine.scheduler.slots, *engine.scheduler.blocks):
                pool.check()
        engine.scheduler.verify()
        assert all(p.used == 0 for p in (*engine.scheduler.slots, *engine.scheduler.blocks)), "leaked"
        assert finished == expected, "every choice ends once"
        assert not engine._tracks and not engine._started and not engine._live and not engine._compiling
        assert not engine.runner.sampler._counts
    assert sum(expected.values()) + seen["refused"] == sum(seen.values())
    return seen


def test_150_requests_leave_nothing_behind(model: Path):
    seen = soak(model, 150, "true", seed=1)
    assert min(seen[r] for r in ("stop", "length", "abort", "refused")) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", ["true", "false"])
def test_2000_requests_leave_nothing_behind(model: Path, overlap: str):
    seen = soak(model, 2000, overlap, seed=2)
    assert min(seen[r] for r in ("stop", "length", "abort", "error", "refused")) > 0
