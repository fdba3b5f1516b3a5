"""Core vocabulary shared by scheduler, runtime and command line. No torch here.

Suffix legend of the repository: T tokens in the step, B rows, H hidden, N heads, D head dim, K top-k,
J draft positions, E logical experts, R ranks, S slots per rank, L layers, V vocab, W window,
M steps in a statistics window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from deepinfer_engine.errors import UsageError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. ``temperature`` 0 is greedy (lowest id wins a tie).

    ``top_k`` 0 and ``top_p`` 1.0 switch those filters off. ``seed`` None draws a random stream and makes the
    completion ``reproducible: false``.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
             f"temperature is {self.temperature}, expected 0..100"),
            (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}, expected (0, 1]"),
            (math.isfinite(self.min_p) and 0.0 <= self.min_p <= 1.0, f"min_p is {self.min_p}, expected 0..1"),
            (self.top_k >= 0, f"top_k is {self.top_k}, expected 0 (off) or more"),
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}, expected 1 or more"),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed is {self.seed}, expected 0..2^64-1"),
        )  # fmt: skip
        for good, message in checks:
            if not good:
                raise UsageError(message)


@dataclass(frozen=True)
class Request:
    """One prompt to complete. ``id`` is the caller's label and must be unique among live requests."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0


@dataclass
class Sequence:
    """A request in flight; owned and mutated by the scheduler only.

    ``num_computed`` counts tokens whose KV is written. ``slot`` is the ring slot of the sequence's windows,
    ``block_ids`` the blocks of its global KV; both belong to ``dp_rank``.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    seed: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    dp_rank: int = -1
    state: Literal["waiting", "running", "finished"] = "waiting"
    finish_reason: FinishReason | None = None
    first_token_s: float | None = None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_len(self) -> int:
        return self.num_prompt + self.request.sampling.max_tokens


@dataclass(frozen=True)
class PlannedRow:
    """``count`` tokens of one sequence from position ``start``; ``sample`` when they reach its newest token."""

    seq_id: str
    dp_rank: int
    start: int
    count: int
    kind: Literal["prefill", "decode"]
    sample: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step runs: integers only, decode rows first."""

    step: int
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


@dataclass(frozen=True)
class Usage:
    """Token counts of one completion. ``num_accepted`` style counters are zero until speculation runs."""

    prompt: int
    cached: int = 0
    replayed: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds on the host clock: first token and end, both from submission."""

    ttft_s: float | None
    e2e_s: float

    def tpot_s(self, generated: int) -> float | None:
        """Seconds per output token after the first; None below two tokens."""
        if self.ttft_s is None or generated < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (generated - 1)


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one request."""

    request_id: str
    token_id: int


@dataclass(frozen=True)
class Completion:
    """A finished request. ``token_ids`` are the generated ones, a final EOS excluded."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reproducible: bool
    usage: Usage
    timing: Timing
