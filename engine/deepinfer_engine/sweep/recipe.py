"""``Sweep``: a sweep as a YAML recipe: which profile, which workload, which keys vary, and what is drawn.

A recipe is found by name among the shipped ones or given as a path. Every problem is reported at once with file, line
and column. ``embedded`` replaces sections when the embedded model runs: it is small, so its grid is small too. The
digest covers what decides a row; descriptions and plots do not.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.bench.recipe import LoadedRecipe, Recipe, check_recipe
from deepinfer_engine.bench.recipe import known_keys as workload_keys
from deepinfer_engine.config import complaint, resources
from deepinfer_engine.config.schema import Name, known_keys
from deepinfer_engine.config.yaml import Document, KeyPath, format_scalar, read_yaml
from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.sweep.grid import WORKLOAD, Axis, Cell, Scalar, as_values, expand, same
from deepinfer_engine.sweep.results import Recorded

Text = Annotated[str, Field(min_length=1, max_length=1024)]
#: Key to value; what the keys may be is checked where the profile and the workload are known.
Values = dict[str, Any]
#: Keys of a workload recipe that a sweep fills in itself.
_WORKLOAD_LABELS = ("schema_version", "kind", "name", "description")
#: More cells than this are a mistake in the grid: at a second each they would run for more than an hour.
MAX_CELLS = 4096
MAX_REPEATS = 1000


class Section(BaseModel):
    """Strict, frozen, no extra keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Plot(Section):
    """One picture: a curve of y over x with a line per value of ``by``; the gain of y over the cell that has the base
    value of one swept key; or the Pareto front of two speeds."""

    name: Name = Field(description="name of the file")
    kind: Literal["curve", "gain", "pareto"] = Field(default="curve", description="form of the picture")
    title: Text = Field(description="line above the picture")
    x: Text | None = Field(default=None, description="column on the horizontal axis (curve)")
    y: Text | None = Field(default=None, description="column on the vertical axis (curve)")
    by: Annotated[tuple[Text, ...], Field(strict=False)] = Field(default=(), description="one line per value of these")
    over: Values | None = Field(default=None, description="swept key with the value that others are compared to (gain)")
    x_scale: Literal["linear", "log"] = Field(default="linear", description="scale of the horizontal axis")
    y_scale: Literal["linear", "log"] = Field(default="linear", description="scale of the vertical axis")
    where: Values | None = Field(default=None, description="rows drawn: every key has (one of) its values")
    vendor: Literal["prefill-chunk", "decode", "decode-by-ep", "dspark"] | None = Field(
        default=None, description="vendor-read points drawn beside the rows"
    )


class Part(Section):
    """What decides the cells; the ``embedded`` section of a recipe replaces these keys one by one."""

    set: Values | None = Field(default=None, description="profile keys of every cell")
    workload: Values | None = Field(default=None, description="workload of every cell, as in a bench recipe")
    grid: Annotated[tuple[Values, ...], Field(strict=False)] | None = Field(
        default=None, description="axes: a key with its values, or several keys that advance together"
    )
    exclude: Annotated[tuple[Values, ...], Field(strict=False)] | None = Field(
        default=None, description="cells left out: every key of an entry has (one of) its values"
    )
    repeats: int | None = Field(default=None, ge=1, le=MAX_REPEATS, description="times every cell is measured")


class Sweep(Part):
    """One sweep. ``find_sweep`` builds it."""

    schema_version: Literal[1] = Field(description="version of this schema")
    kind: Literal["sweep"] = Field(description="what this recipe describes")
    name: Name = Field(description="name of the sweep and of its results folder")
    description: Text = Field(description="one line for the list")
    profile: Text = Field(default="cpu-nano", description="deployment profile, replaced by --profile")
    embedded: Part = Field(default_factory=Part, description="replaces keys when the embedded model runs")
    plots: Annotated[tuple[Plot, ...], Field(strict=False)] = Field(default=(), description="pictures")


@dataclass(frozen=True)
class Plan:
    """The part of a recipe that one run uses, resolved: base values, cells and repeats."""

    sets: Mapping[str, Scalar]
    workload: Mapping[str, Any]
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
    repeats: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Swept keys in axis order."""
        return tuple(key for axis in self.axes for key in axis)


@dataclass(frozen=True)
class LoadedSweep:
    """A valid recipe, where it is from, and its places for messages."""

    sweep: Sweep
    source: Path
    document: Document

    def plan(self, *, embedded: bool) -> Plan:
        """Cells for the embedded model or for another one. UsageError when nothing is left."""
        return _plan(self, embedded=embedded)

    def workload(self, cell: Cell, *, embedded: bool) -> LoadedRecipe:
        """The workload of a cell, checked; ``UsageError`` with the place of what is wrong."""
        tree, at = _chosen(self.sweep, embedded=embedded)["workload"]
        own = {"schema_version": 1, "kind": "workload", "name": self.sweep.name, "description": self.sweep.description}
        inner = Document(
            {**own, **copy.deepcopy(tree)},
            self.document.where,
            {path[len(at) :]: place for path, place in self.document.keys.items() if path[: len(at)] == at},
            {path[len(at) :]: place for path, place in self.document.values.items() if path[: len(at)] == at},
            {},
        )
        sets = [f"{key}={format_scalar(value)}" for key, value in cell.workload.items()]
        try:
            return check_recipe(inner, self.source.parent, sets)
        except UsageError as exc:
            raise UsageError(f"cell {cell.number} ({cell}): {exc.message}", hint=exc.hint) from None

    def digest(self, *, embedded: bool) -> str:
        """SHA-256 of what decides the rows: base values, axes and exclusions; not the repeats, which may grow."""
        part = _chosen(self.sweep, embedded=embedded)
        kept = {name: value for name, (value, _) in part.items() if name != "repeats"}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, allow_nan=False).encode()).hexdigest()


def shipped_sweeps() -> list[LoadedSweep]:
    """All shipped recipes by name; a broken one is a ``UsageError`` that names it."""
    return [load_sweep(path) for path in sorted((resources.data_dir("recipes") / "sweeps").glob("*.yaml"))]


def find_sweep(name: str) -> LoadedSweep:
    """A shipped sweep by name, or any recipe by path. ``UsageError`` with the nearest name."""
    if "/" in name or "\\" in name or name.endswith((".yaml", ".yml")):
        return load_sweep(Path(name), where=name)
    paths = {path.stem: path for path in (resources.data_dir("recipes") / "sweeps").glob("*.yaml")}
    if name in paths:
        return load_sweep(paths[name])
    near = difflib.get_close_matches(name, paths, n=1)
    guess = f"; nearest is {near[0]!r}" if near else ""
    raise UsageError(
        f"no sweep is called {name!r}{guess}",
        hint="deepinfer sweep list shows them; a recipe file needs a / or ends with .yaml",
    )


def load_sweep(path: Path, *, where: str | None = None) -> LoadedSweep:
    """Read and check one recipe; ``UsageError`` lists every problem with its place."""
    document = read_yaml(path, where=where or path.name)
    try:
        sweep = Sweep.model_validate(document.value)
    except ValidationError as exc:
        found = [
            complaint.from_error(e, _known_keys) for e in exc.errors(include_url=False, include_context=True)
        ]  # fmt: skip
        raise _invalid(
            document, [f"{document.at_key(c.path) if c.on_key else document.at_value(c.path)}: {c.text}" for c in found]
        ) from None
    lines = [f"{at}: {text}" for at, text in _problems(sweep, document)]
    if lines:
        raise _invalid(document, lines)
    return LoadedSweep(sweep, path, document)


def plots_of(recorded: Recorded) -> tuple[Plot, ...]:
    """The pictures that a results folder was made with; ``ArtefactError`` when its manifest does not hold them."""
    if not recorded.manifest:
        raise UsageError(f"{recorded.path}: is no results folder", hint="give a folder that sweep wrote")
    try:
        return tuple(Plot.model_validate(plot) for plot in recorded.manifest.get("plots", ()))
    except ValidationError as exc:
        raise ArtefactError(f"{recorded.path}: its manifest has a damaged plot: {exc.errors()[0]['msg']}") from None


def _invalid(document: Document, lines: list[str]) -> UsageError:
    if len(lines) == 1:
        return UsageError(lines[0])
    return UsageError("\n".join([f"{document.where}: {len(lines)} problems", *(f"  {line}" for line in lines)]))


def _known_keys(path: tuple[str, ...]) -> list[str] | None:
    """Keys of a section of the recipe; list positions are steps of the path too."""
    sections: dict[tuple[str, ...], type[Section]] = {(): Sweep, ("embedded",): Part}
    if len(path) == 2 and path[0] == "plots":
        return list(Plot.model_fields)
    section = sections.get(path)
    return None if section is None else list(section.model_fields)


# ------------------------------------------------------------------ checks


def _problems(sweep: Sweep, document: Document) -> Iterator[tuple[str, str]]:
    """What the schema cannot say, as (place, sentence)."""
    for prefix, part in (((), sweep), (("embedded",), sweep.embedded)):
        yield from _part_problems(part, prefix, document)
    if sweep.grid is None:
        yield document.at_value(()), "the required key 'grid' is missing"
    if sweep.workload is None:
        yield document.at_value(()), "the required key 'workload' is missing"
    names: set[str] = set()
    for i, plot in enumerate(sweep.plots):
        at = document.at_value(("plots", i, "name"))
        if plot.name in names:
            yield at, f"two plots are called {plot.name!r}"
        names.add(plot.name)
        if plot.kind != "pareto" and not (plot.x and plot.y):
            yield at, f"the {plot.kind} {plot.name!r} needs x and y"
        if (plot.kind == "gain") != (plot.over is not None and len(plot.over) == 1):
            yield at, f"{plot.name!r}: over, with one key, goes with kind gain and only with it"
        if plot.kind == "gain" and plot.by:
            yield at, f"{plot.name!r}: a gain has a line per value of the key under over; by has no use"
        if plot.kind == "pareto" and (plot.x or plot.y):
            yield at, f"{plot.name!r} is a Pareto front: its axes are tok/s/user and tok/s/GPU, x and y have no use"


def _part_problems(part: Part, prefix: KeyPath, document: Document) -> Iterator[tuple[str, str]]:
    for key in part.workload or {}:
        if key in _WORKLOAD_LABELS:
            yield document.at_key((*prefix, "workload", key)), f"{key} of a sweep's workload is the sweep's own"
    for key, value in (part.set or {}).items():
        here = (*prefix, "set", key)
        if text := _profile_key_problem(key):
            yield document.at_key(here), text
        elif isinstance(value, dict | list):
            yield document.at_value(here), f"{key} is {complaint.found(value)}, expected one value"
    seen: dict[str, int] = {}
    for i, axis in enumerate(part.grid or ()):
        yield from _axis_problems(axis, (*prefix, "grid", i), document)
        for key in axis:
            if key in seen:
                yield document.at_key((*prefix, "grid", i, key)), f"{key} is an axis already"
            elif key in (part.set or {}):
                yield document.at_key((*prefix, "grid", i, key)), f"{key} is given under set too; keep one of them"
            seen[key] = i
    if part.grid is not None:
        yield from _exclusion_problems(part, prefix, document)


def _axis_problems(axis: Values, path: KeyPath, document: Document) -> Iterator[tuple[str, str]]:
    if not axis:
        yield document.at_value(path), "an axis without a key"
    lengths: dict[str, int] = {}
    for key, values in axis.items():
        here = (*path, key)
        text = _workload_key_problem(key) if key.startswith(WORKLOAD) else _profile_key_problem(key)
        if text:
            yield document.at_key(here), text
        if not isinstance(values, list) or not values:
            yield document.at_value(here), f"{key} is {complaint.found(values)}, expected a list of values"
            continue
        lengths[key] = len(values)
        for n, value in enumerate(values):
            if isinstance(value, dict | list):
                yield document.at_value((*here, n)), f"{key} has {complaint.found(value)} among its values"
            elif len(axis) == 1 and any(same(value, earlier) for earlier in values[:n]):
                yield document.at_value((*here, n)), f"{key} has {complaint.found(value)} twice"
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        yield document.at_value(path), f"keys that advance together need equally many values: {counts}"


def _exclusion_problems(part: Part, prefix: KeyPath, document: Document) -> Iterator[tuple[str, str]]:
    known = {key: values for axis in part.grid or () for key, values in axis.items()}
    for i, rule in enumerate(part.exclude or ()):
        if not rule:
            yield document.at_value((*prefix, "exclude", i)), "an empty exclusion would leave every cell out"
        for key, wanted in rule.items():
            here = (*prefix, "exclude", i, key)
            if key not in known:
                yield document.at_key(here), f"{key} is no axis{complaint.nearest(key, list(known))}"
                continue
            if not isinstance(known[key], list):
                continue  # complained about already
            for value in as_values(wanted):
                if not any(same(value, v) for v in known[key]):
                    yield document.at_value(here), f"{key} never is {complaint.found(value)}"


def _profile_key_problem(key: str) -> str | None:
    """Why a dotted key is no profile key (with the nearest one), or None."""
    path = tuple(key.split("."))
    for depth, part in enumerate(path):
        known = known_keys(path[:depth])
        if known is None:
            if path[:depth] == ("kernels", "overrides"):
                return None
            return f"unknown key {key!r}: {'.'.join(path[:depth])} has no keys"
        if part not in known:
            near = [*known, "workload"] if depth == 0 else known
            return complaint.unknown_key(path[: depth + 1], near)
    if known_keys(path) is not None:
        return f"{key} is a section, expected one of its keys"
    if key in ("schema_version", "name", "extends"):
        return f"{key} belongs to a profile's file and cannot be set"
    return None


def _workload_key_problem(key: str) -> str | None:
    """Why a dotted key is no workload key (with the nearest one), or None."""
    path = tuple(key.split("."))
    for depth in range(1, len(path)):
        known = workload_keys(Recipe, path[1:depth])
        if known is None:
            return f"unknown key {key!r}: {'.'.join(path[:depth])} has no keys"
        if path[depth] not in known:
            return complaint.unknown_key(path[: depth + 1], known)
    if workload_keys(Recipe, path[1:]) is not None:
        return f"{key} is a section, expected one of its keys"
    return f"{key} names a recipe and changes nothing" if path[1] in _WORKLOAD_LABELS else None


# -------------------------------------------------------------------- plan


def _chosen(sweep: Sweep, *, embedded: bool) -> dict[str, tuple[Any, KeyPath]]:
    """Value and place of every key of ``Part`` for this run; exclusions go with the grid they were written for."""
    out: dict[str, tuple[Any, KeyPath]] = {}
    own = sweep.embedded if embedded else Part()
    for name in Part.model_fields:
        if (value := getattr(own, name)) is not None:
            out[name] = (value, ("embedded", name))
        elif name == "exclude" and own.grid is not None:
            out[name] = (None, (name,))
        else:
            out[name] = (getattr(sweep, name), (name,))
    return out


def _holds(tree: Any, path: Sequence[str]) -> bool:
    """Whether a nested section states the key at ``path``."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _plan(loaded: LoadedSweep, *, embedded: bool) -> Plan:
    part = _chosen(loaded.sweep, embedded=embedded)
    axes, at = part["grid"]
    sets, workload = part["set"][0] or {}, part["workload"][0] or {}
    for i, axis in enumerate(axes):
        for key in axis:
            if key in sets or (key.startswith(WORKLOAD) and _holds(workload, key.split(".")[1:])):
                place = loaded.document.at_key((*at, i, key))
                raise UsageError(f"{place}: {key} is an axis and also given for every cell; keep one of them")
    place = loaded.document.at_value(at)
    whole = math.prod(len(next(iter(axis.values()))) for axis in axes)
    if whole > MAX_CELLS:
        raise UsageError(f"{place}: {whole:,} cells before exclusions, at most {MAX_CELLS:,} are accepted")
    cells = expand(axes, part["exclude"][0] or ())
    if not cells:
        raise UsageError(f"{place}: every cell is excluded")
    return Plan(sets, workload, tuple(axes), cells, part["repeats"][0] or 1)
