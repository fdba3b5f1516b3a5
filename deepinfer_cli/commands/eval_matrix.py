"""``deepinfer eval TASK --matrix``: the same questions under every combination of the deployment's axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deepinfer_cli import options, render
from deepinfer_cli.commands import eval as eval_command
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import CheckFailed, PartialFailure, UsageError

if TYPE_CHECKING:
    from deepinfer_cli.commands.eval import Ask
    from deepinfer_engine.evals.log import LogContent
    from deepinfer_engine.evals.matrix import Cell, Outcome

_COLUMNS = ("numerics", "replay", "spec", "ep", "%", "low", "high", "p", "result", "reason")
_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)
#: Questions of a matrix without --limit: nine cells then take about a minute on the embedded model.
_LIMIT = 40


def run_matrix(ask: Ask, *, dry_run: bool) -> None:
    """Run every legal cell, compare each with the first, and show the refused ones with the validator's sentence."""
    from deepinfer_engine import launch
    from deepinfer_engine.evals.grade import require_grader
    from deepinfer_engine.evals.matrix import cells, judge
    from deepinfer_engine.evals.run import Job
    from deepinfer_engine.weights.checkpoint import Checkpoint

    options.accept(ask.form, *_FORMATS, verb="eval --matrix")
    ask = replace(ask, limit=ask.limit or _LIMIT)
    loaded, items = eval_command.questions(ask, dry_run=dry_run)
    require_grader(loaded.task.grader)
    if loaded.task.grader == "judge":
        raise UsageError("--matrix needs a task that is graded here")
    plan = eval_command.plan_of(ask, loaded)
    directory = launch.embedded_dir(launch.EMBEDDED) if ask.model is None else ask.model
    every = list(cells(ask.profile, ask.sets, Checkpoint.open(directory).config))
    if dry_run:
        rows = [(*c.values, None, None, None, None, "refused" if c.refused else "would run", c.refused) for c in every]
        _deliver(ask, rows)
        return
    assert items is not None
    runs: list[tuple[Cell, LogContent]] = []
    for cell in every:
        if cell.loaded is None:
            continue
        render.note("cell " + ", ".join(cell.values), quiet=ask.quiet)
        answerer = eval_command.launched(cell.loaded, plan, ask)
        content, _ = eval_command.run_job(Job(loaded, items, plan), answerer, ask)
        runs.append((cell, content))
    if not runs:
        raise UsageError("every combination is refused", hint="deepinfer eval TASK --matrix --dry-run shows why")
    outcomes = judge(runs)
    found = {id(o.cell): o for o in outcomes}
    _deliver(ask, [_row(cell, found.get(id(cell))) for cell in every])
    _check(outcomes)


def _row(cell: Cell, outcome: Outcome | None) -> tuple[render.Cell, ...]:
    from deepinfer_engine.evals.report import percent

    if outcome is None:
        return (*cell.values, None, None, None, None, "refused", cell.refused)
    low, high = outcome.summary.avg.interval or (0.0, 0.0)
    p = outcome.comparison.p_value if outcome.comparison else None
    word = "first" if outcome.comparison is None else "agrees" if outcome.agrees else "differs"
    score = outcome.summary.avg.value
    return (*cell.values, None if score is None else percent(score), percent(low), percent(high), p, word, None)


def _deliver(ask: Ask, rows: Sequence[Sequence[render.Cell]]) -> None:
    if ask.form is OutputFormat.table:
        ran = [row[:-1] for row in rows if row[-1] is None]
        refused = _grouped([row for row in rows if row[-1] is not None])
        text = render.table(_COLUMNS[:-1], ran)
        if refused:
            text += "\nrefused by the validator:\n\n" + render.table((*_COLUMNS[:4], "reason"), refused)
    else:
        text = render.rows_text(ask.form, "eval-matrix", _COLUMNS, rows)
    render.deliver(text, ask.out)


def _grouped(rows: Sequence[Sequence[render.Cell]]) -> list[tuple[render.Cell, ...]]:
    """Refused combinations by reason: one row where they are all combinations of some values of the axes."""
    groups: dict[render.Cell, list[Sequence[render.Cell]]] = {}
    for row in rows:
        groups.setdefault(row[-1], []).append(row)
    out: list[tuple[render.Cell, ...]] = []
    for reason, group in groups.items():
        values = [list(dict.fromkeys(str(row[axis]) for row in group)) for axis in range(4)]
        if math.prod(map(len, values)) == len(group):
            out.append((*("|".join(names) for names in values), reason))
        else:
            out += [(*row[:4], reason) for row in group]
    return out


def _check(outcomes: list[Outcome]) -> None:
    different = [o for o in outcomes if not o.agrees]
    if different:
        names = "; ".join(", ".join(o.cell.values) for o in different)
        raise CheckFailed(f"{len(different)} of {len(outcomes)} cells differ from the first beyond noise: {names}")
    errored = sum(o.summary.outcomes["errored"] for o in outcomes)
    if errored:
        raise PartialFailure(f"{errored} samples errored", hint="the same command tries them again")
