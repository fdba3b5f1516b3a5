"""``deepinfer sweep``: a measurement at every point of a grid, as rows, pictures and one page; and comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli import options
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import UsageError

_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)


@dataclass(frozen=True)
class Ask:
    """The command line as given."""

    recipe: str | None
    profile: str | None
    sets: tuple[str, ...]
    model: Path | None
    folder: Path | None
    repeats: int | None
    resume: bool
    keep_going: bool
    simulate: bool
    plots: bool
    rows: tuple[Path, ...]
    form: OutputFormat
    out: Path | None
    quiet: bool


def command(
    ctx: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A sweep, a recipe file, or: list, draw.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME|PATH",
            help="Deployment profile; default: the recipe's.",
            autocompletion=options.complete_profile,
        ),
    ] = None,
    set_: options.Set = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; default: the embedded model.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Results folder; default: sweep-RECIPE-PROFILE.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and an estimate; run nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the results folder.")] = False,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, max=1000, help="Times a cell is measured.")] = None,
    continue_on_error: Annotated[
        bool, typer.Option("--continue-on-error", help="Note a cell that fails and go on; exit 5 at the end.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict every cell for the released model instead of running it.")
    ] = False,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Rows and page only; needs no matplotlib.")] = False,
    rows: Annotated[
        list[Path] | None,
        typer.Option("--rows", metavar="FILE|DIR", help="Draw these rows too, as series of their own; repeatable."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Ratio B / A of two results folders, with its noise."),
    ] = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure every point of a grid over profile and workload keys, and draw what was found.

    The results folder holds the manifest, every row (JSON lines and CSV), the requests, pictures and one page
    (index.html). Rows are kept as they come: an interrupted sweep continues with --resume. A folder is never
    overwritten. GPUs are counted by the profile that ran. Measured, simulated and vendor-read points have marks of
    their own and never share a line.

    \b
    Examples:
      deepinfer sweep list
      deepinfer sweep cpu-nano-quick
      deepinfer sweep decode-concurrency --repeats 5 --dir before
      deepinfer sweep decode-concurrency --profile decode-ep64 --simulate
      deepinfer sweep prefill-chunk --profile h200x8 --model /models/v41-flash --dry-run
      deepinfer sweep draw --dir before --rows h200.jsonl
      deepinfer sweep --compare before after
    """
    options.accept(format, *_FORMATS, verb="sweep")
    ask = Ask(
        recipe=recipe, profile=profile, sets=tuple(set_ or ()), model=model, folder=folder, repeats=repeats,
        resume=resume, keep_going=continue_on_error, simulate=simulate, plots=not no_plots, rows=tuple(rows or ()),
        form=format, out=out, quiet=quiet,
    )  # fmt: skip
    mode = "--compare" if compare is not None else recipe
    _refuse_idle_options(ctx, mode, dry_run=dry_run, simulate=simulate)
    from deepinfer_cli import sweep_job

    if compare is not None:
        if recipe is not None:
            raise UsageError("--compare takes two results folders and no recipe", hint="deepinfer sweep --compare A B")
        sweep_job.compare(ask, *compare)
    elif recipe is None:
        raise UsageError("which sweep?", hint="deepinfer sweep list shows the shipped ones")
    elif recipe == "list":
        sweep_job.show_list(ask)
    elif recipe == "draw":
        sweep_job.draw(ask)
    elif dry_run:
        sweep_job.dry_run(ask)
    else:
        sweep_job.run(ask)


#: Options that only deliver a result, by the mode that looks at nothing else.
_REPORTING = {"format", "out", "quiet", "recipe"}
_MODES = {"list": _REPORTING, "--compare": _REPORTING | {"compare"}, "draw": _REPORTING | {"folder", "rows"}}
_FLAGS = {"folder": "--dir", "set_": "--set", "continue_on_error": "--continue-on-error"}


def _refuse_idle_options(ctx: typer.Context, mode: str | None, *, dry_run: bool, simulate: bool) -> None:
    """Refuse every option on the command line that this mode would not look at."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if mode in _MODES:
        _refuse(given - _MODES[mode], f"not used by sweep {mode}")
    if dry_run:
        _refuse(given & {"resume", "rows"}, "not with --dry-run, which writes nothing")
    if simulate:
        _refuse(given & {"model", "repeats"}, "not with --simulate, which computes one figure for the released model")
    if "no_plots" in given:
        _refuse(given & {"rows"}, "only drawn, and --no-plots draws nothing")


def _refuse(names: set[str], why: str) -> None:
    if names:
        shown = ", ".join(sorted(_FLAGS.get(name, "--" + name.replace("_", "-")) for name in names))
        raise UsageError(f"{shown}: {why}", hint="deepinfer sweep --help")
