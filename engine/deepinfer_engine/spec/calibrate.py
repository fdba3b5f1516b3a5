"""Confidences that mean what they say: one temperature per draft position, fitted from left to right. No torch.

The budget is split by survival, the product of confidences, so it is the product that must be a probability.
Sequential temperature scaling: with positions before k fixed, take for T_k the one of 41 values in [0.1, 10], even in
the logarithm, with the least expected calibration error of survival(k−1) · sigmoid(z_k / T_k) against "the drafts up
to and with k were accepted". Of equal errors the value closest to 1 wins.

Fit on steps that verified every draft: a step that verified fewer has hidden the outcomes of the others, and those it
hid are the ones it thought bad. One vector per sampling regime, because acceptance differs: ``greedy`` (the draft
equals the best token), ``coupled`` (it equals the token drawn with shared noise), ``rejection`` (1 − TV distance).

Worked example: at one position z = ln 9 throughout says .9; of 10 drafts 7 stood: error .2. T = 10^0.4 = 2.51 says
.706: error .006.

Source: DSpark paper, section on calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from deepinfer_engine.errors import ArtefactError, UsageError

Regime = Literal["greedy", "coupled", "rejection"]
#: order of the rows of the device's temperature table
REGIMES: tuple[Regime, ...] = ("greedy", "coupled", "rejection")

#: 41 values in [0.1, 10], even in the logarithm; the middle one is 1
TEMPERATURES = np.logspace(-1, 1, 41)
#: equal-width bins of the fit and of reports [the paper's and its code's]
FIT_BINS, REPORT_BINS = 15, 20
#: steps below which a fit would describe noise: 15 bins with some tens of outcomes each
MIN_STEPS = 500

#: file of a checkpoint that holds its ``calibration_record``
CONFIDENCE_FILE = "confidence.json"

_EDGE = 1e-8


@dataclass(frozen=True)
class Reliability:
    """How good one position's survival is as a probability, over ``n`` outcomes.

    ``auc`` is None where all outcomes are the same.
    """

    n: int
    ece: float
    auc: float | None
    brier: float
    predicted: float
    observed: float


@dataclass(frozen=True)
class Calibration:
    """Temperatures of one regime and what they changed, per position."""

    regime: Regime
    temperatures: tuple[float, ...]
    before: tuple[Reliability, ...]
    after: tuple[Reliability, ...]


def calibrate(
    logits_NJ: np.ndarray, accepted_N: np.ndarray, regime: Regime, observed_N: np.ndarray | None = None
) -> Calibration:
    """Fit one regime on N fully verified steps.

    ``logits_NJ`` are raw confidence logits; ``accepted_N`` how many drafts stood before the first refusal;
    ``observed_N`` how many positions were verified and before an end of sequence (None: all J). Raises ``UsageError``
    with too few steps, outcomes that contradict each other, or logits that are not finite.
    """
    logits, accepted = np.asarray(logits_NJ, dtype=np.float64), np.asarray(accepted_N)
    steps, width = logits.shape
    observed = np.full(steps, width) if observed_N is None else np.asarray(observed_N)
    if steps < MIN_STEPS:
        raise UsageError(f"{steps} steps to calibrate on, expected {MIN_STEPS} or more", hint="collect more steps")
    if not np.isfinite(logits).all():
        raise UsageError("confidence logits to calibrate on are not all finite")
    if (accepted < 0).any() or (accepted > observed).any() or (observed > width).any():
        raise UsageError(f"accepted drafts must lie in 0..observed, and observed in 0..{width}")
    found, running = [], np.ones(steps)
    for k in range(width):
        seen = observed > k
        outcome = (accepted > k)[seen]
        before = running[seen]
        errors = [ece(before * _sigmoid(logits[seen, k] / t), outcome, FIT_BINS) for t in TEMPERATURES]
        # of equal errors the temperature closest to 1: no change that the data does not ask for
        best = min(range(len(TEMPERATURES)), key=lambda i: (errors[i], abs(i - len(TEMPERATURES) // 2)))
        found.append(float(TEMPERATURES[best]))
        running = running * _sigmoid(logits[:, k] / found[-1])
    values = tuple(found)
    return Calibration(
        regime,
        values,
        reliability(logits, accepted, (1.0,) * width, observed),
        reliability(logits, accepted, values, observed),
    )


def reliability(
    logits_NJ: np.ndarray, accepted_N: np.ndarray, temperatures: Sequence[float], observed_N: np.ndarray | None = None
) -> tuple[Reliability, ...]:
    """Calibration error, ranking and squared error of survival under given temperatures, per position."""
    logits = np.asarray(logits_NJ, dtype=np.float64)
    steps, width = logits.shape
    observed = np.full(steps, width) if observed_N is None else np.asarray(observed_N)
    predicted = np.cumprod(_sigmoid(logits / np.asarray(temperatures)), axis=1).clip(_EDGE, 1 - _EDGE)
    out = []
    for k in range(width):
        seen = observed > k
        p, y = predicted[seen, k], (np.asarray(accepted_N) > k)[seen]
        if not len(p):
            out.append(Reliability(0, 0.0, None, 0.0, 0.0, 0.0))
            continue
        out.append(
            Reliability(
                len(p),
                ece(p, y, REPORT_BINS),
                auc(p, y),
                float(np.mean((p - y) ** 2)),
                float(p.mean()),
                float(y.mean()),
            )
        )
    return tuple(out)


def ece(predicted: np.ndarray, outcome: np.ndarray, bins: int) -> float:
    """Expected calibration error over equal-width bins of [0, 1]: Σ |mean predicted − mean outcome| · share."""
    if not len(predicted):
        return 0.0
    which = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(which, predicted, bins) - np.bincount(which, outcome, bins)
    return float(np.abs(gap).sum() / len(predicted))


def auc(predicted: np.ndarray, outcome: np.ndarray) -> float | None:
    """Probability that an accepted one is ranked above a refused one, equal values counting half; None without both."""
    positive = outcome.astype(bool)
    wins, losses = int(positive.sum()), int((~positive).sum())
    if not wins or not losses:
        return None
    _, which, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # of tied values, from 1
    return float((mean_rank[which][positive].sum() - wins * (wins + 1) / 2) / (wins * losses))


def check_temperatures(values: Sequence[float], draft_tokens: int, where: str) -> tuple[float, ...]:
    """``values`` as given, one finite number above zero per draft position; ``UsageError`` (exit 2) names the fault."""
    if len(values) != draft_tokens:
        raise UsageError(
            f"{where} has {len(values)} temperatures for {draft_tokens} draft positions",
            hint="give one per position, or none to use the checkpoint's own",
        )
    for k, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{where}[{k}] is {value!r}, expected a finite number above 0")
    return tuple(float(v) for v in values)


def temperature_table(
    profile: Sequence[float], checkpoint: Mapping[str, Sequence[float]], draft_tokens: int
) -> np.ndarray:
    """f32 [regimes, J] in the order of ``REGIMES``: the profile's vector for all, else the checkpoint's, else ones.

    A checkpoint that has vectors must have one of every regime: ``ArtefactError`` otherwise.
    """
    if len(profile):
        row = check_temperatures(profile, draft_tokens, "spec.confidence_temperatures")
        return np.tile(np.array(row, dtype=np.float32), (len(REGIMES), 1))
    if not checkpoint:
        return np.ones((len(REGIMES), draft_tokens), dtype=np.float32)
    missing = [r for r in REGIMES if r not in checkpoint]
    if missing:
        raise ArtefactError(f"the checkpoint's confidence temperatures lack {', '.join(missing)}")
    rows = []
    for regime in REGIMES:
        try:
            rows.append(check_temperatures(checkpoint[regime], draft_tokens, f"confidence temperatures of {regime}"))
        except UsageError as bad:
            raise ArtefactError(bad.message) from None
    return np.array(rows, dtype=np.float32)


def regime_of(temperature: float, mode: Literal["coupled", "rejection"]) -> int:
    """Row of the temperature table for a request's sampling temperature and the verification mode."""
    return REGIMES.index("greedy" if temperature == 0 else mode)


def calibration_record(rows: Sequence[Calibration], *, dataset: str) -> dict[str, Any]:
    """What a checkpoint keeps of a calibration, as JSON values: temperatures and what they changed, per regime."""
    return {
        "schema_version": 1,
        "dataset": dataset,
        "temperatures": {c.regime: list(c.temperatures) for c in rows},
        "before": {c.regime: [_rounded(r) for r in c.before] for c in rows},
        "after": {c.regime: [_rounded(r) for r in c.after] for c in rows},
    }


def _rounded(quality: Reliability) -> dict[str, Any]:
    """Four digits: the next ones are noise of a few thousand steps."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(quality).items()}


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(z, -700, 700)))
