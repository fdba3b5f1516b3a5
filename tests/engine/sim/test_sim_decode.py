"""Decode groups against a simulation that takes every step, and the laws any run obeys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.cost.steptime import NO_SPECULATION, DecodeTime, Speculation
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.sim.decode import DecodeJob, DecodePool, simulate_decode
from deepinfer_engine.sim.route import place_row

LAW = DecodeTime(0.01, 1e-3, 1e-3, 1e-7)


def pool(**changes):
    values = {"groups": 1, "ranks": 2, "time": LAW, "speculation": NO_SPECULATION, "max_rows": 3, "max_tokens": 5000,
              **changes}  # fmt: skip
    return DecodePool(**values)


def slow_group(p: DecodePool, jobs):
    """One group, one step at a time, in the plainest way; returns (joined, done)."""
    waiting = sorted(range(len(jobs)), key=lambda i: (jobs[i].ready_s, i))
    joined, done = [math.nan] * len(jobs), [math.nan] * len(jobs)
    live: dict[int, list] = {}  # job -> [rank, tokens left]
    now, turn = 0.0, 0
    waiting = [i for i in waiting if jobs[i].tokens or done.__setitem__(i, jobs[i].ready_s)]
    while waiting or live:
        if not live:
            now = max(now, jobs[waiting[0]].ready_s)
        rows, kv = np.zeros(p.ranks, int), np.zeros(p.ranks, int)
        for i, (rank, _) in live.items():
            rows[rank] += 1
            kv[rank] += jobs[i].prompt_tokens + jobs[i].tokens
        while waiting and jobs[waiting[0]].ready_s <= now:
            need = jobs[waiting[0]].prompt_tokens + jobs[waiting[0]].tokens
            ready = [i for i in waiting if jobs[i].ready_s <= now]
            queued = sum(jobs[i].prompt_tokens + jobs[i].tokens for i in ready)
            limits = {"max_rows": p.max_rows, "max_tokens": p.max_tokens}
            rank = place_row(p.policy, rows, kv, need, waiting_tokens=queued, turn=turn, **limits)
            if rank is None:
                break
            i = waiting.pop(0)
            turn += 1
            live[i] = [rank, float(jobs[i].tokens)]
            joined[i] = now
            rows[rank] += 1
            kv[rank] += need
        verify, committed = p.speculation.at(float(rows.mean()))
        seconds = p.time.base_s + rows * (p.time.token_s * (1 + verify) + p.time.row_s) + p.time.context_s * kv
        now += float(seconds.max())
        for i in list(live):
            live[i][1] -= committed
            if live[i][1] <= 1e-6:
                done[i] = now
                del live[i]
    return joined, done


job_lists = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2000), st.integers(0, 40)), min_size=1, max_size=14).map(
    lambda rows: [DecodeJob(round(a, 3), p, t) for a, p, t in rows]
)


@given(jobs=job_lists, policy=st.sampled_from(["least_rows", "least_kv", "round_robin"]), spec=st.booleans())
@settings(max_examples=60)
def test_skipping_steps_gives_what_taking_them_gives(jobs, policy, spec):
    speculation = Speculation(((1, 4.0, 3.0), (3, 2.0, 2.5))) if spec else NO_SPECULATION
    p = pool(policy=policy, speculation=speculation)
    result = simulate_decode(p, jobs)
    joined, done = slow_group(p, jobs)
    some = [i for i, j in enumerate(jobs) if j.tokens]
    assert result.done_s[some] == pytest.approx([done[i] for i in some], abs=1e-6)
    assert result.joined_s[some] == pytest.approx([joined[i] for i in some], abs=1e-6)


@given(jobs=job_lists, groups=st.integers(1, 3))
@settings(max_examples=30)
def test_rows_are_conserved(jobs, groups):
    p = pool(groups=groups)
    result = simulate_decode(p, jobs)
    assert not np.isnan(result.done_s).any()
    assert all(result.joined_s[i] >= j.ready_s for i, j in enumerate(jobs))
    stayed = float((result.done_s - result.joined_s).sum())
    assert result.row_s == pytest.approx(stayed)  # row seconds by steps are row seconds by rows: Little's law
    assert result.busy_s == pytest.approx(result.slowest_rank_s)
    assert 0 < result.step_balance <= 1
    assert result.rows_held(p) <= p.max_rows


def test_one_row_takes_its_steps():
    job = DecodeJob(1.0, 100, 10)
    result = simulate_decode(pool(), [job])
    step = 0.01 + 2e-3 + 1e-7 * 110
    assert result.done_s[0] == pytest.approx(1.0 + 10 * step)
    drafted = simulate_decode(pool(speculation=Speculation(((1, 4.0, 2.5),))), [job])
    step = 0.01 + 1e-3 * 5 + 1e-3 + 1e-7 * 110
    assert drafted.done_s[0] == pytest.approx(1.0 + 4 * step)


def test_a_one_token_answer_needs_no_decoding():
    result = simulate_decode(pool(), [DecodeJob(2.0, 100, 0)])
    assert (result.joined_s[0], result.done_s[0], result.busy_s, result.step_balance) == (2.0, 2.0, 0, 1.0)
    assert result.rows_held(pool()) == 0


def test_a_full_group_makes_rows_wait_in_order():
    jobs = [DecodeJob(0.0, 10, 100) for _ in range(7)]
    result = simulate_decode(pool(), jobs)
    assert (result.joined_s[:6] == 0).all() and result.joined_s[6] == pytest.approx(result.done_s[:6].min())


def test_a_row_larger_than_a_rank_is_refused():
    with pytest.raises(CapacityError, match="5,001 tokens needs more KV than a decode rank has") as caught:
        simulate_decode(pool(), [DecodeJob(0.0, 5000, 1)])
    assert caught.value.exit_code == 3 and "cache.hbm_tokens_per_rank" in str(caught.value.hint)


def test_a_job_goes_to_the_lighter_group():
    jobs = [DecodeJob(0.0, 1000, 50), DecodeJob(0.0, 10, 50), DecodeJob(0.0, 10, 50)]
    result = simulate_decode(pool(groups=2, ranks=1), jobs)
    assert result.done_s[1] == pytest.approx(result.done_s[2]) and result.done_s[0] < result.done_s[1]


def test_empty_pools_are_refused():
    with pytest.raises(UsageError):
        pool(ranks=0)
