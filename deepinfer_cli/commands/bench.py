"""``deepinfer bench``: how fast is it? One workload on our engine, on single forwards, or on any endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import bench_report, options, render
from deepinfer_cli.endpoint_access import body_keys, named_endpoint
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import Interrupted, PartialFailure, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.bench.engine_target import EngineTarget
    from deepinfer_engine.bench.result import BenchResult
    from deepinfer_engine.bench.workload import Workload


class Forward(StrEnum):
    """Single forwards that can be measured."""

    prefill = "prefill"
    decode = "decode"


class Writer(StrEnum):
    """Whose keys the JSON has."""

    vllm = "vllm"
    inferencex = "inferencex"


class Interface(StrEnum):
    """Interfaces of an endpoint."""

    chat = "chat"
    completions = "completions"


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped workloads that start with what is typed."""
    from deepinfer_engine.bench.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def command(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A workload by name or file.", autocompletion=complete_recipe),
    ] = None,
    profile: options.Profile = "cpu-nano",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; default: the embedded model.")
    ] = None,
    set_: options.Set = None,
    workload_set: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", metavar="KEY=VALUE", help="Override one key of the recipe."),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Short for -w requests=N.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Short for -w arrivals.concurrency=N.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Open loop: arrivals a second; sets arrivals.mode too.")
    ] = None,
    forward: Annotated[Forward | None, typer.Option("--forward", help="Single forwards without the scheduler.")] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="Measure this OpenAI-compatible base URL instead.")
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option("--endpoint-model", metavar="NAME", help="Model to ask for; default: the only one.")
    ] = None,
    interface: Annotated[
        Interface, typer.Option("--interface", help="chat sends words; completions sends token ids.")
    ] = Interface.chat,
    token_ids: Annotated[
        str, typer.Option("--token-ids", metavar="LOW:HIGH", help="completions: ids that prompts are made of.")
    ] = "1000:30000",
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the key.")
    ] = None,
    body: Annotated[
        list[str] | None, typer.Option("--body", metavar="KEY=JSON", help="Set a key of the request; null removes it.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.01, help="Endpoint: longest silence before a request fails.")
    ] = 600.0,
    salt: Annotated[
        int | None, typer.Option("--salt", min=0, help="Contents of prompts; the same salt sends the same prompts.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE", callback=options.writable, help="Also write one JSON line for every request."
        ),
    ] = None,
    detailed: Annotated[bool, typer.Option("--detailed", help="JSON: arrays with a value for every request.")] = False,
    writer: Annotated[Writer, typer.Option("--writer", help="JSON: whose keys.")] = Writer.vllm,
    curve: Annotated[
        bool, typer.Option("--curve", help="Measure step time by rows and tokens a row instead; no recipe.")
    ] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay",
            metavar="TOKENS,…",
            help="Measure prompts of these lengths under off, exact and bounded replay and after a hit; no recipe.",
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped workloads.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run; load and ask nothing.")] = False,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure speed under a workload: our engine, single forwards, or any OpenAI-compatible endpoint.

    Prompts are cold unless the recipe says warm; the share found in a cache is in the result. What is undefined is
    null with its reason. Ctrl-C keeps what had ended, marked as interrupted (exit 130); failed requests exit 5.

    \b
    Formats: table; json (vLLM's keys with our object, or --writer inferencex); jsonl (one line a request);
    csv (one row for the run).

    \b
    Examples:
      deepinfer bench cpu-nano-quick
      deepinfer bench chat-random --profile h200x1-nano --concurrency 64 --format json --out run.json
      deepinfer bench chat-random --rate 2 -w arrivals.burstiness=0.5 --rows requests.jsonl
      deepinfer bench decode-fixed --forward decode --concurrency 16
      deepinfer bench --curve --concurrency 16
      deepinfer bench --replay 1024,4096,16000 --requests 3
      deepinfer bench agent-77k --endpoint http://host:8000/v1 --profile decode-ep64
      deepinfer bench azure-conv -w arrivals.mode=trace -w arrivals.speed=0.1
    """
    if list_:
        render.deliver(_list(format), out)
        return
    options.accept(format, *bench_report.FORMATS, verb="bench")
    given = {n for n in ctx.params if (s := ctx.get_parameter_source(n)) is not None and s.name == "COMMANDLINE"}
    _refuse_idle(given, endpoint=endpoint, forward=forward, format=format, writer=writer, interface=interface)
    if curve:
        _refuse_beside_curve(given, recipe)
        ask = Ask(profile, tuple(set_ or ()), model, None, None, quiet, named_profile=True)
        render.deliver(_curve(ask, concurrency, format), out)
        return
    if replay is not None:
        _refuse_beside_replay(given, recipe)
        ask = Ask(profile, tuple(set_ or ()), model, None, None, quiet, named_profile=True)
        render.deliver(_replay(ask, _lengths(replay), requests or 5, format), out)
        return
    if recipe is None:
        raise UsageError("no recipe given", hint="deepinfer bench cpu-nano-quick, or --list")
    from deepinfer_engine.bench.workload import load_workload

    workload = load_workload(recipe, _sets(workload_set or [], requests, concurrency, rate))
    ask = Ask(profile, tuple(set_ or ()), model, forward, salt, quiet, named_profile="profile" in given)
    if endpoint is not None:
        access = (endpoint, endpoint_model, api_key_env, timeout_s)
        extra = body_keys(body or [], ("messages", "prompt", "n", "stream", "max_tokens", "model"))
        if dry_run:
            _dry_run(workload, ask, endpoint, format, out)
            return
        result = _measure_endpoint(workload, ask, access, Interface(interface), _range(token_ids), extra)
    elif dry_run:
        _dry_run(workload, ask, None, format, out)
        return
    else:
        result = _measure_engine(workload, ask)
    if rows is not None:
        render.deliver(bench_report.text_of(result, OutputFormat.jsonl, writer="", detailed=False), rows)
    render.deliver(bench_report.text_of(result, format, writer=writer.value, detailed=detailed), out)
    _verdict(result)


@dataclass(frozen=True)
class Ask:
    """What is measured and how, as the command line gave it."""

    profile: str
    sets: tuple[str, ...]
    model: Path | None
    forward: Forward | None
    salt: int | None
    quiet: bool
    named_profile: bool


_ENDPOINT_ONLY = {"endpoint_model", "interface", "token_ids", "api_key_env", "body", "timeout_s"}


def _refuse_idle(
    given: set[str],
    *,
    endpoint: str | None,
    forward: Forward | None,
    format: OutputFormat,
    writer: Writer,
    interface: Interface,
) -> None:
    """Refuse every option on the command line that this run would not look at."""
    idle: list[tuple[set[str], str]] = []
    if endpoint is None:
        idle.append((_ENDPOINT_ONLY, "only with --endpoint"))
    else:
        idle.append(({"model", "forward"}, "our engine's, not an endpoint's"))
        if "profile" not in given:
            idle.append(({"set_"}, "only with --profile"))
        if interface is Interface.chat:
            idle.append(({"token_ids"}, "only with --interface completions"))
    if forward is not None:
        idle.append(({"rate", "salt"}, "not used by single forwards"))
    if format is not OutputFormat.json:
        idle.append(({"detailed", "writer"}, "only with --format json"))
    if writer is Writer.inferencex:
        idle.append(({"detailed"}, "not part of InferenceX's form"))
    for names, why in idle:
        for name in sorted(names & given):
            raise UsageError(f"--{name.rstrip('_').replace('_', '-')} is {why}")


_WITH_CURVE = {"curve", "profile", "model", "set_", "concurrency", "format", "out", "quiet"}


def _refuse_beside_curve(given: set[str], recipe: str | None) -> None:
    if recipe is not None:
        raise UsageError(f"--curve runs no recipe, {recipe!r} is given")
    for name in sorted(given - _WITH_CURVE):
        raise UsageError(f"--{name.rstrip('_').replace('_', '-')} is not used by --curve")


_WITH_REPLAY = {"replay", "profile", "model", "set_", "requests", "format", "out", "quiet"}


def _refuse_beside_replay(given: set[str], recipe: str | None) -> None:
    if recipe is not None:
        raise UsageError(f"--replay runs no recipe, {recipe!r} is given")
    for name in sorted(given - _WITH_REPLAY):
        raise UsageError(f"--{name.rstrip('_').replace('_', '-')} is not used by --replay")


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise UsageError(f"--replay {text}: expected different prompt lengths", hint="such as --replay 1024,4096")
    return tuple(int(part) for part in parts)


def _replay(ask: Ask, lengths: tuple[int, ...], rounds: int, form: OutputFormat) -> str:
    """Prefills under every decoder replay and after a hit, beside what the plan predicts."""
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(max(lengths))
    from dataclasses import replace

    from deepinfer_engine.bench.replay import measure_replay

    def opened(sets: tuple[str, ...]) -> EngineTarget:
        return _open(replace(ask, sets=(*ask.sets, *sets), quiet=ask.quiet or sets[0] != "replay.decoder=off"))

    with render.progress("prompts", quiet=ask.quiet) as advance:
        measured = measure_replay(opened, lengths, rounds=rounds, progress=advance)
    return bench_report.replay_text(measured, form)


def _curve(ask: Ask, rows: int | None, form: OutputFormat) -> str:
    """The measured step-time curve, rows up to the given number or the profile's."""
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(rows or 2)
    from deepinfer_engine.bench.curve import measure_step_curve

    target = _open(ask)
    live = bench_report.LiveLine(quiet=ask.quiet)
    try:
        measured = measure_step_curve(target, max_rows=rows, progress=live)
    finally:
        live.end()
        target.close()
    return bench_report.curve_text(measured, form)


def _sets(given: list[str], requests: int | None, concurrency: int | None, rate: float | None) -> list[str]:
    """Overrides of the recipe, short forms last; one key is set once."""
    out = list(given)
    if requests is not None:
        out.append(f"requests={requests}")
    if concurrency is not None:
        out.append(f"arrivals.concurrency={concurrency}")
    if rate is not None:
        out += ["arrivals.mode=open", f"arrivals.rate_per_s={rate!r}"]
        if concurrency is None:
            out.append("arrivals.concurrency=null")
    keys = [text.partition("=")[0] for text in out]
    twice = next((k for k in keys if keys.count(k) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is set twice", hint="keep one of them")
    return out


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and int(low) < int(high) <= 2**31):
        raise UsageError(f"--token-ids {text}: expected LOW:HIGH with LOW below HIGH", hint="such as 1000:30000")
    return int(low), int(high)


def _list(form: OutputFormat) -> str:
    from deepinfer_engine.bench.recipe import bench_dir, kind_of
    from deepinfer_engine.config.yaml import read_yaml

    rows = []
    for path in sorted(bench_dir().glob("*.yaml")):
        document = read_yaml(path, where=path.name)
        if kind_of(document) == "workload":
            rows.append((path.stem, document.value.get("description", "")))
    return render.rows_text(form, "bench-list", ("name", "description"), rows)


def _dry_run(workload: Workload, ask: Ask, endpoint: str | None, form: OutputFormat, out: Path | None) -> None:
    """What would run, checked as far as it can be without weights or network."""
    if endpoint is None:
        from deepinfer_cli.announce import launch_notes
        from deepinfer_engine.bench.engine_target import check_context
        from deepinfer_engine.bench.prompts import with_tokens
        from deepinfer_engine.config.profile import load_profile
        from deepinfer_engine.launch import prepare

        launch = prepare(load_profile(ask.profile, ask.sets).profile, ask.model)
        launch_notes(launch, quiet=ask.quiet)
        workload = with_tokens(workload, launch.checkpoint.directory, launch.checkpoint.config)
        rows = bench_report.workload_rows(workload)
        check_context(workload, launch.profile, launch.checkpoint.config)
        what = f"single {ask.forward.value} forwards" if ask.forward else "engine"
        rows += [("target", what), ("profile", launch.requested.name), ("device", launch.device)]
    else:
        rows = [*bench_report.workload_rows(workload), ("target", endpoint)]
    render.deliver(render.rows_text(form, "bench-plan", ("what", "value"), rows), out)


def _open(ask: Ask) -> EngineTarget:
    """The engine under the asked profile; what differs from the request is said before loading."""
    from deepinfer_cli.announce import launch_notes, load_notes
    from deepinfer_engine.bench.engine_target import EngineTarget

    with render.progress("loading", quiet=ask.quiet) as advance:
        target = EngineTarget.open(
            ask.profile,
            ask.sets,
            model=ask.model,
            progress=advance,
            announce=lambda launch: launch_notes(launch, quiet=ask.quiet),
        )
    load_notes(target.engine, quiet=ask.quiet)
    return target


def _measure_engine(workload: Workload, ask: Ask) -> BenchResult:
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(workload.concurrency or len(workload.requests))  # before torch is imported
    from deepinfer_cli.announce import closing_notes
    from deepinfer_engine.bench.forward import run_forward
    from deepinfer_engine.bench.run import run_bench

    target = _open(ask)
    live = bench_report.LiveLine(quiet=ask.quiet)
    try:
        if ask.forward is not None:
            return run_forward(workload, target, ask.forward.value, progress=live)
        return run_bench(workload, target, progress=live, salt=ask.salt)
    finally:
        live.end()
        target.close()
        closing_notes(target.engine, quiet=ask.quiet)


def _measure_endpoint(
    workload: Workload,
    ask: Ask,
    access: tuple[str, str | None, str | None, float],
    interface: Interface,
    id_range: tuple[int, int],
    extra: dict[str, Any],
) -> BenchResult:
    from deepinfer_engine.bench.endpoint_target import EndpointTarget
    from deepinfer_engine.bench.run import run_bench
    from deepinfer_engine.config.profile import load_profile

    loaded = load_profile(ask.profile, ask.sets) if ask.named_profile else None
    target = EndpointTarget(
        named_endpoint(*access), interface=interface.value, id_range=id_range, extra=extra, profile=loaded
    )
    live = bench_report.LiveLine(quiet=ask.quiet)
    try:
        return run_bench(workload, target, progress=live, salt=ask.salt)
    finally:
        live.end()
        target.close()


def _verdict(result: BenchResult) -> None:
    """Say by the exit code whether the run is whole: 130 before 5."""
    s = result.summary
    if result.status == "interrupted":
        raise Interrupted(
            f"interrupted: {s['completed']} of {s['requests']} requests had completed, the result is marked"
        )
    if result.failures:
        kinds = ", ".join(f"{kind} {n}" for kind, n in result.failures.items())
        raise PartialFailure(f"{s['failed']} of {s['requests']} requests failed: {kinds}")
