"""The prefill pool: closed forms, conservation, order, and what distinguishes the routers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.cost.steptime import PrefillTime
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.prefill import PrefillJob, PrefillPool, simulate_prefill
from deepinfer_engine.sim.route import PrefillRouter, place_row

LAW = PrefillTime(0.02, 1e-5, 1e-11)


def pool(**changes):
    values = {"engines": 2, "ranks": 2, "time": LAW, "chunk_tokens": 8192, "step_budget_s": 0.1, **changes}
    return PrefillPool(**values)


def jobs_from(rng, count, rate=20.0, most=20_000):
    at = np.cumsum(rng.exponential(1 / rate, count))
    tokens = rng.integers(1, most, count)
    cached = [int(rng.integers(0, max(1, (t - 134) // 128))) * 128 if t > 300 else 0 for t in tokens]
    return [PrefillJob(float(a), int(t), c) for a, t, c in zip(at, tokens, cached, strict=True)]


def test_one_prompt_takes_its_steps():
    job = [PrefillJob(1.0, 10_000, 0)]
    result = simulate_prefill(pool(engines=1, ranks=1), job)
    # the budget of 80 ms cuts after 7,968 tokens, the rest is one more step
    first = LAW.largest_chunk(0.08)
    seconds = 0.02 + LAW.chunk_s(first) + 0.02 + LAW.chunk_s(10_000 - first, first)
    assert result.done_s[0] == pytest.approx(1.0 + seconds) and result.steps == 2


@given(seed=st.integers(0, 2**20), engines=st.integers(1, 3), ranks=st.integers(1, 3), count=st.integers(1, 60))
@settings(max_examples=25)
def test_every_token_is_computed_once_and_no_time_is_lost(seed, engines, ranks, count):
    jobs = jobs_from(np.random.default_rng(seed), count)
    p = pool(engines=engines, ranks=ranks)
    result = simulate_prefill(p, jobs)
    assert result.computed_tokens == sum(j.tokens - j.cached for j in jobs)
    assert result.useful_s == pytest.approx(sum(LAW.chunk_s(j.tokens - j.cached, j.cached) for j in jobs))
    assert not np.isnan(result.done_s).any()
    fastest = [LAW.base_s + LAW.chunk_s(min(j.tokens - j.cached, 8192), j.cached) for j in jobs]
    assert all(d - j.arrival_s >= 0.02 - 1e-12 for d, j in zip(result.done_s, jobs, strict=True))
    short = [i for i, j in enumerate(jobs) if LAW.chunk_s(j.tokens - j.cached, j.cached) <= 0.08]
    assert all(result.done_s[i] - jobs[i].arrival_s >= fastest[i] - 1e-9 for i in short)
    assert 0 < result.balance(p) <= 1 + 1e-9
    assert result.useful_s <= result.stepping_s


def test_same_seed_same_result_and_noise_is_seeded():
    jobs = jobs_from(np.random.default_rng(5), 80)
    for policy in ("random", "bucket", "least_work"):
        noisy = pool(policy=policy, cost_sigma=0.5, snapshot_s=0.2, seed=3)
        one, two = (simulate_prefill(noisy, jobs).done_s for _ in range(2))
        assert (one == two).all()


def test_waiting_time_is_that_of_a_single_server_with_constant_service():
    """M/D/1 at 70 %: mean wait = rho·s / (2·(1 − rho)); one prompt per step because the chunk holds only one."""
    law, service, rho = PrefillTime(0.0, 1e-4, 0.0), 0.1, 0.7
    rng = np.random.default_rng(11)
    at = np.cumsum(rng.exponential(service / rho, 40_000))
    single = PrefillPool(1, 1, law, 1000, 10.0, tail_tokens=1)
    result = simulate_prefill(single, [PrefillJob(float(a), 1000, 0) for a in at])
    wait = result.done_s - at - service
    assert wait.min() >= -1e-6
    assert wait.mean() == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.05)


def test_first_come_first_served_on_a_rank():
    rng = np.random.default_rng(2)
    jobs = jobs_from(rng, 60, rate=100)
    done = simulate_prefill(pool(engines=1, ranks=1), jobs).done_s
    assert (np.diff(done) >= -1e-12).all()


def test_final_chunk_keeps_the_window_of_the_decoder_half():
    """A prompt of one chunk and 50 tokens: the first chunk gives up rows so that the last has 134."""
    big = PrefillPool(1, 1, LAW, 1000, 1.0)
    result = simulate_prefill(big, [PrefillJob(0.0, 1050, 0)])
    seconds = 0.02 + LAW.chunk_s(1050 - 134) + 0.02 + LAW.chunk_s(134, 1050 - 134)
    assert result.done_s[0] == pytest.approx(seconds)


def test_ranks_of_an_engine_wait_for_the_slowest():
    two = PrefillPool(1, 2, LAW, 8192, 0.1, policy="round_robin")
    result = simulate_prefill(two, [PrefillJob(0.0, 7000, 0), PrefillJob(0.0, 100, 0)])
    assert result.done_s == pytest.approx([LAW.step_s([(7000, 0)])] * 2) and result.steps == 1
    assert result.stepping_s == pytest.approx(2 * LAW.step_s([(7000, 0)]))


def test_fetches_share_the_link_of_their_engine():
    slow = pool(engines=1, ranks=1, fetch_bytes_s=1000.0)
    done = simulate_prefill(slow, [PrefillJob(0.0, 300, 128, 500.0), PrefillJob(0.0, 300, 128, 500.0)]).done_s
    first = 0.5 + LAW.step_s([(172, 128)])
    assert done == pytest.approx([first, 1.0 + LAW.step_s([(172, 128)])])


def test_least_work_beats_blind_routers_on_uneven_prompts():
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(0.01, 600))
    jobs = [
        PrefillJob(float(a), int(t), 0) for a, t in zip(at, rng.lognormal(8, 1.3, 600).astype(int) + 1, strict=True)
    ]
    p90 = {}
    for policy in ("random", "round_robin", "least_work"):
        done = simulate_prefill(pool(engines=4, policy=policy), jobs).done_s
        p90[policy] = float(np.percentile(done - at, 90))
    assert p90["least_work"] < p90["round_robin"] and p90["least_work"] < p90["random"]


def test_stale_views_and_wrong_guesses_cost_latency():
    rng = np.random.default_rng(4)
    at = np.cumsum(rng.exponential(0.008, 800))
    jobs = [PrefillJob(float(a), int(t), 0) for a, t in zip(at, rng.lognormal(8, 1, 800).astype(int) + 1, strict=True)]

    def mean(**noise):
        return float((simulate_prefill(pool(engines=4, **noise), jobs).done_s - at).mean())

    assert mean(cost_sigma=1.5, snapshot_s=5.0) > mean()


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"engines": 0}, "at least one engine"), ({"ranks": 0}, "at least one engine"),
     ({"step_budget_s": 0.0205}, "fewer than 134 tokens")],
)  # fmt: skip
def test_impossible_pools_are_refused(changes, part):
    with pytest.raises(UsageError, match=part):
        pool(**changes)


# -------------------------------------------------------------------- routing


def test_buckets_share_out_every_rank_by_demand():
    router = PrefillRouter("bucket", 8)
    idle = np.zeros(8)
    for _ in range(3):
        router.choose(0.0, 1000, 1.0, idle)
    router.choose(0.0, 100_000, 1.0, idle)
    router.choose(2.0, 100_000, 1.0, idle)
    shares = [s for b, s in enumerate(router._shares) if b in (0, 2)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(8))
    assert len(shares[0]) > len(shares[1]) >= 1  # three of five parts of the demand are short prompts


def test_a_full_class_spills_to_a_rank_with_less_than_half_of_its_work():
    router = PrefillRouter("bucket", 2, quota_s=1.0)
    router._shares = [np.array([0]), np.array([1]), np.array([1]), np.array([1])]
    router._round_at = 100.0
    assert router.choose(100.0, 10, 0.1, np.array([0.9, 0.0])) == 0
    assert router.choose(100.1, 10, 0.1, np.array([1.5, 1.0])) == 0
    assert router.choose(100.2, 10, 0.1, np.array([1.5, 0.7])) == 1


def test_a_snapshot_is_kept_until_it_is_old_and_own_work_is_added():
    router = PrefillRouter("least_work", 2, snapshot_s=1.0)
    assert router.choose(0.0, 10, 0.5, np.array([0.0, 0.2])) == 0  # now believes 0.5 and 0.2
    assert router.choose(0.5, 10, 0.5, np.array([0.0, 9.0])) == 1  # has not seen the truth yet
    assert router.choose(1.0, 10, 0.5, np.array([0.0, 9.0])) == 0


LIMITS = {"max_rows": 4, "max_tokens": 100}


def test_decode_placement_by_policy():
    rows, kv = np.array([1, 2, 3]), np.array([60, 30, 10])

    def place(policy, need, waiting=0, turn=0):
        return place_row(policy, rows, kv, need, waiting_tokens=waiting or need, turn=turn, **LIMITS)

    assert place("least_rows", 10) == 0
    assert place("least_kv", 10) == 2
    # the level is 1.05 · (10 + 100) / 3 = 38.5: rank 0 is above it, of 1 and 2 the first has fewer rows
    assert place("two_level", 8, waiting=10) == 1
    assert place("two_level", 35, waiting=35) == 2  # level 47.25: rank 2 alone stays below
    assert place("two_level", 60, waiting=60) == 2  # nobody below the level: least KV
    assert [place("round_robin", 10, turn=t) for t in range(4)] == [0, 1, 2, 0]


def test_decode_placement_waits_for_room():
    full = {"waiting_tokens": 1, "turn": 0, **LIMITS}
    assert place_row("two_level", np.array([4, 4]), np.array([0, 0]), 1, **full) is None
    assert place_row("two_level", np.array([0, 0]), np.array([100, 95]), 6, **full) is None
    assert place_row("round_robin", np.array([4, 0]), np.array([0, 0]), 1, **full) == 1
