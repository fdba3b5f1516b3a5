"""Several processes against one: the same answers, and an end with a name when one of them dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.rendezvous import World, spawn
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import PeerLost
from deepinfer_engine.types import Completion, Request, SamplingParams
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_engine(model: Path, world: World | None, *sets: str) -> Engine:
    base = ["sched.max_rows_per_rank=3", "sched.max_context_tokens=256", "sched.prefill_chunk_tokens=160"]
    profile = load_profile("cpu-nano", [*base, *sets]).profile
    return Engine.open(profile, model, device="cpu", world=world)


def requests(count: int = 9) -> list[Request]:
    """Prompts of 3 to 99 tokens, greedy, seeded and penalised, all with log-probabilities."""
    kinds = [
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=True, top_logprobs=20),
        SamplingParams(max_tokens=11, temperature=0.9, seed=5, n=2, logprobs=True, top_logprobs=20),
        SamplingParams(max_tokens=6, frequency_penalty=0.5, logprobs=True, top_logprobs=20, ignore_eos=True),
    ]
    return [
        Request(f"r{i}", tuple((7 * i + 13 * j) % 360 + 4 for j in range(3 + 26 * i)), kinds[i % 3])
        for i in range(count)
    ]


def same(found: list[Completion], expected: list[Completion], tolerance: float) -> None:
    """Equal tokens and reasons, log-probabilities of all alternatives within ``tolerance``."""
    assert [(c.request_id, c.index, c.token_ids, c.finish_reason) for c in found] == [
        (c.request_id, c.index, c.token_ids, c.finish_reason) for c in expected
    ]
    for a, b in zip(found, expected, strict=True):
        assert a.usage == b.usage
        for p, q in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert abs(p.logprob - q.logprob) <= tolerance
            assert max(abs(v - w) for (_, v), (_, w) in zip(p.top, q.top, strict=True)) <= tolerance


def test_two_ranks_give_the_bits_of_one_under_batch_invariance(model):
    sets = ["numerics.batch_invariant=true", "sched.overlap=true", "cache.prefix=true", "replay.decoder=bounded"]
    sets += ["replay.encoder=bounded", "cache.swa_pool_gib_per_rank=0.01", "parallel.dp=2", "parallel.ep=4"]
    with open_engine(model, None, *sets) as alone:
        expected = alone.generate(requests()) + alone.generate(requests())
    assert any(c.usage.cached for c in expected), "the second round must hit"
    world = spawn(2, load_s=90, step_s=60)
    with open_engine(model, world, *sets, "parallel.redundant_experts_per_rank=1") as engine:
        assert len(engine.runner.mesh.local_slots) == 6  # two of four ranks of 2 + 1 slots
        found = engine.generate(requests()) + engine.generate(requests())
        load = engine.balance(now=True)
    same(found, expected, 0.0)
    assert load is not None


def test_four_ranks_answer_as_one_and_a_killed_one_is_named(model):
    sets = ["parallel.ep=4", "parallel.dp=4", "numerics.mode=float"]
    with open_engine(model, None, *sets) as alone:
        expected = alone.generate(requests())
    world = spawn(4, load_s=90, step_s=60)
    engine = open_engine(model, world, *sets)
    try:
        same(engine.generate(requests()), expected, 1e-4)
        assert world.children is not None
        victim = world.children.processes[2]
        for request in requests():
            engine.submit(request)
        engine.step()
        os.kill(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(
            PeerLost, match=rf"^rank 3 \(process {victim.pid} on 127\.0\.0\.1\) was lost: killed by SIGKILL$"
        ):
            while engine.busy:
                engine.step()
        assert time.monotonic() - began < 10
    finally:
        engine.close()
    assert all(p.poll() is not None for p in world.children.processes)
