"""Synthetic and re-batched routing traces: token counts [steps, layers, experts] with the structure that planners live on.

A step's shares are a mixture over the topics of the requests in flight: popularity · topic tilt, where popularity is
log-normal per layer (a few experts several times the mean) and each topic multiplies a sparse subset of experts. Requests
live for a number of steps, so the mixture is correlated in time; the domain that new requests come from drifts and sometimes switches;
low-rank shocks move groups of experts together from step to step; counts are Poisson. ``TraceSpec`` holds every number; the
presets live in ``recipes/eplb/*.yaml``.

``rebatched`` turns recorded per-token top-k ids of a real model into decode-like or prefill-like steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
            push = rng.normal(0, 1, (steps, spec.shock_rank)) @ rng.normal(0, spec.shock, (spec.shock_rank, spec.experts))
            rate_ME *= np.exp(push)
            rate_ME /= rate_ME.sum(axis=1, keepdims=True)
        counts[:, layer] = rng.poisson(rate_ME * spec.routed_per_step)
    return counts
