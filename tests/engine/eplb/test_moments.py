"""Moments: exact, scale-free, and equal to the textbook covariance up to the quantisation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepinfer_engine.eplb import moments


def textbook(counts: np.ndarray) -> np.ndarray:
    """Token-weighted covariance of shares plus three times that of the blocks, in plain floating point."""
    tokens = counts.sum(axis=1)
    share, mean = counts / tokens[:, None], counts.sum(axis=0) / tokens.sum()
    out = (share - mean).T @ ((share - mean) * (tokens / tokens.sum())[:, None])
    blocks = 40 if len(counts) >= 320 else 10 if len(counts) >= 80 else 0
    if blocks:
        edges = [k * len(counts) // blocks for k in range(blocks + 1)]
        for lo, hi in itertools.pairwise(edges):
            d = counts[lo:hi].sum(axis=0) / tokens[lo:hi].sum() - mean
            out += 3 * np.outer(d, d) * tokens[lo:hi].sum() / tokens.sum()
    return out


@pytest.mark.parametrize("steps", [8, 79, 80, 319, 320])
def test_covariance_is_the_textbook_one(decode, steps):
    counts = decode(steps=320)[:steps, 0]
    got, want = moments.layer_moments(counts, ahead=False).cov_EE, textbook(counts)
    scale = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    assert np.abs(got - want).max() < 2e-3 * scale.max()
    assert (np.abs(got - want) <= 5e-3 * scale + 1e-12).all()


def test_covariance_is_symmetric_to_the_last_bit(decode):
    cov = moments.layer_moments(decode()[:, 1]).cov_EE
    assert (cov == cov.T).all()


@pytest.mark.parametrize("factor", [2, 7, 1000])
def test_scaling_the_counts_changes_nothing(decode, factor):
    counts = decode()[:, 0]
    a, b = (moments.layer_moments(moments.reduced(c)) for c in (counts, counts * factor))
    assert (a.cov_EE == b.cov_EE).all() and (a.mean_E == b.mean_E).all() and (a.total_E == b.total_E).all()


def test_reduced_divides_by_the_greatest_common_divisor_wherever_it_hides():
    counts = np.full((200, 3), 6, np.int64)
    counts[150, 2] = 9
    assert (moments.reduced(counts) == counts // 3).all()
    counts[199, 0] = 10
    assert moments.reduced(counts) is counts


def test_idle_steps_change_nothing(decode):
    counts = decode()[:, 0]
    padded = np.insert(counts, [0, 7, 7, len(counts)], 0, axis=0)
    a, b = moments.layer_moments(counts), moments.layer_moments(padded)
    assert a.steps == b.steps and (a.cov_EE == b.cov_EE).all()


def test_few_steps_fall_back_to_counting_noise(decode):
    counts = decode()[:7, 0]
    got = moments.layer_moments(counts)
    assert np.count_nonzero(got.cov_EE - np.diag(np.diagonal(got.cov_EE))) == 0
    assert np.diagonal(got.cov_EE) == pytest.approx(got.mean_E / counts.sum(axis=1).mean())


def shifting(steps: int = 400, seed: int = 3) -> np.ndarray:
    """Counts [steps, 16 experts] whose shares slide from one mix to another."""
    rng = np.random.default_rng(seed)
    first, last = rng.dirichlet(np.ones(16), 2)
    at = np.linspace(0, 1, steps)[:, None]
    return rng.poisson(2000 * ((1 - at) * first + at * last))


def test_a_window_that_shifts_is_expected_to_look_like_its_end():
    counts = shifting()
    got, plain = moments.layer_moments(counts), moments.layer_moments(counts, ahead=False)
    end, mean = counts[-40:].sum(axis=0) / counts[-40:].sum(), counts.sum(axis=0) / counts.sum()
    assert got.recent and np.abs(got.mean_E - end).sum() < 0.5 * np.abs(mean - end).sum()
    assert not plain.recent and plain.mean_E == pytest.approx(mean)
    assert (got.total_E == plain.total_E).all() and got.mean_E.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["still", "short"])
def test_without_a_trend_or_time_to_see_one_every_step_counts_the_same(kind):
    counts = shifting()
    if kind == "still":
        counts = np.random.default_rng(0).poisson(np.broadcast_to(counts[:1] + 1, counts.shape))
    else:
        counts = counts[:319]
    got = moments.layer_moments(counts)
    assert not got.recent and (got.mean_E == counts.sum(axis=0) / counts.sum()).all()


def test_recent_weights_halve_every_three_blocks():
    weights = moments.recent_weights(40)
    assert (weights[39], weights[36], weights[0]) == (65536, 32768, 8)
    assert all(b == a // 2 for a, b in zip(weights[3:], weights[:-3], strict=True))


def test_forecast_weighs_the_same_when_floats_could_not_hold_the_sums():
    block = shifting().reshape(40, 10, 16).sum(axis=1)
    huge = block * (2**37 // int(block.sum()) + 1)
    small, large = moments.forecast(block), moments.forecast(huge)
    assert small is not None and large is not None and int(huge.sum()) * 65536 >= 2**53
    assert large == pytest.approx(small, rel=1e-12)
