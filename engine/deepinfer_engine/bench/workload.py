"""``Workload``: a recipe worked out to requests: lengths, contents, arrival times. Frozen, decided by the seed alone.

Contents are streams: token ``i`` of stream ``s`` is a hash of (seed, salt, s, i), so two prompts share exactly the
tokens that their segments name, on every target, without keeping any text. The salt changes all contents at once and
nothing else: runs with different salts share no prefix. Texts of a file (kind ``prompts``) have neither: they are what
they are, and how many tokens they have is known once a target has rendered them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deepinfer_engine.bench.recipe import Arrivals, Limits, LoadedRecipe, Recipe, Sampling, load_recipe
from deepinfer_engine.errors import UsageError

if TYPE_CHECKING:
    from deepinfer_engine.offline.lines import Item
    from deepinfer_engine.types import GrammarSpec

_MASK = (1 << 64) - 1


class Segment(NamedTuple):
    """``count`` tokens of a content stream from position ``start``."""

    stream: int
    start: int
    count: int


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a workload.

    ``arrival_s``: seconds from the start; None when a finished request starts it. ``after``: index of the request
    that must have ended ``pause_s`` before (the turn before of a session). ``seen_tokens``: leading prompt tokens that
    an earlier request of the workload has too, which is what an unlimited prefix cache could find.

    ``text``: what is sent instead of segments; ``input_tokens`` is None until a tokenizer has rendered it to ``ids``,
    and ``grammar`` is what its conversation restricts the answer to. ``output_tokens`` is then the most of an answer.
    """

    index: int
    input_tokens: int | None
    output_tokens: int
    segments: tuple[Segment, ...]
    arrival_s: float | None = None
    after: int | None = None
    pause_s: float = 0.0
    seen_tokens: int = 0
    text: Item | None = None
    ids: tuple[int, ...] | None = None
    grammar: GrammarSpec | None = None


@dataclass(frozen=True)
class Workload:
    """What is sent, in order. ``skipped``: requests of a file or trace that exceed the recipe's greatest lengths."""

    name: str
    description: str
    digest: str
    seed: int
    requests: tuple[PlannedRequest, ...]
    warmup: tuple[PlannedRequest, ...]
    arrivals: Arrivals
    cache: str
    sampling: Sampling
    limits: Limits
    skipped: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def concurrency(self) -> int | None:
        """Most requests in flight; None without a bound."""
        return self.arrivals.concurrency

    @property
    def measured(self) -> bool:
        """Whether all prompt lengths are known; texts have none before they are rendered."""
        return all(r.input_tokens is not None for r in (*self.requests, *self.warmup))

    @property
    def input_tokens(self) -> np.ndarray:
        """Planned prompt lengths, int64; ``UsageError`` for texts that nothing has rendered."""
        if not self.measured:
            raise UsageError(
                f"workload {self.name}: how long its texts are depends on a tokenizer",
                hint="a load of another kind states its lengths",
            )
        return np.array([r.input_tokens for r in self.requests], dtype=np.int64)

    @property
    def output_tokens(self) -> np.ndarray:
        """Planned answer lengths, int64."""
        return np.array([r.output_tokens for r in self.requests], dtype=np.int64)

    @property
    def seen_rate(self) -> float | None:
        """Share of prompt tokens that an earlier prompt has too; None for texts that nothing has rendered."""
        if not self.measured:
            return None
        return sum(r.seen_tokens for r in self.requests) / int(self.input_tokens.sum())

    def longest(self) -> int:
        """Most tokens of a prompt with its answer, warm-up included; an unrendered text counts as none."""
        return max((r.input_tokens or 0) + r.output_tokens for r in (*self.requests, *self.warmup))

    def token_ids(self, request: PlannedRequest, ids: np.ndarray, *, salt: int = 0) -> tuple[int, ...]:
        """The prompt's tokens, drawn from ``ids`` (the vocabulary entries that may be used, int64), or a text's own."""
        if request.ids is not None:
            return request.ids
        assert request.text is None, "a text is rendered before it is sent as tokens"
        parts = [
            ids[_hash(self.seed ^ salt, s.stream, s.start, s.count) % np.uint64(len(ids))] for s in request.segments
        ]
        return tuple(np.concatenate(parts).tolist())


def load_workload(recipe: str | Path | LoadedRecipe, sets: Sequence[str] = ()) -> Workload:
    """A workload from a shipped recipe's name, a path or a loaded recipe, with ``key=value`` overrides.

    Raises ``UsageError`` (2) for the recipe, ``ArtefactError`` (4) for its file of lengths or trace.
    """
    if isinstance(recipe, LoadedRecipe):
        if sets:
            raise UsageError("overrides apply to a recipe given by name or path, this one is loaded already")
        loaded = recipe
    else:
        loaded = load_recipe(recipe, sets)
    from deepinfer_engine.bench.generate import generate

    spec = loaded.recipe
    made = generate(spec, loaded.folder)
    requests = tuple(_timed(spec, made.requests))
    return Workload(
        name=spec.name,
        description=spec.description,
        digest=loaded.digest if made.contents is None else _with(loaded.digest, made.contents),
        seed=spec.seed,
        requests=requests,
        warmup=_warmup(spec, requests) if made.warmup is None else made.warmup,
        arrivals=spec.arrivals,
        cache=spec.cache,
        sampling=spec.sampling,
        limits=spec.limits,
        skipped=made.skipped,
        recipe=spec.model_dump(mode="json"),
    )


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> np.ndarray:
    """Arrival times in seconds, float64 [count], the first at 0.

    Gaps are gamma distributed with mean 1 / rate and shape ``burstiness``; their coefficient of variation is
    1 / sqrt(burstiness).
    """
    rng = np.random.default_rng([seed, 1])
    gaps = rng.gamma(burstiness, 1.0 / (rate_per_s * burstiness), size=max(0, count - 1))
    return np.concatenate([[0.0], np.cumsum(gaps)])[:count]


def _timed(spec: Recipe, requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Requests with the arrival times of the recipe's mode; those that follow another one keep None."""
    arrivals = spec.arrivals
    if arrivals.mode == "closed":
        return [replace(r, arrival_s=None) for r in requests]
    if arrivals.mode == "at_once":
        return [replace(r, arrival_s=0.0) for r in requests]
    if arrivals.mode == "trace":
        first = min(r.arrival_s for r in requests if r.arrival_s is not None)
        return [
            replace(r, arrival_s=(r.arrival_s - first) / arrivals.speed) for r in requests if r.arrival_s is not None
        ]
    assert arrivals.rate_per_s is not None
    heads = [r for r in requests if r.after is None]
    times = arrival_times(len(heads), arrivals.rate_per_s, arrivals.burstiness, spec.seed)
    at = {r.index: float(t) for r, t in zip(heads, times, strict=True)}
    return [replace(r, arrival_s=at.get(r.index)) for r in requests]


def _warmup(spec: Recipe, requests: tuple[PlannedRequest, ...]) -> tuple[PlannedRequest, ...]:
    """Requests of the same lengths, in order and round again, whose contents nothing else has."""
    return tuple(
        PlannedRequest(i, r.input_tokens, r.output_tokens, (Segment(-1 - i, 0, r.input_tokens or 0),))
        for i, r in ((i, requests[i % len(requests)]) for i in range(spec.warmup.requests))
    )


def _with(digest: str, contents: str) -> str:
    """Digest of a recipe and of the file whose contents are sent."""
    return hashlib.sha256(f"{digest} {contents}".encode()).hexdigest()


def _hash(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """uint64 [count]: a splitmix64 of (seed, stream, position)."""
    key = _mix(np.array([(seed ^ (stream * 0x9E3779B97F4A7C15)) & _MASK], dtype=np.uint64))
    return _mix(key + np.arange(start, start + count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mean_and_p99(values: np.ndarray) -> tuple[float, float]:
    """Mean and 99th percentile of lengths, for the line that announces a workload."""
    return float(values.mean()), float(np.percentile(values, 99)) if len(values) else math.nan
