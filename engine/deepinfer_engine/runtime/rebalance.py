"""``Rebalancer``: live expert placement under a running engine. Plans beside the steps, moves between them.

One process decides (the one that schedules; counts reach it summed over all), every process moves. Life of one
rebalance, all of it between two steps and between the same two on every rank:

1. *collect*: at a trigger (when the window is full, then every period) the counts so far are asked for;
2. *plan*: a thread puts the window together and has the planning process plan it;
3. *agree*: every process works the moves out by itself; different digests change nothing, and say so;
4. *move*: each step carries pieces of the plan, at most ``max_bytes_per_step`` received by a rank; a layer whose
   pieces are there is filled and its row of the table changes before the next step.

A plan that does not pay for its moves ends after 3. The engine may stop anywhere: slots and table always agree.

Between plans the newest steps are looked at, a quarter of a window at a time: when the placement before the last change
or the first one would have been enough better on them (``eplb.fallback``), it is restored in the same way, and the
next plan comes soon, from the steps that have shown the change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np

from deepinfer_engine.eplb.fallback import fallback
from deepinfer_engine.eplb.plan_process import PlanAnswer, PlanJob, PlanProcess
from deepinfer_engine.eplb.record import BalanceMeter, CountChunk
from deepinfer_engine.eplb.report import Economics
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.runtime.expert_watch import ExpertWatch
from deepinfer_engine.runtime.lane import Lane
from deepinfer_engine.runtime.move_site import MoveOrder, MoveSite, Prepared

#: (command, body) → what every process answered, by rank; carried out between the same two steps everywhere
Tell = Callable[[str, Any], list[Any]]

#: price of a received expert in the plan search, in average rank costs: eplb-plan's default
MOVE_PRICE = 0.5
#: share of a step that its experts take, for judging whether moves pay; the split of a step is not measured
MOE_SHARE = 0.5
#: bandwidth of the link that moves are judged by, GB/s, until a rebalance has measured it
LINK_GB_S = 50.0
#: a look sees this share of a planning window, and no fewer steps: it must be done well before the next plan, and
#: fewer steps of a small batch are mostly counting noise
LOOK_SHARE, LEAST_LOOK = 4, 4


@dataclass(frozen=True)
class RebalanceSettings:
    """Steps of a window and between plans, most bytes a rank receives per step, what plans are stamped with."""

    window_steps: int
    period_steps: int
    max_bytes_per_step: int
    top_k: int
    config_digest: str
    weights_digest: str


@dataclass
class Rebalance:
    """One rebalance as it went. Times in ms; balances None where nothing was measured.

    ``observed_before`` is the balance of the steps since the last change up to the trigger, ``observed_after`` of
    those after this one (up to the next trigger, or now). ``back``: it restores an earlier placement; what is predicted
    is then the balance of the steps that were looked at.
    """

    step: int
    outcome: Literal["planning", "moving", "moved", "kept", "refused", "failed", "unfinished"] = "planning"
    reason: str = ""
    predicted_before: float | None = None
    predicted_after: float | None = None
    observed_before: float | None = None
    observed_after: float | None = None
    experts: int = 0
    bytes: int = 0
    max_rank_bytes: int = 0
    max_step_bytes: int = 0
    move_steps: int = 0
    done_step: int | None = None
    plan_ms: float = 0.0
    move_ms: float = 0.0
    loop: str = ""
    back: bool = False


@dataclass(frozen=True, eq=False)
class _Planned:
    """What the planning thread made: the answer, the order of a plan to use, and where one is alone its moves."""

    answer: PlanAnswer
    order: MoveOrder | None = None
    prepared: Prepared | None = None


class Rebalancer:
    """Drives rebalances from the thread that drives the engine; ``before_step`` is called before every launch.

    ``tell`` reaches all processes where there are several; without it this one is alone.
    """

    def __init__(
        self,
        settings: RebalanceSettings,
        *,
        watch: ExpertWatch,
        site: MoveSite,
        lane: Lane,
        step_ms: Callable[[], float],
        tell: Tell | None = None,
    ):
        self.settings = settings
        self.log: list[Rebalance] = []
        self._watch = watch
        self._site = site
        self._lane = lane
        self._step_ms = step_ms
        self._tell = tell
        self._process = PlanProcess()
        self._state: Literal["idle", "collect", "plan", "move"] = "idle"
        self._next = settings.window_steps
        self._look_steps = max(settings.window_steps // LOOK_SHARE, LEAST_LOOK)
        self._look_at: int | None = None
        self._looking = False
        self._end = 0
        self._since = 0
        self._first_LRS = self._before_LRS = watch.slot_LRS
        self._flushed: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._planned: Future[_Planned] = Future()
        self._ready: Prepared | None = None
        self._at = 0
        self._moved_last: Rebalance | None = None
        self._link_gb_s = LINK_GB_S
        self.span = BalanceMeter(watch.slot_LRS, watch.config.n_routed_experts)
        watch.record.meters.append(self.span)

    def before_step(self, step: int) -> None:
        """Do what is due before step ``step`` (numbered from 0) is launched."""
        if self._state == "idle" and step >= self._next:
            self._trigger(step)
        if self._state == "idle" and self._look_at is not None and step >= self._look_at:
            self._look(step)
        if self._state == "collect":
            self._collect()
        if self._state == "plan":
            self._agree()
        if self._state == "move":
            self._move(step)

    def close(self) -> None:
        """Give up what is being planned; what was moved stays. The log is complete after it."""
        self._process.stop()
        if self._thread is not None:
            self._thread.join()
        self._process.release()
        if self._state == "move" or (self._state in ("collect", "plan") and not self._looking):
            now = self.log[-1]
            now.outcome, now.reason = "unfinished", f"the run ended while it was {now.outcome}"
        self._state = "idle"
        self.observe()

    # ------------------------------------------------------------- collect

    def _trigger(self, step: int) -> None:
        self.observe()
        self.log.append(Rebalance(step, observed_before=self.span.balance().moe_lb))
        self._next = step + self.settings.period_steps
        self._ask(step, looking=False)

    def _look(self, step: int) -> None:
        self.observe()  # what the last moves took is what these are judged by
        self._look_at = step + self._look_steps
        self._ask(step, looking=True)

    def _ask(self, step: int, *, looking: bool) -> None:
        """Have the counts of the steps before ``step`` sent."""
        self._end, self._looking = step, looking
        self._flushed = self._lane.launch(self._watch.flush)
        self._state = "collect"

    def observe(self) -> None:
        """Put down what came of the last rebalance that moved: the balance since, and the time its moves took.

        Asks for moves that have run: call it when the lane has caught up.
        """
        now = next((entry for entry in reversed(self.log) if entry.outcome == "moved"), None)
        if now is None:
            return
        now.observed_after = self.span.balance().moe_lb
        if now is self._moved_last:
            spent_ms = self._site.spent_ms()
            now.move_ms = spent_ms or now.move_ms  # what is prepared next starts the clock again
            if now.move_ms > 0 and now.max_rank_bytes:
                self._link_gb_s = now.max_rank_bytes / now.move_ms / 1e6

    def _collect(self) -> None:
        """Start planning, or looking, once the counts of every step asked for have arrived."""
        assert self._flushed is not None
        settings = self.settings
        if self._flushed.done():
            self._flushed.result()
            self._watch.take()
        if self._watch.record.steps < self._end:
            return
        steps, horizon, make = self._look_steps, max(self._next - self._end, 1), self._restored
        if not self._looking:
            steps, horizon, make = settings.window_steps, settings.period_steps, self._planned_from
            steps, self._since = min(steps, self._end - self._since), 0
        chunks = self._watch.record.window(self._end, steps)
        economics = Economics(
            expert_bytes=self._site.expert_bytes,
            link_gb_s=self._link_gb_s,
            moe_ms=max(self._step_ms() * MOE_SHARE, 1e-6),
            horizon_steps=horizon,
        )
        self._planned = Future()
        self._thread = threading.Thread(target=self._plan, args=(make, chunks, economics, self._planned), daemon=True)
        self._thread.start()
        self._state = "plan"

    # ---------------------------------------------------------------- plan

    def _plan(
        self,
        make: Callable[[list[CountChunk], Economics], _Planned],
        chunks: list[CountChunk],
        economics: Economics,
        done: Future[_Planned],
    ) -> None:
        """The planning thread: window, plan, and everything that moving will need."""
        try:
            done.set_result(make(chunks, economics))
        except BaseException as exc:  # the boundary of a thread: the engine's thread decides what it means
            done.set_exception(exc)

    def _planned_from(self, chunks: list[CountChunk], economics: Economics) -> _Planned:
        settings, slot_LRS = self.settings, self._watch.slot_LRS
        answer = self._process.plan(
            PlanJob(
                np.concatenate([c.counts_MLE for c in chunks]),
                np.concatenate([c.tokens_M for c in chunks]),
                slot_LRS,
                len(self.log),
                settings.top_k,
                settings.config_digest,
                settings.weights_digest,
                economics,
                MOVE_PRICE,
            )
        )
        return self._ordered(answer)

    def _restored(self, chunks: list[CountChunk], economics: Economics) -> _Planned:
        """The placement before the last change, the first one, or the one that runs."""
        began, running_LRS = perf_counter(), self._watch.slot_LRS
        found = fallback(chunks, running_LRS, (self._before_LRS, self._first_LRS), economics)
        if found is None:
            return _Planned(PlanAnswer(running_LRS, "keep", "", None, None, (), perf_counter() - began, ""))
        spent_s = perf_counter() - began
        return self._ordered(
            PlanAnswer(found.slot_LRS, "use", found.sentence, found.before, found.after, found.gain_L, spent_s, "")
        )

    def _ordered(self, answer: PlanAnswer) -> _Planned:
        """An answer with the order that carries it out, where there is anything to do."""
        if answer.action != "use" or (answer.slot_LRS == self._watch.slot_LRS).all():
            return _Planned(answer)
        settings = self.settings
        layers = sorted(range(len(answer.gain_L)), key=lambda k: (-answer.gain_L[k], k))
        order = MoveOrder(answer.slot_LRS, tuple(layers), settings.max_bytes_per_step)
        return _Planned(answer, order, self._site.prepare(order) if self._tell is None else None)

    # --------------------------------------------------------------- agree

    def _agree(self) -> None:
        """Act once there is a plan; move only what every process has worked out alike."""
        if not self._planned.done():
            return
        self._state = "idle"
        error = self._planned.exception()
        if self._looking:
            if error is None and self._planned.result().order is None:
                return
            self.log.append(Rebalance(self._end, back=True))
        self.observe()  # with the steps that were still on their way when this began
        now = self.log[-1]
        now.observed_before = self.span.balance().moe_lb
        if error is not None:
            if not isinstance(error, DeepInferError):
                raise error
            now.outcome, now.reason = "failed", f"no plan: {error.message}"
            return
        planned = self._planned.result()
        answer, ready = planned.answer, planned.prepared
        now.plan_ms, now.loop = answer.plan_s * 1000, answer.loop
        now.predicted_before, now.predicted_after = answer.before, answer.after
        now.reason = answer.sentence
        if planned.order is None:
            now.outcome = "kept"
            return
        if self._tell is not None:
            digests = self._tell("experts.prepare", planned.order)
            other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
            if other is not None:
                now.outcome = "refused"
                now.reason = (
                    f"the moves differ between processes: digest {digests[0][:12]}… on rank 0, "
                    f"{digests[other][:12]}… on rank {other}"
                )
                return
            ready = self._site.ready
        assert ready is not None
        now.outcome, now.experts = "moving", ready.moves.experts
        now.bytes, now.max_rank_bytes = ready.moves.bytes, int(ready.moves.received_R.max())
        self._ready, self._at, self._moved_last = ready, 0, now
        self._before_LRS = self._watch.slot_LRS
        self._state = "move"

    # ---------------------------------------------------------------- move

    def _move(self, step: int) -> None:
        """Launch this step's pieces, and the switch of the layers that are complete with them."""
        ready, now, index = self._ready, self.log[-1], self._at
        assert ready is not None
        table = ready.tables[index]
        if table is not None:
            slot_LRS = ready.moves.after[index]
            for meter in self._watch.record.meters:
                meter.use(table.epoch, slot_LRS)
            self._watch.slot_LRS = slot_LRS
        now.max_step_bytes = max(now.max_step_bytes, ready.moves.most[index])
        now.move_steps += 1
        if self._tell is not None:
            self._tell("experts.run", index)
        else:
            self._lane.launch(lambda: self._site.run(index))
        self._at += 1
        if self._at == len(ready.moves.steps):
            assert table is not None
            now.outcome, now.done_step = "moved", step
            self.span.restart(table.epoch)
            self._look_at = step + self._look_steps
            if now.back:  # plan again from what has shown the change, as soon as that is half a window
                self._since = self._end - self._look_steps
                self._next = min(self._next, step + self._look_steps)
            self._state, self._ready = "idle", None
