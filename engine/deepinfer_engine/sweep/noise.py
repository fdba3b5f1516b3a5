"""How far repeated measurements scatter: mean with a 95 % interval, and the ratio of two means with one. Pure.

Repeats are few, so intervals use Student's t. Speeds and times are positive and their errors grow with them, so a ratio
is taken on logarithms: the interval of ``log b − log a`` with Welch's degrees of freedom, carried back by ``exp``.

Worked example: a = (100, 102, 98), b = (110, 113, 107) give a ratio of 1.100 between 1.034 and 1.170.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Two-sided 95 % quantile of Student's t for 1, 2, … degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(df: float) -> float:
    """The quantile; fractional degrees of freedom are rounded down, the wider side. Needs df ≥ 1."""
    n = max(int(df), 1)
    # beyond the table the Cornish-Fisher expansion of the normal quantile is exact to three decimals
    return _T95[n - 1] if n <= len(_T95) else 1.95996 + 2.37227 / df + 2.8225 / df**2


@dataclass(frozen=True)
class Interval:
    """A mean of ``count`` values with its 95 % interval; without repeats the noise is unknown and there are no ends."""

    mean: float
    low: float | None
    high: float | None
    count: int


def interval(values: Sequence[float]) -> Interval:
    """Mean and t interval of at least one value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, None, None, n)
    half = t95(n - 1) * math.sqrt(_variance(values, mean) / n)
    return Interval(mean, mean - half, mean + half, n)


def ratio(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Geometric mean of b over that of a, with its interval; None unless all values are positive."""
    if not a or not b or min(a) <= 0 or min(b) <= 0:
        return None
    la, lb = [math.log(v) for v in a], [math.log(v) for v in b]
    ma, mb = math.fsum(la) / len(la), math.fsum(lb) / len(lb)
    count = min(len(a), len(b))
    if count < 2:
        return Interval(math.exp(mb - ma), None, None, count)
    va, vb = _variance(la, ma) / len(a), _variance(lb, mb) / len(b)
    if va + vb == 0:
        return Interval(math.exp(mb - ma), math.exp(mb - ma), math.exp(mb - ma), count)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = t95(df) * math.sqrt(va + vb)
    return Interval(math.exp(mb - ma), math.exp(mb - ma - half), math.exp(mb - ma + half), count)


def overall(ratios: Sequence[Interval]) -> Interval | None:
    """Geometric mean of ratios over cells, with a t interval over the cells; None without any."""
    if not ratios:
        return None
    logs = [math.log(r.mean) for r in ratios]
    found = interval(logs)
    low = None if found.low is None else math.exp(found.low)
    high = None if found.high is None else math.exp(found.high)
    return Interval(math.exp(found.mean), low, high, found.count)


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
