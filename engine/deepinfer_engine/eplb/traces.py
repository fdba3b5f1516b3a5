"""Synthetic and re-batched routing traces: token counts [steps, layers, experts] with the structure that planners live
on.

A step's shares are a mixture over the topics of the requests in flight: popularity · topic tilt, where popularity is
log-normal per layer (a few experts several times the mean) and each topic multiplies a sparse subset of experts.
Requests live for a number of steps, so the mixture is correlated in time; the domain that new requests come from drifts
and sometimes switches; low-rank shocks move groups of experts together from step to step; counts are Poisson.
``TraceSpec`` holds every number; the presets live in ``recipes/eplb/*.yaml``.

``rebatched`` turns recorded per-token top-k ids of a real model into decode-like or prefill-like steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_engine.eplb.stats import read_npz
from deepinfer_engine.errors import ArtefactError, UsageError


@dataclass(frozen=True)
class TraceSpec:
    """One synthetic workload. Amplitudes are standard deviations of natural logarithms."""

    experts: int
    layers: int
    ranks: int
    top_k: int
    tokens_per_rank: int
    requests: int
    lifetime_steps: float
    skew: float
    hot_experts: int = 0
    hot_boost: float = 0.0
    topics: int = 96
    topic_width: float = 0.25
    topic_tilt: float = 0.8
    domains: int = 6
    domain_drift: float = 0.0004
    domain_swing: float = 1.2
    switch_steps: float = 4000.0
    shock_rank: int = 2
    shock: float = 0.02

    @property
    def routed_per_step(self) -> int:
        """Routed tokens of one layer in one step, over all ranks."""
        return self.tokens_per_rank * self.ranks * self.top_k


def topic_mixture(spec: TraceSpec, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Share of requests in each topic, float64 [steps, topics]: births and deaths of ``requests`` requests."""
    affinity_DK = rng.dirichlet(np.full(spec.topics, 0.25), size=spec.domains)
    mood_D = rng.normal(0.0, 1.0, spec.domains)

    def source() -> np.ndarray:
        w = np.exp(spec.domain_swing * mood_D)
        return (w / w.sum()) @ affinity_DK

    alive_K = rng.multinomial(spec.requests, source())
    death = min(1.0, 1.0 / spec.lifetime_steps)
    out = np.empty((steps, spec.topics))
    for t in range(steps):
        out[t] = alive_K
        mood_D = mood_D * (1 - spec.domain_drift) + np.sqrt(2 * spec.domain_drift) * rng.normal(0, 1, spec.domains)
        if rng.random() < 1.0 / spec.switch_steps:
            mood_D = rng.permutation(mood_D)
        gone_K = rng.binomial(alive_K, death)
        alive_K = alive_K - gone_K + rng.multinomial(int(gone_K.sum()), source())
    return out / spec.requests


def synthetic(spec: TraceSpec, steps: int, seed: int) -> np.ndarray:
    """Counts int64 [steps, layers, experts] of one workload; the same numbers for the same arguments."""
    rng = np.random.default_rng([seed, spec.experts, spec.ranks])
    mix_MK = topic_mixture(spec, steps, rng)
    counts = np.empty((steps, spec.layers, spec.experts), np.int64)
    for layer in range(spec.layers):
        log_pop = rng.normal(0.0, spec.skew, spec.experts)
        if spec.hot_experts:
            log_pop[rng.choice(spec.experts, spec.hot_experts, replace=False)] += spec.hot_boost
        tilt_KE = rng.normal(0.0, spec.topic_tilt, (spec.topics, spec.experts))
        tilt_KE *= rng.random((spec.topics, spec.experts)) < spec.topic_width
        share_KE = np.exp(log_pop + tilt_KE)
        share_KE /= share_KE.sum(axis=1, keepdims=True)
        rate_ME = mix_MK @ share_KE
        if spec.shock > 0:
            push = rng.normal(0, 1, (steps, spec.shock_rank)) @ rng.normal(
                0, spec.shock, (spec.shock_rank, spec.experts)
            )
            rate_ME *= np.exp(push)
            rate_ME /= rate_ME.sum(axis=1, keepdims=True)
        counts[:, layer] = rng.poisson(rate_ME * spec.routed_per_step)
    return counts


@dataclass(frozen=True)
class RoutingSpec:
    """Recorded routing re-batched into steps.

    ``mode`` decode: ``tokens_per_step`` sequences advance one token a step; prefill: a step is whole sequences until
    that many tokens.
    """

    files: tuple[str, ...]
    ranks: int
    mode: str
    tokens_per_step: int
    layer_stride: int = 1


def read_routing(path: Path) -> list[np.ndarray]:
    """Sequences int64 [layers, tokens, k] from an ``.npz`` with ``topk_ids`` [layers, tokens, k] and ``seq_lens``."""
    arrays = read_npz(path)
    ids, lengths = arrays.get("topk_ids"), arrays.get("seq_lens")
    if ids is None or lengths is None or ids.ndim != 3 or lengths.ndim != 1 or int(lengths.sum()) != ids.shape[1]:
        raise ArtefactError(f"{path}: expected topk_ids [layers, tokens, k] and seq_lens that add up to the tokens")
    if ids.min() < 0:
        raise ArtefactError(f"{path}: topk_ids holds {ids.min()}, expected 0 or more")
    ends = np.cumsum(lengths)
    return [ids[:, hi - n : hi].astype(np.int64) for hi, n in zip(ends.tolist(), lengths.tolist(), strict=True)]


def rebatched(
    spec: RoutingSpec, sequences: list[np.ndarray], train_steps: int, next_steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Two windows of counts [M, L, E] from disjoint halves of the shuffled sequences."""
    if spec.mode not in ("decode", "prefill"):
        raise UsageError(f"routing mode is {spec.mode!r}, expected decode or prefill")
    if len(sequences) < 2:
        raise UsageError(f"{len(sequences)} sequences, expected at least 2 to split")
    rng = np.random.default_rng(seed)
    experts = int(max(s.max() for s in sequences)) + 1
    order = rng.permutation(len(sequences))
    halves = (
        [sequences[i][:: spec.layer_stride] for i in order[::2]],
        [sequences[i][:: spec.layer_stride] for i in order[1::2]],
    )
    make = _decode_steps if spec.mode == "decode" else _prefill_steps
    first = make(halves[0], train_steps, spec.tokens_per_step, experts, rng)
    return first, make(halves[1], next_steps, spec.tokens_per_step, experts, rng)


def _counts(ids_LTK: np.ndarray, experts: int) -> np.ndarray:
    layers = ids_LTK.shape[0]
    flat = ids_LTK.reshape(layers, -1) + np.arange(layers)[:, None] * experts
    return np.bincount(flat.reshape(-1), minlength=layers * experts).reshape(layers, experts)


def _decode_steps(
    pool: list[np.ndarray], steps: int, running: int, experts: int, rng: np.random.Generator
) -> np.ndarray:
    """``running`` sequences, each one token further every step; a finished one is replaced by a random one from its
    start."""
    lengths = np.array([s.shape[1] for s in pool])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate(pool, axis=1)
    which = rng.integers(len(pool), size=running)
    at = (rng.random(running) * lengths[which]).astype(np.int64)
    out = np.empty((steps, ids.shape[0], experts), np.int64)
    for t in range(steps):
        out[t] = _counts(ids[:, starts[which] + at], experts)
        at += 1
        done = at >= lengths[which]
        which[done] = rng.integers(len(pool), size=int(done.sum()))
        at[done] = 0
    return out


def _prefill_steps(
    pool: list[np.ndarray], steps: int, tokens: int, experts: int, rng: np.random.Generator
) -> np.ndarray:
    """Every step takes random whole sequences until it has ``tokens``; the last one is cut."""
    out = np.empty((steps, pool[0].shape[0], experts), np.int64)
    for t in range(steps):
        parts, got = [], 0
        while got < tokens:
            s = pool[int(rng.integers(len(pool)))][:, : tokens - got]
            parts.append(s)
            got += s.shape[1]
        out[t] = _counts(np.concatenate(parts, axis=1), experts)
    return out
