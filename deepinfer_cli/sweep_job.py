"""What ``deepinfer sweep`` does, mode by mode: list, dry run, run, draw, compare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import Interrupted, PartialFailure, UsageError

if TYPE_CHECKING:
    from deepinfer_cli.commands.sweep import Ask
    from deepinfer_engine.sweep.job import Job
    from deepinfer_engine.sweep.noise import Interval
    from deepinfer_engine.sweep.recipe import Plot
    from deepinfer_engine.sweep.results import Folder, Row
    from deepinfer_engine.sweep.run import Outcome
    from deepinfer_engine.sweep.series import Source
    from deepinfer_engine.sweep.table import Table


def show_list(ask: Ask) -> None:
    """The shipped sweeps, with what they vary here."""
    from deepinfer_engine.sweep.recipe import shipped_sweeps

    rows = []
    for loaded in shipped_sweeps():
        plan = loaded.plan(embedded=True)
        rows.append((loaded.sweep.name, loaded.sweep.profile, len(plan.cells), plan.repeats, ", ".join(plan.keys),
                     loaded.sweep.description))  # fmt: skip
    head = ("sweep", "profile", "cells", "repeats", "varies", "description")
    render.deliver(render.rows_text(ask.form, "sweep-list", head, rows), ask.out)


def job_of(ask: Ask) -> Job:
    """The recipe, its cells and their profiles, all checked; nothing has run."""
    from deepinfer_engine.sweep.job import open_job

    assert ask.recipe is not None
    return open_job(
        ask.recipe, profile=ask.profile, sets=ask.sets, model=ask.model, simulate=ask.simulate, repeats=ask.repeats
    )


def dry_run(ask: Ask) -> None:
    """Cells, what each will process, and how long it may take; writes nothing."""
    from deepinfer_engine.sweep.estimate import estimate
    from deepinfer_engine.sweep.job import refuse_idle_axes

    job = job_of(ask)
    if job.target == "engine":
        refuse_idle_axes(job)
    guess = estimate(job)
    head = ("cell", *job.plan.keys, "prompt_tokens", "output_tokens", "estimate_s")
    rows = [
        (t.cell.number, *t.cell.values.values(), g.prompt_tokens, g.output_tokens, g.seconds)
        for t, g in zip(job.tasks, guess.cells, strict=True)
    ]
    render.deliver(render.rows_text(ask.form, "sweep-dry-run", head, rows), ask.out)
    render.note(
        f"{len(job.tasks)} cells x {job.plan.repeats} repeats = {len(job.tasks) * job.plan.repeats} measurements; "
        f"{guess.summary}; results would go to {folder_of(ask, job)}",
        quiet=ask.quiet,
    )


def folder_of(ask: Ask, job: Job) -> Path:
    """The results folder: as given, or named after recipe and profile."""
    return ask.folder or Path(f"sweep-{job.sweep.name}-{job.tasks[0].profile.profile.name}")


def run(ask: Ask) -> None:
    """Measure what the folder lacks, then draw. Exit 5 when cells or requests failed, 130 when interrupted."""
    from deepinfer_cli.announce import launch_notes
    from deepinfer_engine.bench.result import source_commit
    from deepinfer_engine.sweep.job import identity, manifest, refuse_idle_axes, row_origin
    from deepinfer_engine.sweep.plot import require_matplotlib
    from deepinfer_engine.sweep.provenance import machine
    from deepinfer_engine.sweep.report import sources
    from deepinfer_engine.sweep.results import Folder

    job = job_of(ask)
    if ask.plots and job.sweep.plots:
        require_matplotlib()
    extra = sources(ask.rows)
    path = folder_of(ask, job)
    here = None
    if job.target == "engine":
        _set_threads(job)
        here = machine()
        launch_notes(refuse_idle_axes(job), quiet=ask.quiet)
    about = manifest(job, identity(job, here, source_commit()), ["deepinfer", *sys.argv[1:]])
    with Folder(path, about, resume=ask.resume) as folder:
        outcome = _measure(ask, job, folder, row_origin(job, about))
    _report(ask, path, job.sweep.plots if ask.plots else (), extra)
    problems = [
        f"{count} {what}"
        for count, what in ((outcome.failed, "cells failed"), (outcome.partial, "rows have failed requests"))
        if count
    ]
    if problems:
        raise PartialFailure(f"{path}: {', '.join(problems)}", hint="--resume tries failed cells again")


def _set_threads(job: Job) -> None:
    """Thread defaults hold for the process, so they follow the widest cell; before torch is imported."""
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(max(task.profile.profile.sched.max_rows_per_rank for task in job.tasks))


def _measure(ask: Ask, job: Job, folder: Folder, common: Mapping[str, Any]) -> Outcome:
    """Run the cells; the folder's state says how it ended, whatever ends it."""
    from deepinfer_engine.sweep.run import run as run_cells
    from deepinfer_engine.sweep.target import measure_of

    total = len(job.tasks) * job.plan.repeats
    if folder.rows:
        render.note(f"continuing {folder.path}: {len(folder.rows)} of {total} rows are there", quiet=ask.quiet)
    state = "stopped"
    try:
        with _progress(job.sweep.name, total, quiet=ask.quiet) as (advance, tell):
            outcome = run_cells(
                folder,
                job.tasks,
                job.plan.repeats,
                measure_of(job), common=common, keep_going=ask.keep_going,
                advance=advance, tell=tell,
            )  # fmt: skip
        state = "partial" if outcome.failed else "complete"
        return outcome
    except KeyboardInterrupt:
        state = "interrupted"
        raise Interrupted(
            f"interrupted; {len(folder.rows)} of {total} rows are in {folder.path}",
            hint="the same command with --resume continues there",
        ) from None
    finally:
        folder.finish(state)


@contextmanager
def _progress(label: str, total: int, *, quiet: bool) -> Iterator[tuple[Callable[[int, int], None], Callable]]:
    """A bar on a terminal; elsewhere one line per measurement."""
    if quiet or sys.stderr.isatty():
        with render.progress(label, quiet=quiet) as advance:
            advance(0, total)
            yield advance, lambda text: None
    else:
        yield lambda done, total: None, render.note


def _report(ask: Ask, path: Path, plots: Sequence[Plot], extra: Sequence[Source]) -> None:
    """Draw a folder and deliver its table."""
    from deepinfer_engine.sweep.report import PAGE, table_of, write_report
    from deepinfer_engine.sweep.results import read_recorded

    for text in write_report(path, plots, extra):
        render.note(text, quiet=ask.quiet)
    recorded = read_recorded(path)
    render.deliver(_result(ask.form, table_of(recorded), recorded.rows), ask.out)
    render.note(f"results: {path / PAGE}", quiet=ask.quiet)


def _result(form: OutputFormat, table: Table, rows: Sequence[Row]) -> str:
    """The table for people; every row as it was measured for machines."""
    from deepinfer_engine.sweep import columns
    from deepinfer_engine.sweep.noise import Interval
    from deepinfer_engine.sweep.results import csv_text
    from deepinfer_engine.sweep.table import figure_text

    if form is OutputFormat.table:
        lines = [[figure_text(v) if isinstance(v, Interval) else v for v in line] for line in table.lines]
        return render.table([columns.label(c) for c in table.columns], lines)
    if form is OutputFormat.csv:
        return csv_text(rows)
    if form is OutputFormat.jsonl:
        return "".join(render.json_text(row, indent=None) for row in rows)
    return render.json_text(render.document("sweep-rows", {"rows": list(rows)}))


def draw(ask: Ask) -> None:
    """Draw a results folder again, with other runs beside it."""
    from deepinfer_engine.sweep.recipe import plots_of
    from deepinfer_engine.sweep.report import sources
    from deepinfer_engine.sweep.results import read_recorded

    if ask.folder is None:
        raise UsageError("sweep draw needs --dir DIR", hint="give a results folder that sweep wrote")
    plots = plots_of(read_recorded(ask.folder))
    _report(ask, ask.folder, plots, sources(ask.rows))


def compare(ask: Ask, a: Path, b: Path) -> None:
    """B over A, cell by cell, with what the repeats say about noise."""
    from deepinfer_engine.sweep.compare import compare as compare_runs
    from deepinfer_engine.sweep.results import read_recorded

    found = compare_runs(read_recorded(a), read_recorded(b))
    head = ("cell", "metric", "a", "b", "ratio", "low", "high", "verdict")
    rows = [_compared(line.cell, line.metric, line.a, line.b, line.ratio, line.verdict) for line in found.lines]
    rows += [_compared("all cells", metric, None, None, r, "") for metric, r in found.totals.items()]
    render.deliver(render.rows_text(ask.form, "sweep-compare", head, rows), ask.out)
    judged = [line for line in found.lines if line.verdict in ("better", "worse", "within noise")]
    unknown = sum(line.verdict == "noise unknown" for line in found.lines)
    apart = sum(line.verdict != "within noise" for line in judged)
    if judged:
        render.note(
            f"{apart} of {len(judged)} ratios differ beyond their 95 % interval; about {0.05 * len(judged):.1f} would "
            "by chance alone",
            quiet=ask.quiet,
        )
    if unknown:
        render.note(f"{unknown} ratios have no interval: measure again with --repeats 3 or more", quiet=ask.quiet)
    for side, cells in ((a, found.only_a), (b, found.only_b)):
        if cells:
            render.note(f"only in {side}: {', '.join(cells)}", quiet=ask.quiet)


def _compared(
    cell: str, metric: str, a: float | None, b: float | None, ratio: Interval | None, verdict: str
) -> tuple[render.Cell, ...]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    parts = (ratio.mean, ratio.low, ratio.high) if ratio else (None, None, None)
    return (cell, metric, rounded(a), rounded(b), *(rounded(p) for p in parts), verdict)
