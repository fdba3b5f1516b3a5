"""``Runner``: executes step plans on one device. It contains no policy.

A step has three parts: ``forward`` (build the batch and launch the model), ``sample`` (launch the drawing, once masks
and the tokens before are known) and ``collect`` (wait for the drawn ids). ``forward`` of the next step may be launched
before ``collect``: ids that are not known yet are taken on the device from the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
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
from deepinfer_engine.runtime.speculate import Record, RowMap, Speculation
from deepinfer_engine.runtime.stopwatch import Stopwatch, stopwatch_of
from deepinfer_engine.sample.sampler import Draws, Sampler
from deepinfer_engine.spec.calibrate import regime_of
from deepinfer_engine.types import Arrival, Move, PlannedRow, Sequence, StepPlan, TokenLogprob


@dataclass(frozen=True)
class StepOutput:
    """Drawn ids of every sampled row (negative where one failed), their log-probabilities where wanted, drafts it
    verified and accepted, tokens per expert int64 [L, E], host time of building and time of the step itself in ms
    (``Stopwatch``), payloads of exports, and blocks whose content was awaited and did not come."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprob]]
    load_LE: Tensor
    build_ms: float
    run_ms: float
    moved: list[tuple[Move, bytes]]
    verified: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Joint:
    """A step over several processes: ``tokens`` of all of them, and whether any goes on past the cut."""

    tokens: int
    past_cut: bool


@dataclass
class Flight:
    """A step between launch and collection. ``sampled``: sequence id → first row of this process's logits; ``first``:
    its token in the step.

    ``draws`` and ``home`` without speculation, ``record`` with it.
    """

    plan: StepPlan
    sampled: dict[int, int]
    first: dict[int, int]
    batch: Batch | None
    build_ms: float
    stopwatch: Stopwatch
    drawn_rows: dict[int, int] = field(default_factory=dict)
    record: Record | None = None
    logits: Tensor | None = None
    load_LE: Tensor | None = None
    draws: Draws | None = None
    home: Draws | None = None
    ready: Any = None
    launched: list[Future[None]] = field(default_factory=list)
    moved: list[tuple[Move, bytes]] = field(default_factory=list)
    lost: frozenset[int] = frozenset()


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
        speculation: Speculation | None = None,
    ):
        """``kept``: layers whose windows are copied at pivots. ``watch`` counts what the experts do. With
        ``speculation`` decode rows verify drafts."""
        self.speculation = speculation
        #: by sequence: drafts that the next step verifies and their raw confidence, known once a step is collected
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.confidence: dict[int, tuple[float, ...]] = {}
        self.kept = kept
        self.watch = watch
        self.model = model
        self.kv = kv
        self.ops = ops
        self.mesh = mesh
        self.device = device
        self.lane = lane
        #: a new one for every step
        self.stopwatch: Callable[[], Stopwatch] = partial(stopwatch_of, device)
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
        firsts: dict[int, int] = {}
        late: list[tuple[int, int]] = []  # (token index, row of the previous step's draws)
        first = wanted = floats = 0
        for row in plan.rows:
            seq = sequences[row.seq_id]
            if self.speculation is not None and row.kind == "decode":
                rows.append(_floating_row(seq, row))
                sampled[row.seq_id], firsts[row.seq_id] = wanted, first
                wanted += row.count
                first += row.count
                floats += 1
                if plan.budget is not None:
                    first = wanted = floats + plan.budget
                continue
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
            first += row.count
            if row.sample:
                sampled[row.seq_id], firsts[row.seq_id] = wanted, first - 1
                wanted += 1
        ngram = self.model.config.engram_max_ngram_size
        batch = build_batch(rows, self.kv.layout, ngram=ngram, device=self.device, budget=plan.budget) if rows else None
        past_cut, tokens = (False, first) if joint is None else (joint.past_cut, joint.tokens)
        where = self._pairs(late) if late else None
        flight = Flight(plan, sampled, firsts, batch, (time.perf_counter() - began) * 1000, self.stopwatch())

        def work() -> None:
            if where is not None:
                assert batch is not None and previous is not None and previous.draws is not None
                _fill(batch, where, previous.draws.ids)
            if self.speculation is not None and batch is not None:
                self.speculation.place(batch, self.kv.layout, self.ops)
            flight.moved += self._move(plan.before, flight.stopwatch)
            if batch is None:
                out = self.model.idle(self.ops, self.mesh, past_cut=past_cut)
            else:
                out = self.model.forward(batch, self.kv, self.ops, self.mesh, past_cut=past_cut)
            flight.logits, flight.load_LE = out.logits, out.load_LE
            flight.lost = self.kv.take_lost()
            if self.watch is not None:
                self.watch.add(out.load_LE, tokens, self.mesh.table.epoch)
            if self.speculation is not None and batch is not None:
                self.speculation.see(batch, out.taps, self.kv, self.ops)
            flight.moved += self._move(plan.after, flight.stopwatch)

        self._launch(flight, work)
        return flight

    def sample(self, flight: Flight, sequences: Mapping[int, Sequence], masks: Mapping[int, np.ndarray]) -> None:
        """Launch the drawing for rows whose sequence still runs as planned (``sequences``: uid → running sequence).

        With speculation: verification, the commit of what it leaves, and the drafts after it. ``masks``: uid → int32
        words of the tokens a grammar allows, with speculation one row of words per place.
        """
        live = self.live(flight, sequences)
        seqs = [sequences[r.seq_id] for r in live]
        flight.drawn_rows = {r.seq_id: i for i, r in enumerate(live)}
        draw: Callable[[Tensor], None] | None = None
        if live:
            made = self._drawing if self.speculation is None else self._verification
            draw = made(flight, live, seqs, masks)

        def work() -> None:
            if draw is not None:
                assert flight.logits is not None
                draw(flight.logits)
            flight.logits = None

        self._launch(flight, work, last=True)

    def _launch(self, flight: Flight, work: Callable[[], None], *, last: bool = False) -> None:
        """Launch a part of a step; what the ``last`` one drew goes to the host."""

        def part() -> None:
            with flight.stopwatch.part():
                work()
            if last:
                self._send_home(flight)

        flight.launched.append(self.lane.launch(part))

    def _drawing(
        self, flight: Flight, live: list[PlannedRow], seqs: list[Sequence], masks: Mapping[int, np.ndarray]
    ) -> Callable[[Tensor], None]:
        inputs = self.sampler.prepare(seqs, masks)
        index = None
        if 0 < len(live) < len(flight.sampled):
            index = torch.tensor([flight.sampled[r.seq_id] for r in live]).to(self.device, non_blocking=True)

        def draw(logits: Tensor) -> None:
            flight.draws = self.sampler.draw(logits if index is None else logits.index_select(0, index), inputs)

        return draw

    def _verification(
        self, flight: Flight, live: list[PlannedRow], seqs: list[Sequence], masks: Mapping[int, np.ndarray]
    ) -> Callable[[Tensor], None]:
        spec = self.speculation
        assert spec is not None
        eos = self.model.config.eos_token_id
        inputs = self.sampler.prepare_verify(
            seqs,
            masks,
            places=spec.tokens + 1,
            stops=[_stop_ids(s, eos) for s in seqs],
            room=[s.max_len - len(s.token_ids) for s in seqs],
        )
        params = [s.request.sampling for s in seqs]
        wanted = tuple(i for i, p in enumerate(params) if p.logprobs)
        top = max((p.top_logprobs for p in params), default=0)
        floating = {r.seq_id: i for i, r in enumerate(r for r in flight.plan.rows if r.kind == "decode")}
        uids = [r.seq_id for r in live]
        columns = (
            [floating.get(u, -1) for u in uids],
            [flight.sampled[u] for u in uids],
            [flight.first[u] for u in uids],
            [s.slot for s in seqs],
            [s.context_from for s in seqs],
            [regime_of(p.temperature, spec.mode) for p in params],
        )
        both = torch.tensor(columns, dtype=torch.int64).to(self.device, non_blocking=True)
        where = RowMap(*both.unbind(0))

        assert flight.batch is not None
        batch = flight.batch

        def draw(logits: Tensor) -> None:
            flight.record = spec.judge(
                batch, logits, where, inputs, self.kv, self.ops, wanted=wanted, top=top, draft=flight.plan.draft
            )

        return draw

    @staticmethod
    def live(flight: Flight, sequences: Mapping[int, Sequence]) -> list[PlannedRow]:
        """Sampled rows whose sequence still runs as planned."""
        rows = (r for r in flight.plan.rows if r.seq_id in flight.sampled and r.seq_id in sequences)
        return [r for r in rows if sequences[r.seq_id].generation == r.generation]

    def ahead(self, row: PlannedRow) -> tuple[int, ...]:
        """Drafts that a row about to be drawn verifies; known once the step before was collected."""
        return self.drafts[row.seq_id][: row.drafts] if row.drafts else ()

    def forget(self, uid: int) -> None:
        """Drop what is kept on the host for a finished sequence."""
        self.sampler.forget(uid)
        self.drafts.pop(uid, None)
        self.confidence.pop(uid, None)

    def collect(self, flight: Flight) -> StepOutput:
        """Wait for a step's ids. Raises what its launched work raised."""
        for launched in flight.launched:
            launched.result()
        if flight.ready is not None:
            flight.ready.synchronize()
        assert flight.load_LE is not None
        if flight.record is not None:
            return self._read_record(flight, flight.record)
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprob]] = {}
        if (home := flight.home) is not None:
            tokens = {uid: [token] for uid, token in zip(flight.drawn_rows, home.ids.tolist(), strict=True)}
            logprobs = {uid: [found] for uid, found in _logprobs(home, list(flight.drawn_rows)).items()}
        return StepOutput(
            tokens, logprobs, flight.load_LE, flight.build_ms, flight.stopwatch.ms(), flight.moved, lost=flight.lost
        )

    def _read_record(self, flight: Flight, record: Record) -> StepOutput:
        rows = list(flight.drawn_rows)
        lines = zip(record.tokens.tolist(), record.count.tolist(), strict=True)
        tokens = {uid: line[:n] for uid, (line, n) in zip(rows, lines, strict=True)}
        self.drafts.update(zip(rows, map(tuple, record.drafts.tolist()), strict=True))
        self.confidence.update(zip(rows, map(tuple, record.confidence.tolist()), strict=True))
        assert flight.load_LE is not None
        return StepOutput(
            tokens,
            _record_logprobs(record, rows, tokens),
            flight.load_LE,
            flight.build_ms,
            flight.stopwatch.ms(),
            flight.moved,
            lost=flight.lost,
            verified=dict(zip(rows, record.verified.tolist(), strict=True)),
            accepted=dict(zip(rows, record.accepted.tolist(), strict=True)),
        )

    def command(self, name: str, body: Any = None) -> list[Any]:
        """Run a command between two steps and wait for it: a list of one, as there is one process."""
        out: list[Any] = []
        self.lane.launch(lambda: out.append(self.commands[name](body))).result()
        return out

    def _move(self, moves: tuple[Move, ...], stopwatch: Stopwatch) -> list[tuple[Move, bytes]]:
        """Copy KV into and out of the cache; payloads of the exports. ``stopwatch`` sees waits for an arrival."""
        out: list[tuple[Move, bytes]] = []
        for move in moves:
            if move.kind == "import_block":
                payload = torch.frombuffer(bytearray(move.data), dtype=torch.uint8).unsqueeze(0)
                self.kv.import_blocks(torch.tensor([move.at], device=self.device), payload.to(self.device))
            elif move.kind == "import_arrival":
                assert move.arrival is not None
                self.kv.expect(_watched(move.arrival, stopwatch))
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
            return
        if flight.draws is not None:
            parts = (flight.draws.ids, flight.draws.wanted, flight.draws.logprob)
            parts += (flight.draws.top_ids, flight.draws.top_values)
            flight.home = Draws(*(None if t is None else _pinned(t) for t in parts))  # pyright: ignore[reportArgumentType]
        if flight.record is not None:
            flight.record = flight.record.moved(_pinned)
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


def _watched(arrival: Arrival, stopwatch: Stopwatch) -> Arrival:
    """The same arrival, whose waits ``stopwatch`` sees."""

    def take(index: int) -> list[bytes | None]:
        with stopwatch.wait():
            return arrival.take(index)

    return replace(arrival, take=take)


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


def _record_logprobs(record: Record, uids: list[int], tokens: Mapping[int, list[int]]) -> dict[int, list[TokenLogprob]]:
    """One entry per committed token of the rows that want them."""
    if record.logprob is None or record.top_ids is None or record.top_values is None:
        return {}
    values, best, best_values = record.logprob.tolist(), record.top_ids.tolist(), record.top_values.tolist()
    places = record.tokens.shape[1]
    out = {}
    for w, row in enumerate(record.wanted):
        ids = tokens[uids[row]]
        at = range(w * places, w * places + len(ids))
        out[uids[row]] = [
            TokenLogprob(token, values[i], tuple(zip(best[i], best_values[i], strict=True)))
            for token, i in zip(ids, at, strict=True)
        ]
    return out


def _floating_row(seq: Sequence, row: PlannedRow) -> RowInput:
    made = RowInput((), row.start + row.slack, row.count, seq.slot, seq.block_ids, logits="all")
    made = made._replace(floating=True, limit=seq.max_len, order=seq.uid)
    if seq.span is None:
        return made
    return made._replace(**(vars(seq.span.limits(row.start, row.count)) | {"tail": None}))


def _stop_ids(seq: Sequence, eos: int) -> tuple[int, ...]:
    sampling = seq.request.sampling
    return sampling.stop_token_ids if sampling.ignore_eos else (eos, *sampling.stop_token_ids)
