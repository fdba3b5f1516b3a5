"""How many prompt tokens fit into a time budget: a quadratic step-time model and its inverse. Pure; units are ms.

A step over parts of ``count`` tokens that start at position ``start`` takes

    base + token · Σ count + pair · Σ count · (start + count / 2)

(the last sum counts query-key pairs). Given what is left of a budget, the longest chunk of one prompt solves the
quadratic in ``count``. Worked example, token 0.1, pair 0.001, 20 ms left: at start 0 the chunk is
(−0.1 + √(0.01 + 0.04)) / 0.001 = 123 tokens; at start 1,000 it is (−1.1 + √(1.21 + 0.04)) / 0.001 = 18.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: weight that an old step keeps per new one: about the last hundred steps decide
_FORGET = 0.99
#: steps seen before the fit is trusted; three coefficients need a few more than three
_MIN_STEPS = 4


@dataclass(frozen=True)
class StepCost:
    """Coefficients in ms: per step, per token, per query-key pair; none is negative."""

    base: float
    token: float
    pair: float

    def ms(self, parts: Iterable[tuple[int, int]]) -> float:
        """Predicted time of a step over (start, count) parts."""
        return self.base + sum(self.part_ms(start, count) for start, count in parts)

    def part_ms(self, start: int, count: int) -> float:
        """What one part adds to a step."""
        return count * (self.token + self.pair * (start + count / 2))

    def longest(self, start: int, left_ms: float) -> int:
        """Most tokens from ``start`` that take at most ``left_ms``; 0 when not even one fits."""
        if left_ms <= 0:
            return 0
        linear = self.token + self.pair * start
        if self.pair == 0:
            return int(min(left_ms / linear, 2**31)) if linear > 0 else 2**31
        # rationalised root: exact where pair is tiny beside linear
        count = 2 * left_ms / (linear + math.sqrt(linear * linear + 2 * self.pair * left_ms))
        return int(min(count, 2**31))


class CostFit:
    """Least squares with forgetting over measured steps; ``cost`` is None until enough steps were seen."""

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._scale = np.ones(3)
        self._steps = 0
        self.cost: StepCost | None = None

    def observe(self, parts: Iterable[tuple[int, int]], ms: float) -> None:
        """Add one measured step and refit."""
        tokens = pairs = 0.0
        for start, count in parts:
            tokens += count
            pairs += count * (start + count / 2)
        if not tokens or not math.isfinite(ms) or ms <= 0:
            return
        # relative error counts, so a long prefill does not drown the decode steps
        row = np.array([1.0, tokens, pairs]) / ms
        self._gram = _FORGET * self._gram + np.outer(row, row)
        self._moment = _FORGET * self._moment + row
        self._steps += 1
        if self._steps >= _MIN_STEPS:
            self.cost = StepCost(*_non_negative(self._gram, self._moment))


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> tuple[float, float, float]:
    """Best non-negative solution of gram · x = moment: the best of the 2³ supports that solves to x ≥ 0."""
    best, chosen = math.inf, np.zeros(3)
    for support in range(1, 8):
        index = [i for i in range(3) if support >> i & 1]
        sub = gram[np.ix_(index, index)]
        scale = np.sqrt(np.diag(sub))
        x = np.linalg.lstsq(sub / np.outer(scale, scale), moment[index] / scale, rcond=1e-9)[0] / scale
        if (x < 0).any():
            continue
        full = np.zeros(3)
        full[index] = x
        loss = float(full @ gram @ full - 2 * full @ moment)
        if loss < best:
            best, chosen = loss, full
    return float(chosen[0]), float(chosen[1]), float(chosen[2])
