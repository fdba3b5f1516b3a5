"""``deepinfer eplb-plan STATS``: plan expert placement from routing statistics of any engine, offline.

Reads statistics, prints a report, writes the plan beside the input and, on request, in peers' formats. ``--bench
RECIPE`` measures the planner against the peers that are installed.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepinfer_engine.eplb.loops import Loops
    from deepinfer_engine.eplb.plan import ExpertPlan
    from deepinfer_engine.eplb.planner import Job, Outcome


class Format(StrEnum):
    table = "table"
    json = "json"


class Dispatch(StrEnum):
    even = "even"
    hash = "hash"
    lp = "lp"


class Loop(StrEnum):
    auto = "auto"
    compiled = "compiled"
    numpy = "numpy"


class Input(StrEnum):
    auto = "auto"
    npz = "npz"
    npy = "npy"
    sglang = "sglang"
    deepseek = "deepseek"
    trtllm = "trtllm"


SIZES, PLANNING, JUDGING, OUTPUT, BENCH = "Sizes", "Planning", "Judging", "Output", "Benchmark"


def command(
    stats: Annotated[
        Path | None, typer.Argument(help="Statistics: .npz, .npy, .pt, .json, a folder, or nano.", show_default=False)
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(max=4096, help="Expert-parallel ranks; default: the file's ep.", rich_help_panel=SIZES)
    ] = None,
    slots_per_rank: Annotated[
        int | None, typer.Option(help="Expert slots on every rank.", rich_help_panel=SIZES)
    ] = None,
    redundant_per_rank: Annotated[
        int | None, typer.Option(help="Slots per rank beyond the even share; default 1.", rich_help_panel=SIZES)
    ] = None,
    alive: Annotated[
        str | None, typer.Option(help="Ranks that are alive, for example 0-11,13.", rich_help_panel=SIZES)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes, to keep expert groups inside one.", rich_help_panel=SIZES)] = 1,
    groups: Annotated[
        int | None, typer.Option(help="Expert groups; default: one per node.", rich_help_panel=SIZES)
    ] = None,
    input_kind: Annotated[
        Input, typer.Option("--input", help="Form of the statistics.", rich_help_panel=PLANNING)
    ] = Input.auto,
    recorded_under: Annotated[
        Path | None, typer.Option(help="Plan whose physical slots were counted.", rich_help_panel=PLANNING)
    ] = None,
    old: Annotated[
        Path | None, typer.Option(help="Plan that runs now; moves away from it cost.", rich_help_panel=PLANNING)
    ] = None,
    move_price: Annotated[
        float, typer.Option(help="Price of a received expert, in average rank costs.", rich_help_panel=PLANNING)
    ] = 0.9,
    max_moves: Annotated[
        int | None, typer.Option(help="Most experts received per layer.", rich_help_panel=PLANNING)
    ] = None,
    window: Annotated[int | None, typer.Option(help="Use only the newest steps.", rich_help_panel=PLANNING)] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads; the plan is the same for any number.", rich_help_panel=PLANNING)
    ] = None,
    loop: Annotated[
        Loop, typer.Option(help="Inner loop; both return the same plan.", rich_help_panel=PLANNING)
    ] = Loop.auto,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the compiled loop is kept.", rich_help_panel=PLANNING)
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="Newest fraction to judge on; default 0.2 from 50 steps.", rich_help_panel=JUDGING),
    ] = None,
    dispatch: Annotated[
        Dispatch, typer.Option(help="How tokens choose a replica, for judging.", rich_help_panel=JUDGING)
    ] = Dispatch.even,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hash dispatch.", rich_help_panel=JUDGING)] = 0,
    expert_bytes: Annotated[
        int | None, typer.Option(help="Bytes of one expert; default V4.1-Flash FP4.", rich_help_panel=JUDGING)
    ] = None,
    link_gb_s: Annotated[
        float | None, typer.Option(help="Link bandwidth per rank, GB/s; default 50.", rich_help_panel=JUDGING)
    ] = None,
    moe_ms: Annotated[
        float | None, typer.Option(help="MoE time of a balanced step, ms; default 10.", rich_help_panel=JUDGING)
    ] = None,
    horizon_steps: Annotated[int, typer.Option(help="Steps until the next re-plan.", rich_help_panel=JUDGING)] = 10_000,
    ladder: Annotated[
        bool, typer.Option(help="Also plan 0, 1, 2 and 4 redundant experts per rank.", rich_help_panel=JUDGING)
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Plan file; default: beside the input.", rich_help_panel=OUTPUT)
    ] = None,
    export: Annotated[
        list[str] | None, typer.Option(help="KIND:PATH, KIND sglang|trtllm|ascend|npz.", rich_help_panel=OUTPUT)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of rank loads before and after.", rich_help_panel=OUTPUT)
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="Form of the report.", rich_help_panel=OUTPUT)
    ] = Format.table,
    bench: Annotated[
        Path | None, typer.Option(help="Compare planners on this recipe instead.", rich_help_panel=BENCH)
    ] = None,
) -> None:
    """Plan where experts live from routing statistics.

    STATS alone is enough when it is a deepinfer statistics file. The plan is written beside it as NAME.plan.json; when
    moving does not pay, that is the old plan. nano stands for the statistics shipped with the embedded model.
    """  # fmt: skip
    from deepinfer_engine.errors import UsageError

    threads = threads if threads is not None else (os.cpu_count() or 1)
    if bench is not None:
        if stats is not None:
            raise UsageError("--bench makes its own statistics", hint="drop the file, or drop --bench")
        return _bench(bench, threads, loop, cache_dir, format_, out)
    if stats is None:
        raise UsageError("no statistics file", hint="deepinfer eplb-plan stats.npz")

    from deepinfer_engine.config.resources import embedded_or
    from deepinfer_engine.eplb import planner
    from deepinfer_engine.eplb.foreign_plans import read_any_plan
    from deepinfer_engine.eplb.interchange import read_statistics
    from deepinfer_engine.eplb.plan import write_plan
    from deepinfer_engine.eplb.plot import require_matplotlib
    from deepinfer_engine.eplb.policy import PlanSettings
    from deepinfer_engine.sim.models import EMBEDDED

    given, stats = stats, embedded_or(stats, EMBEDDED, "stats.npz")
    exports = [_export_target(text) for text in export or []]
    if plot is not None:
        require_matplotlib()
    settings = PlanSettings(move_price=move_price, max_moves=max_moves, threads=threads)
    if max_moves is not None and old is None:
        raise UsageError("--max-moves caps moves away from an old plan", hint="give --old PLAN")
    economics = _economics(expert_bytes, link_gb_s, moe_ms, horizon_steps)
    sizes = planner.Sizes(ranks, slots_per_rank, redundant_per_rank, _rank_list(alive), nodes, groups)
    under = None if recorded_under is None else read_any_plan(recorded_under, ranks)
    read, notes = read_statistics(stats, input_kind.value, under)
    old_plan = None if old is None else read_any_plan(old, ranks or read.ep, read.experts)
    job = planner.Job(read, sizes, old_plan, settings, economics, holdout, window, dispatch.value, seed, ladder)
    loops, why = choose_loops(loop, cache_dir)
    outcome = planner.run_job(job, loops)

    target = out or given.with_name(  # what is shipped with the embedded model is planned in the current folder
        f"{given.name.removesuffix(given.suffix) if stats.is_file() else given.name}.plan.json"
    )
    for path in (target, *(path for _, path in exports), *filter(None, (plot,))):
        _refuse_overwrite(path, stats, old, recorded_under)
    write_plan(outcome.plan, target)
    written = [f"plan: {target}"]
    for kind, path in exports:
        written += _exported(outcome.plan, kind, path)
    if plot is not None:
        from deepinfer_engine.eplb.plot import plot_loads

        plot_loads(outcome.test_MLE, outcome.before, outcome.candidate, plot)
        written.append(f"plot: {plot}")
    _print(outcome, job, [*notes, *outcome.report.notes, *why], written, format_, target)


def choose_loops(loop: Loop, cache_dir: Path | None) -> tuple[Loops, list[str]]:
    """The inner loops to run and, when ``auto`` could not have the compiled ones, why."""
    from deepinfer_engine.eplb import native
    from deepinfer_engine.eplb.loops import NumpyLoops
    from deepinfer_engine.errors import NotReadyError

    if loop is Loop.numpy:
        return NumpyLoops(), []
    try:
        return native.load(cache_dir), []
    except NotReadyError as e:
        if loop is Loop.compiled:
            raise
        return NumpyLoops(), [f"numpy loop (same plan, slower): {e.message}"]


def _rank_list(text: str | None) -> tuple[int, ...] | None:
    """Ranks of ``0-11,13``; UsageError for anything else."""
    from deepinfer_engine.errors import UsageError

    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        lo, dash, hi = part.strip().partition("-")
        if not lo.isdecimal() or (dash and not hi.isdecimal()) or (dash and int(hi) < int(lo)) or int(hi or lo) > 65535:
            raise UsageError(f"--alive {text!r}: {part!r} is not a rank or a range", hint="for example 0-11,13")
        ranks.update(range(int(lo), int(hi or lo) + 1))
    return tuple(sorted(ranks))


def _export_target(text: str) -> tuple[str, Path]:
    from deepinfer_engine.eplb.foreign_plans import EXPORTS
    from deepinfer_engine.errors import UsageError

    kind, colon, path = text.partition(":")
    if not colon or not path or kind not in EXPORTS:
        raise UsageError(f"--export {text!r}, expected KIND:PATH with KIND one of {', '.join(EXPORTS)}")
    return kind, Path(path)


def _economics(expert_bytes: int | None, link_gb_s: float | None, moe_ms: float | None, horizon_steps: int) -> Any:
    from deepinfer_engine.eplb.report import FLASH_EXPERT_BYTES, Economics

    assumed = []
    if expert_bytes is None:
        assumed.append(f"expert of {FLASH_EXPERT_BYTES / 1e6:.1f} MB (V4.1-Flash FP4)")
    if link_gb_s is None:
        assumed.append("link of 50 GB/s")
    if moe_ms is None:
        assumed.append("10 ms of MoE per balanced step")
    return Economics(
        expert_bytes=FLASH_EXPERT_BYTES if expert_bytes is None else expert_bytes,
        link_gb_s=50.0 if link_gb_s is None else link_gb_s,
        moe_ms=10.0 if moe_ms is None else moe_ms,
        horizon_steps=horizon_steps,
        assumed=tuple(assumed),
    )


def _refuse_overwrite(target: Path, *inputs: Path | None) -> None:
    from deepinfer_engine.errors import UsageError

    if any(p is not None and p.exists() and target.exists() and p.samefile(target) for p in inputs):
        raise UsageError(
            f"{target} would be written, but is one of the inputs", hint="give another --out, --export or --plot"
        )


def _exported(plan: ExpertPlan, kind: str, path: Path) -> list[str]:
    from deepinfer_engine.eplb.foreign_plans import export_plan

    return [f"{kind}: {path}", *(f"  {note}" for note in export_plan(plan, kind, path))]


def _print(outcome: Outcome, job: Job, notes: list[str], written: list[str], format_: Format, target: Path) -> None:
    if format_ is Format.json:
        import json

        values = outcome.report.to_dict() | {"notes": notes, "plan": str(target), "plan_digest": outcome.plan.digest()}
        typer.echo(json.dumps(values, allow_nan=False))
        return
    from deepinfer_cli.commands.eplb_tables import print_report

    print_report(outcome, job, notes, written)


def _bench(recipe: Path, threads: int, loop: Loop, cache_dir: Path | None, format_: Format, out: Path | None) -> None:
    import json

    from deepinfer_engine.eplb import bench, replan

    loops, why = choose_loops(loop, cache_dir)
    wanted = bench.read_recipe(recipe)

    def log(text: str) -> None:
        typer.echo(text, err=True)

    if wanted.replans:
        result = replan.run_replan(wanted, wanted.replans, loops, threads, log)
    else:
        result = bench.run_bench(wanted, loops, threads, log)
    values = result.to_dict()
    if out is not None:
        from deepinfer_engine.eplb.plan import write_text

        write_text(out, json.dumps(values, allow_nan=False) + "\n")
    if format_ is Format.json:
        typer.echo(json.dumps(values, allow_nan=False))
        return
    from deepinfer_cli.commands.eplb_tables import print_bench, print_replan

    if isinstance(result, bench.BenchResult):
        print_bench(result, why)
    else:
        print_replan(result, why)
