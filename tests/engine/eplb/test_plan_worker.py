"""The planning process: what it answers to a job, and that noise alone never moves an expert."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_engine.eplb.plan_process import PlanJob, PlanProcess
from deepinfer_engine.eplb.report import Economics
from deepinfer_engine.errors import ArtefactError, NotReadyError


def job(counts: np.ndarray, slots: np.ndarray, moe_ms: float = 10.0) -> PlanJob:
    economics = Economics(expert_bytes=1_000_000, link_gb_s=50.0, moe_ms=moe_ms, horizon_steps=1000)
    return PlanJob(counts, counts[:, 0].sum(axis=1), slots, 0, 1, "c" * 64, "w" * 64, economics, 0.5)


@pytest.fixture(scope="module")
def process():
    planner = PlanProcess()
    yield planner
    planner.stop()
    planner.release()


def test_a_skewed_load_is_moved_and_judged_on_steps_the_plan_has_not_seen(process: PlanProcess):
    slots = np.arange(8).reshape(1, 4, 2)
    counts = np.tile(np.array([40, 40, 1, 1, 30, 30, 2, 2]), (20, 1, 1))
    answer = process.plan(job(counts, slots))
    assert answer.action == "use" and answer.before == pytest.approx(80 / 36.5)
    assert answer.after == pytest.approx(41 / 36.5), "40 + 1 is the best pair with 40"
    assert sorted(answer.slot_LRS.reshape(-1).tolist()) == list(range(8)) and len(answer.gain_L) == 1
    counts[16:] = np.roll(counts[16:], 1, axis=2)  # in the newest fifth that plan would put 40 and 40 together
    turned = process.plan(job(counts, slots))
    assert turned.action == "keep" and (turned.slot_LRS == slots).all()
    assert turned.before == pytest.approx(42 / 36.5) and turned.after == pytest.approx(80 / 36.5)


def test_noise_moves_nothing(process: PlanProcess):
    rng = np.random.default_rng(0)
    slots = np.arange(16).reshape(1, 8, 2)
    counts = rng.poisson(4, (40, 1, 16))
    answer = process.plan(job(counts, slots, moe_ms=1e-3))
    assert answer.action == "keep" and (answer.slot_LRS == slots).all() and "keep the old plan" in answer.sentence


def test_a_job_that_cannot_be_planned_is_refused_and_the_process_goes_on(process: PlanProcess):
    counts = np.ones((12, 1, 8), np.int64)
    with pytest.raises(ArtefactError, match="not a legal plan"):
        process.plan(job(counts, np.zeros((1, 4, 2), np.int64)))
    assert process.plan(job(counts, np.arange(8).reshape(1, 4, 2))).action == "keep"


def test_a_stopped_planner_starts_no_process():
    planner = PlanProcess()
    planner.stop()
    with pytest.raises(NotReadyError, match="stopped"):
        planner.plan(job(np.ones((12, 1, 8), np.int64), np.arange(8).reshape(1, 4, 2)))
