"""Compare planners on a recipe: traces, one window to plan on, the next to judge on, for every planner that is here.

A recipe (``recipes/eplb/*.yaml``) names a workload (``trace``: fields of ``traces.TraceSpec``; or ``routing``: recorded
token routing files beside the recipe), the slots per rank, the window lengths and the seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from deepinfer_engine.eplb import baselines, peers, traces
from deepinfer_engine.eplb.layout import identity
from deepinfer_engine.eplb.loops import Loops, NumpyLoops
from deepinfer_engine.eplb.placement import colocated
from deepinfer_engine.eplb.policy import PlanSettings, Topology, plan_experts
from deepinfer_engine.eplb.score import layer_balance
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError


@dataclass(frozen=True)
class Recipe:
    """One comparison. ``trace`` or ``routing`` is set, not both. With ``replans``, re-planning is compared instead."""

    name: str
    slots_per_rank: int
    train_steps: int
    next_steps: int
    seeds: tuple[int, ...]
    trace: traces.TraceSpec | None = None
    routing: traces.RoutingSpec | None = None
    replans: int = 0
    folder: Path = Path()

    @property
    def ranks(self) -> int:
        spec = self.trace or self.routing
        assert spec is not None
        return spec.ranks


@dataclass(frozen=True)
class BenchRow:
    """One planner, means over layers and seeds; balances are moe_lb_step."""

    planner: str
    origin: str
    train: float
    next: float
    moe_lb_next: float
    p99: float
    excess: float | None
    excess_ratio: float | None
    wasted: float
    cpu_s: float | None


@dataclass(frozen=True)
class BenchResult:
    """The comparison table and what it was measured on."""

    recipe: str
    shape: str
    seeds: tuple[int, ...]
    floor: float
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_TOP = ("name", "slots_per_rank", "train_steps", "next_steps", "seeds", "replans", "trace", "routing")


def read_recipe(path: Path) -> Recipe:
    """The recipe at ``path``; UsageError names the key and what was expected."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: not YAML: {str(e).splitlines()[0]}") from e
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected keys {', '.join(_TOP)}")
    _known(values, _TOP, str(path))
    for key in ("name", "slots_per_rank", "train_steps", "next_steps", "seeds"):
        if key not in values:
            raise UsageError(f"{path}: {key} is missing")
    for key in ("slots_per_rank", "train_steps", "next_steps"):
        _positive(values[key], f"{path}: {key}")
    _positive(values.get("replans", 1), f"{path}: replans")
    seeds = values["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(isinstance(s, int) and s >= 0 for s in seeds):
        raise UsageError(f"{path}: seeds is {seeds!r}, expected a list of integers of 0 or more")
    if ("trace" in values) == ("routing" in values):
        raise UsageError(f"{path}: give trace or routing")
    trace = _spec(traces.TraceSpec, values["trace"], f"{path}: trace") if "trace" in values else None
    routing = _spec(traces.RoutingSpec, values["routing"], f"{path}: routing") if "routing" in values else None
    return Recipe(
        name=str(values["name"]),
        slots_per_rank=values["slots_per_rank"],
        train_steps=values["train_steps"],
        next_steps=values["next_steps"],
        seeds=tuple(seeds),
        trace=trace,
        routing=routing,
        replans=values.get("replans", 0),
        folder=path.parent,
    )


def _positive(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where} is {value!r}, expected an integer of 1 or more")


def _known(values: dict[Any, Any], names: tuple[str, ...], where: str) -> None:
    unknown = [k for k in values if k not in names]
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}", hint=f"keys: {', '.join(names)}")


def _spec(kind: type, values: Any, where: str) -> Any:
    """A spec dataclass from a mapping, every value of its field's type."""
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected keys")
    kinds = {f.name: f.type for f in fields(kind)}
    _known(values, tuple(kinds), where)
    legal = {"int": (int,), "float": (int, float), "str": (str,), "tuple[str, ...]": (list,)}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, legal[str(kinds[key])]):
            raise UsageError(f"{where}: {key} is {value!r}, expected {kinds[key]}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except TypeError as e:
        raise UsageError(f"{where}: {e}") from e


def windows(recipe: Recipe, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(planning window, next window) of one seed: consecutive steps of a trace, or disjoint sequences of recorded
    routing."""
    if recipe.trace is not None:
        counts = traces.synthetic(recipe.trace, recipe.train_steps + recipe.next_steps, seed)
        return counts[: recipe.train_steps], counts[recipe.train_steps :]
    assert recipe.routing is not None
    sequences = []
    for name in recipe.routing.files:
        path = recipe.folder / name
        if not path.exists():
            raise NotReadyError(
                f"{recipe.name} needs {name} beside the recipe", hint="top-k ids per token, see recipes/eplb/README.md"
            )
        sequences += traces.read_routing(path)
    return traces.rebatched(recipe.routing, sequences, recipe.train_steps, recipe.next_steps, seed)


Planner = Callable[[np.ndarray], np.ndarray]


def planners(
    recipe: Recipe, loops: Loops, threads: int, experts: int
) -> tuple[list[tuple[str, str, Planner]], list[str]]:
    """(name, origin, planner) of everything to compare, ours last with either loop; notes on peers that are absent."""
    ranks, slots = recipe.ranks, recipe.slots_per_rank
    topology = Topology(ranks, slots)

    def per_layer(rule: Callable[[np.ndarray, int, int], np.ndarray]) -> Planner:
        return lambda counts: np.stack([rule(counts[:, k], ranks, slots) for k in range(counts.shape[1])])

    def ours(which: Loops) -> Planner:
        def plan(counts: np.ndarray) -> np.ndarray:
            planned = plan_experts(counts, topology, settings=PlanSettings(threads=threads), loops=which)
            return np.stack([p.slot_RS for p in planned])

        return plan

    out: list[tuple[str, str, Planner]] = [
        ("identity layout", "here", lambda counts: np.stack([identity(experts, ranks, slots)] * counts.shape[1])),
        ("longest-first on totals", "here", per_layer(baselines.totals_rule)),
        ("greedy on observed peaks", "here", per_layer(baselines.peak_rule)),
    ]
    found, missing = peers.installed()
    out += [(p.name, p.origin, _bound(p, ranks, slots)) for p in found]
    out += [(_ours(which), "here", ours(which)) for which in _both(loops)]
    return out, missing


def _both(loops: Loops) -> list[Loops]:
    """The numpy loops behind the ones that were asked for, where those are others."""
    return [loops] if loops.name == NumpyLoops.name else [loops, NumpyLoops()]


def _ours(loops: Loops) -> str:
    return f"deepinfer ({loops.name})"


def _bound(peer: peers.Peer, ranks: int, slots: int) -> Planner:
    return lambda counts: peer.plan(counts, ranks, slots)


def run_bench(
    recipe: Recipe, loops: Loops, threads: int = 1, log: Callable[[str], None] = lambda text: None
) -> BenchResult:
    """Plan with everything on every seed and average. CPU seconds are process time of the planner alone, best of
    the seeds."""
    totals: dict[str, list[tuple[float, ...]]] = {}
    origins: dict[str, str] = {}
    floors, notes, shape = [], [], ""
    names = [_ours(which) for which in _both(loops)]
    same = True
    for seed in recipe.seeds:
        train, after = windows(recipe, seed)
        experts = train.shape[2]
        shape = (
            f"{train.shape[1]} layers x {experts} experts, {recipe.ranks} ranks x {recipe.slots_per_rank} slots, "
            f"{train.shape[0]} steps"
        )
        todo, notes = planners(recipe, loops, threads, experts)
        plans = []
        for name, origin, plan in todo:
            started = time.process_time()
            slots_LRS = plan(train)
            cpu = time.process_time() - started
            _check(slots_LRS, experts, name)
            totals.setdefault(name, []).append((*_judged(train, after, slots_LRS), cpu))
            origins[name] = origin
            plans += [slots_LRS] if name in names else []
            log(f"seed {seed}: {name}: next {totals[name][-1][1]:.4f}, {cpu:.3f} CPU s")
        same &= all(np.array_equal(p, plans[0]) for p in plans)
        floors.append(totals[todo[-1][0]][-1][4])
    floor = float(np.mean(floors))
    base = float(np.mean([t[1] for t in totals["longest-first on totals"]])) - floor
    rows = []
    for name, values in totals.items():
        train_lb, next_lb, lb, p99, _, wasted, _ = np.mean(values, axis=0).tolist()
        excess = next_lb - floor
        rows.append(
            BenchRow(
                name,
                origins[name],
                train_lb,
                next_lb,
                lb,
                p99,
                excess,
                excess / base if base > 0 else None,
                wasted,
                min(v[6] for v in values),
            )
        )
    if len(names) == 2:
        cpu = {row.planner: row.cpu_s or 0.0 for row in rows}
        notes.append(
            f"numpy and {loops.name} loops: {'the same plans' if same else 'DIFFERENT PLANS'}, "
            f"numpy takes {cpu[names[1]] / max(cpu[names[0]], 1e-9):.1f}x the CPU time"
        )
    return BenchResult(recipe.name, shape, recipe.seeds, floor, tuple(rows), tuple(notes))


def _check(slots_LRS: np.ndarray, experts: int, name: str) -> None:
    for k, row in enumerate(slots_LRS):
        if row.min() < 0 or row.max() >= experts or len(np.unique(row)) != experts:
            raise ArtefactError(f"{name} returned an incomplete plan for layer {k}")


def _judged(train: np.ndarray, after: np.ndarray, slots_LRS: np.ndarray) -> tuple[float, ...]:
    """(train lb_step, next lb_step, next moe_lb, next p99, next floor, wasted slots), means over layers."""
    out = []
    for k, slot_RS in enumerate(slots_LRS):
        copies_E = np.bincount(slot_RS.reshape(-1), minlength=train.shape[2])
        a, b = layer_balance(train[:, k], slot_RS, copies_E), layer_balance(after[:, k], slot_RS, copies_E)
        if a is not None and b is not None:
            out.append((a.moe_lb_step, b.moe_lb_step, b.moe_lb, b.p99, b.floor, float(len(colocated(slot_RS)))))
    return tuple(np.mean(out, axis=0).tolist())
