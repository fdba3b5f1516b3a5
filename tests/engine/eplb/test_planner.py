"""The planning job: sizes filled in or refused, balance judged on unseen steps, and a verdict that can say no."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_engine.eplb import planner, policy, report
from deepinfer_engine.eplb.planner import Job, Sizes
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.errors import ArtefactError, UsageError


@pytest.fixture
def stats(decode) -> ExpertStats:
    return ExpertStats(decode(steps=240).copy(), (3, 4), ep=8, config_digest="cfg")


def test_statistics_alone_are_enough(stats):
    got = planner.run_job(Job(stats))
    r = got.report
    assert (r.shape["ranks"], r.shape["slots_per_rank"], r.shape["steps"], r.shape["held_out"]) == (8, 7, 192, 48)
    assert (
        got.plan.digests.config == "cfg"
        and got.plan.digests.stats == stats.window(0, 192).digest
        and got.plan.epoch == 0
    )
    assert got.plan.algorithm == policy.ALGORITHM and got.plan.layer_ids == (3, 4)
    train, held, before = r.windows["train"], r.windows["holdout"], r.windows["before"]
    assert train.moe_lb and held.moe_lb and before.moe_lb and train.moe_lb < held.moe_lb < before.moe_lb
    assert got.plan.moe_lb == pytest.approx(train.moe_lb, abs=1e-8)
    assert held.floor and held.excess == held.moe_lb - held.floor and r.colocations == 0 and r.verdict.action == "use"


def test_plan_does_not_see_the_held_out_steps(stats):
    changed = stats.counts_MLE.copy()
    changed[192:] = changed[192:, :, ::-1]
    a, b = planner.run_job(Job(stats)), planner.run_job(Job(replace(stats, counts_MLE=changed)))
    assert a.candidate.same_slots(b.candidate) and a.report.windows["holdout"] != b.report.windows["holdout"]


def test_keeping_the_old_plan_is_an_answer(stats, decode):
    counts = decode(steps=480)
    old = planner.run_job(Job(replace(stats, counts_MLE=counts[:240].copy()))).plan
    dear = report.Economics(moe_ms=1e-6)
    drifted = replace(stats, counts_MLE=counts[240:].copy())
    got = planner.run_job(Job(drifted, old=old, settings=policy.PlanSettings(move_price=0.0), economics=dear))
    assert got.report.verdict.action == "keep" and got.report.moves["total"] > 0
    assert got.report.verdict.sentence.startswith("keep the old plan: gain")
    assert got.plan is old and not got.candidate.same_slots(old) and got.candidate.epoch == 1


def test_moving_is_advised_when_it_pays(stats, decode):
    old = planner.run_job(Job(stats)).plan
    other = replace(stats, counts_MLE=decode(steps=240, seed=9).copy())
    got = planner.run_job(Job(other, old=old))
    v = got.report.verdict
    assert v.action == "use" and v.gain and v.gain > 0.02 and got.plan.epoch == 1 and v.saved_s and v.saved_s > v.cost_s
    assert got.report.moves["total"] == len(got.plan.moves(old)) == sum(got.report.moves["per_layer"])


def test_old_plan_of_lost_ranks_is_always_replaced(stats):
    old = planner.run_job(Job(stats, Sizes(slots_per_rank=8))).plan
    got = planner.run_job(
        Job(stats, Sizes(alive=(0, 1, 2, 3, 4, 6, 7)), old=old, economics=report.Economics(moe_ms=1e-6))
    )
    assert (
        got.report.verdict.action == "use"
        and got.plan.dead_ranks == (5,)
        and "does not fit" in got.report.verdict.sentence
    )
    assert got.report.shape["live_ranks"] == 7 and got.plan.slots_per_rank == 8


def test_all_zero_statistics_give_an_identity_like_plan_and_no_balance():
    got = planner.run_job(Job(ExpertStats(np.zeros((9, 2, 6), np.int64), (0, 1), ep=3)))
    assert got.plan.moe_lb is None and got.report.windows["train"].moe_lb is None
    assert [row.signal for row in got.report.layers] == [False, False] and "no signal" in got.report.verdict.sentence
    assert [row[:2] for row in got.plan.slot_expert_LRS[0].tolist()] == [[0, 1], [2, 3], [4, 5]]


def test_silent_layer_is_listed_and_left_out_of_the_averages(stats):
    counts = stats.counts_MLE.copy()
    counts[:, 1] = 0
    got = planner.run_job(Job(replace(stats, counts_MLE=counts)))
    assert got.report.windows["holdout"].moe_lb == got.report.layers[0].holdout and got.report.layers[1].holdout is None
    assert any("no signal (no tokens) in layers [4]" in n for n in got.report.notes) and got.plan.moe_lb_L[1] is None


def test_ladder_has_more_memory_and_better_balance(stats):
    ladder = planner.run_job(Job(stats)).report.ladder
    assert [rung.redundant for rung in ladder] == [0, 1, 2, 4] and [rung.slots_per_rank for rung in ladder] == [
        6,
        7,
        8,
        10,
    ]
    gib, lb = [rung.gib_per_rank for rung in ladder], [rung.moe_lb or 0.0 for rung in ladder]
    assert gib == sorted(gib) and ladder[0].break_even_steps is None and ladder[1].break_even_steps
    assert max(lb[1:]) < lb[0] - 0.1 and lb[3] < lb[1]
    assert gib[0] == pytest.approx(6 * 2 * report.FLASH_EXPERT_BYTES / 2**30)


def test_dispatches_differ_and_the_seed_decides_hash(stats):
    even, lp, one, two, again = (
        planner.run_job(Job(stats, dispatch=d, seed=s, ladder=False)).report.windows["train"].moe_lb or 0.0
        for d, s in (("even", 0), ("lp", 0), ("hash", 1), ("hash", 2), ("hash", 1))
    )
    assert 1.0 < lp < even < one and one == again != two


@pytest.mark.parametrize(
    ("steps", "holdout", "ordered", "want"),
    [(100, None, True, 80), (49, None, True, 49), (100, None, False, 100), (100, 0.0, False, 100), (10, 0.5, True, 5)],
)
def test_held_out_steps(steps, holdout, ordered, want):
    assert report.split_steps(steps, holdout, ordered)[0] == want


@pytest.mark.parametrize(
    ("steps", "holdout", "ordered", "text"),
    [(9, 1.0, True, "0 to 0.9"), (9, 0.2, False, "time order"), (9, 0.01, True, "is none")],
)
def test_held_out_fractions_that_cannot_be_honoured(steps, holdout, ordered, text):
    with pytest.raises(UsageError, match=text):
        report.split_steps(steps, holdout, ordered)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (Sizes(ranks=0), "ranks is 0"),
        (Sizes(slots_per_rank=7, redundant_per_rank=1), "both set the slots"),
        (Sizes(redundant_per_rank=-1), "redundant per rank is -1"),
        (Sizes(slots_per_rank=5), "40 slots for 48 experts"),
        (Sizes(alive=(0, 8)), "alive rank 8 does not exist, expected 0..7"),
        (Sizes(alive=()), "no rank of 8 is alive"),
        (Sizes(nodes=3), "divisor of the 8 ranks"),
    ],
)
def test_sizes_that_are_refused(stats, sizes, text):
    with pytest.raises(UsageError, match=text):
        planner.run_job(Job(stats, sizes))


def test_unknown_ranks_are_asked_for(stats):
    with pytest.raises(UsageError, match="do not say how many ranks") as e:
        planner.run_job(Job(replace(stats, ep=None)))
    assert e.value.hint == "give --ranks"


def test_one_rank_needs_no_redundancy(stats):
    got = planner.run_job(Job(stats, Sizes(ranks=1)))
    assert got.plan.slots_per_rank == 48 and got.report.windows["train"].moe_lb == 1.0
    assert any("nothing to balance" in n for n in got.report.notes)


def test_the_price_of_expert_groups_on_nodes_is_told(stats):
    got = planner.run_job(Job(stats, Sizes(nodes=4, groups=4)))
    (note,) = (n for n in got.report.notes if "expert groups" in n)
    free = planner.run_job(Job(stats)).report.windows["holdout"].moe_lb
    kept = got.report.windows["holdout"].moe_lb
    assert free and kept and free < kept
    assert note.endswith(f"4 nodes has a price: moe_lb {kept:.4f}, planned globally {free:.4f}")


def test_newest_window(stats):
    got = planner.run_job(Job(stats, window=100, holdout=0.0))
    assert got.plan.same_slots(planner.run_job(Job(stats.window(140, 240), holdout=0.0)).plan)
    with pytest.raises(UsageError, match="the file has 240 steps"):
        planner.run_job(Job(stats, window=241))
    with pytest.raises(UsageError, match="time order"):
        planner.run_job(Job(replace(stats, ordered=False), window=100))


def test_plans_of_another_model_are_refused(stats):
    old = planner.run_job(Job(stats)).plan
    cases = (
        (replace(stats, config_digest="other"), "another model: its config digest"),
        (replace(stats, counts_MLE=stats.counts_MLE[:, :, :40].copy()), "48 experts, the statistics have 40"),
        (replace(stats, layer_ids=(3, 9)), "without layer 9"),
    )
    for other, text in cases:
        with pytest.raises(ArtefactError, match=text):
            planner.run_job(Job(other, old=old))


def test_rows_of_an_old_plan_are_matched_by_layer(stats):
    old = planner.run_job(Job(stats)).plan
    last = replace(stats, counts_MLE=stats.counts_MLE[:, 1:].copy(), layer_ids=(4,))
    got = planner.run_job(Job(last, old=old, settings=policy.PlanSettings(max_moves=0)))
    assert (got.plan.slot_expert_LRS[0] == old.slot_expert_LRS[1]).all()


def test_economics_are_plain_arithmetic():
    e = report.Economics(expert_bytes=10**9, link_gb_s=10.0, moe_ms=2.0, horizon_steps=1000)
    assert e.transfer_s(5) == pytest.approx(0.5) and e.saved_s(1.2, 1.1) == pytest.approx(0.2)
    assert e.break_even_steps(5, 1.5, 1.25) in (1000, 1001) and e.break_even_steps(5, 1.1, 1.2) is None
    with pytest.raises(UsageError, match="link-gb-s is 0"):
        report.Economics(link_gb_s=0)


def test_without_an_old_plan_noise_keeps_the_identity_layout():
    counts = np.random.default_rng(0).integers(0, 99, (60, 4, 16))
    got = planner.run_job(Job(ExpertStats(counts, (0, 1, 2, 3), ep=4)))
    held, before = got.report.windows["holdout"], got.report.windows["before"]
    assert held.moe_lb and before.moe_lb and held.moe_lb >= before.moe_lb
    assert got.report.verdict.action == "keep" and "keep the identity layout" in got.report.verdict.sentence
    assert got.plan is got.before
