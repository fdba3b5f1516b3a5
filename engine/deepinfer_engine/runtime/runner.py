"""``Runner``: executes step plans on one device. It contains no policy.

A step has three parts: ``forward`` (build the batch and launch the model), ``sample`` (launch the drawing, once masks
and the tokens before are known) and ``collect`` (wait for the drawn ids). ``forward`` of the next step may be launched
before ``collect``: ids that are not known yet are taken on the device from the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.cache.state import KVState
from deepinfer_engine.model.ced import CedModel
from deepinfer_engine.runtime.batch import Batch, RowInput, build_batch
from deepinfer_engine.runtime.expert_watch import ExpertWatch
from deepinfer_engine.runtime.lane import Lane
from deepinfer_engine.runtime.move_site import MoveSite
from deepinfer_engine.sample.sampler import Draws, Sampler
from deepinfer_engine.types import Move, Sequence, StepPlan, TokenLogprob


@dataclass(frozen=True)
class StepOutput:
    """Drawn id of every sampled row (negative where it failed), their log-probabilities where wanted, tokens per
    expert int64 [L, E], host time of building and time from launch to the drawn ids in ms, payloads of exports."""

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprob]
    load_LE: Tensor
    build_ms: float
    run_ms: float
    moved: list[tuple[Move, bytes]]


@dataclass(frozen=True)
class Joint:
    """A step over several processes: ``tokens`` of all of them, and whether any goes on past the cut."""

    tokens: int
    past_cut: bool


@dataclass
class Flight:
    """A step between launch and collection. ``sampled``: sequence id → row of this process's logits."""

    plan: StepPlan
    sampled: dict[int, int]
    build_ms: float
    drawn_rows: dict[int, int] = field(default_factory=dict)
    logits: Tensor | None = None
    load_LE: Tensor | None = None
    draws: Draws | None = None
    home: Draws | None = None
    ready: Any = None
    launched: list[Future[None]] = field(default_factory=list)
    started_s: float = 0.0
    run_ms: float = 0.0
    moved: list[tuple[Move, bytes]] = field(default_factory=list)


class Runner:
    """Model, KV and mesh of one process, and the lane that runs them."""

    def __init__(
        self,
        model: CedModel,
        kv: KVState,
        ops: Any,
        mesh: Any,
        device: str,
        lane: Lane,
        *,
        kept: range = range(0),
        watch: ExpertWatch | None = None,
    ):
        """``kept``: layers whose windows are copied at pivots. ``watch`` counts what the experts do."""
        self.kept = kept
        self.watch = watch
        self.model = model
        self.kv = kv
        self.ops = ops
        self.mesh = mesh
        self.device = device
        self.lane = lane
        self.sampler = Sampler(ops, model.config.vocab_size, device)
        #: what may be asked of every process between two steps, by name; runs on the lane
        self.commands: dict[str, Callable[[Any], Any]] = {}
        #: what moves this process's experts, where they may move
        self.site: MoveSite | None = None

    def forward(
        self,
        plan: StepPlan,
        sequences: Mapping[int, Sequence],
        previous: Flight | None,
        *,
        joint: Joint | None = None,
    ) -> Flight:
        """Launch the model over every planned row. ``previous``: the step in flight that draws the missing ids.

        ``joint``: the step runs on several processes, and this one may have no rows.
        """
        began = time.perf_counter()
        rows: list[RowInput] = []
        sampled: dict[int, int] = {}
        late: list[tuple[int, int]] = []  # (token index, row of the previous step's draws)
        first = 0
        for row in plan.rows:
            seq = sequences[row.seq_id]
            unknown = row.start + row.count > len(seq.token_ids)
            if unknown:
                assert previous is not None and row.count == 1
                late.append((first, previous.drawn_rows[row.seq_id]))
            wants = "last" if row.sample else "none"
            limits = {} if seq.span is None else vars(seq.span.limits(row.start, row.count))
            rows.append(
                RowInput(
                    seq.token_ids,
                    row.start,
                    row.count,
                    seq.slot,
                    seq.block_ids,
                    logits=wants,
                    newest_unknown=unknown,
                    **limits,
                )
            )
            if row.sample:
                sampled[row.seq_id] = len(sampled)
            first += row.count
        ngram = self.model.config.engram_max_ngram_size
        batch = build_batch(rows, self.kv.layout, ngram=ngram, device=self.device) if rows else None
        past_cut, tokens = (False, first) if joint is None else (joint.past_cut, joint.tokens)
        where = self._pairs(late) if late else None
        flight = Flight(plan, sampled, (time.perf_counter() - began) * 1000)

        def work() -> None:
            flight.started_s = time.perf_counter()
            if where is not None:
                assert batch is not None and previous is not None and previous.draws is not None
                _fill(batch, where, previous.draws.ids)
            flight.moved += self._move(plan.before)
            if batch is None:
                out = self.model.idle(self.ops, self.mesh, past_cut=past_cut)
            else:
                out = self.model.forward(batch, self.kv, self.ops, self.mesh, past_cut=past_cut)
            flight.logits, flight.load_LE = out.logits, out.load_LE
            if self.watch is not None:
                self.watch.add(out.load_LE, tokens, self.mesh.table.epoch)
            flight.moved += self._move(plan.after)

        flight.launched.append(self.lane.launch(work))
        return flight

    def sample(self, flight: Flight, sequences: Mapping[int, Sequence], masks: Mapping[int, np.ndarray]) -> None:
        """Launch the drawing for rows whose sequence still runs as planned (``sequences``: uid → running sequence)."""
        rows = [r for r in flight.plan.rows if r.seq_id in flight.sampled]
        live = [r.seq_id for r in rows if r.seq_id in sequences and sequences[r.seq_id].generation == r.generation]
        flight.drawn_rows = {uid: i for i, uid in enumerate(live)}
        inputs = self.sampler.prepare([sequences[uid] for uid in live], masks) if live else None
        index = None
        if 0 < len(live) < len(flight.sampled):
            index = torch.tensor([flight.sampled[u] for u in live]).to(self.device, non_blocking=True)

        def work() -> None:
            if inputs is not None:
                assert flight.logits is not None
                logits = flight.logits if index is None else flight.logits.index_select(0, index)
                flight.draws = self.sampler.draw(logits, inputs)
            flight.logits = None
            self._send_home(flight)

        flight.launched.append(self.lane.launch(work))

    def collect(self, flight: Flight) -> StepOutput:
        """Wait for a step's ids. Raises what its launched work raised."""
        for launched in flight.launched:
            launched.result()
        if flight.ready is not None:
            flight.ready.synchronize()
            flight.run_ms = (time.perf_counter() - flight.started_s) * 1000
        assert flight.load_LE is not None
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprob] = {}
        home = flight.home
        if home is not None:
            tokens = dict(zip(flight.drawn_rows, home.ids.tolist(), strict=True))
            logprobs = _logprobs(home, list(flight.drawn_rows))
        return StepOutput(tokens, logprobs, flight.load_LE, flight.build_ms, flight.run_ms, flight.moved)

    def command(self, name: str, body: Any = None) -> list[Any]:
        """Run a command between two steps and wait for it: a list of one, as there is one process."""
        out: list[Any] = []
        self.lane.launch(lambda: out.append(self.commands[name](body))).result()
        return out

    def forget(self, uid: int) -> None:
        """Drop what is kept for a sequence that ended."""
        self.sampler.forget(uid)

    def _move(self, moves: tuple[Move, ...]) -> list[tuple[Move, bytes]]:
        """Copy KV into and out of the cache; payloads of the exports."""
        out: list[tuple[Move, bytes]] = []
        for move in moves:
            if move.kind == "import_block":
                payload = torch.frombuffer(bytearray(move.data), dtype=torch.uint8).unsqueeze(0)
                self.kv.import_blocks(torch.tensor([move.at], device=self.device), payload.to(self.device))
            elif move.kind == "import_window":
                rows = torch.frombuffer(bytearray(move.data), dtype=torch.uint8)
                shape = (len(self.kept), -1, self.kv.layout.window_row_bytes)
                self.kv.import_window(move.at, move.end, self.kept, rows.view(shape).to(self.device))
            elif move.kind == "export_block":
                data = self.kv.export_blocks(torch.tensor([move.at], device=self.device))
                out.append((move, data.cpu().numpy().tobytes()))
            else:
                data = self.kv.export_window(move.at, move.end, self.kept)
                out.append((move, data.cpu().numpy().tobytes()))
        return out

    def _send_home(self, flight: Flight) -> None:
        """Copy the draws to the host; on a device without waiting, ``ready`` tells when they are there."""
        if not self.device.startswith("cuda"):
            flight.home = flight.draws
            flight.run_ms = (time.perf_counter() - flight.started_s) * 1000
            return
        if flight.draws is not None:
            parts = (flight.draws.ids, flight.draws.wanted, flight.draws.logprob)
            parts += (flight.draws.top_ids, flight.draws.top_values)
            flight.home = Draws(*(None if t is None else _pinned(t) for t in parts))  # pyright: ignore[reportArgumentType]
        flight.ready = torch.cuda.Event()
        flight.ready.record()

    def _pairs(self, late: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        both = torch.tensor(late, dtype=torch.int64).to(self.device, non_blocking=True)
        return both[:, 0], both[:, 1]


def _fill(batch: Batch, where: tuple[Tensor, Tensor], drawn: Tensor) -> None:
    """Put ids that the step before drew into their places; a failed draw (negative) is run as id 0 and dropped."""
    at, source = where
    ids = drawn.index_select(0, source).clamp(min=0)
    batch.ids_T.index_copy_(0, at, ids)
    batch.lag_ids_TN[:, 0].index_copy_(0, at, ids)


def _pinned(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def _logprobs(draws: Draws, uids: list[int]) -> dict[int, TokenLogprob]:
    if draws.wanted is None or draws.logprob is None or draws.top_ids is None or draws.top_values is None:
        return {}
    ids = draws.ids.tolist()
    values, best, best_values = draws.logprob.tolist(), draws.top_ids.tolist(), draws.top_values.tolist()
    return {
        uids[row]: TokenLogprob(ids[row], values[w], tuple(zip(best[w], best_values[w], strict=True)))
        for w, row in enumerate(draws.wanted.tolist())
    }
