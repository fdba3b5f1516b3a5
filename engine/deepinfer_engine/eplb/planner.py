"""One planning job from statistics to a stamped plan and its report; what the command and the runtime call.

``topology_for`` turns sizes that may be left out into a ``Topology``; ``build_plan`` plans; ``run_job`` plans on the
older steps, judges on the newer ones and returns the plan to run, which is the old one when moving does not pay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deepinfer_engine import __version__
from deepinfer_engine.eplb import report as rep
from deepinfer_engine.eplb.loops import Loops, NumpyLoops
from deepinfer_engine.eplb.moments import MIN_STEPS
from deepinfer_engine.eplb.plan import Digests, ExpertPlan
from deepinfer_engine.eplb.policy import ALGORITHM, PlannedLayer, PlanSettings, Topology, plan_experts
from deepinfer_engine.eplb.score import layer_balance
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.errors import ArtefactError, UsageError

#: Steps sampled per window for the per-step optimal split: it is iterative, and 32 give ±0.003.
LP_STEPS = 32

DISPATCHES = ("even", "hash", "lp")


@dataclass(frozen=True)
class Sizes:
    """Sizes as the user gave them; None takes the statistics', the old plan's or the default."""

    ranks: int | None = None
    slots_per_rank: int | None = None
    redundant_per_rank: int | None = None
    alive: tuple[int, ...] | None = None
    nodes: int = 1
    groups: int | None = None


@dataclass(frozen=True)
class Job:
    """Everything one planning run depends on."""

    stats: ExpertStats
    sizes: Sizes = field(default_factory=Sizes)
    old: ExpertPlan | None = None
    settings: PlanSettings = field(default_factory=PlanSettings)
    economics: rep.Economics = field(default_factory=rep.Economics)
    holdout: float | None = None
    window: int | None = None
    dispatch: str = "even"
    seed: int = 0
    ladder: bool = True


@dataclass(frozen=True)
class Outcome:
    """The plan to run, the candidate it was judged against ``before``, and the report."""

    plan: ExpertPlan
    candidate: ExpertPlan
    before: ExpertPlan
    report: rep.PlanReport
    test_MLE: np.ndarray


def topology_for(
    sizes: Sizes, experts: int, ep: int | None, old: ExpertPlan | None
) -> tuple[Topology, tuple[str, ...]]:
    """The topology to plan for, checked against ``experts``, and notes on what was filled in.

    Ranks: given, else the statistics' ep, else the old plan's. Slots: given, else the old plan's, else ceil(experts ÷
    live ranks) plus the redundant ones (1, or 0 on a single rank). Raises UsageError with the nearest legal value.
    """
    ranks = sizes.ranks or ep or (old.ranks if old else None)
    if ranks is None:
        raise UsageError("the statistics do not say how many ranks there are", hint="give --ranks")
    if sizes.ranks is not None and sizes.ranks < 1:
        raise UsageError(f"ranks is {sizes.ranks}, expected 1 or more")
    if sizes.slots_per_rank is not None and sizes.redundant_per_rank is not None:
        raise UsageError("--slots-per-rank and --redundant-per-rank both set the slots", hint="give one of them")
    dead: tuple[int, ...] = ()
    if sizes.alive is not None:
        wrong = [r for r in sizes.alive if not 0 <= r < ranks]
        if wrong:
            raise UsageError(f"alive rank {wrong[0]} does not exist, expected 0..{ranks - 1}")
        dead = tuple(sorted(set(range(ranks)) - set(sizes.alive)))
    live = ranks - len(dead)
    if live < 1:
        raise UsageError(f"no rank of {ranks} is alive")
    if sizes.redundant_per_rank is not None and sizes.redundant_per_rank < 0:
        raise UsageError(f"redundant per rank is {sizes.redundant_per_rank}, expected 0 or more")
    notes: list[str] = []
    if sizes.slots_per_rank is not None:
        slots = sizes.slots_per_rank
    elif sizes.redundant_per_rank is not None:
        slots = -(-experts // live) + sizes.redundant_per_rank
    elif old is not None:
        slots = old.slots_per_rank
        notes.append(f"{slots} slots per rank, as in the old plan")
    elif live == 1:
        slots = experts
        notes.append("one rank: nothing to balance, no redundant expert by default")
    else:
        slots = -(-experts // live) + 1
        notes.append("one redundant expert per rank (the default)")
    groups = sizes.groups if sizes.groups is not None else sizes.nodes
    topology = Topology(ranks, slots, dead, sizes.nodes, groups)
    topology.check_fit(experts)
    if live * slots > experts * min(live, 16):
        notes.append(
            f"{live * slots} slots cannot all be useful for {experts} experts on {live} ranks: "
            "some replicas share a rank"
        )
    return topology, tuple(notes)


def matched(old: ExpertPlan, stats: ExpertStats) -> ExpertPlan:
    """The old plan's rows for the layers of ``stats``; ArtefactError when it belongs to another model."""
    for name in ("config", "weights"):
        a, b = getattr(old.digests, name), getattr(stats, f"{name}_digest")
        if a and b and a != b:
            raise ArtefactError(
                f"the old plan is for another model: its {name} digest is {a[:12]}…, the statistics' is {b[:12]}…"
            )
    if old.experts != stats.experts:
        raise ArtefactError(f"the old plan has {old.experts} experts, the statistics have {stats.experts}")
    if old.algorithm == "ascend" and old.layers == stats.layers:
        return replace(old, layer_ids=stats.layer_ids)  # this form numbers MoE layers from 0
    where = {k: i for i, k in enumerate(old.layer_ids)}
    missing = [k for k in stats.layer_ids if k not in where]
    if missing:
        raise ArtefactError(
            f"the old plan has {old.layers} layers without layer {missing[0]}, "
            f"the statistics have {stats.layers} layers"
        )
    rows = [where[k] for k in stats.layer_ids]
    if rows == list(range(old.layers)):
        return old
    return replace(
        old,
        slot_expert_LRS=old.slot_expert_LRS[rows],
        layer_ids=stats.layer_ids,
        moe_lb_L=tuple(old.moe_lb_L[i] for i in rows),
    )


def build_plan(
    stats: ExpertStats,
    topology: Topology,
    *,
    old: ExpertPlan | None = None,
    settings: PlanSettings | None = None,
    loops: Loops | None = None,
) -> tuple[ExpertPlan, tuple[PlannedLayer, ...]]:
    """Plan every layer and stamp the result with what it was made from."""
    planned = plan_experts(
        stats.counts_MLE, topology, old_LRS=None if old is None else old.slot_expert_LRS, settings=settings, loops=loops
    )
    balances = [
        layer_balance(stats.counts_MLE[:, k], p.slot_RS, p.copies_E) if p.signal else None
        for k, p in enumerate(planned)
    ]
    plan = ExpertPlan(
        epoch=0 if old is None else old.epoch + 1,
        experts=stats.experts,
        slot_expert_LRS=np.stack([p.slot_RS for p in planned]),
        layer_ids=stats.layer_ids,
        algorithm=ALGORITHM,
        # Rounded so that the file does not depend on the last bit of a summation.
        moe_lb_L=tuple(None if b is None else round(b.moe_lb, 9) for b in balances),
        digests=Digests(stats.config_digest, stats.weights_digest, stats.digest),
        tool_version=__version__,
    )
    return plan, planned


def _sampled(counts_MLE: np.ndarray, dispatch: str) -> np.ndarray:
    if dispatch != "lp" or counts_MLE.shape[0] <= LP_STEPS:
        return counts_MLE
    return counts_MLE[np.linspace(0, counts_MLE.shape[0] - 1, LP_STEPS).astype(np.int64)]


def run_job(job: Job, loops: Loops | None = None) -> Outcome:
    """Plan, judge and report. Raises UsageError and ArtefactError as its parts do."""
    loops = loops or NumpyLoops()
    if job.dispatch not in DISPATCHES:
        raise UsageError(f"dispatch is {job.dispatch!r}, expected one of {', '.join(DISPATCHES)}")
    stats, notes = _window(job)
    old = None if job.old is None else matched(job.old, stats)
    topology, more = topology_for(job.sizes, stats.experts, stats.ep, old)
    train_steps, note = rep.split_steps(stats.steps, job.holdout, stats.ordered)
    notes += [*more, *filter(None, (note,))]
    train = stats.window(0, train_steps)
    if train_steps < MIN_STEPS:
        notes.append(f"{train_steps} steps to plan on: too few for a covariance, counting noise stands in for it")

    started = time.perf_counter()
    candidate, planned = build_plan(train, topology, old=old, settings=job.settings, loops=loops)
    seconds = time.perf_counter() - started
    before = old if old is not None else rep.identity_plan(candidate)

    test_MLE = stats.counts_MLE[train_steps:] if train_steps < stats.steps else train.counts_MLE
    judged = _sampled(test_MLE, job.dispatch)
    on_train = rep.plan_balances(_sampled(train.counts_MLE, job.dispatch), candidate, job.dispatch, job.seed)
    on_test = rep.plan_balances(judged, candidate, job.dispatch, job.seed) if train_steps < stats.steps else None
    old_test = rep.plan_balances(judged, before, job.dispatch, job.seed)
    windows = {"train": rep.window_of(on_train), "before": rep.window_of(old_test)}
    if on_test is not None:
        windows["holdout"] = rep.window_of(on_test)
    moved = rep.move_summary(candidate, before, job.economics)
    forced = old is not None and (
        old.slot_expert_LRS.shape != candidate.slot_expert_LRS.shape or old.dead_ranks != candidate.dead_ranks
    )
    after = windows.get("holdout", windows["train"])
    verdict = rep.judge(windows["before"], after, moved, job.economics, has_old=old is not None, forced=forced)
    notes += _remarks(stats, planned, moved, job)
    if topology.nodes > 1:
        flat, _ = build_plan(train, replace(topology, nodes=1, groups=1), settings=job.settings, loops=loops)
        free = rep.window_of(rep.plan_balances(judged, flat, job.dispatch, job.seed)).moe_lb
        if free is not None and after.moe_lb is not None:
            notes.append(
                f"keeping {topology.groups} expert groups inside {topology.nodes} nodes has a price: "
                f"moe_lb {after.moe_lb:.4f}, planned globally {free:.4f}"
            )

    def plan_with(slots: int) -> ExpertPlan:
        if slots == topology.slots_per_rank and old is None:
            return candidate
        return build_plan(train, replace(topology, slots_per_rank=slots), settings=job.settings, loops=loops)[0]

    ladder = (
        rep.redundancy_ladder(plan_with, test_MLE, stats.experts, len(topology.live), job.economics)
        if job.ladder
        else ()
    )
    report = rep.PlanReport(
        shape={
            "steps": train_steps,
            "held_out": stats.steps - train_steps,
            "layers": stats.layers,
            "experts": stats.experts,
            "ranks": topology.ranks,
            "live_ranks": len(topology.live),
            "slots_per_rank": topology.slots_per_rank,
            "nodes": topology.nodes,
            "groups": topology.groups,
            "dispatch": job.dispatch,
            "loop": loops.name,
            "plan_s": round(seconds, 4),
        },
        windows=windows,
        layers=rep.layer_rows(
            candidate, stats.layer_kinds, [p.start for p in planned], moved["per_layer"], old_test, on_train, on_test
        ),
        ladder=ladder,
        moves=moved,
        colocations=len(candidate.colocations()),
        verdict=verdict,
        economics=job.economics,
        notes=tuple(notes),
    )
    kept = old if old is not None else before
    return Outcome(kept if verdict.action == "keep" else candidate, candidate, before, report, test_MLE)


def _window(job: Job) -> tuple[ExpertStats, list[str]]:
    """The newest ``window`` steps without the idle ones, and notes about what was left out."""
    stats, notes = job.stats, []
    if job.window is not None:
        if job.window < 1:
            raise UsageError(f"window is {job.window}, expected 1 or more steps")
        if not stats.ordered:
            raise UsageError(
                "the steps of this file are not in time order, so there is no newest window", hint="drop --window"
            )
        if job.window > stats.steps:
            raise UsageError(
                f"window is {job.window}, the file has {stats.steps} steps", hint=f"nearest legal value: {stats.steps}"
            )
        stats = stats.window(stats.steps - job.window, stats.steps)
    busy, idle = stats.without_idle()
    if busy.steps == 0:
        return stats.window(0, 1), ["no step has a token in any layer: identity-like plan"]
    if idle:
        notes.append(f"{idle} steps without any token were left out")
    return busy, notes


def _remarks(stats: ExpertStats, planned: Sequence[PlannedLayer], moved: dict, job: Job) -> list[str]:
    """What the reader of the report has to know about this input."""
    notes = []
    silent = [stats.layer_ids[k] for k, p in enumerate(planned) if not p.signal]
    if silent and len(silent) < len(planned):
        notes.append(f"no signal (no tokens) in layers {silent}: identity-like rows, not counted in the averages")
    if moved["from_checkpoint"] and job.old is not None:
        notes.append(f"{len(moved['from_checkpoint'])} experts have no live holder and come from the checkpoint")
    if job.dispatch == "lp":
        notes.append(f"lp: best split of every step, on at most {LP_STEPS} evenly spaced steps of each window")
    if job.economics.assumed:
        notes.append(f"assumed, not given: {', '.join(job.economics.assumed)}")
    return notes
