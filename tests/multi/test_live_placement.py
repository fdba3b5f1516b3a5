"""Experts move between two processes while they answer: the bits of one process whose experts stay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.rendezvous import World, spawn
from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Request, SamplingParams
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(240)

SETS = (
    "sched.max_rows_per_rank=3",
    "sched.max_context_tokens=256",
    "parallel.ep=4",
    "parallel.dp=2",
    "parallel.redundant_experts_per_rank=1",
    "numerics.batch_invariant=true",
    "eplb.window_steps=8",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_engine(model: Path, world: World | None, *sets: str) -> Engine:
    return Engine.open(load_profile("cpu-nano", [*SETS, *sets]).profile, model, device="cpu", world=world)


def answers(engine: Engine) -> list[tuple]:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=5)
    work = [Request(f"r{i}", tuple(range(5 + i, 25 + i)), sampling) for i in range(4)]
    return [(c.token_ids, c.logprobs) for c in engine.generate(work)]


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_experts_that_move_between_processes_change_no_bit(model: Path, overlap: str):
    with open_engine(model, None) as alone:
        expected = answers(alone)
    # 2,000 bytes a step: an expert takes several, 3,264 bytes packed or 12,288 dense, so pieces cross steps
    live = ("eplb.period_steps=100", "eplb.max_bytes_per_step=2000", f"sched.overlap={overlap}")
    with open_engine(model, spawn(2, load_s=90, step_s=60), *live) as engine:
        rebalancer = engine._rebalancer
        assert rebalancer is not None
        rebalancer._look_steps = 1000  # what is moved stays
        before, built_in = rebalancer.before_step, engine.runner.mesh.placement.slots_LRS

        def waiting(step: int) -> None:
            before(step)
            deadline = time.monotonic() + 60
            while rebalancer._state == "plan" and not rebalancer._planned.done() and time.monotonic() < deadline:
                time.sleep(0.001)

        rebalancer.before_step = waiting  # pyright: ignore[reportAttributeAccessIssue]
        assert answers(engine) == expected
        while rebalancer._state == "move":  # the run is shorter than the moves
            rebalancer.before_step(engine.steps)
        assert answers(engine) == expected
        engine.balance(now=True)
        done, slots = engine.rebalances[0], engine.runner.mesh.placement.slots_LRS
        packed = engine.runner.ops.chosen["moe_experts"].backend == "cpu"
    assert done.outcome == "moved" and done.max_step_bytes == 2000 and done.move_steps > 2
    assert done.bytes == done.experts * 3 * 64 * 32 * (17 if packed else 64) // 32
    ours, was = slots[:, :2].reshape(6, -1), built_in[:, :2].reshape(6, -1)
    assert any(set(a) - set(b) for a, b in zip(ours.tolist(), was.tolist(), strict=True)), "nothing crossed"
