"""``RankedRunner``: one engine over several processes. Rank 0 decides, all ranks do.

Statement. Only rank 0 has requests, scheduler, prefix tiers, grammars and journals; so there is one order of decisions
and nothing to agree on. Its plan of a step goes out as numbers: to each process the rows of the attention ranks that
it hosts, with what it does not know yet of their sequences (tokens, blocks, ring slot; settings once). Every process
then runs its rows through the same layers, meeting the others in the exchanges of the mesh, draws its rows' tokens
and sends them back. A process without rows still serves its experts. Since a row sees its own sequence only, and
each draw depends on the row alone, the tokens are those of one process up to the order of floating-point sums, and
the same bits under ``numerics.batch_invariant``.

Numbers of ring slots and blocks count over all attention ranks; a process gets them without those of the ranks before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deepinfer_engine.dist.control import Crew
from deepinfer_engine.dist.share import Share
from deepinfer_engine.runtime.host import Capacity
from deepinfer_engine.runtime.orders import Born, DrawOrder, News, Placed, StepOrder
from deepinfer_engine.runtime.runner import Flight, Joint, Runner, StepOutput
from deepinfer_engine.types import Move, Sequence, StepPlan


@dataclass
class _Known:
    """What a process knows of a sequence: generation, tokens and blocks."""

    generation: int = -1
    tokens: int = 0
    blocks: int = 0


@dataclass
class Ledger:
    """What the leader has told one process, so that it is told only what is new."""

    share: Share
    capacity: Capacity
    known: dict[int, _Known] = field(default_factory=dict)

    def news(self, seq: Sequence) -> News:
        """What changed since the process last heard of ``seq``."""
        known = self.known.get(seq.uid)
        born = placed = None
        if known is None:
            known = self.known[seq.uid] = _Known()
            born = Born(seq.request, seq.num_prompt, seq.seed, seq.index)
        first = self.share.dp_ranks.start
        if known.generation != seq.generation:
            known.generation, known.blocks = seq.generation, 0
            placed = Placed(seq.generation, seq.slot - first * self.capacity.rows, seq.span)
        blocks = tuple(b - first * self.capacity.blocks for b in seq.block_ids[known.blocks :])
        tokens = tuple(seq.token_ids[known.tokens :])
        known.tokens, known.blocks = len(seq.token_ids), len(seq.block_ids)
        return News(seq.uid, tokens, blocks, placed, born)

    def moves(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """The moves in the process's own KV, in its own numbers."""
        out = []
        for move in moves:
            per_rank = self.capacity.blocks if move.kind.endswith("block") else self.capacity.rows
            if (move.at - 1) // per_rank in self.share.dp_ranks:
                out.append(replace(move, at=move.at - self.share.dp_ranks.start * per_rank))
        return tuple(out)


class RankedRunner(Runner):
    """The leader's runner: its own rows here, the others' on the processes of ``crew``."""

    def __init__(self, *parts: Any, crew: Crew, share: Share, capacity: Capacity, **named: Any):
        """``parts`` and ``named``: what a ``Runner`` takes."""
        super().__init__(*parts, **named)
        self.crew = crew
        self.share = share
        self._ledgers = {r: Ledger(share.other(r), capacity) for r in range(share.size)}
        self._gone: list[int] = []

    def forward(
        self,
        plan: StepPlan,
        sequences: Mapping[int, Sequence],
        previous: Flight | None,
        *,
        joint: Joint | None = None,
    ) -> Flight:
        """Launch the step on all processes."""
        joint = Joint(sum(r.count for r in plan.rows), _past_cut(plan, sequences))
        gone, self._gone = tuple(self._gone), []
        own = plan
        for rank, ledger in self._ledgers.items():
            rows = tuple(r for r in plan.rows if r.dp_rank in ledger.share.dp_ranks)
            part = replace(plan, rows=rows, before=ledger.moves(plan.before), after=ledger.moves(plan.after))
            if rank == 0:
                own = part
                continue
            for uid in gone:
                ledger.known.pop(uid, None)
            news = tuple(ledger.news(sequences[r.seq_id]) for r in rows)
            self.crew.tell(rank, "forward", StepOrder(part, joint, news, gone))
        with self.crew.exchanging():
            flight = super().forward(own, sequences, previous, joint=joint)
        flight.plan = plan
        return flight

    def sample(self, flight: Flight, sequences: Mapping[int, Sequence], masks: Mapping[int, np.ndarray]) -> None:
        """Launch the drawing on all processes."""
        rows = [r for r in flight.plan.rows if r.sample]
        live = [r for r in rows if r.seq_id in sequences and sequences[r.seq_id].generation == r.generation]
        for rank, ledger in self._ledgers.items():
            if rank:
                mine = tuple(r.seq_id for r in live if r.dp_rank in ledger.share.dp_ranks)
                news = tuple(ledger.news(sequences[uid]) for uid in mine)
                order = DrawOrder(mine, news, {uid: masks[uid] for uid in mine if uid in masks})
                self.crew.tell(rank, "sample", order)
        with self.crew.exchanging():
            super().sample(flight, sequences, masks)

    def collect(self, flight: Flight) -> StepOutput:
        """Wait for the drawn ids of all processes. Raises PeerLost when one does not come within the deadline."""
        with self.crew.exchanging():
            own = super().collect(flight)
        parts: list[StepOutput] = [own]
        for rank, part in sorted(self.crew.gather("done", self.crew.step_s, f"step {flight.plan.step}").items()):
            parts.append(replace(part, moved=self._renumbered(rank, part.moved)))
        return StepOutput(
            tokens={uid: token for p in parts for uid, token in p.tokens.items()},
            logprobs={uid: logprob for p in parts for uid, logprob in p.logprobs.items()},
            load_LE=own.load_LE,
            build_ms=own.build_ms,
            run_ms=max(p.run_ms for p in parts),
            moved=[m for p in parts for m in p.moved],
        )

    def forget(self, uid: int) -> None:
        """A sequence has ended; the others hear of it with the next step."""
        super().forget(uid)
        self._gone.append(uid)

    def command(self, name: str, body: Any = None) -> list[Any]:
        """Run a command of the runners between the same two steps everywhere; what each returned, by rank."""
        self.crew.tell_all("command", (name, body))
        with self.crew.exchanging():
            own = super().command(name, body)
        answers = self.crew.gather("answer", self.crew.step_s, name)
        return [*own, *(answers[r] for r in sorted(answers))]

    def _renumbered(self, rank: int, moved: list[tuple[Move, bytes]]) -> list[tuple[Move, bytes]]:
        ledger = self._ledgers[rank]
        first, capacity = ledger.share.dp_ranks.start, ledger.capacity
        out = []
        for move, data in moved:
            per_rank = capacity.blocks if move.kind.endswith("block") else capacity.rows
            out.append((replace(move, at=move.at + first * per_rank), data))
        return out


def _past_cut(plan: StepPlan, sequences: Mapping[int, Sequence]) -> bool:
    """Whether any row of the step goes on past the cut."""
    for row in plan.rows:
        span = sequences[row.seq_id].span
        if span is None or span.tail(row.start, row.count):
            return True
    return False
