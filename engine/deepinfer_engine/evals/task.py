"""``Task``: one evaluation as a YAML recipe: which questions, which prompt, how sampled, how often, how graded.

A recipe is found by name or alias among the shipped ones, or given as a path. Every problem of a recipe is reported at
once with file, line and column. The digest covers all that changes a result, so two runs with one digest asked the
same thing in the same way.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.config import complaint, resources
from deepinfer_engine.config.yaml import Document, read_yaml
from deepinfer_engine.errors import UsageError

Mode = Literal["non-think", "high", "max"]
GraderName = Literal["integer", "number", "math", "choice", "json", "judge"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Text = Annotated[str, Field(min_length=1, max_length=8192)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Column = Annotated[str, Field(min_length=1, max_length=200)]

_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Section(BaseModel):
    """Strict, frozen, no extra keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Columns(Section):
    """Names of the columns of the data; ``wrong`` are the distractors of a multiple-choice question."""

    id: Column | None = Field(default=None, description="unique key of a row; without it rows are numbered")
    question: Column = Field(default="question", description="text put into the prompt")
    answer: Column = Field(default="answer", description="the right answer")
    wrong: Annotated[tuple[Column, ...], Field(strict=False)] = Field(default=(), description="wrong choices")


class Data(Section):
    """Where the questions are: a pinned file on the hub, or a file beside the recipe."""

    hub: Text | None = Field(default=None, description="dataset repository on the Hugging Face hub")
    revision: Commit | None = Field(default=None, description="commit of that repository")
    file: Text = Field(description="file in the repository, or beside the recipe")
    gated: bool = Field(default=False, description="the repository asks for its terms to be accepted")
    rows: int | None = Field(default=None, ge=1, description="rows the pinned file has")
    columns: Columns = Field(default_factory=Columns, description="column names")
    answer_after: Text | None = Field(default=None, description="the answer is what follows this mark, where it occurs")
    skip_where: Column | None = Field(default=None, description="rows with something in this column are left out")


class Sampling(Section):
    """How an answer is drawn. Nothing is cut by stop strings."""

    mode: Mode = Field(default="high", description="reasoning effort of the chat protocol")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass")
    max_tokens: int = Field(default=32_768, ge=1, le=1_048_576, description="most tokens of one answer")


class Embedded(Section):
    """What replaces ``k`` and sampling when the embedded model answers: it is small and needs few tokens."""

    k: int | None = Field(default=None, ge=1, le=1024, description="samples per question")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0 is greedy")
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576, description="most tokens of one answer")


class Vendor(Section):
    """The score the model's maker reports, as a share of 1."""

    score: float = Field(ge=0, le=1, description="reported score")
    source: Text = Field(description="where it is reported")


class Task(Section):
    """One evaluation. ``find_task`` builds it."""

    schema_version: Literal[1] = Field(description="version of this schema")
    name: Name = Field(description="name of the task and of its results")
    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = Field(default=(), description="other names")
    description: Text = Field(description="one line for the list")
    data: Data = Field(description="the questions")
    prompt: Text = Field(description="text of the user message; {{question}} and {{choices}} are filled in")
    sampling: Sampling = Field(default_factory=Sampling, description="how answers are drawn")
    k: int = Field(default=1, ge=1, le=1024, description="samples per question")
    grader: GraderName = Field(description="how an answer is judged")
    embedded: Embedded = Field(default_factory=Embedded, description="overrides for the embedded model")
    vendor: Vendor | None = Field(default=None, description="score reported by the model's maker")
    offline: Name | None = Field(default=None, description="shipped task the embedded model runs without the data")


@dataclass(frozen=True)
class LoadedTask:
    """A valid recipe, the file it came from, and the digest of what decides a result."""

    task: Task
    source: Path
    digest: str

    @property
    def data_file(self) -> Path | None:
        """The shipped file of questions; None when they are on the hub."""
        return None if self.task.data.hub else self.source.parent / self.task.data.file


def shipped_tasks() -> list[LoadedTask]:
    """All shipped recipes by name; a broken one is a ``UsageError`` that names it."""
    return [load_task(path) for path in sorted((resources.data_dir("recipes") / "evals").glob("*.yaml"))]


def find_task(name: str) -> LoadedTask:
    """A shipped task by name or alias, or any recipe by path. ``UsageError`` with the nearest name."""
    if "/" in name or "\\" in name or name.endswith((".yaml", ".yml")):
        return load_task(Path(name))
    known: dict[str, LoadedTask] = {}
    for loaded in shipped_tasks():
        known |= dict.fromkeys((loaded.task.name, *loaded.task.aliases), loaded)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"; nearest is {near[0]!r}" if near else ""
    raise UsageError(
        f"no task is called {name!r}{guess}",
        hint="deepinfer eval list shows them; a recipe file needs a / or ends with .yaml",
    )


def load_task(path: Path) -> LoadedTask:
    """Read and check one recipe; ``UsageError`` lists every problem with its place."""
    document = read_yaml(path, where=path.name)
    try:
        task = Task.model_validate(document.value)
    except ValidationError as exc:
        found = [
            complaint.from_error(e, _known_keys) for e in exc.errors(include_url=False, include_context=True)
        ]  # fmt: skip
        lines = [f"{document.at_key(c.path) if c.on_key else document.at_value(c.path)}: {c.text}" for c in found]
        raise _invalid(document, lines) from None
    lines = [f"{document.at_value(key)}: {text}" for key, text in _relations(task)]
    if lines:
        raise _invalid(document, lines)
    return LoadedTask(task, path, _digest(task))


def _invalid(document: Document, lines: list[str]) -> UsageError:
    if len(lines) == 1:
        return UsageError(lines[0])
    return UsageError("\n".join([f"{document.where}: {len(lines)} problems", *(f"  {line}" for line in lines)]))


def _relations(task: Task) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the fields must hold together, as (key to blame, sentence)."""
    data = task.data
    if (data.hub is None) != (data.revision is None):
        yield ("data", "revision"), "data.hub and data.revision are given together or not at all"
    if data.gated and data.hub is None:
        yield ("data", "gated"), "data.gated is true, but the data are not on the hub"
    wanted = {"question"} | ({"choices"} if task.grader == "choice" else set())
    used = set(_PLACEHOLDER.findall(task.prompt))
    for name in sorted(wanted - used):
        yield ("prompt",), f"the prompt does not contain {{{{{name}}}}}"
    for name in sorted(used - wanted):
        yield ("prompt",), f"the prompt contains {{{{{name}}}}}, which grader {task.grader} does not fill"
    if (task.grader == "choice") != bool(data.columns.wrong):
        yield ("data", "columns"), "data.columns.wrong goes with grader choice, and only with it"
    if task.offline is not None and data.hub is None:
        yield ("offline",), "offline is for tasks whose data are on the hub"


def fill(template: str, values: dict[str, str]) -> str:
    """The template with each ``{{name}}`` replaced once; text that comes in is not looked at again."""
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], template)


def _known_keys(path: tuple[str, ...]) -> list[str] | None:
    section: type[BaseModel] = Task
    for key in path:
        info = section.model_fields.get(key)
        found = None if info is None else _model_of(info.annotation)
        if found is None:
            return None
        section = found
    return list(section.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The section behind an annotation such as ``Vendor`` or ``Vendor | None``."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _digest(task: Task) -> str:
    """SHA-256 of what decides a result: names, texts for people and the vendor's score do not."""
    kept = task.model_dump(mode="json", exclude={"aliases", "description", "vendor", "offline"})
    return hashlib.sha256(json.dumps(kept, sort_keys=True, allow_nan=False).encode()).hexdigest()
