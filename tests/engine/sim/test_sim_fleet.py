"""A trace through both pools: latencies, goodput, efficiency, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.cost.steptime import NO_SPECULATION, DecodeTime, PrefillTime
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.decode import DecodePool
from deepinfer_engine.sim.deployment import Slo
from deepinfer_engine.sim.fleet import (
    Fleet,
    caveats,
    efficiency,
    goodput,
    highest_scale,
    pools,
    prefill_jobs,
    report,
    simulate,
)
from deepinfer_engine.sim.models import RELEASE, PlannedModel, find_model
from deepinfer_engine.sim.prefill import PrefillPool
from deepinfer_engine.sim.trace import Trace, TraceRequest, assumed_hits

MODEL = find_model(RELEASE)
NONE = Slo()


def fleet(**changes):
    values = {
        "prefill": PrefillPool(1, 2, PrefillTime(0.02, 1e-5, 0.0), 8192, 0.1),
        "decode": DecodePool(1, 2, DecodeTime(0.01, 1e-4, 1e-4), NO_SPECULATION, 8, 100_000),
        "bytes_per_token": 890.0,
        "window_bytes": 3_000_000,
        "window": 128,
        **changes,
    }
    return Fleet(**values)


def trace(count=120, rate=10.0, seed=0):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count))
    return Trace(
        "t",
        tuple(
            TraceRequest(float(a), int(i), int(o))
            for a, i, o in zip(at, rng.integers(200, 6000, count), rng.integers(1, 60, count), strict=True)
        ),
        False,
    )


def no_hits(t):
    return np.zeros(len(t.requests), dtype=np.int64)


def test_a_single_request_takes_prefill_transfer_and_steps():
    t = Trace("t", (TraceRequest(0.0, 1000, 11),), False)
    result = simulate(fleet(), t, no_hits(t))
    prefill = 0.02 + 1000 * 1e-5
    transfer = (1000 * 890 + 3_000_000) / 50e9
    step = 0.01 + 2e-4
    assert result.ttft_s[0] == pytest.approx(prefill)
    assert result.tpot_s[0] == pytest.approx((transfer + 10 * step) / 10)
    assert result.e2e_s[0] == pytest.approx(prefill + transfer + 10 * step)


def test_one_token_answers_have_no_tpot():
    t = Trace("t", (TraceRequest(0.0, 1000, 1), TraceRequest(0.0, 1000, 3)), False)
    result = simulate(fleet(), t, no_hits(t))
    assert np.isnan(result.tpot_s[0]) and result.tpot_s[1] > 0
    assert result.e2e_s[0] == result.ttft_s[0]
    assert goodput(result, Slo(tpot_ms=1000.0)) == (1.0, pytest.approx(2 / result.duration_s))


def test_hits_shorten_prefill_and_are_fetched():
    t = trace()
    cold, warm = simulate(fleet(), t, no_hits(t)), simulate(fleet(), t, assumed_hits(t, 0.9, window=128, slack=6))
    assert warm.ttft_s.mean() < cold.ttft_s.mean() and warm.hit_share > 0.6
    assert cold.prefill.computed_tokens == sum(r.input_tokens for r in t.requests)
    jobs = prefill_jobs(fleet(window_hit=1.0), t, assumed_hits(t, 0.9, window=128, slack=6))
    assert sum(j.fetch_bytes for j in jobs) == pytest.approx(890 * sum(j.cached for j in jobs))


def test_a_lost_window_replays_one_window_and_fetches_the_whole_hit():
    t = Trace("t", (TraceRequest(0.0, 2000, 2),), False)
    hits = np.array([1024])
    (kept,) = prefill_jobs(fleet(window_hit=1.0), t, hits)
    (lost,) = prefill_jobs(fleet(window_hit=0.0), t, hits)
    assert (kept.cached, lost.cached) == (1024, 896)
    assert kept.fetch_bytes == lost.fetch_bytes == 1024 * 890


def test_simulation_repeats_exactly():
    t = trace()
    one, two = (simulate(fleet(seed=4), t, assumed_hits(t, 0.5, window=128, slack=6)) for _ in range(2))
    assert (one.ttft_s == two.ttft_s).all() and (one.e2e_s == two.e2e_s).all()


def test_faster_arrivals_wait_longer():
    t = trace()
    slow, fast = simulate(fleet(), t, no_hits(t)), simulate(fleet(), t.scaled(20), no_hits(t.scaled(20)))
    assert fast.ttft_s.mean() > slow.ttft_s.mean() and fast.duration_s < slow.duration_s


def test_goodput_needs_a_limit_and_counts_all_of_them():
    t = trace()
    result = simulate(fleet(), t, no_hits(t))
    assert goodput(result, NONE) is None
    share, rate = goodput(result, Slo(ttft_ms=60.0, tpot_ms=12.0)) or (0, 0)
    good = (result.ttft_s <= 0.06) & (np.isnan(result.tpot_s) | (result.tpot_s <= 0.012))
    assert (
        0 < share < 1 and share == pytest.approx(good.mean()) and rate == pytest.approx(good.sum() / result.duration_s)
    )


def test_report_is_simulated_and_finite():
    t, f = trace(), fleet()
    found = report(f, t, simulate(f, t, no_hits(t)), Slo(ttft_ms=100.0))
    assert {x.source for x in found} == {"simulated"} and all(np.isfinite(x.value) for x in found)
    names = [x.name for x in found]
    assert names[:3] == ["TTFT p50", "TTFT p90", "TTFT p99"] and "goodput" in names
    assert "goodput" not in [x.name for x in report(f, t, simulate(f, t, no_hits(t)), NONE)]


def test_caveats_name_short_traces_and_the_routers_errors():
    t = trace(count=30)
    exact = caveats(fleet(), t)
    assert "30 requests are few for 16 decode rows" in exact[1] and "knows every cost exactly" in exact[2]
    assert len(caveats(fleet(), trace(count=200))) == 2
    noisy = fleet(prefill=replace(fleet().prefill, cost_sigma=0.5, snapshot_s=0.1))
    assert "sigma of 0.5 and looks every 100 ms" in caveats(noisy, t)[2]


# ----------------------------------------------------------------- efficiency


@pytest.mark.parametrize("limit", [0.003, 0.7, 1.0, 37.5])
def test_highest_scale_finds_the_edge(limit):
    found = highest_scale(lambda s: s <= limit, steps=10)
    assert found is not None and limit / 1.001 <= found <= limit


def test_highest_scale_of_what_never_holds_is_none():
    assert highest_scale(lambda s: False) is None


def test_efficiency_is_at_the_edge_of_the_limits():
    t = trace(count=400)
    slo = Slo(ttft_ms=300.0, tpot_ms=14.0)
    found = efficiency(fleet(), t, no_hits(t), slo)
    assert 0 < found.prefill <= 1 and 0 < found.decode <= 1
    assert found.decode == pytest.approx(found.decode_balance * found.rows_held / found.rows_allowed)
    edge = [np.percentile(simulate(fleet(), t.scaled(s), no_hits(t)).ttft_s, 90) for s in
            (found.prefill_scale, found.prefill_scale * 1.3)]  # fmt: skip
    assert edge[0] <= 0.3 < edge[1]
    assert {f.source for f in found.figures()} == {"simulated", "vendor"}


def test_blind_routing_is_less_efficient():
    t, slo = trace(count=300, seed=3), Slo(ttft_ms=250.0, tpot_ms=14.0)
    base = fleet()
    wide = replace(base.prefill, engines=4)
    best = efficiency(replace(base, prefill=wide), t, no_hits(t), slo, steps=3)
    blind = efficiency(replace(base, prefill=replace(wide, policy="random")), t, no_hits(t), slo, steps=3)
    assert blind.prefill_scale < best.prefill_scale


@pytest.mark.parametrize(
    ("slo", "part"),
    [
        (Slo(ttft_ms=100.0), "needs both limits"),
        (Slo(ttft_ms=1.0, tpot_ms=14.0), "no arrival rate keeps 90 % of TTFT within 1 ms"),
        (Slo(ttft_ms=300.0, tpot_ms=1.0), "not one row keeps TPOT within 1 ms"),
    ],
)
def test_limits_that_nothing_meets_are_refused(slo, part):
    t = trace(count=20)
    with pytest.raises(UsageError, match=part):
        efficiency(fleet(), t, no_hits(t), slo)


def test_answers_of_one_token_cannot_measure_decode():
    t = Trace("t", tuple(TraceRequest(float(i), 500, 1) for i in range(10)), False)
    with pytest.raises(UsageError, match="one-token answers only"):
        efficiency(fleet(), t, no_hits(t), Slo(ttft_ms=300.0, tpot_ms=14.0))


# -------------------------------------------------------------------- profiles


def test_pools_come_from_profiles():
    f = pools(MODEL, load_profile("prefill-ep4").profile, load_profile("decode-ep64").profile, engines=3, groups=2)
    assert (f.prefill.engines, f.prefill.ranks, f.decode.groups, f.decode.ranks) == (3, 4, 2, 64)
    assert f.prefill.step_budget_s == pytest.approx(f.prefill.time.step_s([(32_768, 0)]))
    assert f.bytes_per_token == 890 and f.prefill.tail_tokens == 134
    assert (f.decode.max_rows, f.decode.max_tokens) == (60, 8_388_608)
    budget = load_profile("prefill-ep4", ["sched.step_budget_ms=100.0"]).profile
    assert pools(MODEL, budget, load_profile("decode-ep64").profile, engines=1, groups=1).prefill.step_budget_s == 0.1


def test_a_profile_of_the_other_role_or_without_step_times_is_refused():
    prefill, decode = load_profile("prefill-ep4").profile, load_profile("decode-ep64").profile
    with pytest.raises(UsageError, match="has role decode and cannot be the prefill pool"):
        pools(MODEL, decode, decode, engines=1, groups=1)
    with pytest.raises(UsageError, match="has role prefill and cannot be the decode pool"):
        pools(MODEL, prefill, prefill, engines=1, groups=1)
    with pytest.raises(UsageError, match="nothing is published for cpu"):
        pools(MODEL, load_profile("cpu-nano").profile, decode, engines=1, groups=1)
    other = PlannedModel("other", replace(MODEL.config, num_attention_heads=32))
    with pytest.raises(UsageError, match="not for other"):
        pools(other, prefill, decode, engines=1, groups=1)


def test_both_phases_on_one_kind_of_host():
    both = load_profile("h200x8").profile
    f = pools(MODEL, both, both, engines=1, groups=1)
    t = trace(count=30, rate=5.0)
    result = simulate(f, t, no_hits(t))
    assert not np.isnan(result.e2e_s).any()
