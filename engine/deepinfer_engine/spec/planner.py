"""How many drafts the next step verifies: none, all, or a budget between them. Pure host arithmetic, no torch.

A step of R rows that verifies K drafts emits R + (the K largest survivals) tokens in expectation and takes what the
step-time curve says. ``rates`` finds the best K; verifying all (fixed) and not drafting at all (off) are always
candidates, so speculation is used where it pays.

The budget must be known before the drafts are: survivals of the step's own drafts would leak drawn tokens into the
lengths, and would make the host wait. So the planner predicts from survivals of earlier steps, kept as a histogram with
exact means per bin (what matters is how many drafts lie above a threshold, not whose they were). Text that the
calibration never saw may keep fewer drafts than its survivals promise; so predictions are scaled by what recent steps
accepted over what they had hoped for.

A path is left only for one that was predicted better several plans in a row; entering ``adaptive`` also takes a margin,
because its gain is a difference of two predictions. While drafts are off nothing is learned, so from time to time one
fixed step is run to look.

Worked example: 4 rows, survivals .9 .5 .2 each; off 10 ms, fixed 15 ms, adaptive 11 + K/3 ms. Off gives .40 tokens per
ms, fixed 10.4/15 = .693; adaptive is best with K = 8: (4 + 5.6)/13.67 = .702, since the ninth draft adds .2 tokens in
.33 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepinfer_engine.errors import UsageError
from deepinfer_engine.spec.curve import StepCurve, Way

#: of equal ways the first, which does less
_WAYS: tuple[Way, ...] = ("off", "fixed", "adaptive")


@dataclass(frozen=True)
class Choice:
    """What a step does: its way, how many drafts it verifies in all, and the predicted tokens per second."""

    way: Way
    budget: int
    tokens_s: float


@dataclass(frozen=True)
class PlannerSettings:
    """``enter_gain``: predicted gain that adaptive must show. ``enter_after`` / ``leave_after``: plans in a row that
    must agree before adaptive, or another way, is taken. ``probe_every``: plans without drafts between two fixed ones.
    ``memory``: share of the histogram that stays at each observation, ``trust_memory``: of the hopes and outcomes.
    ``trust_prior``: drafts that are taken to have come out as hoped. ``probe_fade``: what stays of both at a probe."""

    enter_gain: float = 0.005  # half of the regret that is allowed
    enter_after: int = 4
    leave_after: int = 2
    probe_every: int = 256  # a lost step in 256 costs 0.2 % at the worst published ratio of two paths
    memory: float = 0.75  # some four steps: confidences change with the text, not faster
    trust_memory: float = 0.95  # some twenty steps: calibration changes with the kind of text
    trust_prior: float = 16.0
    probe_fade: float = 0.5  # after some ten probes drafts are tried again in earnest


def prospect(survival_BJ: np.ndarray, cap_B: np.ndarray | None = None) -> np.ndarray:
    """f64 [n+1]: expected accepted drafts when the K best of n are verified, K = 0..n.

    ``cap_B``: drafts that a row may verify (None: all).
    """
    scores = np.asarray(survival_BJ, dtype=np.float64)
    if cap_B is not None:
        scores = scores[np.arange(scores.shape[1]) < np.asarray(cap_B)[:, None]]
    best = -np.sort(-scores.ravel())
    return np.concatenate(([0.0], np.cumsum(best)))


def rates(curve: StepCurve, rows: int, gain_K: np.ndarray) -> dict[Way, Choice]:
    """The best choice on each of the three ways; of equal budgets the smaller. ``gain_K`` is a prospect."""
    most = len(gain_K) - 1
    times = curve.adaptive(rows, np.arange(most + 1))
    speed = (rows + gain_K) / times
    best = int(speed.argmax())
    return {
        "off": Choice("off", 0, 1e3 * rows / curve.off(rows)),
        "fixed": Choice("fixed", most, 1e3 * float(rows + gain_K[-1]) / curve.fixed(rows)),
        "adaptive": Choice("adaptive", best, 1e3 * float(speed[best])),
    }


def best_choice(curve: StepCurve, rows: int, gain_K: np.ndarray) -> Choice:
    """The fastest way; of equal ones the one that does less: off, then fixed, then adaptive."""
    found = rates(curve, rows, gain_K)
    return max((found[way] for way in _WAYS), key=lambda c: c.tokens_s)


def regret(curve: StepCurve, survival_BJ: np.ndarray, taken: Choice) -> float:
    """Share of the expected tokens per second that ``taken`` gave away, knowing the step's own survivals."""
    rows = len(survival_BJ)
    gain = prospect(survival_BJ)
    best = best_choice(curve, rows, gain)
    budget = min(taken.budget, len(gain) - 1)
    if taken.way == "off":
        got = rows / curve.off(rows)
    elif taken.way == "fixed":
        got = (rows + gain[-1]) / curve.fixed(rows)
    else:
        got = (rows + gain[budget]) / float(curve.adaptive(rows, np.array(budget)))
    return float(1 - 1e3 * got / best.tokens_s)


class SurvivalHistory:
    """Survivals of recent steps as a fading histogram, of ``BINS`` bins with their sums."""

    BINS = 64

    def __init__(self, draft_tokens: int, memory: float):
        self.draft_tokens = draft_tokens
        self.memory = memory
        self.rows = 0.0
        self._count = np.zeros(self.BINS)
        self._sum = np.zeros(self.BINS)

    def add(self, survival_BJ: np.ndarray) -> None:
        """Survivals [B, J] of one step's drafts, all J of each row whether verified or not."""
        scores = np.asarray(survival_BJ, dtype=np.float64)
        if not len(scores):
            return
        flat = scores.ravel()
        which = np.minimum((flat * self.BINS).astype(np.int64), self.BINS - 1)
        keep = self.memory
        self._count = keep * self._count + np.bincount(which, minlength=self.BINS)
        self._sum = keep * self._sum + np.bincount(which, flat, self.BINS)
        self.rows = keep * self.rows + len(scores)

    def prospect(self, rows: int) -> np.ndarray:
        """f64 [rows·J + 1]: what the K best drafts of ``rows`` rows may be expected to add. Needs an observation."""
        share = rows / self.rows
        counts = np.concatenate(([0.0], np.cumsum(self._count[::-1] * share)))
        gains = np.concatenate(([0.0], np.cumsum(self._sum[::-1] * share)))
        return np.interp(np.arange(rows * self.draft_tokens + 1), counts, gains)


class BudgetPlanner:
    """Chooses way and budget of every step. Everything it knows is older than the step's drafts."""

    def __init__(self, curve: StepCurve, verify: Literal["fixed", "adaptive"], settings: PlannerSettings | None = None):
        self.curve = curve
        self.verify = verify
        self.settings = settings or PlannerSettings()
        self.way: Way = "fixed"
        self.history = SurvivalHistory(curve.draft_tokens, self.settings.memory)
        self._rival: tuple[Way, int] = ("fixed", 0)  # a better way and how many plans in a row it was better
        self._since_probe = 0
        self._hoped = self._accepted = 0.0

    @property
    def trust(self) -> float:
        """Drafts that recent steps accepted, over those that their survivals had promised."""
        prior = self.settings.trust_prior
        return (self._accepted + prior) / (self._hoped + prior)

    def outcome(self, hoped: float, accepted: int) -> None:
        """A step accepted ``accepted`` drafts; the calibrated survivals of those it verified add up to ``hoped``."""
        keep = self.settings.trust_memory
        self._hoped = keep * self._hoped + hoped
        self._accepted = keep * self._accepted + accepted

    def observe(self, survival_BJ: np.ndarray) -> None:
        """Calibrated survivals [B, J] of a step's drafts, once they are on the host; in the order of the steps."""
        if self.verify == "adaptive":
            self.history.add(survival_BJ)

    def plan(self, rows: int) -> Choice:
        """The choice for a step of ``rows`` decode rows; all drafts until something was observed."""
        if rows < 1:
            raise UsageError(f"{rows} rows to plan a verify budget for, expected 1 or more")
        everything = Choice("fixed", rows * self.curve.draft_tokens, 0.0)
        if self.verify == "fixed" or not self.history.rows:
            return everything
        gain = np.minimum(self.trust * self.history.prospect(rows), np.arange(rows * self.curve.draft_tokens + 1))
        found = rates(self.curve, rows, gain)
        self._consider(found)
        if self.way == "off":
            self._since_probe += 1
            if self._since_probe >= self.settings.probe_every:
                self._since_probe = 0
                self._hoped *= self.settings.probe_fade
                self._accepted *= self.settings.probe_fade
                return found["fixed"]
        return found[self.way]

    def _consider(self, found: dict[Way, Choice]) -> None:
        """Move to a way that has been better for long enough."""
        s = self.settings
        asked = {way: c.tokens_s / (1 + (s.enter_gain if way == "adaptive" else 0.0)) for way, c in found.items()}
        asked[self.way] = found[self.way].tokens_s
        best: Way = max(_WAYS, key=lambda way: asked[way])
        if asked[best] <= asked[self.way]:
            self._rival = (self.way, 0)
            return
        before, times = self._rival
        times = times + 1 if before == best else 1
        self._rival = (best, times)
        if times >= (s.enter_after if best == "adaptive" else s.leave_after):
            self.way = best
            self._rival = (best, 0)
            self._since_probe = 0
