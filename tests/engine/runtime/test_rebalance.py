"""Live rebalancing over a tiny model: slots always hold what the table says, and no token changes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.eplb.plan_process import PlanAnswer, PlanJob
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.types import Request, SamplingParams
from tests.tiny_model import write_tiny_model

BASE = (
    "sched.max_context_tokens=512",
    "cache.hbm_tokens_per_rank=2048",
    "sched.max_rows_per_rank=6",
    "numerics.mode=fast",
    "parallel.ep=4",
    "parallel.redundant_experts_per_rank=1",
    "eplb.window_steps=8",
)
LIVE = "eplb.period_steps=40"
EXACT = ("numerics.mode=float", "numerics.batch_invariant=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_engine(model: Path, *sets: str) -> Engine:
    chosen = dict(text.split("=", 1) for text in (*BASE, *sets))
    profile = load_profile("cpu-nano", [f"{key}={value}" for key, value in chosen.items()]).profile
    return Engine.open(profile, model, device="cpu", lane=ThreadLane())


def work() -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(5 + i, 25 + i)), SamplingParams(max_tokens=28, ignore_eos=True)) for i in range(3)
    ]


@pytest.fixture(scope="module")
def want(model: Path) -> list[tuple[int, ...]]:
    """Tokens of ``work`` with experts that stay where they are."""
    with open_engine(model, *EXACT) as engine:
        return [c.token_ids for c in engine.generate(work())]


def wait_for_plans(engine: Engine) -> None:
    """Steps of this model are over long before a plan is there: let the step after a trigger wait for it."""
    rebalancer = engine._rebalancer
    assert rebalancer is not None
    before = rebalancer.before_step

    def waiting(step: int) -> None:
        before(step)
        deadline = time.monotonic() + 60
        while rebalancer._state == "plan" and not rebalancer._planned.done() and time.monotonic() < deadline:
            time.sleep(0.001)

    rebalancer.before_step = waiting  # pyright: ignore[reportAttributeAccessIssue]


def weights_by_expert(engine: Engine) -> list[dict[int, torch.Tensor]]:
    """Per layer: expert → its weights, from the slots that the table names; every replica must hold the same."""
    out = []
    placement = engine.runner.mesh.table.placement
    for layer, row in zip(engine.runner.model.weights.layers, placement.slot_expert, strict=True):
        bank = layer.ffn.bank
        held: dict[int, torch.Tensor] = {}
        for slot, expert in enumerate(row.tolist()):
            value = torch.cat([w.dense[slot].flatten() for w in (bank.w1, bank.w3, bank.w2)])
            assert expert not in held or torch.equal(held[expert], value), "replicas differ"
            held[expert] = value.clone()
        out.append(held)
    return out


def logits(engine: Engine) -> torch.Tensor:
    """Of a fixed batch over the engine's model and its current slots, in a cache of its own."""
    runner = engine.runner
    kv = KVState(runner.kv.layout, runner.ops, slots=2, blocks=2)
    texts = [list(range(7, 40)), list(range(100, 120))]
    rows = [RowInput(t, 0, len(t), i + 1, [i + 1], logits="all") for i, t in enumerate(texts)]
    batch = build_batch(rows, kv.layout, ngram=engine.config.engram_max_ngram_size)
    return runner.model.forward(batch, kv, runner.ops, runner.mesh).logits


@pytest.mark.parametrize(("overlap", "limit"), [("false", 1 << 26), ("true", 10_000)])
def test_switching_under_load_changes_no_token_and_no_bit_of_a_fixed_batch(
    model: Path, want: list[tuple[int, ...]], overlap: str, limit: int
):
    sets = (LIVE, *EXACT, f"sched.overlap={overlap}", f"eplb.max_bytes_per_step={limit}")
    with open_engine(model, *sets) as engine:
        wait_for_plans(engine)
        assert engine._rebalancer is not None
        engine._rebalancer._look_steps = 1000  # what is moved stays: the bits are to be those of other slots
        before, experts, slots = logits(engine), weights_by_expert(engine), engine.runner.mesh.placement.slots_LRS
        assert [c.token_ids for c in engine.generate(work())] == want
        engine.balance(now=True)
        done, after = engine.rebalances[0], engine.runner.mesh.placement.slots_LRS
        assert (after != slots).any()
        assert torch.equal(logits(engine), before)
        for was, now in zip(experts, weights_by_expert(engine), strict=True):
            assert all(torch.equal(was[e], now[e]) for e in range(8))
    assert done.step == 8 and done.experts > 0 and done.bytes == done.experts * 3 * 64 * 32 * 4
    assert 0 < done.max_step_bytes <= limit
    assert done.predicted_before is not None and done.predicted_after is not None
    assert done.predicted_after < done.predicted_before
    if overlap == "true":  # 24,576 bytes of an expert take three steps of 10,000
        assert done.max_step_bytes == limit and done.move_steps > 6
    else:
        assert done.outcome == "moved" and done.move_steps == 1 and done.move_ms > 0 and done.plan_ms > 0
        assert done.observed_before is not None and done.observed_after is not None


def test_a_plan_that_does_not_pay_is_not_executed(model: Path):
    with open_engine(model, LIVE) as engine:
        wait_for_plans(engine)
        assert engine._rebalancer is not None
        engine._rebalancer._step_ms = lambda: 0.0  # no time to save
        slots = engine.runner.mesh.placement.slots_LRS
        engine.generate(work())
        assert (engine.runner.mesh.placement.slots_LRS == slots).all()
        (entry,) = engine.rebalances
    assert entry.outcome == "kept" and entry.experts == 0
    assert "keep the old plan" in entry.reason and "< cost" in entry.reason


def test_a_plan_that_the_next_steps_refute_is_taken_back_and_another_follows_soon(model: Path, want):
    with open_engine(model, "eplb.period_steps=100", "eplb.window_steps=16", *EXACT) as engine:
        wait_for_plans(engine)
        rebalancer = engine._rebalancer
        assert rebalancer is not None
        rebalancer._step_ms = lambda: 1e6  # whatever is better pays
        planned = rebalancer._process.plan

        def refuted(job: PlanJob) -> PlanAnswer:
            """The opposite of a plan: the ranks in the order of their experts' loads, the hottest together."""
            rebalancer._process.plan = planned  # pyright: ignore[reportAttributeAccessIssue]
            load_LE = job.counts_MLE.sum(axis=0)
            slots = []
            for load_E in load_LE:
                spare = [int(load_E.argmin())] * (job.slot_LRS[0].size - len(load_E))
                slots.append(np.array([*np.argsort(-load_E), *spare]).reshape(job.slot_LRS[0].shape))
            return PlanAnswer(np.stack(slots), "use", "for the test", 2.0, 1.0, (1.0,) * len(slots), 0.0, "")

        rebalancer._process.plan = refuted  # pyright: ignore[reportAttributeAccessIssue]
        before = logits(engine)
        assert [c.token_ids for c in engine.generate(work())] == want
        engine.balance(now=True)
        bad, back, *after = engine.rebalances
        assert torch.equal(logits(engine), before)
    assert (bad.step, bad.outcome, bad.back) == (16, "moved", False)
    # four steps under the plan are enough to see it, four more and the next plan is made from both
    assert bad.done_step is not None and back.done_step is not None
    assert (back.step, back.outcome, back.back) == (bad.done_step + 4, "moved", True)
    assert back.predicted_before is not None and back.predicted_after is not None
    assert back.predicted_before > back.predicted_after and "back to an earlier placement" in back.reason
    assert back.observed_before == pytest.approx(back.predicted_before)
    assert after and after[0].step == back.done_step + 4 and not after[0].back


def test_processes_that_work_out_other_moves_change_nothing_and_say_so(model: Path):
    with open_engine(model, "eplb.period_steps=16") as engine:
        wait_for_plans(engine)
        assert engine._rebalancer is not None
        site = engine._rebalancer._site
        # a second process whose slots are not what they are here
        engine._rebalancer._tell = lambda name, order: [site.prepare(order).digest, "0" * 64]
        slots = engine.runner.mesh.placement.slots_LRS
        engine.generate(work())
        assert (engine.runner.mesh.placement.slots_LRS == slots).all()
        entry = engine.rebalances[0]
    assert entry.outcome == "refused" and "moves differ" in entry.reason and "000000000000… on rank 1" in entry.reason


def test_a_planner_that_dies_leaves_the_placement_and_is_started_again(model: Path):
    with open_engine(model, "eplb.period_steps=16") as engine:
        rebalancer = engine._rebalancer
        assert rebalancer is not None
        wait_for_plans(engine)
        begin = rebalancer._process.plan

        def dying(job):
            rebalancer._process.plan = begin  # pyright: ignore[reportAttributeAccessIssue]
            rebalancer._process._running().kill()
            return begin(job)

        rebalancer._process.plan = dying  # pyright: ignore[reportAttributeAccessIssue]
        engine.generate(work())
        first, second = engine.rebalances[:2]
    assert first.outcome == "failed" and "ended unexpectedly" in first.reason
    assert (second.step, second.outcome) == (24, "moved")


def test_closing_while_a_plan_is_made_ends_its_process(model: Path):
    with open_engine(model, LIVE) as engine:
        engine.submit(work()[0])
        while not engine.rebalances:
            engine.step()
        rebalancer = engine._rebalancer
    assert rebalancer is not None and rebalancer._process._process is None
    assert engine.rebalances[0].outcome == "unfinished" and "the run ended" in engine.rebalances[0].reason
