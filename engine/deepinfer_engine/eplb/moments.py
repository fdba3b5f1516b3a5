"""Mean and covariance of expert loads over the steps of one layer, reproducible to the last bit.

Statement. With x[t, e] tokens of expert e in step t and T[t] = Σ_e x[t, e]:

    mean[e]   = Σ_t x[t, e] / Σ_t T[t]                       (share of the layer's tokens)
    cov[e, f] = Σ_t y[t, e] · y[t, f] / Σ_t T[t],   y[t, e] = (x[t, e] − mean[e] · T[t]) / √T[t]

which is the token-weighted covariance of per-step shares. From 80 steps on, the same sum over blocks of steps is added
three times: what changed slowly inside the window is what goes on changing after it. Counts are divided by their
greatest common divisor first, so that scaling a layer changes nothing.

From 320 steps on the mean may favour the recent past: a block counts half as much as the one three blocks later. It
does so only where that rule would have forecast later parts of the same window better than the plain mean
(``forecast``), so a layer whose traffic stands still keeps every step. Steps are taken to be in time order.

y is rounded to integers (|q| ≤ ``QUANT``, one scale per expert) before the E × E product: every partial sum is then
exact, and the result does not depend on threads, BLAS or the order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Largest quantised deviation. 11 bits: squares of 512 steps still fit int32, and the rounding error (2.4e-4 of an
#: expert's own peak deviation) is far below counting noise.
QUANT = 2047

#: Below this many usable steps a covariance says nothing; counting noise (variance = mean) stands in for it.
MIN_STEPS = 8

#: Blocks that show slow change: many where each still holds ``BLOCK_STEPS``, else few, else none. The drift weight 3 is
#: the best of 1, 3, 10 on tuning seeds of decode-ep64 and decode-ep128.
BLOCK_STEPS = 8
MANY_BLOCKS, FEW_BLOCKS = 40, 10
DRIFT_ROOT = 1.7320508075688772  # √3

#: Weight of a block 0, 1, 2 blocks before the last one, in 2^-16; halved for every three blocks more.
RECENT = (65536, 52016, 41285)

#: Where in the window forecasts are tried (blocks before it are the past), and how many blocks each forecasts.
ORIGINS = (20, 30)
HORIZON = 10

#: Recent blocks are favoured when their forecast error is below this part of the plain mean's.
FORECAST_GAIN = 0.9


@dataclass(frozen=True)
class LayerMoments:
    """What the search knows of one layer: totals int64 [E], expected share [E], covariance of shares [E, E].

    ``recent`` says that the expected share favours the recent past and is not the totals' share.
    """

    total_E: np.ndarray
    mean_E: np.ndarray
    cov_EE: np.ndarray
    steps: int
    tokens_per_step: float
    recent: bool = False


def reduced(counts_ME: np.ndarray) -> np.ndarray:
    """The counts divided by their greatest common divisor (int64 [M, E]); a copy only when something divides."""
    # A few rows nearly always settle it: once the divisor is 1 the rest cannot raise it.
    g = int(np.gcd.reduce(counts_ME[:1], axis=None))
    for lo in range(1, counts_ME.shape[0], 64):
        if g == 1:
            return counts_ME
        g = int(np.gcd(g, np.gcd.reduce(counts_ME[lo : lo + 64], axis=None)))
    return counts_ME if g <= 1 else counts_ME // g


def block_count(steps: int) -> int:
    """How many blocks a window of ``steps`` usable steps is cut into; 0 when it is too short to show slow change."""
    for blocks in (MANY_BLOCKS, FEW_BLOCKS):
        if steps >= blocks * BLOCK_STEPS:
            return blocks
    return 0


def block_starts(steps: int, blocks: int) -> list[int]:
    """First step of every block, then ``steps``."""
    return [k * steps // blocks for k in range(blocks + 1)]


def block_sums(counts_ME: np.ndarray, blocks: int) -> np.ndarray:
    """Counts [blocks, E] of consecutive, equally long runs of steps."""
    steps, experts = counts_ME.shape
    if steps % blocks == 0:  # a sum over an axis takes a third of reduceat's time
        return counts_ME.reshape(blocks, steps // blocks, experts).sum(axis=1)
    return np.add.reduceat(counts_ME, block_starts(steps, blocks)[:-1])


def forecast(block_BE: np.ndarray) -> np.ndarray | None:
    """Expected share [E] after the window from block sums that favours the recent past, or None where that would not
    have paid.

    The past before each of ``ORIGINS`` forecasts the next ``HORIZON`` blocks, with and without weights; errors are
    squared differences of shares over the mean share.
    """
    if len(block_BE) != MANY_BLOCKS:
        return None
    share_KE = _shares(_FORECASTS, block_BE)
    mean_E = np.maximum(block_BE.sum(axis=0), 1).astype(np.float64)
    tried = 3 * len(ORIGINS)
    plain_OE, weighted_OE, after_OE = share_KE[0:tried:3], share_KE[1:tried:3], share_KE[2:tried:3]
    # cumsum adds from left to right: the decision is the same wherever it is made.
    plain, weighted = (
        float(np.cumsum((guess_OE - after_OE) ** 2 / mean_E)[-1]) for guess_OE in (plain_OE, weighted_OE)
    )
    return share_KE[-1] if weighted < FORECAST_GAIN * plain else None


def recent_weights(blocks: int) -> list[int]:
    """Weight of every block, the newest last."""
    return [RECENT[age % 3] >> (age // 3) for age in range(blocks - 1, -1, -1)]


def _forecasts() -> np.ndarray:
    """Weights [3 · origins + 1, MANY_BLOCKS] of the block sums that ``forecast`` looks at: for every origin the plain
    past, the weighted past and what came after; then the weighted window."""
    rows = []
    for t in ORIGINS:
        rest = MANY_BLOCKS - t
        after = [0] * t + [1] * HORIZON + [0] * (rest - HORIZON)
        rows += [[1] * t + [0] * rest, recent_weights(t) + [0] * rest, after]
    return np.array([*rows, recent_weights(MANY_BLOCKS)], np.int64)


_FORECASTS = _forecasts()


def _shares(weight_KB: np.ndarray, block_BE: np.ndarray) -> np.ndarray:
    """Shares [K, E] of weighted sums of blocks; the sums are exact, in float64 where every one stays below 2^53."""
    if int(block_BE.sum()) * RECENT[0] < 2**53:
        sum_KE = weight_KB.astype(np.float64) @ block_BE.astype(np.float64)
    else:
        sum_KE = weight_KB @ block_BE
    return sum_KE / sum_KE.sum(axis=1, keepdims=True).astype(np.float64)


def _share(sum_E: np.ndarray) -> np.ndarray:
    return sum_E / float(int(sum_E.sum()))


def usable(counts_ME: np.ndarray) -> np.ndarray:
    """The steps that have tokens; a copy only when some have none."""
    busy_M = counts_ME.any(axis=1)
    return counts_ME if busy_M.all() else counts_ME[busy_M]


def quantised(counts_ME: np.ndarray, blocks_BE: np.ndarray, mean_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integer deviations q [M + B, E] from ``mean_E`` (float64 holding integers) and their scales [E].

    Rows are the steps, all with tokens, then the blocks, weighted.
    """
    steps, experts = counts_ME.shape
    y_ME = np.empty((steps + len(blocks_BE), experts))
    _deviations(counts_ME, counts_ME.sum(axis=1), mean_E, y_ME[:steps])
    if len(blocks_BE):
        _deviations(blocks_BE, blocks_BE.sum(axis=1), mean_E, y_ME[steps:])
        y_ME[steps:] *= DRIFT_ROOT
    peak_E = np.maximum(y_ME.max(axis=0), -y_ME.min(axis=0))
    unit_E = np.where(peak_E > 0, peak_E, 1.0)
    y_ME *= (QUANT / unit_E)[None, :]
    np.rint(y_ME, out=y_ME)
    return y_ME, unit_E / QUANT


def expected(total_E: np.ndarray, block_BE: np.ndarray, ahead: bool) -> tuple[np.ndarray, bool]:
    """Expected share [E] from totals and block sums, and whether it favours the recent past; only with ``ahead`` may
    it."""
    recent_E = forecast(block_BE) if ahead else None
    return (_share(total_E), False) if recent_E is None else (recent_E, True)


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


def layer_moments(counts_ME: np.ndarray, ahead: bool = True) -> LayerMoments:
    """Moments of one layer from reduced int64 counts [M, E] with at least one token; ``ahead`` as in ``expected``."""
    counts_ME = usable(counts_ME)
    steps = counts_ME.shape[0]
    blocks = block_count(steps)
    block_BE = block_sums(counts_ME, blocks) if blocks else np.empty((0, counts_ME.shape[1]), np.int64)
    total_E = counts_ME.sum(axis=0)
    mean_E, recent = expected(total_E, block_BE, ahead)
    tokens = float(int(total_E.sum()))
    per_step = tokens / steps
    if steps < MIN_STEPS:
        return LayerMoments(total_E, mean_E, noise_only(mean_E, per_step), steps, per_step)
    q_ME, scale_E = quantised(counts_ME, block_BE, mean_E)
    return LayerMoments(total_E, mean_E, covariance(gram(q_ME), scale_E, tokens), steps, per_step, recent)
