"""``deepinfer plan``: what fits, how fast it may be, and what a fleet does on a trace. Needs no GPU and no weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.config.profile import LoadedProfile
    from deepinfer_engine.cost.account import Workload
    from deepinfer_engine.sim.deployment import DeploymentPlan, Slo
    from deepinfer_engine.sim.models import PlannedModel

_ROWS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)

_Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", "-p", metavar="NAME|PATH", help="Profile to plan.", autocompletion=options.complete_profile
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|DIR|FILE",
        help="Shapes to plan for: deepseek-v4.1-flash, nano, a model folder or a config.json.",
    ),
]
_Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", help="Without a profile: accelerators.")]
_Hbm = Annotated[float | None, typer.Option("--hbm", metavar="GIB", help="Usable memory of one device, GiB.")]
_Platform = Annotated[str | None, typer.Option("--platform", help="Without a profile: sm90, sm100 or ascend950.")]
_Role = Annotated[str | None, typer.Option("--role", help="Without a profile: prefill, decode or both.")]
_Context = Annotated[str | None, typer.Option("--context", metavar="L", help="Longest context, such as 128k.")]
_Rows = Annotated[int | None, typer.Option("--rows", metavar="B", help="Rows per rank.")]
_Healthy = Annotated[int | None, typer.Option("--healthy", metavar="N", help="Re-form the instance over N GPUs.")]
_Input = Annotated[str | None, typer.Option("--input-tokens", metavar="N", help="Workload: mean prompt. [77k]")]
_Output = Annotated[str | None, typer.Option("--output-tokens", metavar="N", help="Workload: mean answer. [500]")]
_HitRate = Annotated[
    float | None, typer.Option("--hit-rate", metavar="F", help="Workload: share of the prompt cached. [0.96]")
]
_Ttft = Annotated[float | None, typer.Option("--ttft-ms", metavar="MS", help="Limit of the time to first token.")]
_Tpot = Annotated[float | None, typer.Option("--tpot-ms", metavar="MS", help="Limit of the time per output token.")]
_Write = Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Save the planned profile as YAML.")]
_Anchors = Annotated[bool, typer.Option("--check-anchors", help="Derive the published rows again and compare.")]
_Simulate = Annotated[
    str | None,
    typer.Option("--simulate", metavar="TRACE", help="Run a trace (.csv, .jsonl, agent-32k|48k|64k) through a fleet."),
]
_Prefill = Annotated[
    str | None, typer.Option("--prefill", metavar="NAME|PATH", help="Simulation: prefill profile. [prefill-ep4]")
]
_Decode = Annotated[
    str | None, typer.Option("--decode", metavar="NAME|PATH", help="Simulation: decode profile. [decode-ep64]")
]
_Engines = Annotated[int | None, typer.Option("--engines", metavar="N", help="Simulation: prefill instances. [1]")]
_Groups = Annotated[int | None, typer.Option("--groups", metavar="N", help="Simulation: decode instances. [1]")]
_Scale = Annotated[
    float | None, typer.Option("--rate-scale", metavar="X", help="Simulation: arrivals X times as fast. [1]")
]
_Requests = Annotated[int | None, typer.Option("--requests", metavar="N", help="Simulation: only the first N.")]
_Efficiency = Annotated[
    bool, typer.Option("--efficiency", help="Simulation: also search the highest rates within both limits.")
]
_Router = Annotated[
    str | None,
    typer.Option("--router", metavar="POLICY", help="Simulation: [least_work], bucket, round_robin or random."),
]
_Placement = Annotated[
    str | None,
    typer.Option("--placement", metavar="POLICY", help="Simulation: [two_level], least_rows, least_kv, round_robin."),
]
_Ttl = Annotated[
    float | None, typer.Option("--ttl-s", metavar="S", help="Simulation: seconds a block is kept. [for ever]")
]
_CostError = Annotated[
    float | None, typer.Option("--cost-error", metavar="S", help="Simulation: sigma of the router's guess. [0]")
]
_Snapshot = Annotated[
    float | None, typer.Option("--snapshot-ms", metavar="MS", help="Simulation: age of the router's view. [0]")
]
_Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Simulation: seed of all that is random. [0]")]


def command(
    profile: _Profile = None,
    set_: options.Set = None,
    model: _Model = None,
    gpus: _Gpus = None,
    hbm: _Hbm = None,
    platform: _Platform = None,
    role: _Role = None,
    context: _Context = None,
    rows: _Rows = None,
    healthy: _Healthy = None,
    input_tokens: _Input = None,
    output_tokens: _Output = None,
    hit_rate: _HitRate = None,
    ttft_ms: _Ttft = None,
    tpot_ms: _Tpot = None,
    write: _Write = None,
    check_anchors: _Anchors = False,
    simulate: _Simulate = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    engines: _Engines = None,
    groups: _Groups = None,
    rate_scale: _Scale = None,
    requests: _Requests = None,
    efficiency: _Efficiency = False,
    router: _Router = None,
    placement: _Placement = None,
    ttl_s: _Ttl = None,
    cost_error: _CostError = None,
    snapshot_ms: _Snapshot = None,
    seed: _Seed = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Say what fits, how fast it may be, and where each number is from.

    Memory is arithmetic on the model's config. Speeds are predicted from published figures and never measured here;
    --check-anchors shows how well they are met (exit 6 beyond a bound). A plan that does not fit is shown, then
    refused with need, have and the knob (exit 3).

    \b
    Examples:
      deepinfer plan --profile decode-ep64 --tpot-ms 5
      deepinfer plan --gpus 8 --hbm 139 --platform sm90 --context 128k --write mine.yaml
      deepinfer plan --profile decode-ep64 --healthy 61
      deepinfer plan --check-anchors
      deepinfer plan --simulate trace.jsonl --engines 4 --rate-scale 20 --ttft-ms 1000 --tpot-ms 8
    """
    from deepinfer_engine.sim.deployment import Slo

    planned = {"--profile": profile, "--set": set_, "--gpus": gpus, "--hbm": hbm, "--platform": platform,
               "--role": role, "--context": context, "--rows": rows, "--healthy": healthy,
               "--write": write}  # fmt: skip
    lengths = {"--input-tokens": input_tokens, "--output-tokens": output_tokens}
    fleet = {"--prefill": prefill, "--decode": decode, "--engines": engines, "--groups": groups,
             "--rate-scale": rate_scale, "--requests": requests, "--efficiency": efficiency or None,
             "--router": router, "--placement": placement, "--ttl-s": ttl_s, "--cost-error": cost_error,
             "--snapshot-ms": snapshot_ms, "--seed": seed}  # fmt: skip
    _check_limits({"--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms, "--hbm": hbm})
    if check_anchors:
        limits = {"--hit-rate": hit_rate, "--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms}
        _refuse({**planned, **lengths, **limits, **fleet, "--simulate": simulate}, "--check-anchors")
        _anchors(_find_model(model, "accelerator"), format, out)
    elif simulate is not None:
        from deepinfer_cli.plan_simulation import SimulationOptions, run_simulation

        _refuse({**planned, **lengths}, "--simulate")
        options.accept(format, *_ROWS, verb="plan --simulate")
        given = {key[2:].replace("-", "_"): value for key, value in fleet.items() if value is not None}
        chosen = SimulationOptions(trace=simulate, hit_rate=hit_rate, **given)
        run_simulation(_find_model(model, "accelerator"), chosen, Slo(ttft_ms, tpot_ms), format, out)
    else:
        _refuse(fleet, "a plan", hint="add --simulate TRACE")
        _refuse({"--ttft-ms": ttft_ms}, "a plan", hint="queues are part of --simulate TRACE")
        options.accept(format, OutputFormat.table, OutputFormat.json, verb="plan")
        workload = _workload(input_tokens, output_tokens, hit_rate)
        if profile is not None:
            _refuse({"--gpus": gpus, "--platform": platform, "--role": role}, "--profile", hint="use --set")
            loaded = _loaded(profile, set_, hbm, context, rows)
        else:
            loaded = _drafted(model, platform, gpus, hbm, role, context, rows, set_)
        _plan(loaded, model, workload, Slo(ttft_ms, tpot_ms), hbm, healthy, write, format, out)


def _refuse(given: Mapping[str, object], mode: str, hint: str | None = None) -> None:
    """Options that a mode would ignore are refused by name."""
    for name, value in given.items():
        if value is not None and value != []:
            raise UsageError(f"{name} does nothing with {mode}", hint=hint or f"leave out {name} or {mode}")


def _check_limits(given: Mapping[str, float | None]) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < 1e9:
            unit = "GiB" if name == "--hbm" else "milliseconds"
            raise UsageError(f"{name} is {value:g}, expected {unit} above 0")


def tokens(text: str, name: str) -> int:
    """A number of tokens: digits, or with k (1,024) or m (1,048,576) behind them."""
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"{name} is {text!r}, expected a number of tokens such as 4096 or 128k")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def _workload(input_tokens: str | None, output_tokens: str | None, hit_rate: float | None) -> Workload:
    from deepinfer_engine.cost import published
    from deepinfer_engine.cost.account import Workload

    return Workload(
        tokens(input_tokens, "--input-tokens") if input_tokens else published.INPUT_TOKENS,
        tokens(output_tokens, "--output-tokens") if output_tokens else published.OUTPUT_TOKENS,
        published.HIT_RATE if hit_rate is None else hit_rate,
    )


def _find_model(name: str | None, platform: str) -> PlannedModel:
    """The model asked for; without one the embedded model on a CPU, the released one on accelerators."""
    from deepinfer_engine.sim.models import EMBEDDED, RELEASE, find_model

    return find_model(name or (EMBEDDED if platform == "cpu" else RELEASE))


# ----------------------------------------------------------------------- plan


def _loaded(
    profile: str, set_: list[str] | None, hbm: float | None, context: str | None, rows: int | None
) -> LoadedProfile:
    """The profile with --hbm, --context and --rows as settings; a KV capacity below one context is raised to it."""
    from deepinfer_engine.config.profile import load_profile

    base = load_profile(profile, set_ or ()).profile
    sets = list(set_ or ())
    if hbm is not None and base.hardware.platform != "cpu":
        sets.append(f"hardware.hbm_gib={float(hbm)}")
    if rows is not None:
        sets.append(f"sched.max_rows_per_rank={rows}")
    if context is not None:
        longest = tokens(context, "--context")
        sets.append(f"sched.max_context_tokens={longest}")
        asked = any(text.startswith("cache.hbm_tokens_per_rank=") for text in sets)
        if 0 < base.cache.hbm_tokens_per_rank < longest and not asked:
            sets.append(f"cache.hbm_tokens_per_rank={-(-longest // 128) * 128}")
    return load_profile(profile, sets)


def _drafted(model, platform, gpus, hbm, role, context, rows, set_) -> LoadedProfile:
    from deepinfer_engine.sim.draft_profile import Hardware, draft_profile

    if gpus is None or platform is None:
        raise UsageError(
            "nothing to plan", hint="give --profile NAME, or --gpus N with --platform sm90|sm100|ascend950"
        )
    if set_:
        raise UsageError("--set changes a profile, and none is given", hint="save one with --write, then use --profile")
    if role not in (None, "prefill", "decode", "both"):
        raise UsageError(f"--role is {role!r}, expected prefill, decode or both")
    longest = tokens(context, "--context") if context else None
    hardware = Hardware(platform, gpus, hbm, role or "both")
    return draft_profile(hardware, _find_model(model, "accelerator"), rows=rows, context=longest)


def _plan(
    loaded: LoadedProfile, model_name: str | None, workload: Workload, slo: Slo, hbm: float | None,
    healthy: int | None, write: Path | None, format: OutputFormat, out: Path | None,
) -> None:  # fmt: skip
    from deepinfer_cli.plan_report import comparison_text, plan_document, plan_text
    from deepinfer_engine.sim.deployment import plan_deployment

    model = _find_model(model_name, loaded.profile.hardware.platform)
    if write is not None:
        if write.exists():
            raise UsageError(f"--write {write}: the file exists", hint="choose another name")
        if not write.parent.is_dir():
            raise UsageError(f"--write {write}: there is no folder {write.parent}")
    plan = plan_deployment(loaded.profile, model, workload=workload, slo=slo, hbm_gib=hbm)
    before: DeploymentPlan | None = None
    if healthy is not None:
        before, loaded = plan, _reformed(loaded, healthy)
        plan = plan_deployment(loaded.profile, model, workload=workload, slo=slo, hbm_gib=hbm)
    if format is OutputFormat.json:
        document = plan_document(plan, loaded.digest)
        if before is not None:
            document["before"] = plan_document(before, "")["mesh"]
        text = render.json_text(document)
    else:
        text = plan_text(plan, loaded.digest)
        if before is not None:
            text += "\n" + comparison_text(before, plan)
    render.deliver(text, out)
    plan.require_fit()
    if write is not None:
        _write(loaded, write)


def _reformed(loaded: LoadedProfile, healthy: int) -> LoadedProfile:
    from deepinfer_engine.config.profile import load_profile_text
    from deepinfer_engine.sim.deployment import reform

    sets = reform(loaded.profile, healthy)
    return load_profile_text(_as_yaml(loaded, loaded.profile.name), where=loaded.profile.name, sets=sets)


def _as_yaml(loaded: LoadedProfile, name: str) -> str:
    """A complete profile of its own under another name, with the reasons that are known."""
    from deepinfer_engine.config.profile import render_yaml

    keys = [key for key in loaded.origins if key != "extends"]  # every value is stated, the base is not needed
    text = render_yaml(loaded, keys, dict(loaded.reasons))
    return re.sub(r"(?m)^name: .*$", f"name: {name}", text, count=1)


def _write(loaded: LoadedProfile, path: Path) -> None:
    from deepinfer_engine.config.profile import load_profile_text

    text = _as_yaml(loaded, path.stem)
    again = load_profile_text(text, where=str(path))  # refuses a file name that is no profile name
    render.deliver(text, path)
    render.note(f"wrote {path}, profile {again.profile.name}, {again.digest[:12]}")


# -------------------------------------------------------------------- anchors


def _anchors(model: PlannedModel, format: OutputFormat, out: Path | None) -> None:
    from deepinfer_cli.plan_report import ANCHOR_COLUMNS, anchor_rows, anchor_text
    from deepinfer_engine.cost.anchors import anchors

    options.accept(format, *_ROWS, verb="plan --check-anchors")
    if not model.is_release:
        raise UsageError(f"the published rows are of the released model, not of {model.name}", hint="leave out --model")
    found = anchors(model.config)
    if format is OutputFormat.table:
        render.deliver(anchor_text(found), out)
    else:
        render.deliver(render.rows_text(format, "plan-anchors", ANCHOR_COLUMNS, anchor_rows(found)), out)
    bad = [a for a in found if not a.holds]
    if bad:
        names = "; ".join(f"{a.quantity} is off by {a.error:+.1f}, allowed {a.bound:g}" for a in bad)
        raise CheckFailed(f"{len(bad)} of {len(found)} published rows are not met: {names}")
