"""Balance of a plan on recorded steps: moe_lb, moe_lb_step, the counting-noise floor, and what dispatch does to them.

With even splitting, the load of a rank in a step is Σ over its slots of count(expert) ÷ copies. Per layer, over the
steps that have tokens:

* ``moe_lb``       Σ_steps max_rank ÷ Σ_steps mean_rank      (the fraction of time: weights busy steps more)
* ``moe_lb_step``  mean over steps of max_rank ÷ mean_rank

and both are averaged over the layers that have tokens. The floor is what a perfectly planned placement would still show
because counts are random: 1 + g(R) · √(mean counting-noise variance of a rank), g(R) = expected maximum of R standard
normals, with Poisson counts split over the copies.

Sums are exact: loads are integers in units of 1 ÷ lcm(1..16) token, and float64 products are used only where every
partial sum stays below 2^53.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from deepinfer_engine.eplb.placement import LCM


@dataclass(frozen=True)
class LayerBalance:
    """Balance of one layer on one window; None for a layer without tokens."""

    moe_lb: float
    moe_lb_step: float
    p99: float
    floor: float


def rank_loads(counts_ME: np.ndarray, slot_RS: np.ndarray, copies_E: np.ndarray) -> np.ndarray:
    """Exact loads [M, R] in units of 1/LCM token; float64 holding integers, or int64 where those would not fit."""
    ranks, experts = slot_RS.shape[0], counts_ME.shape[1]
    unit_ER = np.zeros((experts, ranks), np.int64)
    live = slot_RS >= 0
    np.add.at(unit_ER, (slot_RS[live], np.nonzero(live)[0]), 1)
    unit_ER *= (LCM // copies_E)[:, None]
    if int(counts_ME.sum(axis=1).max(initial=0)) < 2**53 // LCM:
        return counts_ME.astype(np.float64) @ unit_ER.astype(np.float64)
    return counts_ME @ unit_ER


def peak_sum(counts_ME: np.ndarray, slot_RS: np.ndarray, copies_E: np.ndarray) -> int:
    """Σ over steps of the largest rank load, exact, in units of 1/LCM token."""
    return int(rank_loads(counts_ME, slot_RS, copies_E).max(axis=1).astype(np.int64).sum())


@lru_cache(maxsize=64)
def expected_normal_max(ranks: int) -> float:
    """Expected maximum of ``ranks`` independent standard normals (0.56 for 2, 1.03 for 4, 2.35 for 64)."""
    if ranks < 2:
        return 0.0
    x = np.linspace(-8.0, 8.0, 8001)
    density = np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)
    step = x[1] - x[0]
    below = np.cumsum(density) * step - 0.5 * density * step
    return float((x * ranks * density * below ** (ranks - 1)).sum() * step)


def noise_floor(counts_ME: np.ndarray, copies_E: np.ndarray, ranks: int) -> float:
    """The balance that counting noise alone costs an even-split plan with these copies."""
    tokens_M = counts_ME.sum(axis=1)
    steps = int((tokens_M > 0).sum())
    total_E = counts_ME.sum(axis=0)
    mean_rank = float(total_E.sum()) / steps / ranks
    # Poisson: a replica of an expert with mean n per step has variance n / copies², and there are `copies` of it.
    variance = float((total_E / copies_E).sum()) / steps / ranks / mean_rank**2
    return 1.0 + expected_normal_max(ranks) * variance**0.5


def balance_of(loads_MR: np.ndarray, floor: float) -> LayerBalance:
    """Balance from rank loads [M, R] over live ranks; steps without load are left out."""
    mean_M = loads_MR.mean(axis=1)
    busy = mean_M > 0
    peak_M, mean_M = loads_MR[busy].max(axis=1).astype(np.float64), mean_M[busy].astype(np.float64)
    ratio_M = peak_M / mean_M
    return LayerBalance(
        moe_lb=float(peak_M.sum() / mean_M.sum()),
        moe_lb_step=float(ratio_M.mean()),
        p99=float(np.quantile(ratio_M, 0.99)),
        floor=floor,
    )


def layer_balance(
    counts_ME: np.ndarray,
    slot_RS: np.ndarray,
    copies_E: np.ndarray,
    *,
    dispatch: str = "even",
    rng: np.random.Generator | None = None,
) -> LayerBalance | None:
    """Balance of one layer under ``dispatch``; None when the layer has no tokens in these steps.

    ``even`` splits every expert equally, ``hash`` sends each token to a random replica (``rng`` decides), ``lp`` splits
    each step as well as the replicas allow. Rows of ``slot_RS`` that are all -1 are dead ranks and are left out.
    """
    if not counts_ME.any():
        return None
    slot_RS = slot_RS[(slot_RS >= 0).any(axis=1)]
    floor = noise_floor(counts_ME, copies_E, slot_RS.shape[0])
    if dispatch == "even":
        loads_MR = rank_loads(counts_ME, slot_RS, copies_E)
    elif dispatch == "hash":
        assert rng is not None
        loads_MR = hashed_loads(counts_ME, slot_RS, rng)
    else:
        loads_MR = best_split_loads(counts_ME, slot_RS)
    return balance_of(loads_MR, floor)


def holders(slot_RS: np.ndarray, experts: int) -> list[list[int]]:
    """For every expert the ranks that hold it, one entry per replica."""
    out: list[list[int]] = [[] for _ in range(experts)]
    for r, row in enumerate(slot_RS.tolist()):
        for e in row:
            if e >= 0:
                out[e].append(r)
    return out


def hashed_loads(counts_ME: np.ndarray, slot_RS: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rank loads [M, R] when every token picks one of its expert's replicas independently."""
    loads_MR = np.zeros((counts_ME.shape[0], slot_RS.shape[0]), np.int64)
    for e, ranks in enumerate(holders(slot_RS, counts_ME.shape[1])):
        if len(ranks) == 1:
            loads_MR[:, ranks[0]] += counts_ME[:, e]
        else:
            split = rng.multinomial(counts_ME[:, e], np.full(len(ranks), 1.0 / len(ranks)))
            for k, r in enumerate(ranks):
                loads_MR[:, r] += split[:, k]
    return loads_MR


def best_split_loads(counts_ME: np.ndarray, slot_RS: np.ndarray, sweeps: int = 200, tol: float = 1e-5) -> np.ndarray:
    """Rank loads [M, R] of the split of each step that makes the largest rank smallest (the linear-programming
    optimum).

    Replicated experts re-split their tokens over their holders in turn, each exactly (water filling). That minimises Σ
    load², whose minimiser over these splits also has the smallest maximum (loads form a base polytope). Stops when no
    step's peak moved by more than ``tol`` of its mean in a sweep.
    """
    where = holders(slot_RS, counts_ME.shape[1])
    steps, ranks = counts_ME.shape[0], slot_RS.shape[0]
    loads_MR = np.zeros((steps, ranks))
    shares: dict[int, np.ndarray] = {}
    for e, on in enumerate(where):
        unique = sorted(set(on))
        if len(unique) == 1:
            loads_MR[:, unique[0]] += counts_ME[:, e]
        else:
            shares[e] = np.repeat(counts_ME[:, e, None] / len(unique), len(unique), axis=1)
            loads_MR[:, unique] += shares[e]
    mean_M = np.maximum(loads_MR.mean(axis=1), 1e-30)
    peak_M = loads_MR.max(axis=1)
    for _ in range(sweeps):
        for e, share in shares.items():
            on = sorted(set(where[e]))
            other = loads_MR[:, on] - share
            shares[e] = _filled(other, counts_ME[:, e].astype(np.float64))
            loads_MR[:, on] = other + shares[e]
        now_M = loads_MR.max(axis=1)
        if float(((peak_M - now_M) / mean_M).max(initial=0.0)) < tol:
            break
        peak_M = now_M
    return loads_MR


def _filled(other_MC: np.ndarray, amount_M: np.ndarray) -> np.ndarray:
    """Water filling: non-negative parts [M, C] summing to ``amount`` that level ``other`` + part from below."""
    sorted_MC = np.sort(other_MC, axis=1)
    count = np.arange(1, other_MC.shape[1] + 1)
    level_MC = (amount_M[:, None] + np.cumsum(sorted_MC, axis=1)) / count
    # The level with k vessels is right for the largest k whose k-th vessel still lies below it.
    k = np.maximum((level_MC >= sorted_MC).sum(axis=1), 1)
    level_M = level_MC[np.arange(len(k)), k - 1]
    return np.maximum(level_M[:, None] - other_MC, 0.0)
