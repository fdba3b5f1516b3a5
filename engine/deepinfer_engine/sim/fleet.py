"""A trace through a prefill pool and a decode pool: TTFT, TPOT, goodput, and how far from perfectly packed it was.

The phases are simulated one after the other: a decode pool without room delays the second token, it does not hold
prefill back. KV goes from prefill to decode over one link per request. Nothing fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.cost.figure import Figure
from deepinfer_engine.cost.published import BALANCE
from deepinfer_engine.cost.steptime import rows_at_speed
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.decode import DecodeJob, DecodePool, DecodeResult, simulate_decode
from deepinfer_engine.sim.deployment import Slo, deployment_of
from deepinfer_engine.sim.models import PlannedModel
from deepinfer_engine.sim.prediction import speculation_of, times
from deepinfer_engine.sim.prefill import PrefillJob, PrefillPool, PrefillResult, simulate_prefill
from deepinfer_engine.sim.trace import Trace

#: Published: window KV of a prefix hit is found in the host pool this often; otherwise one window is replayed.
_WINDOW_HIT = 0.98
#: One 400 Gbit/s port: published for KV between hosts; a storage client peaks at 40 GiB/s of it (3FS, README).
_LINK_BYTES_S = 50e9
_FETCH_BYTES_S = 40 * 2**30


@dataclass(frozen=True)
class Fleet:
    """Two pools and what lies between them. ``seed`` draws the window misses."""

    prefill: PrefillPool
    decode: DecodePool
    bytes_per_token: float
    window_bytes: int
    window: int
    window_hit: float = _WINDOW_HIT
    link_bytes_s: float = _LINK_BYTES_S
    seed: int = 0


def pools(
    model: PlannedModel,
    prefill: Profile,
    decode: Profile,
    *,
    engines: int,
    groups: int,
    seed: int = 0,
    cost_sigma: float = 0.0,
    snapshot_s: float = 0.0,
) -> Fleet:
    """The fleet of two profiles. A step budget of 0 means the time of one full chunk.

    Raises ``UsageError`` where no step times are known, and for a profile of the other role.
    """
    for profile, wrong in ((prefill, "decode"), (decode, "prefill")):
        if profile.role == wrong:
            name = "prefill" if wrong == "decode" else "decode"
            raise UsageError(f"profile {profile.name} has role {wrong} and cannot be the {name} pool")
    laws, others = times(prefill, model), times(decode, model)
    if isinstance(laws, str) or isinstance(others, str):
        raise UsageError(laws if isinstance(laws, str) else str(others))
    config, chunk = model.config, prefill.sched.prefill_chunk_tokens
    budget = prefill.sched.step_budget_ms / 1e3 or laws[0].step_s([(chunk, 0)])
    layout = KVLayout.of(config, records=True)
    shape = deployment_of(decode, config)
    return Fleet(
        prefill=PrefillPool(
            engines, prefill.parallel.dp, laws[0], chunk, budget, tail_tokens=config.ring,
            fetch_bytes_s=_FETCH_BYTES_S, cost_sigma=cost_sigma, snapshot_s=snapshot_s, seed=seed,
        ),
        decode=DecodePool(
            groups, decode.parallel.dp, others[1], speculation_of(decode), shape.rows, shape.kv_tokens
        ),
        bytes_per_token=layout.block_bytes / BLOCK_TOKENS,
        window_bytes=layout.slot_bytes,
        window=config.sliding_window,
        seed=seed,
    )  # fmt: skip


@dataclass(frozen=True)
class FleetResult:
    """Seconds of every request [requests] and the results of both pools. TPOT is NaN for one-token answers."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    duration_s: float
    hit_share: float
    prefill: PrefillResult
    decode: DecodeResult


def simulate(fleet: Fleet, trace: Trace, hits: np.ndarray) -> FleetResult:
    """Run a trace whose requests find ``hits`` cached tokens [requests]."""
    jobs = prefill_jobs(fleet, trace, hits)
    first = simulate_prefill(fleet.prefill, jobs)
    rows = []
    for request, done in zip(trace.requests, first.done_s, strict=True):
        moved = request.input_tokens * fleet.bytes_per_token + fleet.window_bytes
        rows.append(
            DecodeJob(float(done) + moved / fleet.link_bytes_s, request.input_tokens, request.output_tokens - 1)
        )
    second = simulate_decode(fleet.decode, rows)
    arrival = np.array([r.arrival_s for r in trace.requests])
    more = np.array([r.output_tokens - 1 for r in trace.requests])
    end = np.where(more > 0, second.done_s, first.done_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(more > 0, (end - first.done_s) / more, np.nan)
    inputs = sum(r.input_tokens for r in trace.requests)
    return FleetResult(
        ttft_s=first.done_s - arrival,
        tpot_s=tpot,
        e2e_s=end - arrival,
        duration_s=float(end.max() - arrival.min()),
        hit_share=float(hits.sum()) / inputs,
        prefill=first,
        decode=second,
    )


def prefill_jobs(fleet: Fleet, trace: Trace, hits: np.ndarray) -> list[PrefillJob]:
    """Jobs of a trace: a hit without its windows computes one window again, and fetches the whole hit either way."""
    missed = np.random.default_rng(fleet.seed).random(len(trace.requests)) >= fleet.window_hit
    jobs = []
    for request, hit, lost in zip(trace.requests, hits.tolist(), missed.tolist(), strict=True):
        start = max(0, hit - fleet.window) if lost and hit else hit
        jobs.append(PrefillJob(request.arrival_s, request.input_tokens, start, hit * fleet.bytes_per_token))
    return jobs


# -------------------------------------------------------------------- reports


def goodput(result: FleetResult, slo: Slo) -> tuple[float, float] | None:
    """Share and rate per second of requests that meet every given limit; None when none is given."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return None
    good = np.ones(len(result.ttft_s), dtype=bool)
    if slo.ttft_ms is not None:
        good &= result.ttft_s * 1e3 <= slo.ttft_ms
    if slo.tpot_ms is not None:
        good &= np.isnan(result.tpot_s) | (result.tpot_s * 1e3 <= slo.tpot_ms)
    return float(good.mean()), float(good.sum() / result.duration_s)


def report(fleet: Fleet, trace: Trace, result: FleetResult, slo: Slo) -> tuple[Figure, ...]:
    """The simulation's figures, percentiles first."""
    figures: list[Figure] = []
    for name, seconds in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("end to end", result.e2e_s)):
        known = seconds[~np.isnan(seconds)]
        for q in (50, 90, 99):
            if len(known):
                figures.append(Figure(f"{name} p{q}", float(np.percentile(known, q)) * 1e3, "ms", "simulated"))
    share = goodput(result, slo)
    if share is not None:
        limits = [f"TTFT {slo.ttft_ms:g} ms"] if slo.ttft_ms is not None else []
        limits += [f"TPOT {slo.tpot_ms:g} ms"] if slo.tpot_ms is not None else []
        figures.append(Figure("requests within limits", 100 * share[0], "%", "simulated", ", ".join(limits)))
        figures.append(Figure("goodput", share[1], "requests/s", "simulated"))
    outputs = sum(r.output_tokens for r in trace.requests)
    inputs = sum(r.input_tokens for r in trace.requests)
    p, d = fleet.prefill, fleet.decode
    gpus = p.engines * p.ranks + d.groups * d.ranks
    figures += [
        Figure("request rate", len(trace.requests) / result.duration_s, "requests/s", "simulated"),
        Figure("input rate", inputs / result.duration_s, "tok/s", "simulated", "hits counted"),
        Figure("output rate", outputs / result.duration_s, "tok/s", "simulated"),
        Figure("prefix hits", 100 * result.hit_share, "% of input", "simulated"),
        Figure("prefill busy", 100 * result.prefill.balance(p), "% of packed", "simulated",
               f"{p.engines} x {p.ranks} ranks against perfectly packed steps"),
        Figure("decode balance", 100 * result.decode.step_balance, "%", "simulated", "mean rank over slowest rank"),
        Figure("decode rows held", result.decode.rows_held(d), "rows/rank", "simulated", f"{d.max_rows} at most"),
        Figure("GPU seconds", gpus * result.duration_s / len(trace.requests), "GPU s/request", "simulated",
               f"{gpus} GPUs for the whole trace"),
    ]  # fmt: skip
    return tuple(figures)


def caveats(fleet: Fleet, trace: Trace) -> tuple[str, ...]:
    """What the reader of a simulation must know, one sentence each."""
    notes = ["a full decode pool delays second tokens, it does not hold prefill back; nothing fails"]
    seats = fleet.decode.groups * fleet.decode.ranks * fleet.decode.max_rows
    if len(trace.requests) < 10 * seats:
        notes.append(
            f"{len(trace.requests):,} requests are few for {seats:,} decode rows: the pool is mostly filling or "
            "draining, and rows held say little"
        )
    if fleet.prefill.cost_sigma or fleet.prefill.snapshot_s:
        notes.append(
            f"the router errs by a sigma of {fleet.prefill.cost_sigma:g} and looks every "
            f"{fleet.prefill.snapshot_s * 1e3:g} ms"
        )
    else:
        notes.append("the router knows every cost exactly and at once; --cost-error and --snapshot-ms take that away")
    return tuple(notes)


# ------------------------------------------------------------------ searching


def highest_scale(meets: Callable[[float], bool], *, start: float = 1.0, steps: int = 8) -> float | None:
    """Largest arrival scale for which ``meets`` holds, to a part in 2^steps of an octave; None if none above 2^-20."""
    low = start
    if meets(low):
        while meets(2 * low):
            low *= 2
            if low > 2**20 * start:
                return low
    else:
        while not meets(low):
            low /= 2
            if low < start / 2**20:
                return None
    high = 2 * low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Efficiency:
    """Goodput over the perfectly packed offline rate, by phase, each at the largest arrival scale that meets its
    limit."""

    prefill_scale: float
    prefill: float
    decode_scale: float
    decode: float
    decode_balance: float
    rows_held: float
    rows_allowed: int

    def figures(self) -> tuple[Figure, ...]:
        held = f"balance {self.decode_balance:.3f}, {self.rows_held:.1f} of {self.rows_allowed} rows held"
        return (
            Figure("prefill efficiency", 100 * self.prefill, "% of packed", "simulated",
                   f"at {self.prefill_scale:.3g} x the trace's rate"),
            Figure("decode efficiency", 100 * self.decode, "% of packed", "simulated",
                   f"at {self.decode_scale:.3g} x the trace's rate; {held}"),
            Figure("published efficiency", 100 * BALANCE, "% of packed", "vendor", "real traffic, both phases"),
        )  # fmt: skip


def efficiency(fleet: Fleet, trace: Trace, hits: np.ndarray, slo: Slo, *, steps: int = 6) -> Efficiency:
    """Efficiency of prefill (P90 of TTFT within its limit) and, apart from it, of decode (P90 of TPOT within its
    limit, waiting to join included): step balance times rows held over the rows that the limit allows.

    Hits are taken as given whatever the arrival rate. Raises ``UsageError`` without both limits, or when no rate
    meets them.
    """
    if slo.ttft_ms is None or slo.tpot_ms is None:
        raise UsageError("the efficiency search needs both limits", hint="add --ttft-ms and --tpot-ms")
    scale, packed = _prefill_efficiency(fleet, trace, hits, slo.ttft_ms, steps)
    d = fleet.decode
    context = float(np.mean([r.input_tokens + r.output_tokens / 2 for r in trace.requests]))
    allowed = rows_at_speed(d.time, d.speculation, 1e3 / slo.tpot_ms, limit=d.max_rows, context=context)
    if allowed == 0:
        raise UsageError(f"not one row keeps TPOT within {slo.tpot_ms:g} ms", hint="raise --tpot-ms")
    pool = replace(d, max_rows=allowed)
    decode_scale, result = _decode_at_limit(pool, trace, slo.tpot_ms, steps)
    held = result.rows_held(pool)
    balance = result.step_balance
    return Efficiency(scale, packed, decode_scale, balance * held / allowed, balance, held, allowed)


def _prefill_efficiency(
    fleet: Fleet, trace: Trace, hits: np.ndarray, ttft_ms: float, steps: int
) -> tuple[float, float]:
    def run(scale: float) -> tuple[PrefillResult, np.ndarray]:
        faster = trace.scaled(scale)
        done = simulate_prefill(fleet.prefill, prefill_jobs(fleet, faster, hits))
        return done, done.done_s - np.array([r.arrival_s for r in faster.requests])

    scale = highest_scale(lambda s: bool(np.percentile(run(s)[1], 90) * 1e3 <= ttft_ms), steps=steps)
    if scale is None:
        raise UsageError(f"no arrival rate keeps 90 % of TTFT within {ttft_ms:g} ms", hint="raise --ttft-ms")
    return scale, run(scale)[0].balance(fleet.prefill)


def _decode_at_limit(pool: DecodePool, trace: Trace, tpot_ms: float, steps: int) -> tuple[float, DecodeResult]:
    more = np.array([r.output_tokens - 1 for r in trace.requests])
    if not more.any():
        raise UsageError(f"{trace.name} has one-token answers only; there is nothing to decode")

    def run(scale: float) -> tuple[DecodeResult, np.ndarray]:
        jobs = [DecodeJob(r.arrival_s / scale, r.input_tokens, r.output_tokens - 1) for r in trace.requests]
        done = simulate_decode(pool, jobs)
        waited = done.done_s - np.array([j.ready_s for j in jobs])
        return done, waited[more > 0] / more[more > 0]

    scale = highest_scale(lambda s: bool(np.percentile(run(s)[1], 90) * 1e3 <= tpot_ms), steps=steps)
    if scale is None:
        raise UsageError(f"no arrival rate keeps 90 % of TPOT within {tpot_ms:g} ms", hint="raise --tpot-ms")
    return scale, run(scale)[0]
