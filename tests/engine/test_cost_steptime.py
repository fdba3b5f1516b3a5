"""Step-time laws: inversion, fitting, and the search along the decode curve against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.cost import published
from deepinfer_engine.cost.account import RequestCost, Workload, gpu_split, request_cost
from deepinfer_engine.cost.hardware import REFERENCE, peak_of
from deepinfer_engine.cost.steptime import (
    NO_SPECULATION,
    DecodeTime,
    PrefillTime,
    Speculation,
    decode_point,
    rows_at_speed,
)
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.models import release_config

CONFIG = release_config()
LAW = PrefillTime(0.02, 1e-5, 1e-11)


def test_worked_example_of_the_module():
    time = published.prefill_time(CONFIG)
    assert round(time.step_s([(4096, 0)]) * 1e3, 3) == 68.0
    assert round(time.step_s([(32_768, 0)]) * 1e3) == 378
    decode = published.decode_time(CONFIG, 7)
    assert round(decode.step_s(60, 3.58) * 1e3, 1) == 14.5


def test_chunks_of_a_step_share_the_base_and_an_empty_step_takes_none():
    assert LAW.step_s([(100, 0), (50, 1000)]) == pytest.approx(0.02 + LAW.chunk_s(100) + LAW.chunk_s(50, 1000))
    assert LAW.step_s([]) == 0


@given(first=st.integers(1, 10_000), second=st.integers(1, 10_000), context=st.integers(0, 10**6))
def test_cutting_a_chunk_changes_nothing_but_the_base(first, second, context):
    parts = LAW.chunk_s(first, context) + LAW.chunk_s(second, context + first)
    assert parts == pytest.approx(LAW.chunk_s(first + second, context))


@given(
    budget=st.floats(1e-4, 2.0), context=st.integers(0, 10**6), token=st.floats(1e-7, 1e-4),
    pair=st.sampled_from([0.0, 1e-12, 7.75e-12, 1e-10]),
)  # fmt: skip
def test_largest_chunk_is_the_largest_within_the_budget(budget, context, token, pair):
    law = PrefillTime(0.02, token, pair)
    n = law.largest_chunk(budget, context)
    assert law.chunk_s(n, context) <= budget * (1 + 1e-9)
    assert law.chunk_s(n + 1, context) > budget * (1 - 1e-9)


def test_no_budget_no_chunk():
    assert LAW.largest_chunk(0.0) == LAW.largest_chunk(-1.0) == 0


@given(base=st.floats(0, 0.1), token=st.floats(1e-6, 1e-4), pair=st.sampled_from([0.0, 1e-11]))
def test_fit_recovers_the_law_its_points_come_from(base, token, pair):
    law = PrefillTime(base, token, pair)
    points = [(c, law.step_s([(c, 0)])) for c in (512, 4096, 20_000, 65_536)]
    found = PrefillTime.fit(points, pair)
    assert found.base_s == pytest.approx(base, abs=1e-9) and found.token_s == pytest.approx(token, rel=1e-6)


@pytest.mark.parametrize(
    ("points", "part"),
    [
        ([(4096, 0.07)], "two different chunk sizes"),
        ([(4096, 0.07), (4096, 0.08)], "two different chunk sizes"),
        ([(4096, 0.07), (8192, 0.06)], "us per token"),
        ([(4096, 0.01), (8192, 0.03)], "ms per step"),
    ],
)
def test_points_that_are_no_curve_are_refused(points, part):
    with pytest.raises(UsageError, match=part):
        PrefillTime.fit(points)


def test_prefill_is_carried_by_fp8_peak_and_by_what_replay_saves():
    here, there = (published.prefill_time(CONFIG, peak) for peak in (REFERENCE, peak_of("sm90", 139)))
    assert there.token_s / here.token_s == pytest.approx(4.5 / 1.979)
    assert there.base_s == here.base_s
    off = published.prefill_time(CONFIG, decoder_replay=False)
    assert off.token_s / here.token_s == pytest.approx(34.694 / 17.339, rel=1e-3)
    assert off.pair_s / here.pair_s == pytest.approx(20_480 / 12_288)


def test_decode_is_linear_in_slots_between_the_published_widths():
    a, b, mid = (published.decode_time(CONFIG, slots) for slots in (7, 49, 28))
    assert mid.base_s == pytest.approx((a.base_s + b.base_s) / 2)
    assert mid.token_s == pytest.approx((a.token_s + b.token_s) / 2)
    # EP8 meets its two published points with 3.15 tokens a step and 3.24 verified
    for rows, speed in ((250.0, 100.0), (19_000 / 150, 150.0)):
        assert 3.15 / b.step_s(rows, 3.24) == pytest.approx(speed)


def test_slow_memory_costs_the_time_it_needs_for_the_weights():
    here, there = published.decode_time(CONFIG, 7), published.decode_time(CONFIG, 7, peak_of("sm90", 139))
    assert published.weight_bytes_per_step(CONFIG, 7) == 9_531_704_768 + 7 * 40 * 18_800_640
    extra = published.weight_bytes_per_step(CONFIG, 7) * (1 / 4.8e12 - 1 / 8e12)
    assert there.base_s - here.base_s == pytest.approx(extra)
    assert there.row_s / here.row_s == pytest.approx(8 / 4.8)


def test_peaks_are_known_for_accelerators_only():
    assert peak_of("cpu", 0) is None
    assert peak_of("ascend950", 119).memory_bytes_s < peak_of("ascend950", 134).memory_bytes_s


@given(rows=st.floats(1, 400))
def test_speculation_stays_within_its_table(rows):
    verify, committed = published.ADAPTIVE.at(rows)
    assert 3.24 <= verify <= 4.7 and 3.12 <= committed <= 3.28 and committed <= verify + 1


def test_speculation_meets_its_points_and_holds_beyond_them():
    table = Speculation(((10, 4.0, 3.0), (20, 2.0, 2.5)))
    assert table.at(10) == (4.0, 3.0) and table.at(15) == (3.0, 2.75)
    assert table.at(1) == (4.0, 3.0) and table.at(99) == (2.0, 2.5)
    assert NO_SPECULATION.at(50) == (0.0, 1.0)


@given(speed=st.floats(20, 400), context=st.sampled_from([0.0, 77_000.0]))
def test_rows_at_speed_is_the_largest_load_that_is_fast_enough(speed, context):
    time = published.decode_time(CONFIG, 7)
    brute = [n for n in range(1, 301) if decode_point(time, published.ADAPTIVE, n, context).tokens_per_s_user >= speed]
    assert rows_at_speed(time, published.ADAPTIVE, speed, limit=300, context=context) == (max(brute) if brute else 0)


def test_context_costs_by_its_length():
    time = DecodeTime(0.01, 1e-5, 1e-5, 1e-11)
    assert time.step_s(10, 0, 1e5) - time.step_s(10, 0) == pytest.approx(10 * 1e5 * 1e-11)


# -------------------------------------------------------------------- account


def test_the_published_account_follows_from_the_published_rates():
    cold = request_cost(Workload(77_000, 500, 0.0), prefill_tokens_s=60_000, decode_tokens_s=230, replay_window=128)
    assert (round(cold.prefill_gpu_s, 2), round(cold.decode_gpu_s, 2)) == (1.28, 2.17)
    assert cold.gpu_s == cold.prefill_gpu_s + cold.decode_gpu_s


def test_a_hit_replays_one_window_and_a_miss_none():
    assert Workload(77_000, 500, 0.96).computed_tokens(128) == pytest.approx(3208)
    assert Workload(77_000, 500, 0.0).computed_tokens(128) == 77_000
    assert Workload(100, 1, 0.5).computed_tokens(128) == 100  # never more than the prompt


@pytest.mark.parametrize("bad", [(0, 1, 0.5), (1, 0, 0.5), (1, 1, 1.1), (1, 1, -0.1), (1, 1, float("nan"))])
def test_workloads_out_of_range_are_refused(bad):
    with pytest.raises(UsageError):
        Workload(*bad)


@given(gpus=st.integers(2, 256), ratio=st.floats(0.01, 100))
def test_split_is_the_closest_to_the_ratio(gpus, ratio):
    prefill, decode = gpu_split(gpus, ratio)
    assert prefill >= 1 and decode >= 1 and prefill + decode == gpus
    assert abs(prefill - ratio * decode) == min(abs(p - ratio * (gpus - p)) for p in range(1, gpus))


def test_one_gpu_is_not_split():
    with pytest.raises(UsageError, match="at least 2"):
        gpu_split(1, 1.0)
    assert RequestCost(1.0, 2.0).prefill_per_decode == 0.5
