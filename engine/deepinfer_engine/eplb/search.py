"""Swap search over one layer: exchange replicas between ranks until no exchange lowers the expected peak.

Statement. A rank's future load (mean 1) is about Normal(μ, σ²); both are exact functions of the mean and covariance of
expert loads. The plan's cost is Σ_ranks φ(b(μ − 1) + b²σ²/2 − x₀), with φ(x) = max(0, 1 + x/64)^64 ≈ exp: a
Chernoff-type bound on the expected maximum, b = 1.5·√(2 ln R) ÷ mean σ of the start. φ needs only additions and
multiplications, so numpy and the compiled loop return the same bits on every machine. One step: take the costliest rank
that has not failed yet, try every exchange of its slots with every slot of the other ranks, make the best one if it
gains, else mark the rank. Ties go to the lowest (own slot, other slot).

Covariance and not observed peaks: independent noise adds the same variance to every placement and cannot be fitted,
while a search on the window's own peaks fits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: φ(x) = (1 + x/64)^64: six squarings. Everything below is kept as y = 1 + x/64.
POWER_LOG2 = 6
INV_POWER = 1.0 / (1 << POWER_LOG2)

#: y is cut here: its 64th power is 1e294, and sums over ranks stay finite.
PHI_CAP = 4e4

#: An exchange must also gain this fraction of the other rank's cost: next to a rank that costs far more than the first,
#: rounding would pass for a gain, and two ranks could exchange the same experts for ever.
KEEP = 1.0 - 1e-9

#: Cost of what is not allowed; above every sum of two φ, which stay below 1e295.
BARRED = 1e300

#: Exchanges per slot after which a search stops; real searches make fewer than one.
EXCHANGES_PER_SLOT = 32


@dataclass(frozen=True)
class SearchRules:
    """Fixed settings of one search.

    ``tol`` is the least gain worth an exchange, as a fraction of ``_State.scale``. ``price`` is paid per expert a rank
    must receive: 1 is the cost of a perfectly average rank (φ(0) = 1). ``cap`` is the most experts that may be received
    in the layer.
    """

    tol: float = 1e-4
    price: float = 0.0
    cap: int | None = None


def sharpness(ranks: int) -> float:
    """b · σ̄: 1.5·√(2 ln R), where √(2 ln R) is the growth of the maximum of R normals."""
    return round(1.5 * math.sqrt(2.0 * math.log(max(ranks, 2))), 9)


def phi(y: np.ndarray) -> np.ndarray:
    """φ in place, from y = 1 + x/64."""
    np.clip(y, 0.0, PHI_CAP, out=y)
    for _ in range(POWER_LOG2):
        np.multiply(y, y, out=y)
    return y


def _phi_of(y: float) -> float:
    """φ of one y: the same additions and multiplications."""
    y = min(max(y, 0.0), PHI_CAP)
    for _ in range(POWER_LOG2):
        y *= y
    return y


def swap_search(
    slot_RS: np.ndarray,
    mean_E: np.ndarray,
    cov_EE: np.ndarray,
    copies_E: np.ndarray,
    rules: SearchRules,
    held_RE: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Improved slots [R, S] and the number of exchanges made.

    ``mean_E`` and ``cov_EE`` are those of shares of the layer's tokens. ``held_RE`` (bool) says which rank already
    holds which expert: with it, exchanges pay ``rules.price`` per expert received and never exceed ``rules.cap``.
    """
    state = _State(slot_RS, mean_E, cov_EE, copies_E, held_RE)
    swaps = state.descend(rules)
    return state.slot.reshape(slot_RS.shape), swaps


def _left(a: np.ndarray) -> np.ndarray:
    """The sum over the second axis, added from left to right."""
    out = a[:, 0].copy()
    for k in range(1, a.shape[1]):
        out += a[:, k]
    return out


class _State:
    """Slot-ordered arrays of one search; P = R·S slots, rank r owns slots r·S … r·S + S − 1."""

    def __init__(
        self,
        slot_RS: np.ndarray,
        mean_E: np.ndarray,
        cov_EE: np.ndarray,
        copies_E: np.ndarray,
        held_RE: np.ndarray | None,
    ):
        self.ranks: int
        self.slots: int
        self.ranks, self.slots = slot_RS.shape
        self.slot = slot_RS.reshape(-1).copy()
        # One replica's part of an expert's share, in units of the mean rank load.
        self.part_E: np.ndarray = float(self.ranks) / copies_E
        self.load_E = mean_E * self.part_E
        self.cov_EE = cov_EE
        rank_P = np.repeat(np.arange(self.ranks), self.slots)
        self.bar_RE = np.zeros((self.ranks, len(mean_E)))  # BARRED where the rank holds the expert
        self.bar_RE[rank_P, self.slot] = BARRED
        # Ranks that hold each expert of several copies; the only holder of another one is barred as the first rank.
        self.on: dict[int, set[int]] = {e: set() for e in np.flatnonzero(copies_E > 1).tolist()}
        for r, e in zip(rank_P.tolist(), self.slot.tolist(), strict=True):
            if e in self.on:
                self.on[e].add(r)
        # 1 where a rank would have to receive the expert; only with an old plan.
        self.new_RE = None if held_RE is None else (~held_RE).astype(np.int64)
        self.received = 0 if self.new_RE is None else int(self.new_RE[rank_P, self.slot].sum())

        self._fill(sharpness(self.ranks))

    def _fill(self, sharp: float) -> None:
        """Fix b from the spread of the start and compute everything that depends on it."""
        R, S = self.ranks, self.slots
        own = np.arange(R)
        part = self.part_E[self.slot]
        cov_PP = self.cov_EE[self.slot[:, None], self.slot[None, :]]
        cov_PP *= part[:, None] * part[None, :]
        own_RSS = cov_PP.reshape(R, S, R, S)[own, :, own]
        load_RS = self.load_E[self.slot].reshape(R, S)
        var_R = _left(_left(own_RSS))
        mu_R = _left(load_RS)
        spread = float(_left(np.sqrt(np.maximum(var_R, 0.0))[None, :])[0])
        sharpness = sharp / max(spread / R, 1e-4)
        b, half = sharpness * INV_POWER, 0.5 * sharpness * sharpness * INV_POWER
        load_P, diag_P = load_RS.reshape(-1) * b, np.diagonal(cov_PP) * half
        self.gain_P, self.rest_P = load_P + diag_P, diag_P - load_P
        cov_PP *= 2.0 * half
        self.K2 = cov_PP
        self.V2 = _left(cov_PP.reshape(R, S, R * S))
        base = half * (float(_left(var_R[None, :])[0]) / R)
        self.y_R = (((mu_R - 1.0) * b + var_R * half) - base) + 1.0
        self.phi_R = phi(self.y_R.copy())
        self.keep_P = np.repeat(self.phi_R * KEEP, S)
        self.loss_P = np.empty(R * S)
        self.both = np.empty((2, S, R * S))  # scratch of _best
        for r in range(R):
            self._reset(r)

    def _reset(self, r: int) -> None:
        """loss[p] = y of p's rank without p."""
        lo, hi = r * self.slots, (r + 1) * self.slots
        self.loss_P[lo:hi] = self.y_R[r] + (self.rest_P[lo:hi] - self.V2[r, lo:hi])

    def total(self) -> float:
        """The cost of all ranks, added from left to right."""
        return float(np.add.accumulate(self.phi_R)[-1])

    def scale(self, a: int) -> float:
        """The cost that gains on rank ``a`` are measured by: all ranks together, or R times ``a`` if that is less.

        One rank that cannot be relieved may cost more than all others; it must not hide what they can gain.
        """
        return min(self.total(), self.ranks * float(self.phi_R[a]))

    def descend(self, rules: SearchRules) -> int:
        """Exchange until every rank has failed once since the last change that touched it; returns the exchanges
        made."""
        swaps = 0
        live = np.ones(self.ranks, bool)
        while swaps < EXCHANGES_PER_SLOT * len(self.slot):
            a = int(np.where(live, self.phi_R, -1.0).argmax())
            if not live[a]:
                break
            found = self._best(a, rules)
            if found is None:
                live[a] = False
                continue
            self._swap(a, *found)
            live[a] = live[found[1] // self.slots] = True
            swaps += 1
        return swaps

    def _best(self, a: int, rules: SearchRules) -> tuple[int, int, float, float] | None:
        """The best exchange of a slot of rank ``a``: (own slot, other slot, new y of a, new y of the other), or
        None."""
        R, S = self.ranks, self.slots
        P, lo, hi = R * S, a * S, a * S + S
        k, both = self.K2[lo:hi], self.both
        np.add(self.loss_P[lo:hi, None], self.gain_P + self.V2[a], out=both[0])
        into_SR = self.gain_P[lo:hi, None] + self.V2[:, lo:hi].T
        np.add(into_SR.repeat(S, axis=1), self.loss_P, out=both[1])
        both -= k
        phi(both)
        cost = np.add(both[0], both[1], out=both[0])
        cost -= self.keep_P - self.bar_RE[a].take(self.slot)
        by_rank = cost.reshape(S, R, S)
        if self.new_RE is not None:
            self._charge(by_rank, self.new_RE, a, rules)
        for i, e in enumerate(self.slot[lo:hi].tolist()):
            for r in self.on.get(e, ()):
                by_rank[i, r] = BARRED
        best = int(cost.argmin())
        i, p = divmod(best, P)
        least = rules.tol * self.scale(a)
        if not cost.reshape(-1)[best] < self.phi_R[a] - least:
            return None
        i += lo
        y_a = (self.loss_P[i] + (self.gain_P[p] + self.V2[a, p])) - self.K2[i, p]
        b = p // S
        y_b = ((self.gain_P[i] + self.V2[b, i]) + self.loss_P[p]) - self.K2[i, p]
        return i, p, float(y_a), float(y_b)

    def _charge(self, cost: np.ndarray, new_RE: np.ndarray, a: int, rules: SearchRules) -> None:
        """Add the price of received experts to ``cost`` [S, R, S]; forbid what would exceed the cap."""
        R, S = self.ranks, self.slots
        lo, hi = a * S, a * S + S
        ranks_P = np.repeat(np.arange(R), S)
        out_P = new_RE[a, self.slot] - new_RE[ranks_P, self.slot]
        mine = self.slot[lo:hi]
        in_SR = (new_RE[:, mine] - new_RE[a, mine][None, :]).T
        delta = in_SR[:, :, None] + out_P.reshape(1, R, S)
        cost += delta * rules.price
        if rules.cap is not None:
            cost[(delta > 0) & (self.received + delta > rules.cap)] = BARRED

    def _swap(self, a: int, i: int, p: int, y_a: float, y_b: float) -> None:
        S, b = self.slots, p // self.slots
        e, f = int(self.slot[i]), int(self.slot[p])
        if (new := self.new_RE) is not None:
            self.received += int(new[a, f] - new[a, e] + new[b, e] - new[b, f])
        self.slot[i], self.slot[p] = f, e
        self._moved(e, a, b)
        self._moved(f, b, a)
        for m in (self.K2, self.K2.T, self.V2.T):
            row = m[i].copy()
            m[i], m[p] = m[p], row
        shift = self.K2[i] - self.K2[p]
        self.V2[a] += shift
        self.V2[b] -= shift
        for v in (self.gain_P, self.rest_P):
            v[i], v[p] = v[p], v[i]
        for r, y in ((a, y_a), (b, y_b)):
            self.y_R[r], self.phi_R[r] = y, (cost := _phi_of(y))
            self.keep_P[r * S : r * S + S] = cost * KEEP
            self._reset(r)

    def _moved(self, e: int, a: int, b: int) -> None:
        """One replica of expert e has left rank a for rank b."""
        stays = e in self.on and e in self.slot[a * self.slots : (a + 1) * self.slots]
        self.bar_RE[a, e], self.bar_RE[b, e] = BARRED if stays else 0.0, BARRED
        if e in self.on:
            self.on[e].add(b)
            if not stays:
                self.on[e].remove(a)
