"""Moments: exact, scale-free, and equal to the textbook covariance up to the quantisation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepinfer_engine.eplb import moments


def textbook(counts: np.ndarray) -> np.ndarray:
    """Token-weighted covariance of shares plus three times that of ten blocks, in plain floating point."""
    tokens = counts.sum(axis=1)
    share, mean = counts / tokens[:, None], counts.sum(axis=0) / tokens.sum()
    out = (share - mean).T @ ((share - mean) * (tokens / tokens.sum())[:, None])
    if len(counts) >= 80:
        edges = [k * len(counts) // 10 for k in range(11)]
        for lo, hi in itertools.pairwise(edges):
            d = counts[lo:hi].sum(axis=0) / tokens[lo:hi].sum() - mean
            out += 3 * np.outer(d, d) * tokens[lo:hi].sum() / tokens.sum()
    return out


@pytest.mark.parametrize("steps", [8, 79, 80, 240])
def test_covariance_is_the_textbook_one(decode, steps):
    counts = decode()[:steps, 0]
    got, want = moments.layer_moments(counts).cov_EE, textbook(counts)
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
