"""Decide where experts live: a pure function from token counts to slots, one layer at a time.

Statement, per layer:

1. Counts are divided by their greatest common divisor; expected load, weighted to the recent past where that forecasts
   better, and covariance of expert loads over the window (``moments``).
2. Replicas by largest mean ÷ copies, then longest-first placement on mean + one standard deviation (``placement``).
3. Swap search against the expected peak (``search``).
4. If a rank's mean stays above 1.05, the steps 2 and 3 are repeated from eight flatter replica rules, mean^α with z
   standard deviations added.
5. Of all candidates, longest-first on plain totals among them, the one with the smallest exact Σ_steps max_rank is
   taken; the earliest wins a tie. So no layer is ever worse on its window than longest-first.

With an old plan the search starts from it, is repeated, and pays for every expert a rank would have to receive;
surviving experts keep their slots, and no layer is ever worse on its window than it was. With a cap on moves,
expected loads are plain means: most slots then stay for several windows, and moves that follow the last steps are
wasted. A layer without tokens gets an identity-like layout (or keeps its old one) and no balance.

Worked example (``tests/engine/eplb/test_policy.py`` checks it). One step, eight experts with 600, 560, 120, 120, 20,
10, 10, 10 tokens on 8 ranks of 2 slots; the mean rank load is 181.25. Replicas by load ÷ copies give 5, 5, 1, 1, 1, 1,
1, 1 and 232 on the hottest rank. This planner gives 4, 4, 2, 2, 1, 1, 1, 1 and 200:

    ranks 0-3   experts 0+4, 0+5, 0+6, 0+7   150 + 20, 150 + 10, 150 + 10, 150 + 10
    ranks 4-7   experts 1+2, 1+2, 1+3, 1+3   140 + 60 each

Everything here is deterministic: layers are independent, sums have a fixed order or are exact, and equal candidates are
decided by (score, id), so the plan is the same on any number of threads, in any process, compiled or not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.eplb import layout
from deepinfer_engine.eplb.loops import Loops, NumpyLoops, Window
from deepinfer_engine.eplb.moments import LayerMoments, reduced
from deepinfer_engine.eplb.placement import MAX_WEIGHT, colocated, replica_cap
from deepinfer_engine.eplb.search import SearchRules
from deepinfer_engine.errors import ArtefactError, UsageError

#: Name and version stamped into plans; changes whenever the same input may give another plan.
ALGORITHM = "covariance-swap/4"

#: Weights of all experts together: far more digits than the counts carry, and one rank could hold them all in int64
#: (x LCM, 0.34 of what it holds).
WEIGHT_SUM = 2.0**42

#: A rank whose mean stays above this after the search is worth the eight other starts.
HARD_RANK = 1.05

#: (z, α) of the other starts: replicas by (mean + z·sd)^α ÷ copies. Flatter rules give cold experts copies to pair
#: with.
OTHER_STARTS = ((0.0, 0.85), (0.0, 0.7), (0.0, 0.55), (0.0, 0.4), (1.0, 1.0), (1.0, 0.85), (1.0, 0.7), (1.0, 0.55))

#: Searches of a re-plan, each from the result of the one before, and the part of the move price each asks: spreads are
#: measured anew, ranks that failed are tried again, and what was cheap to move at first must be worth the whole price
#: at last or goes home. On tuning seeds, against a cold plan: 96 moves per layer at +0.0011; three searches at one
#: price, 97 at +0.0013.
WARM_PRICES = (0.55, 0.55, 1.0)


@dataclass(frozen=True)
class Topology:
    """Ranks, their slots, the ranks that are gone, and (optionally) nodes that keep expert groups together.

    Raises UsageError for sizes that cannot hold together; whether the experts fit is ``check_fit``'s question.
    """

    ranks: int
    slots_per_rank: int
    dead: tuple[int, ...] = ()
    nodes: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"ranks is {self.ranks}, expected 1 or more")
        if self.slots_per_rank < 1:
            raise UsageError(f"slots per rank is {self.slots_per_rank}, expected 1 or more")
        wrong = [r for r in self.dead if not 0 <= r < self.ranks]
        if wrong:
            raise UsageError(f"rank {wrong[0]} does not exist, expected 0..{self.ranks - 1}")
        if not self.live:
            raise UsageError(f"no rank of {self.ranks} is alive")
        if self.nodes < 1 or self.ranks % self.nodes:
            raise UsageError(f"nodes is {self.nodes}, expected a divisor of the {self.ranks} ranks")
        if self.groups < 1 or self.groups % self.nodes:
            raise UsageError(
                f"groups is {self.groups}, expected a multiple of the {self.nodes} nodes",
                hint="drop --groups and --nodes to plan globally",
            )

    @property
    def live(self) -> tuple[int, ...]:
        gone = set(self.dead)
        return tuple(r for r in range(self.ranks) if r not in gone)

    def node_ranks(self, node: int) -> tuple[int, ...]:
        """Live ranks of one node."""
        size = self.ranks // self.nodes
        return tuple(r for r in self.live if r // size == node)

    def check_fit(self, experts: int) -> None:
        """Raise UsageError with the nearest legal value when ``experts`` do not fit."""
        live, slots = len(self.live), self.slots_per_rank
        if live * slots < experts:
            raise UsageError(
                f"{live} live ranks x {slots} slots = {live * slots} slots for {experts} experts",
                hint=f"the least that fits: {-(-experts // live)} slots per rank, or {-(-experts // slots)} live ranks",
            )
        if experts % self.groups:
            raise UsageError(f"groups is {self.groups}, expected a divisor of the {experts} experts")
        for node in range(self.nodes):
            ranks, need = len(self.node_ranks(node)), experts // self.nodes
            if ranks * slots < need:
                raise UsageError(
                    f"node {node}: {ranks} live ranks x {slots} slots = {ranks * slots} slots for its {need} experts",
                    hint="plan globally (drop --groups and --nodes), or bring the node back",
                )
            if ranks * slots > 16 * need:
                raise UsageError(
                    f"{ranks} ranks x {slots} slots = {ranks * slots} slots for {need} experts "
                    "need more than 16 replicas of one expert",
                    hint=f"the most that fits: {max(16 * need // ranks, 1)} slots per rank",
                )


@dataclass(frozen=True)
class PlanSettings:
    """What a caller may choose about planning; defaults are the measured ones of recipes/results/eplb.md.

    ``move_price`` is the cost of one received expert in units of an average rank's; ``max_moves`` caps received
    experts per layer.
    """

    move_price: float = 0.9
    max_moves: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.move_price < 1e6:
            raise UsageError(f"move price is {self.move_price}, expected 0 or more")
        if self.max_moves is not None and self.max_moves < 0:
            raise UsageError(f"max moves is {self.max_moves}, expected 0 or more")
        if not 1 <= self.threads <= 1024:
            raise UsageError(f"threads is {self.threads}, expected 1..1024")


@dataclass(frozen=True)
class PlannedLayer:
    """One layer's decision: expert of every slot [R, S] (-1 on dead ranks), copies [E], and how it came about."""

    slot_RS: np.ndarray
    copies_E: np.ndarray
    signal: bool
    start: str
    exchanges: int


def plan_experts(
    counts_MLE: np.ndarray,
    topology: Topology,
    *,
    old_LRS: np.ndarray | None = None,
    settings: PlanSettings | None = None,
    loops: Loops | None = None,
) -> tuple[PlannedLayer, ...]:
    """Plan every layer of int64 counts [M, L, E].

    ``old_LRS`` [L, R', S'] is the running plan (R' and S' may differ; -1 = empty slot). Raises UsageError for sizes
    that do not fit, ArtefactError for counts too large for exact arithmetic or an old plan of another shape.
    """
    settings, loops = settings or PlanSettings(), loops or NumpyLoops()
    _, layers, experts = counts_MLE.shape
    topology.check_fit(experts)
    if old_LRS is not None and old_LRS.shape[0] != layers:
        raise ArtefactError(f"the old plan has {old_LRS.shape[0]} layers, the statistics have {layers}")
    planner = _LayerPlanner(topology, settings, loops)

    def one(layer: int) -> PlannedLayer:
        try:
            return planner.plan(counts_MLE[:, layer], None if old_LRS is None else old_LRS[layer])
        except OverflowError as e:
            raise ArtefactError(f"layer {layer}: {e}", hint="use a shorter window") from e

    if settings.threads == 1 or layers == 1:
        return tuple(one(k) for k in range(layers))
    with ThreadPoolExecutor(settings.threads) as pool:
        return tuple(pool.map(one, range(layers)))


class _Memory(threading.local):
    """A thread's last window, whose memory the next one may take."""

    spare: Window | None = None


class _LayerPlanner:
    """Plans one layer; holds only what all layers share."""

    def __init__(self, topology: Topology, settings: PlanSettings, loops: Loops):
        self.topology, self.settings, self.loops = topology, settings, loops
        self.live = np.array(topology.live)
        self.memory = _Memory()

    def plan(self, counts_ME: np.ndarray, old_RS: np.ndarray | None) -> PlannedLayer:
        topology, experts = self.topology, counts_ME.shape[1]
        held = None if old_RS is None else layout.on_ranks(old_RS, topology.ranks)
        if not counts_ME[:1].any() and not counts_ME.any():
            return self._silent(experts, held)
        counts_ME = reduced(counts_ME)
        slot_RS = np.full((topology.ranks, topology.slots_per_rank), -1, np.int64)
        copies_E, starts, exchanges = np.zeros(experts, np.int64), [], 0
        ahead = held is None or self.settings.max_moves is None
        for ranks, ids in self._parts(counts_ME):
            mine_ME = counts_ME if len(ids) == experts else np.ascontiguousarray(counts_ME[:, ids])
            part = _Part(
                self.loops, self.settings, mine_ME, len(ranks), topology.slots_per_rank, ahead, self.memory.spare
            )
            self.memory.spare = part.window
            old = None if held is None else [layout.renumbered(held[r], ids) for r in ranks]
            best, start, swaps = part.warm(old) if old is not None else part.cold()
            slot_RS[list(ranks)] = ids[best]
            copies_E[ids] = np.bincount(best.reshape(-1), minlength=len(ids))
            starts.append(start)
            exchanges += swaps
        if held is not None:
            slot_RS = layout.aligned(slot_RS, held)
        return PlannedLayer(slot_RS, copies_E, True, "+".join(sorted(set(starts))), exchanges)

    def _parts(self, counts_ME: np.ndarray) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """(ranks, expert ids) that are planned together: everything, or one pair per node."""
        if self.topology.nodes == 1:
            return [(self.topology.live, np.arange(counts_ME.shape[1]))]
        packed = layout.groups_on_nodes(counts_ME.sum(axis=0), self.topology.groups, self.topology.nodes)
        return [(self.topology.node_ranks(n), ids) for n, ids in enumerate(packed)]

    def _silent(self, experts: int, held: list[list[int]] | None) -> PlannedLayer:
        """A layer without tokens: the old row where it still fits, else the identity-like layout."""
        topology = self.topology
        slot_RS = np.full((topology.ranks, topology.slots_per_rank), -1, np.int64)
        live_held = None if held is None else [held[r] for r in topology.live]
        kept = live_held is not None and layout.complete(live_held, experts, topology.slots_per_rank)
        if kept:
            assert live_held is not None
            slot_RS[self.live] = live_held
        else:
            slot_RS[self.live] = layout.identity(experts, len(self.live), topology.slots_per_rank)
        copies_E = np.bincount(slot_RS[slot_RS >= 0], minlength=experts)
        return PlannedLayer(slot_RS, copies_E, False, "kept" if kept else "identity", 0)


Candidate = tuple[np.ndarray, str, int]


class _Part:
    """One layer (or one node's experts of it) on ``ranks`` interchangeable ranks; loads in units of their mean rank
    load."""

    def __init__(
        self,
        loops: Loops,
        settings: PlanSettings,
        counts_ME: np.ndarray,
        ranks: int,
        slots: int,
        ahead: bool,
        spare: Window | None = None,
    ):
        self.loops, self.settings = loops, settings
        self.ranks, self.slots, self.experts = ranks, slots, counts_ME.shape[1]
        self.window = loops.window(counts_ME, spare)
        experts, tokens = self.experts, self.window.tokens
        if tokens > MAX_WEIGHT // 2:
            raise OverflowError(f"{tokens:.3g} tokens in the window, exact arithmetic holds {MAX_WEIGHT // 2:.3g}")
        if not tokens:  # a node whose groups saw no token
            self.m = LayerMoments(
                np.ones(experts, np.int64), np.full(experts, 1.0 / experts), np.zeros((experts, experts)), 1, 1.0
            )
        else:
            self.m = self.window.moments(ahead)
        # What copies are given by: totals, exact, unless the recent past says more.
        self.weight_E = self._weights(0.0, 1.0) if self.m.recent else self.m.total_E

    def _weights(self, z: float, alpha: float) -> np.ndarray:
        """(mean + z·sd)^α as int64, together ``WEIGHT_SUM``."""
        sd_E = np.sqrt(np.maximum(np.diagonal(self.m.cov_EE), 0.0))
        raw_E = self.m.mean_E + z * sd_E
        if alpha != 1.0:
            raw_E = raw_E**alpha
        # cumsum adds from left to right: the same sum on every machine.
        return np.rint(raw_E * (WEIGHT_SUM / float(np.cumsum(raw_E)[-1]))).astype(np.int64)

    def _searched(self, copies_E: np.ndarray, name: str) -> Candidate:
        start_RS = self.loops.longest_first(self._weights(1.0, 1.0), copies_E, self.ranks)
        slot_RS, swaps = self.loops.swap_search(start_RS, self.m.mean_E, self.m.cov_EE, copies_E, SearchRules())
        return slot_RS, name, swaps

    def _copies(self, slot_RS: np.ndarray) -> np.ndarray:
        return np.bincount(slot_RS.reshape(-1), minlength=self.experts)

    def _hard(self, slot_RS: np.ndarray) -> bool:
        load_E = self.m.mean_E * float(self.ranks) / self._copies(slot_RS)
        return float(load_E[slot_RS].sum(axis=1).max()) > HARD_RANK

    def _best(self, candidates: Sequence[Candidate]) -> Candidate:
        """Smallest exact Σ_steps max_rank; the earliest of equals."""
        scored = [self.window.peak_sum(c[0], self._copies(c[0])) for c in candidates]
        return candidates[scored.index(min(scored))]

    def cold(self) -> Candidate:
        copies_E = self.loops.replica_counts(self.weight_E, self.ranks, self.ranks * self.slots)
        found = [self._searched(copies_E, "mean")]
        if self._hard(found[0][0]):
            seen = {copies_E.tobytes()}
            for z, alpha in OTHER_STARTS:
                other_E = self.loops.replica_counts(self._weights(z, alpha), self.ranks, self.ranks * self.slots)
                if other_E.tobytes() not in seen:
                    seen.add(other_E.tobytes())
                    found.append(self._searched(other_E, f"z{z:g}a{alpha:g}"))
        plain_E = copies_E
        if self.m.recent:
            plain_E = self.loops.replica_counts(self.m.total_E, self.ranks, self.ranks * self.slots)
        found.append((self.loops.longest_first(self.m.total_E, plain_E, self.ranks), "longest-first", 0))
        return self._best(found)

    def warm(self, held: list[list[int]]) -> Candidate:
        """From the experts each rank holds now (ids of this part, -1 elsewhere): fewest moves for the balance."""
        experts = self.experts
        complete = layout.complete(held, experts, self.slots)
        cap = self.settings.max_moves
        replicas = replica_cap(experts, self.ranks, self.ranks * self.slots)
        start_RS = layout.inherited(held, self.weight_E, self.slots, replicas, cap)
        held_RE = np.zeros((self.ranks, experts), bool)
        for r, row in enumerate(held):
            held_RE[r, [e for e in row if e >= 0]] = True
        slot_RS, copies_E, swaps = start_RS, self._copies(start_RS), 0
        for part in WARM_PRICES:
            rules = SearchRules(price=part * self.settings.move_price, cap=cap)
            slot_RS, made = self.loops.swap_search(slot_RS, self.m.mean_E, self.m.cov_EE, copies_E, rules, held_RE)
            swaps += made
        found: list[Candidate] = [(slot_RS, "warm", swaps)]
        if complete:
            kept_RS = np.array(held, np.int64)
            if not colocated(kept_RS) or bool((self._copies(kept_RS) > self.ranks).any()):
                found.insert(0, (kept_RS, "kept", 0))
        return self._best(found)
