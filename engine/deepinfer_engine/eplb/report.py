"""What a plan is worth: balance on the planning window and on steps it has not seen, its price, and whether to use it.

Statement. The new plan is compared with the one that runs now (``old``), or with the identity layout when there is
none, on the held-out steps (the planning window when nothing is held out):

    gain  = (moe_lb_old − moe_lb_new) ÷ moe_lb_old                         (fraction of MoE time saved)
    cost  = most bytes one rank receives ÷ link bandwidth                  (seconds the slowest transfer takes)
    value = horizon_steps · moe_ms · (moe_lb_old − moe_lb_new)             (milliseconds saved until the next re-plan)

Use the new plan when value > cost, else keep the old one. Assumed figures (expert size, link, MoE time) are marked as
such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from deepinfer_engine.eplb.layout import identity
from deepinfer_engine.eplb.plan import ExpertPlan
from deepinfer_engine.eplb.score import LayerBalance, layer_balance
from deepinfer_engine.errors import UsageError

#: Bytes of one V4.1-Flash expert in FP4: three 5120 x 2304 matrices at half a byte plus one scale byte per 32.
FLASH_EXPERT_BYTES = 3 * 5120 * 2304 * 17 // 32

#: Extra slots per rank the redundancy ladder looks at.
LADDER = (0, 1, 2, 4)


@dataclass(frozen=True)
class Economics:
    """What moving and imbalance cost. ``assumed`` names the figures nobody gave."""

    expert_bytes: int = FLASH_EXPERT_BYTES
    link_gb_s: float = 50.0
    moe_ms: float = 10.0
    horizon_steps: int = 10_000
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "link_gb_s", "moe_ms", "horizon_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name.replace('_', '-')} is {value}, expected more than 0")

    def transfer_s(self, experts: int) -> float:
        """Seconds for one rank to receive that many experts."""
        return experts * self.expert_bytes / (self.link_gb_s * 1e9)

    def saved_s(self, lb_before: float, lb_after: float) -> float:
        """Seconds of MoE time saved over the horizon."""
        return (lb_before - lb_after) * self.moe_ms * 1e-3 * self.horizon_steps

    def break_even_steps(self, experts: int, lb_before: float, lb_after: float) -> int | None:
        """Steps until the transfer is paid back; None when it never is."""
        per_step = (lb_before - lb_after) * self.moe_ms * 1e-3
        return math.ceil(self.transfer_s(experts) / per_step) if per_step > 1e-12 else None


@dataclass(frozen=True)
class Window:
    """Balance of one plan on one window: means over the layers that have tokens, None when none has."""

    moe_lb: float | None
    moe_lb_step: float | None
    p99: float | None
    floor: float | None

    @property
    def excess(self) -> float | None:
        """Balance above the counting-noise floor."""
        return None if self.moe_lb is None or self.floor is None else self.moe_lb - self.floor


@dataclass(frozen=True)
class LayerRow:
    """One layer of the report. Balances are on the held-out steps when there are any."""

    layer_id: int
    signal: bool
    kind: str
    before: float | None
    train: float | None
    train_step: float | None
    holdout: float | None
    holdout_step: float | None
    floor: float | None
    hottest_copies: int
    moves: int
    start: str


@dataclass(frozen=True)
class Rung:
    """One step of the redundancy ladder: ``redundant`` extra slots per rank and what they buy over none."""

    redundant: int
    slots_per_rank: int
    moe_lb: float | None
    gib_per_rank: float
    break_even_steps: int | None


@dataclass(frozen=True)
class Verdict:
    """``use`` or ``keep`` (the old plan, or the identity layout), with the numbers behind it in one sentence."""

    action: str
    sentence: str
    gain: float | None
    cost_s: float
    saved_s: float | None


@dataclass(frozen=True)
class PlanReport:
    """Everything the command prints; ``to_dict`` is its JSON form."""

    shape: dict[str, Any]
    windows: dict[str, Window]
    layers: tuple[LayerRow, ...]
    ladder: tuple[Rung, ...]
    moves: dict[str, Any]
    colocations: int
    verdict: Verdict
    economics: Economics
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        windows = {name: asdict(w) | {"excess": w.excess} for name, w in self.windows.items()}
        return asdict(self) | {"windows": windows}


def split_steps(steps: int, holdout: float | None, ordered: bool) -> tuple[int, str]:
    """Steps to plan on (the rest, the newest, are held out) and a note when the default held nothing out.

    The default holds out the newest fifth of at least 50 ordered steps. Raises UsageError for a fraction that cannot be
    honoured.
    """
    if holdout is None:
        if not ordered:
            return steps, ""
        if steps < 50:
            return steps, f"{steps} usable steps: too few to hold any out, so every number is on the planning window"
        return steps - steps // 5, ""
    if not 0.0 <= holdout <= 0.9:
        raise UsageError(f"holdout is {holdout}, expected 0 to 0.9")
    held = int(steps * holdout)
    if holdout and not ordered:
        raise UsageError("the steps of this file are not in time order, so none can be held out", hint="--holdout 0")
    if holdout and held == 0:
        raise UsageError(f"holdout {holdout} of {steps} steps is none", hint=f"nearest: {1 / steps:.3f}, or 0")
    return steps - held, ""


def plan_balances(
    counts_MLE: np.ndarray, plan: ExpertPlan, dispatch: str = "even", seed: int = 0
) -> list[LayerBalance | None]:
    """Balance of every layer of a plan on a window; the hash dispatch draws from ``seed`` and the layer."""
    return [
        layer_balance(
            counts_MLE[:, k],
            plan.slot_expert_LRS[k],
            plan.replicas_LE[k],
            dispatch=dispatch,
            rng=np.random.default_rng([seed, k]),
        )
        for k in range(plan.layers)
    ]


def window_of(layers: Sequence[LayerBalance | None]) -> Window:
    """Averages over the layers with tokens."""
    known = [b for b in layers if b is not None]

    def mean(name: str) -> float | None:
        return math.fsum(getattr(b, name) for b in known) / len(known) if known else None

    return Window(mean("moe_lb"), mean("moe_lb_step"), mean("p99"), mean("floor"))


def identity_plan(like: ExpertPlan) -> ExpertPlan:
    """The layout a deployment starts with: experts in order, spare slots filled in turn; dead ranks as in ``like``."""
    live = [r for r in range(like.ranks) if r not in like.dead_ranks]
    slots = np.full(like.slot_expert_LRS.shape, -1, np.int64)
    slots[:, live] = identity(like.experts, len(live), like.slots_per_rank)
    return ExpertPlan(0, like.experts, slots, like.layer_ids, "identity", (None,) * like.layers, like.digests)


def move_summary(plan: ExpertPlan, old: ExpertPlan, economics: Economics) -> dict[str, Any]:
    """Received experts per layer, in total and on the busiest rank, with bytes and seconds; what only the
    checkpoint has."""
    moves = plan.moves(old)
    per_layer = np.bincount([m.layer for m in moves], minlength=plan.layers)
    per_rank = np.bincount([m.dst_rank for m in moves], minlength=plan.ranks)
    most = int(per_rank.max())
    return {
        "total": len(moves),
        "per_layer": per_layer.tolist(),
        "mean_per_layer": float(per_layer.mean()),
        "slots_per_layer": plan.ranks * plan.slots_per_rank,
        "bytes": len(moves) * economics.expert_bytes,
        "max_rank": most,
        "max_rank_bytes": most * economics.expert_bytes,
        "transfer_s": economics.transfer_s(most),
        "from_checkpoint": sorted({(m.layer, m.expert) for m in moves if m.src_rank < 0}),
    }


def judge(
    before: Window, after: Window, moved: dict[str, Any], economics: Economics, *, has_old: bool, forced: bool
) -> Verdict:
    """Whether the new plan pays for its moves. ``forced``: the old plan cannot run any more (ranks or slots
    changed)."""
    cost = moved["transfer_s"] if has_old else 0.0
    if before.moe_lb is None or after.moe_lb is None:
        action = "keep" if has_old and not forced else "use"
        return Verdict(action, "no signal: no layer has tokens in this window", None, cost, None)
    gain, saved = (before.moe_lb - after.moe_lb) / before.moe_lb, economics.saved_s(before.moe_lb, after.moe_lb)
    numbers = f"moe_lb {before.moe_lb:.4f} -> {after.moe_lb:.4f}"
    if not has_old and gain <= 0:
        return Verdict("keep", f"keep the identity layout: a plan does not help here ({numbers})", gain, cost, saved)
    if not has_old:
        return Verdict("use", f"use this plan: {numbers} against the identity layout", gain, cost, saved)
    if forced:
        return Verdict(
            "use", f"use this plan: the old one does not fit these ranks and slots ({numbers})", gain, cost, saved
        )
    steps = f"{economics.horizon_steps} steps"
    price = f"{moved['total']} moves, {cost:.2f} s on the busiest rank"
    if saved > cost:
        return Verdict(
            "use",
            f"use this plan: gain {gain:.1%} ({numbers}) saves {saved:.2f} s in {steps}, cost {price}",
            gain,
            cost,
            saved,
        )
    return Verdict(
        "keep",
        f"keep the old plan: gain {gain:.1%} ({numbers}) saves {saved:.2f} s in {steps} < cost {price}",
        gain,
        cost,
        saved,
    )


def redundancy_ladder(
    plan_with: Callable[[int], ExpertPlan], test_MLE: np.ndarray, experts: int, live: int, economics: Economics
) -> tuple[Rung, ...]:
    """Balance, memory and break-even of 0, 1, 2 and 4 extra slots per rank.

    ``plan_with(slots)`` plans for that many slots per rank. Break-even counts the steps in which the saved MoE time
    pays for loading the extra replicas once. Rungs that cannot be filled with at most 16 replicas are left out.
    """
    base = -(-experts // live)
    rungs: list[Rung] = []
    first: float | None = None
    for extra in LADDER:
        if live * (base + extra) > 16 * experts or (extra and live == 1):
            continue
        plan = plan_with(base + extra)
        lb = window_of(plan_balances(test_MLE, plan)).moe_lb
        first = lb if extra == 0 else first
        even = (
            economics.break_even_steps(extra * plan.layers, first, lb)
            if extra and lb is not None and first is not None
            else None
        )
        gib = (base + extra) * plan.layers * economics.expert_bytes / 2**30
        rungs.append(Rung(extra, base + extra, lb, gib, even))
    return tuple(rungs)


def layer_rows(
    plan: ExpertPlan,
    kinds: Sequence[str],
    starts: Sequence[str],
    moved: Sequence[int],
    before: Sequence[LayerBalance | None],
    train: Sequence[LayerBalance | None],
    holdout: Sequence[LayerBalance | None] | None,
) -> tuple[LayerRow, ...]:
    """One row per layer; ``before`` is on the same window as the last of ``train`` and ``holdout`` that exists."""
    rows = []
    for k in range(plan.layers):
        b, t, h = before[k], train[k], holdout[k] if holdout is not None else None
        shown = h or t
        rows.append(
            LayerRow(
                layer_id=plan.layer_ids[k],
                signal=t is not None,
                kind=kinds[k] if kinds else "",
                before=b.moe_lb if b else None,
                train=t.moe_lb if t else None,
                train_step=t.moe_lb_step if t else None,
                holdout=h.moe_lb if h else None,
                holdout_step=h.moe_lb_step if h else None,
                floor=shown.floor if shown else None,
                hottest_copies=int(plan.replicas_LE[k].max()),
                moves=moved[k],
                start=starts[k],
            )
        )
    return tuple(rows)
