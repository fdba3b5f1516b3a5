"""The simulation behind ``deepinfer plan --simulate``: options, trace, fleet, and how the result looks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from deepinfer_cli import render
from deepinfer_cli.options import OutputFormat
from deepinfer_cli.plan_report import figure_objects, figures_text
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.fleet import Fleet, caveats, efficiency, pools, report, simulate
from deepinfer_engine.sim.route import DecodePolicy, PrefillPolicy
from deepinfer_engine.sim.trace import (
    AGENT_SESSIONS,
    Trace,
    assumed_hits,
    describe,
    prefix_hits,
    read_trace,
    synthetic_agents,
)

if TYPE_CHECKING:
    from deepinfer_engine.cost.figure import Figure
    from deepinfer_engine.sim.deployment import Slo
    from deepinfer_engine.sim.models import PlannedModel

#: Requests and session starts per second of a synthetic trace before ``requests`` and ``rate_scale``.
_SYNTHETIC_REQUESTS, _SYNTHETIC_SESSIONS_S = 5000, 0.5


@dataclass(frozen=True)
class SimulationOptions:
    """What the command line may ask of a simulation. Raises ``UsageError`` for a value out of range."""

    trace: str
    prefill: str = "prefill-ep4"
    decode: str = "decode-ep64"
    engines: int = 1
    groups: int = 1
    rate_scale: float = 1.0
    requests: int | None = None
    hit_rate: float | None = None
    ttl_s: float = math.inf
    efficiency: bool = False
    router: str = "least_work"
    placement: str = "two_level"
    cost_error: float = 0.0
    snapshot_ms: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.requests is None or self.requests >= 1, f"--requests is {self.requests}, expected 1 or more"),
            (0 <= self.cost_error <= 3, f"--cost-error is {self.cost_error:g}, expected 0 to 3"),
            (0 <= self.snapshot_ms <= 60_000, f"--snapshot-ms is {self.snapshot_ms:g}, expected 0 to 60000"),
            (self.ttl_s > 0, f"--ttl-s is {self.ttl_s:g}, expected seconds above 0"),
            (self.seed >= 0, f"--seed is {self.seed}, expected 0 or more"),
            (self.router in get_args(PrefillPolicy),
             f"--router is {self.router!r}, expected one of {', '.join(get_args(PrefillPolicy))}"),
            (self.placement in get_args(DecodePolicy),
             f"--placement is {self.placement!r}, expected one of {', '.join(get_args(DecodePolicy))}"),
            (self.hit_rate is None or self.ttl_s == math.inf,
             "--ttl-s does nothing with --hit-rate: assumed hits do not expire"),
        )  # fmt: skip
        for good, message in checks:
            if not good:
                raise UsageError(message)


def run_simulation(
    model: PlannedModel, asked: SimulationOptions, slo: Slo, format: OutputFormat, out: Path | None
) -> None:
    """Simulate and deliver the result."""
    fleet, trace = _fleet(model, asked), _trace(asked)
    hits, origin = _hits(fleet, trace, asked)
    figures = report(fleet, trace, simulate(fleet, trace, hits), slo)
    if asked.efficiency:
        figures += efficiency(fleet, trace, hits, slo).figures()
    if format is OutputFormat.json:
        content = {
            "trace": {"name": trace.name, **describe(trace.requests)},
            "hits": origin,
            "seed": asked.seed,
            "figures": figure_objects(figures),
            "notes": list(caveats(fleet, trace)),
        }
        render.deliver(render.json_text(render.document("plan-simulation", content)), out)
    elif format is OutputFormat.table:
        render.deliver(_text(fleet, trace, origin, figures), out)
    else:
        columns = ("figure", "value", "unit", "source", "note")
        rows = [(f.name, f.value, f.unit, f.source, f.note) for f in figures]
        render.deliver(render.rows_text(format, "plan-simulation", columns, rows), out)


def _fleet(model: PlannedModel, asked: SimulationOptions) -> Fleet:
    prefill, decode = load_profile(asked.prefill).profile, load_profile(asked.decode).profile
    fleet = pools(model, prefill, decode, engines=asked.engines, groups=asked.groups, seed=asked.seed,
                  cost_sigma=asked.cost_error, snapshot_s=asked.snapshot_ms / 1e3)  # fmt: skip
    routed = replace(fleet.prefill, policy=asked.router)
    return replace(fleet, prefill=routed, decode=replace(fleet.decode, policy=asked.placement))


def _trace(asked: SimulationOptions) -> Trace:
    if asked.trace in AGENT_SESSIONS:
        count = asked.requests or _SYNTHETIC_REQUESTS
        trace = synthetic_agents(asked.trace, requests=count, sessions_per_s=_SYNTHETIC_SESSIONS_S, seed=asked.seed)
    else:
        trace = read_trace(Path(asked.trace), limit=asked.requests)
    return trace.scaled(asked.rate_scale)


def _hits(fleet: Fleet, trace: Trace, asked: SimulationOptions) -> tuple[np.ndarray, str]:
    """Cached tokens per request, and where they come from."""
    tail = {"window": fleet.window, "slack": fleet.prefill.tail_tokens - fleet.window}
    if asked.hit_rate is not None:
        return assumed_hits(trace, asked.hit_rate, **tail), f"assumed: {asked.hit_rate:.0%} of every prompt"
    if trace.has_prefixes:
        kept = "for ever" if asked.ttl_s == math.inf else f"{asked.ttl_s:g} s after their last use"
        hits = prefix_hits(trace, ttl_s=asked.ttl_s, **tail)
        return hits, f"from the trace's block ids, blocks are kept {kept}"
    if asked.ttl_s != math.inf:
        raise UsageError(f"--ttl-s does nothing with {trace.name}, which names no prefixes", hint="give --hit-rate")
    return assumed_hits(trace, 0.0, **tail), "none: the trace names no prefixes; give --hit-rate"


def _text(fleet: Fleet, trace: Trace, origin: str, figures: tuple[Figure, ...]) -> str:
    about, p, d = describe(trace.requests), fleet.prefill, fleet.decode
    head = (
        f"trace    {trace.name}: {about['requests']:,} requests in {about['seconds']:,.0f} s, "
        f"{about['input_mean']:,.0f} tokens in, {about['output_mean']:,.0f} out\n"
        f"pools    prefill {p.engines} x {p.ranks} ranks ({p.policy}), "
        f"decode {d.groups} x {d.ranks} ranks ({d.policy})\n"
        f"hits     {origin}\n\n"
    )
    notes = "\nnotes\n" + "".join(f"  {note}\n" for note in caveats(fleet, trace))
    return head + figures_text("simulated, step times fitted to vendor figures", figures) + notes
