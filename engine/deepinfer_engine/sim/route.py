"""Who gets the next request: policies over prefill ranks and over the ranks of a decode group. Integers decide ties.

Prefill: ``least_work`` (fewest predicted seconds queued), ``bucket`` (ranks are shared out to length classes by
demand; a loaded class spills over), ``round_robin``, ``random``. Decode: ``two_level`` (a rank below the KV level with
the fewest rows, else the lowest KV), ``least_rows``, ``least_kv``, ``round_robin``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

PrefillPolicy = Literal["least_work", "bucket", "round_robin", "random"]
DecodePolicy = Literal["two_level", "least_rows", "least_kv", "round_robin"]

#: Upper edges of the published length classes; the last is open.
BUCKET_EDGES = (16_384, 65_536, 262_144)
#: Seconds between two allotments of engines to length classes.
_ROUND_S = 1.0
#: KV level of a decode group over its mean: room to place without overshooting.
_LEVEL = 1.05


@dataclass
class PrefillRouter:
    """Chooses a prefill rank. ``work_s`` is what the router believes is queued on each rank.

    ``snapshot_s`` is the age at which it learns the truth again (0: always true); in between it adds what it sent.
    ``cost_sigma`` is the log-normal error of its predictions.
    """

    policy: PrefillPolicy
    ranks: int
    seed: int = 0
    snapshot_s: float = 0.0
    cost_sigma: float = 0.0
    spill: bool = True
    quota_s: float = 1.0
    work_s: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.work_s = np.zeros(self.ranks)
        self._rng = np.random.default_rng(self.seed)
        self._next = 0
        self._seen_at = -math.inf
        self._demand = np.zeros(len(BUCKET_EDGES) + 1)
        self._observed = np.zeros(len(BUCKET_EDGES) + 1)
        self._round_at = 0.0
        self._shares: list[np.ndarray] = [np.arange(self.ranks)] * len(self._demand)

    def choose(self, now: float, tokens: int, work_s: float, true_work_s: np.ndarray) -> int:
        """Rank for a prompt of ``tokens`` whose computation takes ``work_s``; ``true_work_s`` [R] is what is queued."""
        if now - self._seen_at >= self.snapshot_s:
            self.work_s = true_work_s.copy()
            self._seen_at = now
        guess = work_s * math.exp(self.cost_sigma * self._rng.standard_normal()) if self.cost_sigma else work_s
        rank = self._pick(now, tokens, guess)
        self.work_s[rank] += guess
        return rank

    def _pick(self, now: float, tokens: int, work_s: float) -> int:
        if self.policy == "random":
            return int(self._rng.integers(self.ranks))
        if self.policy == "round_robin":
            self._next = (self._next + 1) % self.ranks
            return self._next
        lightest = int(np.argmin(self.work_s))
        if self.policy == "least_work":
            return lightest
        bucket = int(np.searchsorted(BUCKET_EDGES, tokens, side="right"))
        self._observed[bucket] += work_s
        if now - self._round_at >= _ROUND_S:
            self._allot(now)
        own = self._shares[bucket]
        best = int(own[np.argmin(self.work_s[own])])
        if self.spill and self.work_s[best] > self.quota_s and self.work_s[lightest] < self.work_s[best] / 2:
            return lightest
        return best

    def _allot(self, now: float) -> None:
        """Share the ranks out by demand, at least one for every class with traffic, largest remainders first."""
        self._demand = 0.5 * self._demand + 0.5 * self._observed
        self._observed[:] = 0
        self._round_at = now
        active = np.flatnonzero(self._demand > 0)
        if len(active) == 0 or len(active) > self.ranks:
            return  # nothing known yet, or too few ranks to separate: everyone shares all
        spare = self.ranks - len(active)
        exact = spare * self._demand[active] / self._demand[active].sum()
        counts = 1 + np.floor(exact).astype(int)
        order = np.lexsort((active, -(exact - np.floor(exact))))
        counts[order[: self.ranks - counts.sum()]] += 1
        shares = [np.arange(self.ranks)] * len(self._demand)
        first = 0
        for bucket, count in zip(active, counts, strict=True):
            shares[int(bucket)] = np.arange(first, first + count)
            first += int(count)
        self._shares = shares


def place_row(
    policy: DecodePolicy,
    rows: np.ndarray,
    kv_tokens: np.ndarray,
    need_tokens: int,
    *,
    max_rows: int,
    max_tokens: int,
    waiting_tokens: int,
    turn: int,
) -> int | None:
    """Rank of a decode group [R] for a row of ``need_tokens``; None while no rank has room.

    ``waiting_tokens`` are those of the queued rows, this one included: they set the level of ``two_level``.
    """
    room = (rows < max_rows) & (kv_tokens + need_tokens <= max_tokens)
    if not room.any():
        return None
    able = np.flatnonzero(room)
    if policy == "round_robin":
        return int(able[np.searchsorted(able, turn % len(rows)) % len(able)])
    if policy == "least_rows":
        return int(able[np.lexsort((able, kv_tokens[able], rows[able]))[0]])
    if policy == "two_level":
        level = _LEVEL * (waiting_tokens + int(kv_tokens.sum())) / len(rows)
        under = able[kv_tokens[able] + need_tokens <= level]
        if len(under):
            return int(under[np.lexsort((under, kv_tokens[under], rows[under]))[0]])
    return int(able[np.lexsort((able, rows[able], kv_tokens[able]))[0]])
