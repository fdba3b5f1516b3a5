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
    np.maximum(y, 0.0, out=y)
    np.minimum(y, PHI_CAP, out=y)
    for _ in range(POWER_LOG2):
        np.multiply(y, y, out=y)
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
        has = np.zeros((self.ranks, len(mean_E)), bool)
        has[np.repeat(np.arange(self.ranks), self.slots), self.slot] = True
        self.has_RE = has
        # 1 where a rank would have to receive the expert; all zero without an old plan.
        self.warm = held_RE is not None
        self.new_RE = np.zeros(has.shape, np.int64) if held_RE is None else (~held_RE).astype(np.int64)
        self.received = int(self.new_RE[np.repeat(np.arange(self.ranks), self.slots), self.slot].sum())

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
        self.load_P = load_RS.reshape(-1) * b
        self.diag_P = np.diagonal(cov_PP) * half
        self.gain_P = self.load_P + self.diag_P
        cov_PP *= 2.0 * half
        self.K2 = cov_PP
        self.V2 = _left(cov_PP.reshape(R, S, R * S))
        base = half * (float(_left(var_R[None, :])[0]) / R)
        self.y_R = (((mu_R - 1.0) * b + var_R * half) - base) + 1.0
        self.phi_R = phi(self.y_R.copy())
        self.loss_P = np.empty(R * S)
        for r in range(R):
            self._reset(r)

    def _reset(self, r: int) -> None:
        """loss[p] = y of p's rank without p."""
        lo, hi = r * self.slots, (r + 1) * self.slots
        self.loss_P[lo:hi] = self.y_R[r] + ((self.diag_P[lo:hi] - self.load_P[lo:hi]) - self.V2[r, lo:hi])

    def total(self) -> float:
        out = 0.0
        for v in self.phi_R.tolist():
            out += v
        return out

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
        mine, k = self.slot[lo:hi], self.K2[lo:hi]
        both = np.empty((2, S, P))
        np.add(self.loss_P[lo:hi, None], (self.gain_P + self.V2[a])[None, :], out=both[0])
        there = self.gain_P[lo:hi, None] + self.V2[:, lo:hi].T
        np.add(there[:, :, None], self.loss_P.reshape(1, R, S), out=both[1].reshape(S, R, S))
        both -= k
        phi(both)
        cost = np.add(both[0], both[1], out=both[0]).reshape(S, R, S)
        cost -= (self.phi_R * KEEP)[None, :, None]
        if self.warm:
            self._charge(cost, a, rules)
        cost.reshape(S, P)[:, self.has_RE[a, self.slot]] = np.inf
        cost[self.has_RE[:, mine].T] = np.inf
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

    def _charge(self, cost: np.ndarray, a: int, rules: SearchRules) -> None:
        """Add the price of received experts to ``cost`` [S, R, S]; forbid what would exceed the cap."""
        R, S = self.ranks, self.slots
        lo, hi = a * S, a * S + S
        ranks_P = np.repeat(np.arange(R), S)
        out_P = self.new_RE[a, self.slot] - self.new_RE[ranks_P, self.slot]
        mine = self.slot[lo:hi]
        in_SR = (self.new_RE[:, mine] - self.new_RE[a, mine][None, :]).T
        delta = in_SR[:, :, None] + out_P.reshape(1, R, S)
        cost += delta * rules.price
        if rules.cap is not None:
            cost[(delta > 0) & (self.received + delta > rules.cap)] = np.inf

    def _swap(self, a: int, i: int, p: int, y_a: float, y_b: float) -> None:
        S, b = self.slots, p // self.slots
        e, f = int(self.slot[i]), int(self.slot[p])
        new = self.new_RE
        self.received += int(new[a, f] - new[a, e] + new[b, e] - new[b, f])
        self.slot[i], self.slot[p] = f, e
        for r in (a, b):
            self.has_RE[r] = False
            self.has_RE[r, self.slot[r * S : r * S + S]] = True
        self.K2[[i, p]] = self.K2[[p, i]]
        self.K2[:, [i, p]] = self.K2[:, [p, i]]
        self.V2[:, [i, p]] = self.V2[:, [p, i]]
        shift = self.K2[i] - self.K2[p]
        self.V2[a] += shift
        self.V2[b] -= shift
        for v in (self.load_P, self.diag_P, self.gain_P):
            v[i], v[p] = v[p], v[i]
        self.y_R[a], self.y_R[b] = y_a, y_b
        pair = phi(np.array([y_a, y_b]))
        self.phi_R[a], self.phi_R[b] = pair
        self._reset(a)
        self._reset(b)
