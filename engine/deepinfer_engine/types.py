"""Core vocabulary shared by scheduler, runtime and command line. No torch here.

Suffix legend of the repository: T tokens in the step, B rows, H hidden, N heads, D head dim, K top-k,
J draft positions, E logical experts, R ranks, S slots per rank, L layers, V vocab, W window,
M steps in a statistics window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from deepinfer_engine.errors import UsageError

if TYPE_CHECKING:
    from deepinfer_engine.cache.replay import ReplaySpan

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "tools", "tools_required"]

#: most alternatives reported per token, as in the chat-completions interface
MAX_TOP_LOGPROBS = 20
#: most choices of one request
MAX_CHOICES = 128
_MAX_STOPS = 64


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` as a finite float in [low, high] (or (low, high]); a bool is no number."""
    bracket = "(" if open_low else ""
    expected = f"expected a number in {bracket or '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}, {expected}")
    if not low <= value <= high or (open_low and value == low):
        raise UsageError(f"{name} is {value!r}, {expected}")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """``value`` as an integer in low..high; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}, expected an integer in {low}..{high}")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, expected true or false")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"{name} is {value!r}, expected a list of token ids")
    return tuple(_whole(f"{name}[{i}]", v, 0, 2**31 - 1) for i, v in enumerate(value))


def _stops(value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, tuple | list) or len(items) > _MAX_STOPS:
        raise UsageError(f"stop is {value!r}, expected up to {_MAX_STOPS} strings")
    for i, text in enumerate(items):
        if not isinstance(text, str) or not text:
            raise UsageError(f"stop[{i}] is {text!r}, expected a non-empty string")
    return tuple(items)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple | list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in value):
        pairs = [(p[0], p[1]) for p in value]
    else:
        raise UsageError(f"logit_bias is {value!r}, expected an object of token id to number")
    out = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = _whole("logit_bias key", token, 0, 2**31 - 1)
        if token in out:
            raise UsageError(f"logit_bias names token {token} twice")
        out[token] = _real(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return tuple(sorted(out.items()))


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, validated here for every entrance (``UsageError`` names the field).

    ``temperature`` 0 is greedy (lowest id wins a tie). ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and penalties of 0 (1 for
    ``repetition_penalty``) switch those off. ``seed`` None draws a random stream and makes the completion
    ``reproducible: false``. ``logprobs`` reports the model's own log-probability of each token, before any of these
    settings, and ``top_logprobs`` the best alternatives. ``allowed_token_ids`` None allows all. ``n`` choices share
    the prompt; choice i draws from a stream derived from (seed, i). ``stop`` strings end the answer and are not part
    of it; with ``stop_scope`` answer they are not looked for in the reasoning. ``stop_token_ids`` end like EOS.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    seed: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_scope: Literal["answer", "all"] = "answer"

    def __post_init__(self) -> None:
        clean = {
            "temperature": _real("temperature", self.temperature, 0.0, 100.0),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": _whole("top_k", self.top_k, 0, 2**31 - 1),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "max_tokens": _whole("max_tokens", self.max_tokens, 1, 2**31 - 1),
            "seed": None if self.seed is None else _whole("seed", self.seed, 0, 2**64 - 1),
            "ignore_eos": _switch("ignore_eos", self.ignore_eos),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True),
            "logit_bias": _biases(self.logit_bias),
            "logprobs": _switch("logprobs", self.logprobs),
            "top_logprobs": _whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
            "allowed_token_ids": None
            if self.allowed_token_ids is None
            else _ids("allowed_token_ids", self.allowed_token_ids),
            "banned_token_ids": _ids("banned_token_ids", self.banned_token_ids),
            "n": _whole("n", self.n, 1, MAX_CHOICES),
            "stop": _stops(self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
        }
        if self.stop_scope not in ("answer", "all"):
            raise UsageError(f"stop_scope is {self.stop_scope!r}, expected answer or all")
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true")
        if self.allowed_token_ids is not None and not set(clean["allowed_token_ids"]) - set(clean["banned_token_ids"]):
            raise UsageError("allowed_token_ids without banned_token_ids leaves no token to draw")
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and filters changes the distribution."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
        )


@dataclass(frozen=True)
class GrammarSpec:
    """What an answer is restricted to. ``source`` is JSON text for schemas and tool lists, else the grammar itself.

    It applies after the reasoning, when there is any.
    """

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True)
class Request:
    """One prompt to complete. ``id`` is the caller's label and must be unique among live requests."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    grammar: GrammarSpec | None = None


@dataclass(slots=True)
class Sequence:
    """One choice of a request in flight; owned and mutated by the scheduler only.

    ``token_ids`` are the known tokens; ``pending`` counts drawn ones whose value has not come back yet (with drafts:
    steps in flight, each of which commits at least one token and together up to ``ahead`` more). ``num_computed``
    counts tokens whose KV is written or planned (with drafts: at least so many). ``slot`` is the ring slot of the
    sequence's windows, ``block_ids`` the blocks of its global KV; both belong to ``dp_rank``. ``generation`` grows with
    every preemption: a result planned under an older one is dropped. ``expected_len`` is the length the router counted.
    ``span`` is the plan of its prefill; ``keys`` name its complete blocks, the first ``published`` of which others may
    share; ``windowed`` is the last pivot whose window KV was asked for. ``drafted`` and ``accepted`` count verified
    drafts; ``context_from`` is the first position from which on the draft blocks have every context row;
    ``drafts_ready``: the last planned step drafts for it.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    seed: int
    uid: int = -1
    index: int = 0
    generation: int = 0
    num_computed: int = 0
    pending: int = 0
    ahead: int = 0
    drafted: int = 0
    accepted: int = 0
    context_from: int = 0
    drafts_ready: bool = False
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    dp_rank: int = -1
    expected_len: int = 0
    span: ReplaySpan | None = None
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    windowed: int = 0
    state: Literal["new", "waiting", "running", "finished"] = "new"
    finish_reason: FinishReason | None = None
    error: str | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    max_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_len = self.num_prompt + self.request.sampling.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt


class PlannedRow(NamedTuple):
    """``count`` tokens of one sequence from position ``start``; ``sample`` when they reach its newest token.

    ``drafts`` of them are drafts to verify. ``slack``: how much further it may start, by what steps in flight commit.
    """

    seq_id: int
    dp_rank: int
    start: int
    count: int
    kind: Literal["prefill", "decode"]
    sample: bool
    generation: int
    drafts: int = 0
    slack: int = 0


@dataclass(frozen=True)
class Arrival:
    """Block KV that is still on its way when a step begins, one section per source layer.

    ``take(i)`` waits for the section of ``sources[i]`` of each of ``blocks``; None for those that did not come.
    """

    blocks: tuple[int, ...]
    sources: tuple[int, ...]
    take: Callable[[int], list[bytes | None]]


@dataclass(frozen=True)
class Move:
    """KV to copy out of or into the cache, in step order. ``at``: block, or ring slot of a window that ends at ``end``.

    An import carries its ``data`` or, of several blocks from ``at`` on, their ``arrival``; an export its ``key``,
    lineage, whether it goes to the store, and as ``owner`` the (uid, generation) of the sequence that computed it
    (None: a kept block that is given up).
    """

    kind: Literal["import_block", "import_arrival", "export_block", "import_window", "export_window"]
    at: int
    end: int = 0
    key: bytes = b""
    data: bytes = b""
    replayed: bool = False
    store: bool = False
    owner: tuple[int, int] | None = None
    arrival: Arrival | None = None


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, decode rows first. ``admitted`` and ``preempted`` are sequence ids.

    ``before`` and ``after``: moves around the rows. ``budget``: drafts verified altogether, where that is fewer than
    the rows name; the device shares it out. ``draft``: whether the next step may have drafts to verify.
    """

    step: int
    rows: tuple[PlannedRow, ...]
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()
    budget: int | None = None
    draft: bool = True


@dataclass(frozen=True)
class Usage:
    """Token counts of one completion. ``drafted``: drafts that were verified, ``accepted``: those that became tokens.

    ``preemptions`` counts how often its KV was given up and computed again.
    """

    prompt: int
    cached: int = 0
    replayed: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds on the host clock, all from submission: first token, end, and the first step that runs the prompt."""

    ttft_s: float | None
    e2e_s: float
    queued_s: float | None = None

    def tpot_s(self, generated: int) -> float | None:
        """Seconds per output token after the first; None below two tokens."""
        if self.ttft_s is None or generated < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (generated - 1)


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a drawn token, and of the best alternatives (best first, ties by id)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one choice. A token that may begin a stop string is held back until that is decided."""

    request_id: str
    token_id: int
    index: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Completion:
    """A finished choice. ``token_ids`` are the generated ones, without the token that ended it.

    ``text`` is their text; ``tail`` its last part where a stop string began inside a token (that token is not in
    ``token_ids``). ``error`` says why when ``finish_reason`` is error: non_finite_logits, no_token_allowed, or
    grammar with the compiler's sentence in ``error_detail``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reproducible: bool
    usage: Usage
    timing: Timing
    index: int = 0
    text: str = ""
    tail: str = ""
    stop_reason: str | int | None = None
    error: str | None = None
    error_detail: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
