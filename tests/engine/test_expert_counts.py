"""Expert counts of a running engine against a recount of every routed id; the balance against the planner's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.eplb.record import BalanceMeter, CountChunk, LoadRecord
from deepinfer_engine.eplb.score import layer_balance
from deepinfer_engine.errors import UsageError
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.types import Request, SamplingParams
from tests.tiny_model import write_tiny_model

BASE = (
    "sched.max_context_tokens=512",
    "cache.hbm_tokens_per_rank=2048",
    "sched.max_rows_per_rank=6",
    "sched.prefill_chunk_tokens=160",
    "numerics.mode=float",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_engine(model: Path, *sets: str, record: bool = True) -> Engine:
    chosen = dict(text.split("=", 1) for text in (*BASE, *sets))
    profile = load_profile("cpu-nano", [f"{key}={value}" for key, value in chosen.items()]).profile
    return Engine.open(profile, model, device="cpu", record_experts=record, lane=ThreadLane())


def watched(engine: Engine) -> list[tuple[int, np.ndarray]]:
    """Fills with (tokens, counts [L, E]) of every step, counted one routed id at a time."""
    seen: list[tuple[int, np.ndarray]] = []
    forward = engine.runner.model.forward
    layers, experts = engine.config.num_hidden_layers, engine.config.n_routed_experts

    def spy(batch, kv, ops, mesh, **named):
        counts = np.zeros((layers, experts), np.int64)

        def probe(name, layer, value):
            if name == "experts":
                for expert in value.flatten().tolist():
                    counts[layer, expert] += 1

        out = forward(batch, kv, ops, mesh, probe, **named)
        seen.append((sum(r.count for r in batch.rows), counts))
        return out

    engine.runner.model.forward = spy  # pyright: ignore[reportAttributeAccessIssue]
    return seen


def work(n: int) -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(5 + i, 131 + i)), SamplingParams(max_tokens=132 if i < 2 else 9, ignore_eos=True))
        for i in range(n)
    ]


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_counts_equal_a_recount_of_every_routed_id(model: Path, overlap: str):
    # a bounded decoder stops most prompt rows at the cut: they count in the encoder half only
    with open_engine(model, f"sched.overlap={overlap}", "replay.decoder=bounded") as engine:
        seen = watched(engine)
        engine.generate(work(3))
        stats = engine.expert_stats()
    assert stats.steps == len(seen) == engine.steps
    assert stats.tokens_M is not None and stats.tokens_M.tolist() == [tokens for tokens, _ in seen]
    assert (stats.counts_MLE == np.stack([counts for _, counts in seen])).all()
    per_layer = stats.counts_MLE.sum(axis=2)
    assert (per_layer[:, 0] == stats.tokens_M * 2).all(), "every token of a step chooses two experts"
    assert per_layer[:, 5].sum() < per_layer[:, 0].sum(), "no prompt row was trimmed"
    assert stats.layer_kinds[2] == "full" and stats.top_k == 2 and stats.config_digest == engine.config.digest


def test_what_is_computed_again_after_a_preemption_counts_again(model: Path):
    # two sequences start a third block at position 256, and there are four blocks
    with open_engine(model) as engine:
        engine.generate(work(2))
        calm = engine.expert_stats()
    with open_engine(model, "cache.hbm_tokens_per_rank=512", "sched.overlap=true") as engine:
        seen = watched(engine)
        done = engine.generate(work(2))
        tight = engine.expert_stats()
    assert sum(c.usage.preemptions for c in done) == 1
    assert (tight.counts_MLE == np.stack([counts for _, counts in seen])).all()
    assert calm.tokens_M is not None and tight.tokens_M is not None
    again = int(tight.tokens_M.sum() - calm.tokens_M.sum())
    assert again >= 255, "the preempted sequence had computed that many tokens"


def test_an_engine_that_does_not_record_says_so(model: Path):
    with open_engine(model, record=False) as engine:
        assert engine.balance() is None
        with pytest.raises(UsageError, match="does not record"):
            engine.expert_stats()
    with open_engine(model) as engine, pytest.raises(UsageError, match="no step has run"):
        engine.expert_stats()


def test_the_balance_of_a_run_is_the_planners_balance_of_its_counts(model: Path):
    with open_engine(model, "parallel.ep=4", "parallel.redundant_experts_per_rank=1") as engine:
        engine.generate(work(3))
        stats, got = engine.expert_stats(), engine.balance(now=True)
        slots = engine.runner.mesh.placement.slots_LRS
    want = [
        layer_balance(stats.counts_MLE[:, k], slots[k], np.bincount(slots[k].reshape(-1), minlength=8))
        for k in range(stats.layers)
    ]
    assert got is not None and got.steps == stats.steps and all(w is not None for w in want)
    assert got.moe_lb == pytest.approx(np.mean([w.moe_lb for w in want if w]), rel=1e-12)
    assert got.moe_lb_step == pytest.approx(np.mean([w.moe_lb_step for w in want if w]), rel=1e-12)
    assert got.moe_lb is not None and got.moe_lb > 1.05
    assert got.load_LR.mean(axis=1) == pytest.approx(np.ones(stats.layers))


def test_each_step_is_judged_under_the_slots_it_ran_with():
    # two experts on two ranks: all tokens choose expert 0, which has one replica, then two
    meter = BalanceMeter(np.array([[[0], [1]]]), 2)
    meter.use(1, np.array([[[0, 1], [0, 1]]]))
    counts = np.array([[[6, 0]], [[6, 0]], [[6, 0]]], np.int64)
    meter.add(CountChunk(counts, np.array([6, 6, 6]), np.array([0, 1, 1])))
    got = meter.balance()
    assert got.moe_lb == pytest.approx((6 + 3 + 3) / 9) and got.moe_lb_step == pytest.approx((2 + 1 + 1) / 3)
    assert got.load_LR.tolist() == [[pytest.approx(12 / 9), pytest.approx(6 / 9)]]


@pytest.mark.parametrize("keep", [1, 3, 7, 100])
def test_a_record_keeps_exactly_the_newest_steps(keep: int):
    rng = np.random.default_rng(keep)
    every = rng.integers(0, 9, (40, 2, 3))
    record = LoadRecord(keep)
    at = 0
    while at < 40:
        size = min(int(rng.integers(1, 6)), 40 - at)
        part = slice(at, at + size)
        record.add(CountChunk(every[part], np.arange(40)[part], np.zeros(size, np.int64)))
        at += size
    counts, tokens = record.newest()
    assert record.steps == 40 and record.kept == min(keep, 40)
    assert (counts == every[-keep:]).all() and tokens.tolist() == list(range(40))[-keep:]
    assert (record.newest(1)[0] == every[-1:]).all()
