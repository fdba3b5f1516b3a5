"""Simulated speculation on a step-time law: none, all drafts, and a planned budget, by rows per rank.

Drafts are drawn from a law of acceptance: whether draft k stands, given that those before it did, has a probability
whose logit is normal, with a part that belongs to the request and one that is new with every draft. Its mean is set so
that five drafts commit what the vendor published for fixed verification. Its two spreads and the time that a split
costs were chosen on a grid so that the largest error over the published gains is smallest: agreement with them shows
that the laws have the right shape, it is no prediction. The confidences are these probabilities (a calibrated head).
Requests are replaced at random, each by one of its own stratum, so that the load and its mix stay.

The planner sees survivals two steps late, as a running engine does. Tokens are counted in expectation, so that what is
left of noise is the mix of requests; fixed and planned steps see the same drafts. Three results stand side by side:

* ``planned``: what the planner chooses.
* ``as_published``: the budget that the vendor's mean verify length makes, split by survival. This is what its published
  gain can be held against.
* ``none``: no drafts at all. The law's per-row time includes drafting, so none is understated by that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.cost import published
from deepinfer_engine.cost.steptime import DecodeTime
from deepinfer_engine.errors import UsageError
from deepinfer_engine.spec.budget import survival
from deepinfer_engine.spec.curve import Load, StepCurve, curve_loads, fit_curve
from deepinfer_engine.spec.planner import BudgetPlanner, Choice, best_choice, prospect

#: rows per rank of the table: the published ones and two below them
ROWS = (1, 8, 16, 32, 48, 60, 72, 96)
#: tokens per step of fixed verification, mean of the published rows
COMMITTED_FIXED = 3.29
#: slots per rank behind the published decode law: 384 experts over 64 ranks and one redundant
_SLOTS = 7
#: what a split costs a step (allocation, uneven rows), fitted; 0.16 to 0.20 ms were reported for unfused operations
SPLIT_MS = 0.2
#: two-sided 95 % of Student's t at 19 degrees of freedom, for the 20 windows of a run
_T19 = 2.093
_WINDOWS = 20
_NORMAL = NormalDist()
#: steps before counting: the planner's history fills and its votes are cast
_WARMUP = 32


@dataclass(frozen=True)
class AcceptanceLaw:
    """Logits of conditional acceptance: ``mean`` + request part + draft part. A request lives ``life_steps`` on
    average."""

    mean: float
    request_sigma: float = 1.75
    draft_sigma: float = 1.5
    life_steps: float = 150.0  # some 500 answer tokens at the published tokens per step

    @classmethod
    def committing(cls, tokens: float, draft_tokens: int) -> AcceptanceLaw:
        """The law whose ``draft_tokens`` drafts commit ``tokens`` per step, bonus included."""
        if not 1 < tokens < draft_tokens + 1:
            raise UsageError(f"{draft_tokens} drafts cannot commit {tokens:g} tokens per step")
        rng = np.random.default_rng(0)
        request = rng.normal(0, 1, (20_000, 1))
        draft = rng.normal(0, 1, (20_000, draft_tokens))
        low, high = -20.0, 20.0
        for _ in range(50):  # halving 40 that often leaves 4e-14
            law = cls((low + high) / 2)
            found = 1 + law.survivals(request, draft).sum(1).mean(dtype=float)
            low, high = (law.mean, high) if found < tokens else (low, law.mean)
        return cls((low + high) / 2)

    def survivals(self, request_B1: np.ndarray, draft_BJ: np.ndarray) -> np.ndarray:
        """f32 [B, J] for standard normal parts."""
        logits = self.mean + self.request_sigma * request_B1 + self.draft_sigma * draft_BJ
        return survival((1 / (1 + np.exp(-logits))).astype(np.float32))


@dataclass(frozen=True)
class DsparkRow:
    """One load. Verify lengths count drafts, tokens per step the bonus too; ``*_tok_s`` are per rank.

    ``gain`` is per cent over fixed, ``half_width`` its 95 % interval over 20 windows; ``regret`` is the share that the
    planner lost against knowing each step's survivals. ``published_*`` is None where the vendor printed nothing.
    """

    rows: int
    fixed_tokens: float
    verify: float
    tokens: float
    none_tok_s: float
    fixed_tok_s: float
    planned_tok_s: float
    gain: float
    half_width: float
    regret: float
    ways: dict[str, float]
    published_verify: float | None
    published_gain: float | None
    as_published_tokens: float | None
    as_published_gain: float | None


def curve_of(time: DecodeTime, max_rows: int, draft_tokens: int) -> StepCurve:
    """The step-time curve of a law, at the loads an engine would measure."""
    return fit_curve({load: _step_ms(time, load) for load in curve_loads(max_rows, draft_tokens)})


def _step_ms(time: DecodeTime, load: Load) -> float:
    return 1e3 * time.step_s(load.rows, load.drafts) + (SPLIT_MS if load.path == "adaptive" else 0.0)


def simulate_dspark_table(
    config: ModelConfig, rows: Sequence[int] = ROWS, *, steps: int = 400, seed: int = 0, context: float = 0.0
) -> tuple[DsparkRow, ...]:
    """The table for the published step-time law, beside the vendor's figures.

    ``steps`` are counted per load, more below 16 rows, where a step holds few requests. Raises ``UsageError`` for
    fewer steps than windows.
    """
    if steps < _WINDOWS:
        raise UsageError(f"{steps} steps, expected {_WINDOWS} or more")
    time = published.decode_time(config, _SLOTS)
    draft_tokens = 5
    law = AcceptanceLaw.committing(COMMITTED_FIXED, draft_tokens)
    at_context = DecodeTime(time.base_s, time.token_s, time.row_s + time.context_s * context)
    curve = curve_of(at_context, max(rows), draft_tokens)
    return tuple(_row(curve, law, r, steps * max(1, 16 // r), seed) for r in rows)


def _row(curve: StepCurve, law: AcceptanceLaw, rows: int, steps: int, seed: int) -> DsparkRow:
    drafts = _Drafts(law, rows, curve.draft_tokens, np.random.default_rng((seed, rows)))
    planner = BudgetPlanner(curve, "adaptive")
    vendor = next((v for v in published.VERIFY_TABLE if v.rows == rows), None)
    taken, held, best = [], [], []
    late: list[np.ndarray] = []
    for step in range(_WARMUP + steps):
        choice = planner.plan(rows)
        scores = drafts.step()
        if step >= _WARMUP:
            gain = prospect(scores)
            taken.append(_outcome(curve, rows, gain, choice))
            top = best_choice(curve, rows, gain)
            best.append(top.tokens_s)
            if vendor is not None:
                fixed_budget = Choice("adaptive", round(rows * vendor.verify), 0.0)
                held.append(_outcome(curve, rows, gain, fixed_budget))
        late.append(scores)
        if len(late) > 2:
            planner.observe(late.pop(0))
    return _summary(rows, curve, np.array(taken), np.array(held), np.array(best), vendor)


class _Drafts:
    """Survivals of one rank, step after step."""

    def __init__(self, law: AcceptanceLaw, rows: int, draft_tokens: int, rng: np.random.Generator):
        self.law, self.rng = law, rng
        self.shape = (rows, draft_tokens)
        self.request = self._fresh(np.arange(rows))

    def step(self) -> np.ndarray:
        gone = np.flatnonzero(self.rng.random(self.shape[0]) < 1 / self.law.life_steps)
        self.request[gone] = self._fresh(gone)
        return self.law.survivals(self.request, self.rng.normal(0, 1, self.shape))

    def _fresh(self, rows: np.ndarray) -> np.ndarray:
        """Standard normal request parts [n, 1]: row i draws from the i-th of as many equal shares as there are rows."""
        share = (rows + self.rng.random(len(rows))) / self.shape[0]
        return np.array([_NORMAL.inv_cdf(min(max(x, 1e-9), 1 - 1e-9)) for x in share.tolist()]).reshape(-1, 1)


_WAY_NUMBERS = {"off": 0, "fixed": 1, "adaptive": 2}


def _outcome(curve: StepCurve, rows: int, gain: np.ndarray, choice: Choice) -> tuple[float, ...]:
    """(tokens, ms, drafts verified, way, tokens of fixed, ms of fixed) of one step."""
    whole = (rows + float(gain[-1]), curve.fixed(rows))
    if choice.way == "off":
        return (float(rows), curve.off(rows), 0.0, 0.0, *whole)
    if choice.way == "fixed":
        return (*whole, float(len(gain) - 1), 1.0, *whole)
    ms = float(curve.adaptive(rows, np.array(choice.budget)))
    return (rows + float(gain[choice.budget]), ms, float(choice.budget), 2.0, *whole)


def _gains(outcomes: np.ndarray) -> np.ndarray:
    """Per cent over fixed in each window."""
    windows = [w.sum(0) for w in np.array_split(outcomes, _WINDOWS)]
    return np.array([100 * (w[0] / w[1] / (w[4] / w[5]) - 1) for w in windows])


def _summary(
    rows: int,
    curve: StepCurve,
    taken: np.ndarray,
    held: np.ndarray,
    best: np.ndarray,
    vendor: published.VerifyRow | None,
) -> DsparkRow:
    total = taken.sum(0)
    gains = _gains(taken)
    # what the best choice of every step would have emitted in the time that was taken
    ideal = float((best * taken[:, 1]).sum()) / 1e3
    return DsparkRow(
        rows=rows,
        fixed_tokens=total[4] / len(taken) / rows,
        verify=total[2] / len(taken) / rows,
        tokens=total[0] / len(taken) / rows,
        none_tok_s=1e3 * rows / curve.off(rows),
        fixed_tok_s=1e3 * total[4] / total[5],
        planned_tok_s=1e3 * total[0] / total[1],
        gain=100 * (total[0] / total[1] / (total[4] / total[5]) - 1),
        half_width=_T19 * float(gains.std(ddof=1)) / np.sqrt(_WINDOWS),
        regret=1 - total[0] / ideal,
        ways={name: float((taken[:, 3] == number).mean()) for name, number in _WAY_NUMBERS.items()},
        published_verify=vendor.verify if vendor else None,
        published_gain=vendor.gain_percent if vendor else None,
        as_published_tokens=held[:, 0].mean() / rows if vendor else None,
        as_published_gain=float(_gains(held).mean()) if vendor else None,
    )
