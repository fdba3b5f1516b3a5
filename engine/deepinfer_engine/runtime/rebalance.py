"""``Rebalancer``: live expert placement under a running engine. Plans beside the steps, moves between them.

Life of one rebalance, all of it decided between two steps and at the same step on every rank:

1. *collect*: at a trigger (when the window is full, then every period) the counts so far are asked for;
2. *plan*: a thread puts the window together (summed over ranks) and has the planning process plan it;
3. *agree*: ranks exchange the digest of what they planned; different digests change nothing, and say so;
4. *move*: each step carries pieces of the plan, at most ``max_bytes_per_step`` received by a rank; a layer whose
   pieces are there is filled and its row of the table changes before the next step.

A plan that does not pay for its moves ends after 3. The engine may stop anywhere: slots and table always agree.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.eplb.moving import MovePlan, plan_moves
from deepinfer_engine.eplb.plan_process import PlanAnswer, PlanJob, PlanProcess
from deepinfer_engine.eplb.record import BalanceMeter, CountChunk
from deepinfer_engine.eplb.report import Economics
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.runtime.expert_mover import ExpertMover
from deepinfer_engine.runtime.expert_watch import ExpertWatch
from deepinfer_engine.runtime.lane import Lane

#: price of a received expert in the plan search, in average rank costs: eplb-plan's default
MOVE_PRICE = 0.5
#: share of a step that its experts take, for judging whether moves pay; the split of a step is not measured
MOE_SHARE = 0.5
#: bandwidth of the link that moves are judged by, GB/s, until a rebalance has measured it
LINK_GB_S = 50.0
#: steps between two exchanges of digests while plans are made; one process agrees with itself at every step
AGREE_STEPS = 16


class Peers(Protocol):
    """What a rebalance asks of the other ranks' processes. Every process makes the same calls in the same order."""

    @property
    def processes(self) -> int: ...

    def gather(self, text: str) -> Sequence[str]:
        """The texts of all processes, by process; called between steps."""
        ...

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum over all processes; called from the planning thread."""
        ...


class Alone:
    """One process has no others."""

    processes = 1

    def gather(self, text: str) -> Sequence[str]:
        return (text,)

    def total(self, values: np.ndarray) -> np.ndarray:
        return values


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
    """What the planning thread made: the answer, its digest, and for moves their steps and the tables after them."""

    answer: PlanAnswer
    digest: str
    moves: MovePlan | None = None
    tables: tuple[SlotTable | None, ...] = ()


class Rebalancer:
    """Drives rebalances from the thread that drives the engine; ``before_step`` is called before every launch."""

    def __init__(
        self,
        settings: RebalanceSettings,
        *,
        watch: ExpertWatch,
        mesh: Any,
        mover: ExpertMover,
        lane: Lane,
        device: str,
        step_ms: Callable[[], float],
        peers: Peers | None = None,
    ):
        self.settings = settings
        self.log: list[Rebalance] = []
        self._watch = watch
        self._mesh = mesh
        self._mover = mover
        self._lane = lane
        self._device = device
        self._step_ms = step_ms
        self._peers: Peers = Alone() if peers is None else peers
        self._process = PlanProcess()
        self._state: Literal["idle", "collect", "plan", "move"] = "idle"
        self._next = settings.window_steps
        self._flushed: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._planned: Future[_Planned] = Future()
        self._ready: _Planned | None = None
        self._at = 0
        self._timed: list[tuple[Any, Any]] = []
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
            self._agree(step)
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
        if not self._timed:
            return
        if self._device.startswith("cuda"):
            self._timed[-1][1].synchronize()  # long past, except at the end of a run
            now.move_ms = sum(began.elapsed_time(ended) for began, ended in self._timed)
        else:
            now.move_ms = sum(ended - began for began, ended in self._timed) * 1000
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
            expert_bytes=self._mover.expert_bytes,
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
        settings, peers, old_LRS = self.settings, self._peers, self._watch.slot_LRS
        counts_MLE = np.concatenate([c.counts_MLE for c in chunks])
        tokens_M = np.concatenate([c.tokens_M for c in chunks])
        if peers.processes > 1:  # ranks plan the same only from the same numbers
            counts_MLE, tokens_M = peers.total(counts_MLE), peers.total(tokens_M)
            means = peers.total(np.array([economics.link_gb_s, economics.moe_ms])) / peers.processes
            economics = Economics(economics.expert_bytes, float(means[0]), float(means[1]), economics.horizon_steps)
        answer = self._process.plan(
            PlanJob(
                counts_MLE,
                tokens_M,
                old_LRS,
                self._watch.epoch,
                settings.top_k,
                settings.config_digest,
                settings.weights_digest,
                economics,
                MOVE_PRICE,
            )
        )
        digest = hashlib.sha256(answer.action.encode() + answer.slot_LRS.astype("<i4").tobytes()).hexdigest()
        if answer.action != "use" or (answer.slot_LRS == old_LRS).all():
            return _Planned(answer, digest)
        layers = range(len(answer.gain_L))
        moves = plan_moves(
            old_LRS,
            answer.slot_LRS,
            expert_bytes=self._mover.expert_bytes,
            limit=settings.max_bytes_per_step,
            order=sorted(layers, key=lambda k: (-answer.gain_L[k], k)),
        )
        tables: list[SlotTable | None] = []
        epoch, experts = self._watch.epoch, self._watch.config.n_routed_experts
        for step, slot_LRS in zip(moves.steps, moves.after, strict=True):
            if any(part.last for part in step):
                epoch += 1
                tables.append(SlotTable.build(Placement.of(slot_LRS), experts, self._device, epoch=epoch))
            else:
                tables.append(None)
        return _Planned(answer, digest, moves, tuple(tables))

    # --------------------------------------------------------------- agree

    def _agree(self, step: int) -> None:
        """Act once every rank has planned, and only on the same plan."""
        now = self.log[-1]
        if self._peers.processes > 1 and (step - now.step) % AGREE_STEPS:
            return
        if self._peers.processes == 1 and not self._planned.done():
            return
        mine = ""
        if self._planned.done():
            error = self._planned.exception()
            mine = self._planned.result().digest if error is None else f"failed: {error}"
        texts = self._peers.gather(mine)
        if not all(texts):
            return
        self._state = "idle"
        failed = next((text for text in texts if text.startswith("failed: ")), None)
        if failed is not None:
            error = self._planned.exception()
            if error is not None and not isinstance(error, DeepInferError):
                raise error
            now.outcome, now.reason = "failed", f"no plan: {failed.removeprefix('failed: ')}"
            return
        planned = self._planned.result()
        answer = planned.answer
        now.plan_ms, now.loop = answer.plan_s * 1000, answer.loop
        now.predicted_before, now.predicted_after = answer.before, answer.after
        if len(set(texts)) > 1:
            other = next(i for i, text in enumerate(texts) if text != mine)
            now.outcome = "refused"
            now.reason = f"processes planned differently (digest {mine[:12]}… here, {texts[other][:12]}… on {other})"
            return
        now.reason = answer.sentence
        if planned.moves is None:
            now.outcome = "kept"
            return
        now.outcome, now.experts = "moving", planned.moves.experts
        now.bytes, now.max_rank_bytes = planned.moves.bytes, int(planned.moves.received_R.max())
        self._ready, self._at, self._timed = planned, 0, []
        self._state = "move"

    # ---------------------------------------------------------------- move

    def _move(self, step: int) -> None:
        """Launch this step's pieces, and the switch of the layers that are complete with them."""
        planned, now = self._ready, self.log[-1]
        assert planned is not None and planned.moves is not None
        part, table = planned.moves.steps[self._at], planned.tables[self._at]
        if table is not None:
            slot_LRS = planned.moves.after[self._at]
            for meter in self._watch.record.meters:
                meter.use(table.epoch, slot_LRS)
            self._watch.slot_LRS = slot_LRS
        received: dict[int, int] = {}
        for layer in part:
            for piece in layer.pieces:
                if piece.received:
                    rank = piece.dst // self._mesh.table.placement.slots_per_rank
                    received[rank] = received.get(rank, 0) + piece.hi - piece.lo
        now.max_step_bytes = max(now.max_step_bytes, *received.values(), 0)
        now.move_steps += 1

        def work() -> None:
            began = self._clock()
            self._mover.run(part)
            if table is not None:
                self._mesh.switch(table)
                self._watch.epoch = table.epoch
            self._timed.append((began, self._clock()))

        self._lane.launch(work)
        self._at += 1
        if self._at == len(planned.moves.steps):
            assert table is not None
            now.outcome, now.done_step = "moved", step
            self.span.restart(table.epoch)
            self._state, self._ready = "idle", None

    def _clock(self) -> Any:
        if not self._device.startswith("cuda"):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
