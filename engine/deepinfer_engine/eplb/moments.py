"""Mean and covariance of expert loads over the steps of one layer, reproducible to the last bit.

Statement. With x[t, e] tokens of expert e in step t and T[t] = Σ_e x[t, e]:

    mean[e]   = Σ_t x[t, e] / Σ_t T[t]                       (share of the layer's tokens)
    cov[e, f] = Σ_t y[t, e] · y[t, f] / Σ_t T[t],   y[t, e] = (x[t, e] − mean[e] · T[t]) / √T[t]

which is the token-weighted covariance of per-step shares. From 80 steps on, the same sum over ten blocks of steps is
added three times: what changed slowly inside the window is what goes on changing after it. Counts are divided by their
greatest common divisor first, so that scaling a layer changes nothing. y is rounded to integers (|q| ≤ ``QUANT``, one
scale per expert) before the E × E product: every partial sum is then exact, and the result does not depend on threads,
BLAS or the order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Largest quantised deviation. 11 bits: squares of 512 steps still fit int32, and the rounding error (2.4e-4 of an
#: expert's own peak deviation) is far below counting noise.
QUANT = 2047

#: Below this many usable steps a covariance says nothing; counting noise (variance = mean) stands in for it.
MIN_STEPS = 8

#: Blocks that show slow change, and the least steps in each. 3 is the best of 1, 3, 10 on tuning seeds of decode-ep64
#: (excess on the next
#: window 0.0218 -> 0.0176, two windows on 0.042 -> 0.036) and neutral on stationary traces.
BLOCKS = 10
BLOCK_STEPS = 8
DRIFT_ROOT = 1.7320508075688772  # √3


@dataclass(frozen=True)
class LayerMoments:
    """What the search knows of one layer: totals int64 [E], mean share [E], covariance of shares [E, E]."""

    total_E: np.ndarray
    mean_E: np.ndarray
    cov_EE: np.ndarray
    steps: int
    tokens_per_step: float


def reduced(counts_ME: np.ndarray) -> np.ndarray:
    """The counts divided by their greatest common divisor (int64 [M, E]); a copy only when something divides."""
    # A few rows nearly always settle it: once the divisor is 1 the rest cannot raise it.
    g = int(np.gcd.reduce(counts_ME[:1], axis=None))
    for lo in range(1, counts_ME.shape[0], 64):
        if g == 1:
            return counts_ME
        g = int(np.gcd(g, np.gcd.reduce(counts_ME[lo : lo + 64], axis=None)))
    return counts_ME if g <= 1 else counts_ME // g


def quantised(counts_ME: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Totals [E], mean shares [E], integer deviations q [M', E] (float64 holding integers) and their scales [E].

    Rows are the steps that have tokens (the caller guarantees one), then the blocks, weighted.
    """
    tokens_M = counts_ME.sum(axis=1)
    if not tokens_M.all():
        counts_ME, tokens_M = counts_ME[tokens_M > 0], tokens_M[tokens_M > 0]
    total_E = counts_ME.sum(axis=0)
    mean_E = total_E / float(tokens_M.sum())
    steps, experts = counts_ME.shape
    blocks = BLOCKS if steps >= BLOCKS * BLOCK_STEPS else 0
    y_ME = np.empty((steps + blocks, experts))
    _deviations(counts_ME, tokens_M, mean_E, y_ME[:steps])
    if blocks:
        first = [k * steps // BLOCKS for k in range(BLOCKS)]
        _deviations(np.add.reduceat(counts_ME, first), np.add.reduceat(tokens_M, first), mean_E, y_ME[steps:])
        y_ME[steps:] *= DRIFT_ROOT
    peak_E = np.maximum(y_ME.max(axis=0), -y_ME.min(axis=0))
    unit_E = np.where(peak_E > 0, peak_E, 1.0)
    y_ME *= (QUANT / unit_E)[None, :]
    np.rint(y_ME, out=y_ME)
    return total_E, mean_E, y_ME, unit_E / QUANT


def _deviations(counts_ME: np.ndarray, tokens_M: np.ndarray, mean_E: np.ndarray, out_ME: np.ndarray) -> None:
    """out = (counts − mean · tokens) / √tokens, row by row."""
    tokens_M = tokens_M.astype(np.float64)
    np.multiply(mean_E[None, :], tokens_M[:, None], out=out_ME)
    np.subtract(counts_ME, out_ME, out=out_ME)
    out_ME *= (1.0 / np.sqrt(tokens_M))[:, None]


def gram(q_ME: np.ndarray) -> np.ndarray:
    """qᵀq as float64 [E, E]; exact because |q| ≤ 2047 keeps every partial sum of < 2^31 steps below 2^53."""
    return q_ME.T @ q_ME


def covariance(gram_EE: np.ndarray, scale_E: np.ndarray, tokens: float) -> np.ndarray:
    """Covariance of shares [E, E] from the integer product: symmetric to the last bit."""
    cov_EE = scale_E[:, None] * scale_E[None, :]
    cov_EE *= gram_EE
    cov_EE /= tokens
    return cov_EE


def noise_only(mean_E: np.ndarray, tokens_per_step: float) -> np.ndarray:
    """Counting-noise covariance of shares: Poisson, so the variance of a share is mean ÷ tokens per step."""
    return np.diag(mean_E / tokens_per_step)


def layer_moments(counts_ME: np.ndarray) -> LayerMoments:
    """Moments of one layer from reduced int64 counts [M, E] with at least one token."""
    total_E, mean_E, q_ME, scale_E = quantised(counts_ME)
    steps = int(counts_ME.any(axis=1).sum())
    tokens = float(int(total_E.sum()))
    per_step = tokens / steps
    cov_EE = noise_only(mean_E, per_step) if steps < MIN_STEPS else covariance(gram(q_ME), scale_E, tokens)
    return LayerMoments(total_E, mean_E, cov_EE, steps, per_step)
