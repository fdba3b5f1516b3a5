"""Continuous batching over data-parallel ranks: who is admitted, which rows a step runs, who is finished.

Every sequence takes a ring slot and all blocks it can ever need when it is admitted, so an admitted sequence always
finishes. A step runs every decode row first, then prompt chunks under each rank's token budget, in order of arrival.
A request goes to the rank with the fewest rows, then the fewest tokens, then the lowest number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_engine.cache.layout import PAD
from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.types import FinishReason, PlannedRow, Sequence, StepPlan


@dataclass(frozen=True)
class Limits:
    """Capacities: data-parallel ranks, and per rank the rows, blocks and prompt tokens of a step."""

    dp: int
    rows: int
    blocks: int
    chunk_tokens: int
    context_tokens: int
    eos_token_id: int


class Scheduler:
    """Owns the sequences in flight and the pools of slots and blocks."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.slots = [IdPool(limits.rows, "rows") for _ in range(limits.dp)]
        self.blocks = [IdPool(limits.blocks, "blocks") for _ in range(limits.dp)]
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self._step = 0

    # ------------------------------------------------------------- admission

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. A request that can never fit is refused here, with need and have."""
        limits = self.limits
        if seq.request.id in self.running or any(s.request.id == seq.request.id for s in self.waiting):
            raise UsageError(f"request id {seq.request.id!r} is already in flight")
        if not seq.num_prompt:
            raise UsageError(f"request {seq.request.id!r} has an empty prompt")
        if seq.max_len > limits.context_tokens:
            raise CapacityError(
                f"request {seq.request.id!r} needs {seq.num_prompt} prompt + {seq.request.sampling.max_tokens} new "
                f"tokens, the context holds {limits.context_tokens}",
                hint="lower --max-tokens, shorten the prompt or raise sched.max_context_tokens",
            )
        need = -(-seq.max_len // BLOCK_TOKENS)
        if need > limits.blocks:
            raise CapacityError(
                f"request {seq.request.id!r} needs {need} blocks of {BLOCK_TOKENS} tokens, a rank has {limits.blocks}",
                hint="raise cache.hbm_tokens_per_rank",
            )
        self.waiting.append(seq)

    def _admit(self) -> None:
        while self.waiting:
            seq = self.waiting[0]
            need = -(-seq.max_len // BLOCK_TOKENS)
            ranks = [r for r in range(self.limits.dp) if self.slots[r].free and self.blocks[r].free >= need]
            if not ranks:
                return  # in order of arrival: nobody overtakes the head of the queue
            rank = min(ranks, key=lambda r: (self.slots[r].used, self.blocks[r].used, r))
            self.waiting.popleft()
            seq.dp_rank = rank
            seq.slot = self.global_slot(rank, self.slots[rank].take(1)[0])
            seq.block_ids = [self.global_block(rank, b) for b in self.blocks[rank].take(need)]
            seq.state = "running"
            self.running[seq.request.id] = seq

    def global_slot(self, rank: int, slot: int) -> int:
        """Number of a rank's slot in the store that all virtual ranks share."""
        return rank * self.limits.rows + slot

    def global_block(self, rank: int, block: int) -> int:
        """Number of a rank's block in the shared store."""
        return rank * self.limits.blocks + block

    # -------------------------------------------------------------- planning

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """Admit what fits and plan one step; the plan has no rows when nothing can run."""
        self._admit()
        left = [self.limits.chunk_tokens] * self.limits.dp
        decode, prefill = [], []
        for seq in self.running.values():
            remaining = len(seq.token_ids) - seq.num_computed
            if seq.num_computed >= seq.num_prompt:
                decode.append(
                    PlannedRow(seq.request.id, seq.dp_rank, seq.num_computed, remaining, "decode", sample=True)
                )
                continue
            count = min(remaining, left[seq.dp_rank])
            if count:
                left[seq.dp_rank] -= count
                sample = count == remaining
                prefill.append(
                    PlannedRow(seq.request.id, seq.dp_rank, seq.num_computed, count, "prefill", sample=sample)
                )
        self._step += 1
        return StepPlan(self._step, (*decode, *prefill))

    # ------------------------------------------------------------ completion

    def commit(self, plan: StepPlan, tokens: Mapping[str, int]) -> list[Sequence]:
        """Apply a step's result: ``tokens`` holds the drawn id of every sampled row, PAD for one that failed.

        Returns the sequences that finished, their slots and blocks given back.
        """
        finished = []
        for row in plan.rows:
            seq = self.running.get(row.seq_id)
            if seq is None:
                continue  # aborted while the step ran
            seq.num_computed = row.start + row.count
            if not row.sample:
                continue
            token = tokens[row.seq_id]
            reason = self._append(seq, token)
            if reason is not None:
                self._finish(seq, reason)
                finished.append(seq)
        return finished

    def _append(self, seq: Sequence, token: int) -> FinishReason | None:
        if token == PAD:
            return "error"
        seq.token_ids.append(token)
        if token == self.limits.eos_token_id and not seq.request.sampling.ignore_eos:
            return "stop"
        return "length" if seq.num_generated >= seq.request.sampling.max_tokens else None

    def abort(self, request_id: str) -> Sequence | None:
        """End a request in any state; None when it is not in flight. Safe to call twice."""
        for seq in self.waiting:
            if seq.request.id == request_id:
                self.waiting.remove(seq)
                seq.state, seq.finish_reason = "finished", "abort"
                return seq
        seq = self.running.get(request_id)
        if seq is not None:
            self._finish(seq, "abort")
        return seq

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        del self.running[seq.request.id]
        rank = seq.dp_rank
        self.slots[rank].give([seq.slot - rank * self.limits.rows])
        self.blocks[rank].give([b - rank * self.limits.blocks for b in seq.block_ids])
        seq.block_ids = []
        seq.state, seq.finish_reason = "finished", reason
        if not self.busy:
            for pool in (*self.slots, *self.blocks):
                pool.check()
