"""Measure re-planning: consecutive windows, a plan after each, what every plan moves and how it does on the next
window.

The first plan is made cold by every strategy; from the second window on, moves and balance are averaged. Strategies:
our planner warm at several move prices and one cap, our planner cold, the two reference rules cold, and keeping the
first plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepinfer_engine.eplb import baselines, traces
from deepinfer_engine.eplb.bench import Recipe
from deepinfer_engine.eplb.loops import Loops
from deepinfer_engine.eplb.policy import PlanSettings, Topology, plan_experts
from deepinfer_engine.eplb.score import layer_balance
from deepinfer_engine.errors import UsageError

Replanner = Callable[[np.ndarray, np.ndarray | None], np.ndarray]

#: Move prices to show, and a cap of 5 % of the slots.
PRICES = (0.0, 0.5, 0.9, 1.5, 3.0)
CAP_FRACTION = 0.05


@dataclass(frozen=True)
class ReplanRow:
    """One strategy: mean received experts per layer and re-plan, their share of the slots, moe_lb_step on the next
    window."""

    strategy: str
    moves: float
    share: float
    next: float


@dataclass(frozen=True)
class ReplanResult:
    """All strategies on one recipe."""

    recipe: str
    shape: str
    seeds: tuple[int, ...]
    replans: int
    rows: tuple[ReplanRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def received(new_LRS: np.ndarray, old_LRS: np.ndarray) -> int:
    """Experts that ranks must receive to go from one set of slots to another."""
    pairs = zip(
        new_LRS.reshape(-1, new_LRS.shape[2]).tolist(), old_LRS.reshape(-1, old_LRS.shape[2]).tolist(), strict=True
    )
    return sum(len(set(new) - set(old)) for new, old in pairs)


def strategies(recipe: Recipe, loops: Loops, threads: int) -> dict[str, Replanner]:
    """Name → function of (window counts, running slots) to new slots."""
    topology = Topology(recipe.ranks, recipe.slots_per_rank)
    cap = int(CAP_FRACTION * recipe.ranks * recipe.slots_per_rank)

    def ours(price: float, most: int | None, warm: bool) -> Replanner:
        settings = PlanSettings(move_price=price, max_moves=most, threads=threads)

        def replan(counts: np.ndarray, old: np.ndarray | None) -> np.ndarray:
            planned = plan_experts(counts, topology, old_LRS=old if warm else None, settings=settings, loops=loops)
            return np.stack([p.slot_RS for p in planned])

        return replan

    def cold(rule: Callable[[np.ndarray, int, int], np.ndarray]) -> Replanner:
        return lambda counts, old: np.stack(
            [rule(counts[:, k], recipe.ranks, recipe.slots_per_rank) for k in range(counts.shape[1])]
        )

    first = ours(0.0, None, False)
    return {
        "longest-first on totals": cold(baselines.totals_rule),
        "greedy on observed peaks": cold(baselines.peak_rule),
        "deepinfer, cold": first,
        **{f"deepinfer, warm, price {price:g}": ours(price, None, True) for price in PRICES},
        f"deepinfer, warm, at most {cap} moves": ours(0.0, cap, True),
        "keep the first plan": lambda counts, old: first(counts, None) if old is None else old,
    }


def run_replan(
    recipe: Recipe, replans: int, loops: Loops, threads: int = 1, log: Callable[[str], None] = lambda text: None
) -> ReplanResult:
    """Re-plan after each of ``replans`` + 1 windows of ``train_steps`` steps on every seed; UsageError for recorded
    routing."""
    if recipe.trace is None:
        raise UsageError(f"{recipe.name}: re-planning needs a trace that goes on, not recorded routing")
    if replans < 1:
        raise UsageError(f"replans is {replans}, expected 1 or more")
    size, trace = recipe.train_steps, recipe.trace
    moves: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for seed in recipe.seeds:
        counts = traces.synthetic(trace, size * (replans + 2), seed)
        for name, replan in strategies(recipe, loops, threads).items():
            slots = replan(counts[:size], None)
            for k in range(1, replans + 1):
                new = replan(counts[k * size : (k + 1) * size], slots)
                moves.setdefault(name, []).append(received(new, slots) / trace.layers)
                after.setdefault(name, []).append(_balance(counts[(k + 1) * size : (k + 2) * size], new))
                slots = new
            log(f"seed {seed}: {name}: {np.mean(moves[name]):.1f} moves, next {np.mean(after[name]):.4f}")
    total = recipe.ranks * recipe.slots_per_rank
    rows = tuple(
        ReplanRow(name, float(np.mean(m)), float(np.mean(m)) / total, float(np.mean(after[name])))
        for name, m in moves.items()
    )
    shape = f"{trace.layers} layers x {trace.experts} experts, {recipe.ranks} ranks x {recipe.slots_per_rank} slots"
    return ReplanResult(recipe.name, shape, recipe.seeds, replans, rows)


def _balance(counts: np.ndarray, slots_LRS: np.ndarray) -> float:
    known = []
    for k, slot_RS in enumerate(slots_LRS):
        found = layer_balance(counts[:, k], slot_RS, np.bincount(slot_RS.reshape(-1), minlength=counts.shape[2]))
        if found is not None:
            known.append(found.moe_lb_step)
    return float(np.mean(known))
