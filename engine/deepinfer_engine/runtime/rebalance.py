"""``Rebalancer``: live expert placement under a running engine. Plans beside the steps, moves between them.

One process decides (the one that schedules; counts reach it summed over all), every process moves. Life of one
rebalance, all of it between two steps and between the same two on every rank:

1. *collect*: at a trigger (when the window is full, then every period) the counts so far are asked for;
2. *plan*: a thread puts the window together and has the planning process plan it;
3. *agree*: every process works the moves out by itself; different digests change nothing, and say so;
4. *move*: each step carries pieces of the plan, at most ``max_bytes_per_step`` received by a rank; a layer whose
   pieces are there is filled and its row of the table changes before the next step.

A plan that does not pay for its moves ends after 3. The engine may stop anywhere: slots and table always agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

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
    those after this one (up to the next trigger, or now).
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
        if self._state in ("collect", "plan", "move"):
            now = self.log[-1]
            now.outcome, now.reason = "unfinished", f"the run ended while it was {now.outcome}"
        self._state = "idle"
        self.observe()

    # ------------------------------------------------------------- collect

    def _trigger(self, step: int) -> None:
        self.observe()
        self.log.append(Rebalance(step, observed_before=self.span.balance().moe_lb))
        self._next = step + self.settings.period_steps
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
            now.move_ms = self._site.spent_ms()
            if now.move_ms > 0 and now.max_rank_bytes:
                self._link_gb_s = now.max_rank_bytes / now.move_ms / 1e6

    def _collect(self) -> None:
        """Start planning once the counts of every step before the trigger have arrived."""
        assert self._flushed is not None
        trigger, settings = self.log[-1].step, self.settings
        if self._flushed.done():
            self._flushed.result()
            self._watch.take()
        if self._watch.record.steps < trigger:
            return
        chunks = self._watch.record.window(trigger, settings.window_steps)
        economics = Economics(
            expert_bytes=self._site.expert_bytes,
            link_gb_s=self._link_gb_s,
            moe_ms=max(self._step_ms() * MOE_SHARE, 1e-6),
            horizon_steps=settings.period_steps,
        )
        self._planned = Future()
        self._thread = threading.Thread(target=self._plan, args=(chunks, economics, self._planned), daemon=True)
        self._thread.start()
        self._state = "plan"

    # ---------------------------------------------------------------- plan

    def _plan(self, chunks: list[CountChunk], economics: Economics, done: Future[_Planned]) -> None:
        """The planning thread: window, plan, and everything that moving will need."""
        try:
            done.set_result(self._planned_from(chunks, economics))
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
        if answer.action != "use" or (answer.slot_LRS == slot_LRS).all():
            return _Planned(answer)
        layers = sorted(range(len(answer.gain_L)), key=lambda k: (-answer.gain_L[k], k))
        order = MoveOrder(answer.slot_LRS, tuple(layers), settings.max_bytes_per_step)
        return _Planned(answer, order, self._site.prepare(order) if self._tell is None else None)

    # --------------------------------------------------------------- agree

    def _agree(self) -> None:
        """Act once there is a plan; move only what every process has worked out alike."""
        if not self._planned.done():
            return
        self._state = "idle"
        now, error = self.log[-1], self._planned.exception()
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
            self._state, self._ready = "idle", None
