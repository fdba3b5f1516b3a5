"""``deepinfer eval``: is this deployment right? Tasks, graders and intervals on our engine or on any endpoint."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import options, render
from deepinfer_cli.commands import eval_output
from deepinfer_cli.endpoint_access import api_key, body_keys, named_endpoint
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import CheckFailed, Interrupted, PartialFailure, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.config.profile import LoadedProfile
    from deepinfer_engine.evals.backend import Backend
    from deepinfer_engine.evals.endpoint import EndpointBackend
    from deepinfer_engine.evals.items import ItemSet
    from deepinfer_engine.evals.log import LogContent
    from deepinfer_engine.evals.prompt import Plan
    from deepinfer_engine.evals.report import Expect
    from deepinfer_engine.evals.run import Job
    from deepinfer_engine.evals.task import LoadedTask
    from deepinfer_engine.launch import Launch


class Mode(StrEnum):
    """Reasoning effort of the chat protocol."""

    non_think = "non-think"
    high = "high"
    max = "max"


def command(
    ctx: typer.Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task, a recipe file, or: list, report.")],
    profile: options.Profile = "cpu-nano",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; default: the embedded model.")
    ] = None,
    set_: options.Set = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="Ask this OpenAI-compatible base URL instead.")
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option("--endpoint-model", metavar="NAME", help="Model to ask for; default: the only one.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the key.")
    ] = None,
    body: Annotated[
        list[str] | None, typer.Option("--body", metavar="KEY=JSON", help="Set a key of the request; null removes it.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=1024, help="Requests in flight.")] = 16,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.01, help="Longest wait for one answer.")] = 3600.0,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Questions from a .jsonl, .csv or .parquet file.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first questions.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, max=1024, help="Samples per question.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the first sample; the next have seed + 1, ….")
    ] = 0,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Reasoning effort; default: the task's.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=100, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus mass, 1 is off.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", metavar="URL", help="Endpoint that compares free-form answers (hle).")
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option("--judge-model", metavar="NAME", help="Model of the judge.")
    ] = None,
    judge_key_env: Annotated[
        str | None, typer.Option("--judge-key-env", metavar="NAME", help="Variable that holds the judge's key.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Log of samples, the state of the run.")
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="vendor|VALUE", help="Exit 6 unless the interval holds it; >=VALUE: a floor."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="LOG", help="Paired test against an earlier run.")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Every combination of numerics, replay, speculation and ep.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run; ask and write nothing.")] = False,
    dump_prompt: Annotated[bool, typer.Option("--dump-prompt", help="Print the first prompt as it is sent.")] = False,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure accuracy, with intervals, on our engine or on any OpenAI-compatible endpoint.

    Every finished sample is in the log before the next is counted. The same command continues a log that is not
    complete; a complete one is never reused. Wrong, unparsed, truncated and errored answers are counted apart.

    \b
    Examples:
      deepinfer eval list
      deepinfer eval nano-arith --expect ">=0.9"
      deepinfer eval aime --endpoint http://host:8000/v1 --concurrency 64 --expect vendor
      deepinfer eval gpqa --data gpqa_diamond.csv --endpoint http://host:8000/v1 --compare before.jsonl
      deepinfer eval nano-arith --matrix
      deepinfer eval report --log eval-nano-arith-1f2e3d4c-20260101-120000.jsonl
    """
    ask = Ask(
        task=task, profile=profile, model=model, sets=tuple(set_ or ()), endpoint=endpoint,
        endpoint_model=endpoint_model, api_key_env=api_key_env, body=tuple(body or ()), concurrency=concurrency,
        timeout_s=timeout_s, data=data, limit=limit, k=k, seed=seed, mode=mode.value if mode else None,
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, judge=judge, judge_model=judge_model,
        judge_key_env=judge_key_env, log=log, expect=expect, compare=compare, form=format, out=out, quiet=quiet,
    )  # fmt: skip
    _refuse_idle_options(ctx, ask, matrix=matrix)
    if task == "list":
        render.deliver(eval_output.task_list(format), out)
    elif task == "report":
        _report_log(ask)
    else:
        options.accept(format, *eval_output.FORMATS, verb="eval")
        if matrix:
            from deepinfer_cli.commands.eval_matrix import run_matrix

            run_matrix(ask, dry_run=dry_run)
        else:
            _evaluate(ask, dry_run=dry_run, dump_prompt=dump_prompt)


@dataclass(frozen=True)
class Ask:
    """The command line as given."""

    task: str
    profile: str
    model: Path | None
    sets: tuple[str, ...]
    endpoint: str | None
    endpoint_model: str | None
    api_key_env: str | None
    body: tuple[str, ...]
    concurrency: int
    timeout_s: float
    data: Path | None
    limit: int | None
    k: int | None
    seed: int
    mode: str | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    judge: str | None
    judge_model: str | None
    judge_key_env: str | None
    log: Path | None
    expect: str | None
    compare: Path | None
    form: OutputFormat
    out: Path | None
    quiet: bool

    @property
    def embedded(self) -> bool:
        return self.model is None and self.endpoint is None


@dataclass(frozen=True)
class Answerer:
    """Who will answer: an endpoint, or a launch of our engine; ``identity`` is what the log states."""

    identity: dict[str, Any]
    endpoint: EndpointBackend | None = None
    launch: Launch | None = None


_REPORTING = {"task", "format", "out", "quiet"}
_ENDPOINT_ONLY = {"endpoint_model", "api_key_env", "body", "concurrency"}
_ENGINE_ONLY = {"profile", "model", "set_"}
_NOT_WITH_MATRIX = {"log", "expect", "compare", "judge", "dump_prompt"}


def _refuse_idle_options(ctx: typer.Context, ask: Ask, *, matrix: bool) -> None:
    """Refuse every option on the command line that this run would not look at."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if ask.task in ("list", "report"):
        used = _REPORTING if ask.task == "list" else _REPORTING | {"log", "expect", "compare"}
        _refuse(given - used, f"not used by eval {ask.task}")
    if ask.endpoint is None:
        _refuse(given & _ENDPOINT_ONLY, "only with --endpoint")
        if ask.judge is None:
            _refuse(given & {"timeout_s"}, "only with --endpoint or --judge")
    else:
        _refuse(given & _ENGINE_ONLY, "not with --endpoint, which asks another engine")
    if ask.judge is None:
        _refuse(given & {"judge_model", "judge_key_env"}, "only with --judge")
    if matrix:
        _refuse(given & (_NOT_WITH_MATRIX | {"endpoint"}), "not with --matrix, which compares cells of our engine")


def _refuse(names: set[str], why: str) -> None:
    if names:
        shown = ", ".join(sorted("--" + name.strip("_").replace("_", "-") for name in names))
        raise UsageError(f"{shown}: {why}", hint="deepinfer eval --help")


# ----------------------------------------------------------------- one run


def _evaluate(ask: Ask, *, dry_run: bool, dump_prompt: bool) -> None:
    from deepinfer_engine.evals.grade import require_grader
    from deepinfer_engine.evals.log import read_log
    from deepinfer_engine.evals.report import check_pairs

    loaded, items = questions(ask, dry_run=dry_run)
    task = loaded.task
    require_grader(task.grader)
    if task.grader != "judge" and ask.judge is not None:
        raise UsageError(f"--judge: {task.name} is graded by {task.grader}")
    if task.grader == "judge" and ask.judge is None and ask.expect is not None:
        raise UsageError(f"--expect needs a score, and {task.name} without --judge stays ungraded")
    plan = plan_of(ask, loaded)
    expect = _expect(ask, loaded, items)
    answerer = _answerer(ask, plan)
    if dump_prompt:
        _dump_prompt(loaded, items, plan, answerer, ask)
        return
    if dry_run:
        render.deliver(eval_output.dry_run(ask.form, loaded, items, plan, answerer.identity), ask.out)
        return
    assert items is not None
    job = _job(ask, loaded, items, plan)
    if ask.compare is not None:  # known before hours of answers, not after
        check_pairs(job.identity(answerer.identity), read_log(ask.compare).identity)
    content, log = run_job(job, answerer, ask)
    _finish(content, log, expect, ask)


def questions(ask: Ask, *, dry_run: bool) -> tuple[LoadedTask, ItemSet | None]:
    """The task and its questions; the embedded model runs a shipped replacement where the data are out of reach.

    In a dry run nothing is downloaded, so the questions are None when they are not on this machine.
    """
    from deepinfer_engine.evals.hub import DataUnreachable, cached, fetch
    from deepinfer_engine.evals.items import load_items
    from deepinfer_engine.evals.task import find_task

    loaded = find_task(ask.task)
    spec = loaded.task.data
    if ask.data is not None:
        return loaded, _limited(load_items(loaded, ask.data, source=ask.data.name), ask.limit)
    shipped = loaded.data_file
    if shipped is not None:
        return loaded, _limited(load_items(loaded, shipped, source=shipped.name), ask.limit)
    source = f"{spec.hub}:{spec.file}"
    if dry_run:
        path = cached(spec)
        items = None if path is None else load_items(loaded, path, source=source, revision=spec.revision)
        return loaded, None if items is None else _limited(items, ask.limit)
    try:
        path = fetch(spec)
    except DataUnreachable as exc:
        if not (ask.embedded and loaded.task.offline) or ask.expect or ask.compare:
            raise
        replacement = find_task(loaded.task.offline)
        render.panel(
            f"{loaded.task.name}: its questions cannot be reached; running {replacement.task.name} instead",
            f"{exc.message}\n{replacement.task.description}. The result is named {replacement.task.name}.\n"
            "Give the questions with --data FILE.jsonl|csv|parquet.",
            quiet=ask.quiet,
        )
        shipped = replacement.data_file
        assert shipped is not None
        return replacement, _limited(load_items(replacement, shipped, source=shipped.name), ask.limit)
    return loaded, _limited(load_items(loaded, path, source=source, revision=spec.revision), ask.limit)


def _limited(items: ItemSet, limit: int | None) -> ItemSet:
    return items if limit is None else replace(items, items=items.items[:limit])


def plan_of(ask: Ask, loaded: LoadedTask) -> Plan:
    """Sampling and seeds: recipe, embedded overrides, flags."""
    from pydantic import ValidationError

    from deepinfer_engine.evals.prompt import plan_for

    flags = {"mode": ask.mode, "temperature": ask.temperature, "top_p": ask.top_p, "max_tokens": ask.max_tokens}
    try:
        return plan_for(loaded.task, embedded=ask.embedded, k=ask.k, seed=ask.seed, sampling=flags)
    except ValidationError as exc:
        first = exc.errors()[0]
        flag = "--" + str(first["loc"][-1]).replace("_", "-")
        raise UsageError(f"{flag} is {first['input']}: {first['msg'].lower()}") from None


def _expect(ask: Ask, loaded: LoadedTask, items: ItemSet | None) -> Expect | None:
    from deepinfer_engine.evals.report import parse_expect

    if ask.expect is None:
        return None
    rows = loaded.task.data.rows
    whole = ask.limit is None and (items is None or rows is None or len(items.items) + items.skipped == rows)
    return parse_expect(ask.expect, loaded.task, whole=whole)


def _answerer(ask: Ask, plan: Plan) -> Answerer:
    if ask.endpoint is not None:
        backend = _endpoint(ask, plan)
        return Answerer(backend.identity(), endpoint=backend)
    from deepinfer_engine.config.profile import load_profile

    return launched(load_profile(ask.profile, ask.sets), plan, ask)


def launched(loaded: LoadedProfile, plan: Plan, ask: Ask) -> Answerer:
    """Our engine under a profile, fitted to this machine and checked, before weights are loaded."""
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(loaded.profile.sched.max_rows_per_rank)
    from deepinfer_engine.evals.local import check_room, engine_identity
    from deepinfer_engine.launch import prepare

    launch = prepare(loaded.profile, ask.model)
    check_room(plan.sampling, launch)
    return Answerer(engine_identity(launch, loaded.digest), launch=launch)


def _endpoint(ask: Ask, plan: Plan) -> EndpointBackend:
    from deepinfer_engine.evals.endpoint import EndpointBackend
    from deepinfer_engine.remote.client import Client

    extra = body_keys(ask.body, ("messages", "n", "stream", "seed", "model"))
    assert ask.endpoint is not None
    target = named_endpoint(ask.endpoint, ask.endpoint_model, ask.api_key_env, ask.timeout_s)
    return EndpointBackend(Client(target), plan.sampling, concurrency=ask.concurrency, extra=extra)


def _job(ask: Ask, loaded: LoadedTask, items: ItemSet, plan: Plan) -> Job:
    from deepinfer_engine.evals.judge import Judge
    from deepinfer_engine.evals.run import Job
    from deepinfer_engine.remote.client import Client, Endpoint, check_url

    judge = None
    if ask.judge is not None:
        target = Endpoint(check_url(ask.judge), ask.judge_model or "", api_key(ask.judge_key_env), ask.timeout_s)
        if not target.model:
            raise UsageError("--judge needs --judge-model", hint="the result names the judge")
        judge = Judge(Client(target))
    return Job(loaded, items, plan, judge)


def run_job(job: Job, answerer: Answerer, ask: Ask) -> tuple[LogContent, Path]:
    """Run what the log lacks. A complete log that was named is refused: its samples would pass for new ones."""
    from deepinfer_engine.evals.log import SampleLog, choose_log
    from deepinfer_engine.evals.run import run

    identity = job.identity(answerer.identity)
    started = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = ask.log or choose_log(Path(), identity, started)
    with SampleLog(path, identity) as log:
        held = len(log.content.done)
        if log.content.complete:
            raise UsageError(
                f"{path}: complete, {held} samples; nothing would be run",
                hint=f"deepinfer eval report --log {path}, or give another --log",
            )
        if held:
            render.note(f"continuing {path}: {held} of {log.content.expected} samples are there", quiet=ask.quiet)
        else:
            render.note(f"log: {path}", quiet=ask.quiet)
        backend = _open(answerer, ask, job.plan)
        meter = eval_output.Meter(job.loaded.task.name, quiet=ask.quiet)
        try:
            content = run(job, backend, log, meter)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; finished samples are in {path}", hint="the same command continues there"
            ) from None
        finally:
            meter.end()
            backend.close()
            if job.judge is not None:
                job.judge.close()
    return content, path


def _open(answerer: Answerer, ask: Ask, plan: Plan) -> Backend:
    if answerer.endpoint is not None:
        return answerer.endpoint
    from deepinfer_cli.announce import fallback_notes, launch_notes
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.evals.local import EngineBackend

    launch = answerer.launch
    assert launch is not None
    launch_notes(launch, quiet=ask.quiet)
    with render.progress("loading", quiet=ask.quiet) as advance:
        engine = Engine.open(launch.profile, launch.checkpoint.directory, device=launch.device, progress=advance)
    fallback_notes(engine, quiet=ask.quiet)
    return EngineBackend(engine, launch, plan.sampling)


def _dump_prompt(loaded: LoadedTask, items: ItemSet | None, plan: Plan, answerer: Answerer, ask: Ask) -> None:
    from deepinfer_engine.evals.prompt import prompts

    if items is None:
        raise UsageError("--dump-prompt needs the questions, which --dry-run does not download")
    first = next(prompts(loaded.task, items.items, plan))
    if answerer.endpoint is not None:
        text = answerer.endpoint.shown(first)
    else:
        from deepinfer_engine.evals.local import Renderer

        assert answerer.launch is not None
        text = Renderer(answerer.launch, plan.sampling).render(first).text
    render.note(f"question {first.item.id}, seed {first.seed}, message sha256 {first.digest}", quiet=ask.quiet)
    render.deliver(text, ask.out)


# ------------------------------------------------------------------ results


def _report_log(ask: Ask) -> None:
    from deepinfer_engine.evals.log import read_log
    from deepinfer_engine.evals.report import parse_expect
    from deepinfer_engine.evals.task import find_task

    options.accept(ask.form, *eval_output.FORMATS, verb="eval report")
    if ask.log is None:
        raise UsageError("eval report needs --log FILE")
    content = read_log(ask.log)
    expect = None
    if ask.expect is not None:
        task = find_task(str(content.identity["task"])).task
        rows = content.identity["items"] + content.identity.get("skipped", 0)
        whole = task.data.rows is None or rows == task.data.rows
        expect = parse_expect(ask.expect, task, whole=whole)
    _finish(content, ask.log, expect, ask)


def _finish(content: LogContent, log: Path, expect: Expect | None, ask: Ask) -> None:
    """Deliver the result, then say by the exit code whether it holds: 6 before 5."""
    from deepinfer_engine.evals.log import read_log
    from deepinfer_engine.evals.report import ALPHA, compared, differences, summary_of

    summary = summary_of(content)
    other = None if ask.compare is None else read_log(ask.compare)
    comparison = None if other is None else compared(content, other)
    changed = {} if other is None else differences(content, other)
    verdict = None if expect is None else expect.verdict(summary)
    render.deliver(eval_output.result(ask.form, content, log, expect, verdict, comparison, changed), ask.out)
    if verdict is not None:
        raise CheckFailed(f"{content.identity['task']}: {verdict}", hint="see the wrong answers in the log")
    if comparison is not None and comparison.p_value < ALPHA and comparison.worse > comparison.better:
        raise CheckFailed(
            f"{content.identity['task']}: worse than {ask.compare} on {comparison.worse} questions, better on "
            f"{comparison.better} (p = {comparison.p_value:.2g}, {comparison.test})"
        )
    errored = summary.outcomes["errored"]
    if errored:
        raise PartialFailure(
            f"{errored} of {summary.samples} samples errored", hint="the same command tries them again"
        )
