"""How long a step takes: two small laws, their inversions, and how they are fitted.

* prefill: ``base + token·c + pair·c·(x + c/2)`` for a chunk of c tokens behind a context of x; several chunks of a step
  share ``base``. The pair term is the full index scan, the only part that grows with the context.
* decode: ``base + token·n·(1 + v) + row·n + context·n·x`` for n rows that verify v drafts each.

Worked example (the published SM100 fit): a chunk of 4,096 takes 68 ms, one of 32,768 378 ms; 60 rows that verify 3.58
drafts take 14.5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.errors import UsageError


@dataclass(frozen=True)
class PrefillTime:
    """Seconds: ``base_s`` per step, ``token_s`` per token, ``pair_s`` per (token, earlier token)."""

    base_s: float
    token_s: float
    pair_s: float

    def chunk_s(self, tokens: float, context: float = 0.0) -> float:
        """A chunk without the step's base."""
        return self.token_s * tokens + self.pair_s * tokens * (context + tokens / 2)

    def step_s(self, chunks: Iterable[tuple[float, float]]) -> float:
        """A step over (tokens, context) chunks of one rank; 0 without any."""
        total = [self.chunk_s(tokens, context) for tokens, context in chunks]
        return self.base_s + sum(total) if total else 0.0

    def tokens_per_s(self, chunk: int, context: float = 0.0) -> float:
        """Throughput of a rank whose every step is one chunk of this size."""
        return chunk / (self.base_s + self.chunk_s(chunk, context))

    def largest_chunk(self, budget_s: float, context: float = 0.0) -> int:
        """Most tokens behind ``context`` whose chunk (without base) takes no longer than ``budget_s``."""
        if budget_s <= 0:
            return 0
        linear = self.token_s + self.pair_s * context
        if self.pair_s == 0:
            return int(budget_s / linear)
        # the positive root of pair/2·c² + linear·c − budget, in the form that does not cancel
        return int(2 * budget_s / (linear + math.sqrt(linear * linear + 2 * self.pair_s * budget_s)))

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]], pair_s: float = 0.0) -> PrefillTime:
        """Least squares of base and token time through (chunk, seconds) points without context.

        Two points are met exactly. Raises ``UsageError`` when the points imply a negative time.
        """
        if len({c for c, _ in points}) < 2:
            raise UsageError("a prefill curve needs two different chunk sizes")
        chunks = np.array([c for c, _ in points], dtype=float)
        seconds = np.array([s for _, s in points]) - pair_s * chunks**2 / 2
        (base, token), *_ = np.linalg.lstsq(np.stack([np.ones_like(chunks), chunks], 1), seconds, rcond=None)
        if base < 0 or token <= 0:
            raise UsageError(f"the points imply {base * 1e3:.3f} ms per step and {token * 1e6:.3f} us per token")
        return cls(float(base), float(token), pair_s)


@dataclass(frozen=True)
class DecodeTime:
    """Seconds: ``base_s`` per step, ``token_s`` per verified position, ``row_s`` per row, ``context_s`` per
    (row, earlier token)."""

    base_s: float
    token_s: float
    row_s: float
    context_s: float = 0.0

    def step_s(self, rows: float, verify: float, context: float = 0.0) -> float:
        """A step of ``rows`` that verify ``verify`` drafts each behind a mean context."""
        return self.base_s + rows * (self.token_s * (1 + verify) + self.row_s + self.context_s * context)


@dataclass(frozen=True)
class Speculation:
    """Drafts verified and tokens committed (bonus included) per row and step, by rows per rank.

    ``points`` are (rows, verify, committed) in ascending rows; between them both are interpolated, beyond them the
    last point holds. Verify length is no smooth function of the load, so it comes from a table.
    """

    points: tuple[tuple[float, float, float], ...]

    def at(self, rows: float) -> tuple[float, float]:
        """(verify, committed) at a load."""
        xs = [p[0] for p in self.points]
        verify = float(np.interp(rows, xs, [p[1] for p in self.points]))
        return verify, float(np.interp(rows, xs, [p[2] for p in self.points]))


#: One token per step, nothing verified.
NO_SPECULATION = Speculation(((1, 0.0, 1.0),))


@dataclass(frozen=True)
class DecodePoint:
    """A load on the decode curve: seconds per step and the two speeds that are published for it."""

    rows: float
    step_s: float
    tokens_per_s_user: float
    tokens_per_s_gpu: float


def decode_point(time: DecodeTime, speculation: Speculation, rows: float, context: float = 0.0) -> DecodePoint:
    """Speeds at ``rows`` per rank, one rank per GPU."""
    verify, committed = speculation.at(rows)
    step = time.step_s(rows, verify, context)
    return DecodePoint(rows, step, committed / step, rows * committed / step)


def rows_at_speed(
    time: DecodeTime, speculation: Speculation, tokens_per_s_user: float, *, limit: int = 4096, context: float = 0.0
) -> int:
    """Most rows per rank (up to ``limit``) at which a user still gets the speed; 0 when even one row is slower.

    The speed need not fall monotonically where verify length jumps, so every load is tried from above.
    """
    for rows in range(limit, 0, -1):
        if decode_point(time, speculation, rows, context).tokens_per_s_user >= tokens_per_s_user:
            return rows
    return 0
