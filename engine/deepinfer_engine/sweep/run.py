"""Run the cells of a sweep one after the other, keeping every row as it comes. No torch: measuring is handed in.

``prepare`` resolves all cells before the first one runs, so that a wrong value in the last cell costs nothing. ``run``
stops at the first failure, or notes it and goes on; an interrupted cell leaves no row and is measured again on resume.
"""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.bench.recipe import LoadedRecipe
from deepinfer_engine.config.profile import LoadedProfile, load_profile
from deepinfer_engine.config.yaml import format_scalar
from deepinfer_engine.errors import DeepInferError, UsageError
from deepinfer_engine.sweep.grid import Cell, Scalar, order
from deepinfer_engine.sweep.recipe import LoadedSweep, Plan
from deepinfer_engine.sweep.results import Folder, Row


@dataclass(frozen=True)
class Task:
    """A cell with its profile resolved and its workload merged."""

    cell: Cell
    profile: LoadedProfile
    workload: LoadedRecipe


@dataclass(frozen=True)
class Measurement:
    """What a measurement gives: one flat row, and one object per request where there are requests."""

    row: Row
    requests: Sequence[Mapping[str, Any]] = ()


#: Measures one cell once.
Measure = Callable[[Task], Measurement]


@dataclass(frozen=True)
class Outcome:
    """What a run did: rows it added, cells that failed, rows with failed requests."""

    added: int
    failed: int
    partial: int


def prepare(sweep: LoadedSweep, plan: Plan, profile: str, sets: Sequence[str], *, embedded: bool) -> tuple[Task, ...]:
    """Every cell with profile and workload; ``--set`` wins over the recipe's values, and may not touch a swept key.

    Raises ``ProfileError`` that names the cell, or ``UsageError`` for a ``--set`` of an axis.
    """
    given = _given(sets)
    for key in given:
        if key in plan.keys:
            raise UsageError(f"--set {key}: the sweep varies this key", hint="edit the grid in a copy of the recipe")
    tasks = []
    for cell in plan.cells:
        values: dict[str, Scalar] = {**plan.sets, **cell.profile}
        texts = [f"{key}={format_scalar(value)}" for key, value in values.items() if key not in given]
        try:
            loaded = load_profile(profile, [*texts, *sets])
        except DeepInferError as exc:
            raise type(exc)(f"cell {cell.number} ({cell}): {exc.message}", hint=exc.hint) from None
        tasks.append(Task(cell, loaded, sweep.workload(cell, embedded=embedded)))
    return tuple(tasks)


def _given(sets: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in sets}


def run(
    folder: Folder,
    tasks: Sequence[Task],
    repeats: int,
    measure: Measure,
    *,
    common: Mapping[str, Any],
    keep_going: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measure what the folder lacks. Raises what a cell raised unless ``keep_going``; rows so far are kept.

    ``common`` are columns of every row; ``tell`` receives one line per cell.
    """
    by_number = {task.cell.number: task for task in tasks}
    todo = list(order([task.cell for task in tasks], repeats))
    done = folder.done
    held = sum((cell.number, repeat) in done for cell, repeat in todo)
    added = failed = partial = 0
    for cell, repeat in todo:
        if (cell.number, repeat) in done:
            continue
        task = by_number[cell.number]
        started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
        try:
            found = measure(task)
        except Exception as exc:  # a cell is a boundary: what it raised is kept in the failure file, then decided on
            folder.fail(_failure(cell, repeat, exc))
            tell(f"cell {cell.number} ({cell}) failed: {_message(exc)}")
            if not keep_going:
                raise
            failed += 1
            continue
        row = {
            **common,
            "cell": cell.number,
            "repeat": repeat,
            **cell.values,
            **found.row,
            "started_at": started.isoformat(timespec="seconds"),
            "wall_s": round(time.perf_counter() - clock, 3),
        }
        folder.append(row, found.requests)
        added += 1
        partial += bool(row.get("failed"))
        advance(held + added + failed, len(todo))
        tell(f"cell {cell.number} of {len(tasks)}, repeat {repeat} of {repeats} ({cell}): {row['wall_s']:.1f} s")
    return Outcome(added, failed, partial)


def _message(exc: Exception) -> str:
    return exc.message if isinstance(exc, DeepInferError) else f"{type(exc).__name__}: {exc}"


def _failure(cell: Cell, repeat: int, exc: Exception) -> dict[str, Any]:
    known = isinstance(exc, DeepInferError)
    return {
        "cell": cell.number,
        "repeat": repeat,
        **cell.values,
        "error": type(exc).__name__,
        "message": _message(exc),
        "hint": exc.hint if isinstance(exc, DeepInferError) else None,
        "exit_code": exc.exit_code if isinstance(exc, DeepInferError) else 1,
        "traceback": None if known else "".join(traceback.format_exception(exc)),
    }
