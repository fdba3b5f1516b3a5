"""``Job``: a recipe made ready to run: cells with resolved profiles, the identity of their rows, and how to measure.

``open_job`` checks everything that can be checked before the first cell: keys, values, workloads, and that no swept key
is one this version or this machine would not honour, since all cells would then measure the same thing.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sim.models import EMBEDDED, RELEASE, find_model
from deepinfer_engine.sweep.recipe import LoadedSweep, Plan, Sweep, find_sweep
from deepinfer_engine.sweep.results import SCHEMA
from deepinfer_engine.sweep.run import Task, prepare

if TYPE_CHECKING:
    from deepinfer_engine.launch import Launch

Target = Literal["engine", "simulate"]


@dataclass(frozen=True)
class Job:
    """A sweep that may run. ``model`` is a checkpoint folder, or None for the embedded model."""

    loaded: LoadedSweep
    plan: Plan
    tasks: tuple[Task, ...]
    target: Target
    model: Path | None
    profile: str

    @property
    def sweep(self) -> Sweep:
        return self.loaded.sweep

    @property
    def embedded(self) -> bool:
        return self.target == "engine" and self.model is None

    @property
    def model_name(self) -> str:
        if self.target == "simulate":
            return RELEASE
        return EMBEDDED if self.model is None else self.model.resolve().name


def open_job(
    recipe: str,
    *,
    profile: str | None,
    sets: Sequence[str],
    model: Path | None,
    simulate: bool,
    repeats: int | None,
) -> Job:
    """Find the recipe, expand its grid for this model, and resolve every cell's profile."""
    loaded = find_sweep(recipe)
    embedded = not simulate and model is None
    plan = loaded.plan(embedded=embedded)
    if simulate:
        plan = replace(plan, repeats=1)
    elif repeats is not None:
        plan = replace(plan, repeats=repeats)
    name = profile or loaded.sweep.profile
    tasks = prepare(loaded, plan, name, sets, embedded=embedded)
    return Job(loaded, plan, tasks, "simulate" if simulate else "engine", model, name)


def identity(job: Job, machine: Mapping[str, Any] | None, commit: str | None) -> dict[str, Any]:
    """What must be the same for rows to belong to one folder."""
    config = find_model(job.model_name if job.model is None else str(job.model)).config
    return {
        "kind": "simulated" if job.target == "simulate" else "measured",
        "sweep": job.sweep.name,
        "grid": job.loaded.digest(embedded=job.embedded),
        "workload": digest(job.plan.workload),
        "profile": job.tasks[0].profile.profile.name,
        "profiles": digest([task.profile.digest for task in job.tasks]),
        "model": job.model_name,
        "model_config": config.digest,
        "machine": machine,
        "commit": commit,
    }


def manifest(job: Job, identity: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The manifest of a folder before its first row."""
    return {
        "schema": SCHEMA,
        "name": job.sweep.name,
        "description": job.sweep.description,
        "state": "running",
        "command": shlex.join(_without_folder(command)),
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cells": len(job.tasks),
        "repeats": job.plan.repeats,
        "rows": 0,
        "keys": list(job.plan.keys),
        "identity": dict(identity),
        "set": dict(job.plan.sets),
        "workload": dict(job.plan.workload),
        "grid": [dict(axis) for axis in job.plan.axes],
        "plots": [plot.model_dump(mode="json") for plot in job.sweep.plots],
    }


def _without_folder(command: Sequence[str]) -> list[str]:
    """The command line without where its results went: a folder may be moved, and its path says nothing about it."""
    out: list[str] = []
    skip = False
    for word in command:
        if not skip and word != "--dir" and not word.startswith("--dir="):
            out.append(word)
        skip = word == "--dir"
    return out


def row_origin(job: Job, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that every row carries, so that a row alone says where it is from."""
    here = manifest["identity"]["machine"] or {}
    return {
        "sweep": job.sweep.name,
        "profile": manifest["identity"]["profile"],
        "hardware": here.get("name"),
        "threads": here.get("threads"),
        "commit": manifest["identity"]["commit"],
    }


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_idle_axes(job: Job) -> Launch:
    """The launch of the first cell. Raises ``UsageError`` when a swept profile key is inactive or replaced here: its
    cells would be the same run."""
    from deepinfer_engine.launch import prepare as launch_of

    launches = [launch_of(task.profile.profile, job.model) for task in job.tasks]
    for task, launch in zip(job.tasks, launches, strict=True):
        idle = {i.key: f"is not built yet ({i.reason})" for i in launch.inactive}
        idle |= {r.key: f"would be {r.used} here ({r.reason})" for r in launch.replaced}
        for key in task.cell.profile:
            if key in idle:
                raise UsageError(
                    f"cell {task.cell.number} ({task.cell}): the swept key {key} {idle[key]}, "
                    "so the cell would not measure what it says",
                    hint="leave those values out of the grid, or --simulate",
                )
    return launches[0]
