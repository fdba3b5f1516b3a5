"""``Scheduler``: the one owner of sequences, ring slots and blocks. It asks the deciders and applies their plans.

Life of a sequence: new, waiting (in order of arrival), running on one rank, finished. A sequence is admitted with the
blocks of all tokens it has; while it decodes it takes a block every 128 tokens. Preemption sends it back to the queue,
at the place of its arrival, with its tokens kept and its KV to be computed again.

Steps may be planned before the tokens of the step before them are known: a planned draw counts as ``pending`` until
``commit``. Resources of a finished or preempted sequence are free at once, although a step in flight may still write
them: steps run in order on one device, so whoever gets them next writes later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.cache.replay import ReplayShape
from deepinfer_engine.cache.tiers import Tiers
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.sched.limits import Limits
from deepinfer_engine.sched.prefill_budget import CostFit
from deepinfer_engine.sched.reuse import Reuse
from deepinfer_engine.sched.router import Head, RankLoad, route
from deepinfer_engine.sched.rows import plan_decode, plan_prefill
from deepinfer_engine.spec.planner import BudgetPlanner
from deepinfer_engine.types import FinishReason, PlannedRow, Sequence, StepPlan

#: weight of the latest answer's length in the expected length of the next
_LENGTH_DECAY = 0.1


class Drawn(NamedTuple):
    """A token that came back: its sequence, its id, and why the sequence ended with it (None: it goes on)."""

    seq: Sequence
    token: int
    reason: FinishReason | None


def _follow_context(seq: Sequence, row: PlannedRow) -> None:
    """Tokens that stop at the cut have no taps, so the draft blocks get no context row of them."""
    if seq.span is None:
        return
    tail = seq.span.limits(row.start, row.count).tail
    if tail is not None and tail < row.count:
        seq.context_from = row.start + row.count - tail


class Scheduler:
    """Owns the sequences in flight and the pools of slots and blocks. Not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        shape: ReplayShape | None = None,
        tiers: Tiers | None = None,
        planner: BudgetPlanner | None = None,
    ):
        """``shape``: how prompts are replayed; without one, all rows run through all layers and nothing is shared.
        ``planner`` chooses how many drafts a step verifies; without one, all."""
        self.planner = planner
        self.limits = limits
        self.reuse = Reuse(shape, limits.dp, limits.blocks, tiers)
        self.slots = [IdPool(limits.rows, "rows") for _ in range(limits.dp)]
        self.blocks = self.reuse.device
        self.running: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}
        self.fit = CostFit()
        self.preemptions = 0
        self._queue: list[int] = []  # heap of waiting uids; entries whose sequence left stay until they surface
        self._rank_seqs = [0] * limits.dp
        self._rank_tokens = [0] * limits.dp
        self._free_slots = limits.dp * limits.rows
        self._mean_new: float | None = None
        self._next_uid = 0
        self._step = 0

    # ------------------------------------------------------------- admission

    def check(self, seq: Sequence) -> None:
        """Refuse a sequence that can never run, with need and have."""
        self.limits.check(f"request {seq.request.id!r}", seq.num_prompt, seq.request.sampling.max_tokens)

    def reserve(self, seq: Sequence) -> int:
        """Check a new sequence and give it its place in the order of arrival; ``submit`` queues it, now or later."""
        assert seq.state == "new" and seq.uid < 0
        self.check(seq)
        seq.uid = self._next_uid
        self._next_uid += 1
        return seq.uid

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence at the place of its arrival."""
        if seq.uid < 0:
            self.reserve(seq)
        assert seq.state == "new"
        self.reuse.begin(seq)
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = "waiting"
        self.waiting[seq.uid] = seq
        heapq.heappush(self._queue, seq.uid)

    def _admit(self) -> list[Sequence]:
        heads: list[Sequence] = []
        fetching: list[int] = []
        while self._queue and len(heads) < self._free_slots:
            seq = self.waiting.get(heapq.heappop(self._queue))
            if seq is None:
                continue
            if self.reuse.ready(seq):
                heads.append(seq)
            else:
                fetching.append(seq.uid)  # its blocks are on their way; others go first
        for uid in fetching:
            heapq.heappush(self._queue, uid)
        if not heads:
            return []
        loads = [
            RankLoad(self._rank_seqs[r], self._rank_tokens[r], self.slots[r].free, self.blocks[r].free)
            for r in range(self.limits.dp)
        ]
        ranks = route([Head(self._expected(s), -(-len(s.token_ids) // BLOCK_TOKENS)) for s in heads], loads)
        for seq, rank in zip(heads, ranks, strict=False):
            self._place(seq, rank)
        for seq in heads[len(ranks) :]:
            heapq.heappush(self._queue, seq.uid)
        return heads[: len(ranks)]

    def _expected(self, seq: Sequence) -> int:
        """Length the router counts: prompt plus the recent mean answer, bounded by what the request allows."""
        new = seq.request.sampling.max_tokens
        if self._mean_new is not None:
            new = min(new, round(self._mean_new))
        return max(len(seq.token_ids), seq.num_prompt + new)

    def _place(self, seq: Sequence, rank: int) -> None:
        del self.waiting[seq.uid]
        seq.dp_rank = rank
        seq.slot = rank * self.limits.rows + self.slots[rank].take(1)[0]
        seq.pending = seq.ahead = 0
        seq.drafts_ready = False
        self.reuse.place(seq)
        seq.num_computed = seq.context_from = 0 if seq.span is None else seq.span.start
        seq.expected_len = self._expected(seq)
        seq.state = "running"
        self.running[seq.uid] = seq
        self._rank_seqs[rank] += 1
        self._rank_tokens[rank] += seq.expected_len
        self._free_slots -= 1

    # -------------------------------------------------------------- planning

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """Preempt, admit and plan one step; no rows when nothing can run before a result comes back."""
        free = [pool.free for pool in self.blocks] if self.running else []
        decode = plan_decode(self.running.values(), free, self.reuse.users, draft_tokens=self.limits.draft_tokens)
        for seq in decode.preempt:
            self._preempt(seq)
        for seq in decode.grow:
            self.reuse.grow(seq, 1)
        admitted = self._admit() if self._queue and self._free_slots else []
        prefill = plan_prefill(
            [*decode.prefilling, *admitted],
            decode.rows,
            chunk_tokens=self.limits.chunk_tokens,
            budget_ms=self.limits.step_budget_ms,
            cost=self.fit.cost,
            stop=self.reuse.stop,
        )
        decoding, budget, draft = self._verified(decode.rows)
        rows = (*decoding, *prefill)
        running, shares = self.running, self.reuse.tiers is not None
        verifies = self.limits.draft_tokens > 0
        for uid, _, start, count, _, sample, _, drafts, _ in rows:
            seq = running[uid]
            seq.num_computed = start + count - drafts
            if sample:
                seq.pending += 1
                if verifies:
                    seq.ahead += drafts
                    seq.drafts_ready = draft
            if shares:
                self.reuse.advance(seq)
        if verifies:
            for row in prefill:
                _follow_context(running[row.seq_id], row)
        self._step += 1
        gone = tuple(s.uid for s in decode.preempt)
        return StepPlan(
            self._step, rows, tuple(s.uid for s in admitted), gone, *self.reuse.moves(bool(rows)), budget, draft
        )

    def _verified(self, rows: list[PlannedRow]) -> tuple[list[PlannedRow], int | None, bool]:
        """(decode rows, verify budget where it is less than all their drafts, whether this step drafts)."""
        if self.planner is None or not rows:
            return rows, None, True
        choice = self.planner.plan(len(rows))
        if choice.way == "fixed":
            return rows, None, True
        if choice.way == "off" or choice.budget == 0:
            return [r._replace(count=1, drafts=0) for r in rows], None, choice.way != "off"
        return rows, (choice.budget if choice.budget < sum(r.drafts for r in rows) else None), True

    def observe(self, plan: StepPlan, ms: float) -> None:
        """Learn from a step's measured time: what a row takes, and the whole cost where a time budget is to be kept."""
        self.reuse.observe(sum(r.count for r in plan.rows), ms / 1000)
        if self.limits.step_budget_ms > 0:
            self.fit.observe(((r.start, r.count) for r in plan.rows), ms)

    def lose(self, blocks: frozenset[int]) -> None:
        """Fetched ``blocks`` proved wrong or did not come in time for a step that ran: compute again what read them.

        Wrong are the sequences that use them, what those computed, and whoever shares that. Call it before the step
        is committed, whose tokens of these sequences are dropped.
        """
        bad, wrong = set(blocks), []
        while more := [s for s in self.running.values() if s not in wrong and not bad.isdisjoint(s.block_ids)]:
            wrong += more
            for seq in more:
                bad.update(seq.block_ids[0 if seq.span is None else seq.span.reused // BLOCK_TOKENS :])
        for seq in wrong:
            self._preempt(seq, wrong=True)
        self.reuse.lose(bad)

    def _preempt(self, seq: Sequence, *, wrong: bool = False) -> None:
        self._release(seq, wrong=wrong)
        seq.pending = seq.ahead = 0
        seq.generation += 1
        seq.preemptions += 1
        self.preemptions += 1
        self._enqueue(seq)

    # ------------------------------------------------------------ completion

    def commit(self, plan: StepPlan, tokens: Mapping[int, int | Items[int]]) -> list[Drawn]:
        """``committed`` at once."""
        return list(self.committed(plan, tokens))

    def committed(self, plan: StepPlan, tokens: Mapping[int, int | Items[int]]) -> Iterator[Drawn]:
        """Apply a step's result token by token: ``tokens`` holds what every sampled row drew, negative where it failed.

        Rows of sequences that ended or were preempted since the step was planned are dropped, and so are the tokens
        after one with which the sequence ended; the caller may end it between two of them.
        """
        for row in plan.rows:
            if not row.sample:
                continue
            seq = self.running.get(row.seq_id)
            if seq is None or seq.generation != row.generation:
                continue
            drawn = tokens[row.seq_id]
            seq.pending -= 1
            if row.drafts:
                seq.ahead -= row.drafts
            first = True
            for token in (drawn,) if isinstance(drawn, int) else drawn:
                if not first:
                    seq.num_computed += 1
                first = False
                reason = self._append(seq, token)
                if reason is not None:
                    self.finish(seq, reason)
                yield Drawn(seq, token, reason)
                if seq.state != "running":
                    break

    def _append(self, seq: Sequence, token: int) -> FinishReason | None:
        if token < 0:
            return "error"
        seq.token_ids.append(token)
        sampling = seq.request.sampling
        if token == self.limits.eos_token_id and not sampling.ignore_eos:
            return "stop"
        if token in sampling.stop_token_ids:
            return "stop"
        return "length" if seq.num_generated >= sampling.max_tokens else None

    def abort(self, uid: int) -> Sequence | None:
        """End a sequence in any state; None when it is not in flight. Safe to call twice."""
        seq = self.running.get(uid) or self.waiting.get(uid)
        if seq is not None:
            self.finish(seq, "abort")
        return seq

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that is waiting or running, and free what it holds."""
        if seq.state == "running":
            self._release(seq, wrong=reason == "error", delete=reason == "error")
        else:
            del self.waiting[seq.uid]
            self.reuse.forget(seq)
        if reason in ("stop", "length"):
            new = float(seq.num_generated)
            self._mean_new = new if self._mean_new is None else self._mean_new + _LENGTH_DECAY * (new - self._mean_new)
        seq.state, seq.finish_reason = "finished", reason
        if not self.busy:
            self.verify()

    def _release(self, seq: Sequence, *, wrong: bool = False, delete: bool = False) -> None:
        del self.running[seq.uid]
        rank = seq.dp_rank
        self.slots[rank].give([seq.slot - rank * self.limits.rows])
        self.reuse.release(seq, wrong=wrong, delete=delete)
        self._rank_seqs[rank] -= 1
        self._rank_tokens[rank] -= seq.expected_len
        self._free_slots += 1
        seq.slot = seq.dp_rank = -1

    def verify(self) -> None:
        """Assert that slots and blocks in use are exactly those of running sequences; shared blocks count once."""
        limits = self.limits
        held_slots = [s.slot for s in self.running.values()]
        held_blocks = [b for s in self.running.values() for b in s.block_ids]
        assert len(set(held_slots)) == len(held_slots)
        assert self.reuse.tiers is not None or len(set(held_blocks)) == len(held_blocks)
        assert sum(p.used for p in self.slots) == len(held_slots) == limits.dp * limits.rows - self._free_slots
        assert sum(p.used for p in self.blocks) == len(set(held_blocks))
        for rank in range(limits.dp):
            mine = [s for s in self.running.values() if s.dp_rank == rank]
            assert self._rank_seqs[rank] == len(mine)
            assert self._rank_tokens[rank] == sum(s.expected_len for s in mine)
            self.slots[rank].check()
            self.blocks[rank].check()
