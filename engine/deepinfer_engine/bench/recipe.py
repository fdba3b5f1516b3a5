"""``Recipe``: a workload as YAML: which lengths, how requests arrive, what is warm, how tokens are drawn.

A recipe is found by name among the shipped ones (``recipes/bench``) or given as a path; ``key=value`` overrides are
applied before it is checked. Every problem is reported at once with file, line and column.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.config import complaint, resources
from deepinfer_engine.config.yaml import Document, parse_scalar, read_yaml
from deepinfer_engine.errors import UsageError

LoadKind = Literal["fixed", "random", "file", "azure", "mooncake", "agent", "prompts"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
#: a million tokens is the longest context of the model family
Tokens = Annotated[int, Field(ge=1, le=1_048_576)]


class Section(BaseModel):
    """Strict, frozen, no extra keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Load(Section):
    """How long prompts and answers are, and what prompts share."""

    kind: LoadKind = Field(
        description="fixed, random, file (lengths), azure, mooncake (traces), agent (sessions) or prompts (real texts)"
    )
    input_tokens: Tokens | None = Field(default=None, description="prompt length (mean of random and agent)")
    output_tokens: Tokens | None = Field(
        default=None, description="answer length (mean of random and agent; most of prompts)"
    )
    spread: float | None = Field(default=None, ge=0.0, lt=1.0, description="random: lengths within mean x (1 ± spread)")
    shared_prefix_tokens: int = Field(default=0, ge=0, description="leading tokens that all prompts share")
    file: Text | None = Field(default=None, description="file of lengths, trace or prompts; relative to the recipe")
    shuffle: bool = Field(default=False, description="prompts: lines in an order drawn by the seed")
    input_column: Text = Field(default="input_tokens", description="file: column of prompt lengths")
    output_column: Text = Field(default="output_tokens", description="file: column of answer lengths")
    scale: float = Field(default=1.0, gt=0.0, le=100.0, description="factor on every length of a file or trace")
    max_input_tokens: Tokens | None = Field(default=None, description="longer prompts are skipped and counted")
    max_output_tokens: Tokens | None = Field(default=None, description="longer answers are skipped and counted")
    turns: int | None = Field(default=None, ge=2, le=10_000, description="agent: requests of a session")
    hit_rate: float | None = Field(default=None, gt=0.0, lt=1.0, description="agent: prompt tokens seen before")
    pause_s: float = Field(default=0.0, ge=0.0, description="agent: mean pause between answer and next turn")


class Arrivals(Section):
    """When requests start. closed: a number in flight; open: a rate; trace: the trace's times; at_once: all at 0."""

    mode: Literal["closed", "open", "trace", "at_once"] = Field(default="closed", description="what starts a request")
    concurrency: int | None = Field(default=None, ge=1, le=65_536, description="most requests in flight")
    rate_per_s: float | None = Field(default=None, gt=0.0, description="open: mean arrivals a second")
    burstiness: float = Field(default=1.0, gt=0.0, description="open: gamma shape; 1 Poisson, below bursty, above even")
    speed: float = Field(default=1.0, gt=0.0, description="trace: times as fast as recorded")


class Warmup(Section):
    """What runs before the measurement; none of it is counted."""

    requests: int = Field(default=0, ge=0, le=100_000, description="requests of other content, of the same lengths")


class Sampling(Section):
    """How tokens are drawn."""

    temperature: float = Field(default=0.0, ge=0.0, le=100.0, description="0 is greedy")
    ignore_eos: bool = Field(default=True, description="every answer has its planned length; never of prompts")


class Limits(Section):
    """What a good request fulfils, all of it; goodput is null when nothing is given."""

    ttft_ms: float | None = Field(default=None, gt=0.0, description="time to first token")
    tpot_ms: float | None = Field(default=None, gt=0.0, description="time per output token after the first")
    e2e_ms: float | None = Field(default=None, gt=0.0, description="time to the end")

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class Recipe(Section):
    """One workload."""

    schema_version: Literal[1] = Field(description="version of this schema")
    kind: Literal["workload"] = Field(description="what this recipe describes")
    name: Name = Field(description="equal to the file's name")
    description: Text = Field(description="one line for people")
    seed: int = Field(default=0, ge=0, lt=2**63, description="decides lengths, contents and arrival times")
    requests: int | None = Field(default=None, ge=1, le=1_000_000, description="how many; null: all of a file or trace")
    load: Load = Field(description="lengths and contents")
    arrivals: Arrivals = Field(default_factory=Arrivals, description="when requests start")
    warmup: Warmup = Field(default_factory=Warmup, description="what runs before")
    cache: Literal["cold", "warm"] = Field(
        default="cold", description="cold: no prompt was seen before the run; warm: each was sent once"
    )
    sampling: Sampling = Field(default_factory=Sampling, description="how tokens are drawn")
    limits: Limits = Field(default_factory=Limits, description="goodput limits")


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, the folder its files are relative to, and the digest of what decides a workload."""

    recipe: Recipe
    folder: Path
    digest: str


def bench_dir() -> Path:
    """Folder of the shipped workload and sweep recipes."""
    return resources.data_dir("recipes") / "bench"


def recipe_names(kind: str = "workload") -> list[str]:
    """Names of the shipped recipes of one kind, sorted."""
    return sorted(p.stem for p in bench_dir().glob("*.yaml") if kind_of(read_yaml(p, where=p.name)) == kind)


def kind_of(document: Document) -> Any:
    """The ``kind`` of a recipe that is not checked yet; None when it states none."""
    return document.value.get("kind") if isinstance(document.value, Mapping) else None


def find_recipe(name: str | Path) -> Path:
    """File of a shipped recipe by name, or the path itself. ``UsageError`` with the nearest name."""
    text = str(name)
    if isinstance(name, Path) or "/" in text or "\\" in text or text.endswith((".yaml", ".yml")):
        return Path(name)
    known = {p.stem: p for p in bench_dir().glob("*.yaml")}
    if text in known:
        return known[text]
    near = difflib.get_close_matches(text, known, n=1)
    guess = f"; nearest is {near[0]!r}" if near else ""
    raise UsageError(
        f"no recipe is called {text!r}{guess}",
        hint="deepinfer bench --list shows them; a recipe file needs a / or ends with .yaml",
    )


def load_recipe(name: str | Path, sets: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check one workload recipe with overrides; ``UsageError`` lists every problem with its place."""
    path = find_recipe(name)
    document = read_yaml(path, where=path.name)
    if kind_of(document) == "sweep":
        raise UsageError(f"{path.name}: is a sweep, not a workload", hint=f"deepinfer sweep {name}")
    return check_recipe(document, path.parent, sets)


def check_recipe(document: Document, folder: Path, sets: Sequence[str] = ()) -> LoadedRecipe:
    """Check a parsed recipe with overrides."""
    tree = document.value
    for text in sets:
        apply_set(tree, text, Recipe)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as exc:
        raise refused(document, exc, Recipe) from None
    lines = [f"{document.at_value(key)}: {text}" for key, text in _relations(recipe)]
    if lines:
        raise several(document.where, lines)
    if recipe.load.kind == "prompts":  # the model ends its answers itself
        sampling = recipe.sampling.model_copy(update={"ignore_eos": False})
        recipe = recipe.model_copy(update={"sampling": sampling})
    return LoadedRecipe(recipe, folder, digest_of(recipe))


def apply_set(tree: Any, text: str, schema: type[BaseModel]) -> None:
    """Put ``a.b=value`` into a tree that is not checked yet; an unknown key is refused here, with the nearest."""
    dotted, equals, raw = text.partition("=")
    if not equals:
        raise UsageError(f"{text}: has no '='", hint="write key=value, as in arrivals.concurrency=8")
    path = tuple(dotted.split("."))
    for depth in range(len(path)):
        known = known_keys(schema, path[:depth])
        if known is None:
            raise UsageError(f"{text}: {'.'.join(path[:depth])} has no keys")
        if path[depth] not in known:
            raise UsageError(f"{text}: {complaint.unknown_key(path[: depth + 1], known)}")
    inner = known_keys(schema, path)
    if inner is not None:
        raise UsageError(f"{text}: {dotted} is a section", hint=f"set one of its keys, such as {dotted}.{inner[0]}")
    target = tree
    for key in path[:-1]:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    target[path[-1]] = parse_scalar(raw, where=text)


def refused(document: Document, exc: ValidationError, schema: type[BaseModel]) -> UsageError:
    """Every problem of a document under a schema, with its place."""
    found = [
        complaint.from_error(e, lambda path: known_keys(schema, path))
        for e in exc.errors(include_url=False, include_context=True)
    ]
    return several(
        document.where,
        [f"{document.at_key(c.path) if c.on_key else document.at_value(c.path)}: {c.text}" for c in found],
    )


def several(where: str, lines: Sequence[str]) -> UsageError:
    """One error for one problem or many."""
    if len(lines) == 1:
        return UsageError(lines[0])
    return UsageError("\n".join([f"{where}: {len(lines)} problems", *(f"  {line}" for line in lines)]))


def known_keys(schema: type[BaseModel], path: Sequence[str]) -> list[str] | None:
    """Keys of the section at ``path``; None when it has none."""
    section = schema
    for key in path:
        info = section.model_fields.get(key)
        if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
            return None
        section = info.annotation
    return list(section.model_fields)


def digest_of(recipe: Recipe) -> str:
    """SHA-256 of what decides a workload: names and texts for people do not."""
    kept = recipe.model_dump(mode="json", exclude={"name", "description"})
    if not recipe.load.shuffle:  # the key came later: workloads without it keep the digest of what was recorded
        del kept["load"]["shuffle"]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, allow_nan=False).encode()).hexdigest()


#: keys of ``load`` beside its kind: which kinds need them, which may have them
_NEEDED: dict[str, tuple[LoadKind, ...]] = {
    "input_tokens": ("fixed", "random", "agent"),
    "output_tokens": ("fixed", "random", "agent", "prompts"),
    "file": ("file", "azure", "mooncake", "prompts"),
    "turns": ("agent",),
    "hit_rate": ("agent",),
}
_ALLOWED: dict[str, tuple[LoadKind, ...]] = {
    **_NEEDED,
    "spread": ("random",),
    "shuffle": ("prompts",),
    "shared_prefix_tokens": ("fixed", "random", "file", "azure", "agent"),
    "input_column": ("file",),
    "output_column": ("file",),
    "scale": ("file", "azure", "mooncake"),
    "max_input_tokens": ("file", "azure", "mooncake"),
    "max_output_tokens": ("file", "azure", "mooncake"),
    "pause_s": ("agent",),
}


def _relations(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the keys must hold together, as (key to blame, sentence)."""
    load, arrivals = recipe.load, recipe.arrivals
    given = load.model_fields_set
    for key, kinds in _ALLOWED.items():
        if load.kind not in kinds and key in given and getattr(load, key) is not None:
            yield ("load", key), f"load.{key} goes with kind {', '.join(kinds)}, this one is {load.kind}"
        if load.kind in _NEEDED.get(key, ()) and getattr(load, key) is None:
            hint = "; give the file with load.file=PATH" if key == "file" else ""
            yield ("load",), f"load.{key} is needed by kind {load.kind}{hint}"
    if load.kind == "prompts" and "ignore_eos" in recipe.sampling.model_fields_set and recipe.sampling.ignore_eos:
        yield (
            ("sampling", "ignore_eos"),
            "sampling.ignore_eos is true; answers of kind prompts end where the model ends",
        )
    if recipe.requests is None and load.kind in ("fixed", "random", "agent"):
        yield ("requests",), f"requests is needed by kind {load.kind}"
    if load.input_tokens is not None and load.shared_prefix_tokens >= load.input_tokens:
        yield (
            ("load", "shared_prefix_tokens"),
            f"load.shared_prefix_tokens {load.shared_prefix_tokens} leaves nothing of the prompt's {load.input_tokens}",
        )
    if arrivals.mode == "closed" and arrivals.concurrency is None:
        yield ("arrivals",), "arrivals.concurrency is needed by mode closed"
    if (arrivals.mode == "open") != (arrivals.rate_per_s is not None):
        yield ("arrivals", "rate_per_s"), "arrivals.rate_per_s goes with mode open, and only with it"
    if arrivals.mode != "open" and "burstiness" in arrivals.model_fields_set:
        yield ("arrivals", "burstiness"), "arrivals.burstiness goes with mode open"
    if arrivals.mode != "trace" and "speed" in arrivals.model_fields_set:
        yield ("arrivals", "speed"), "arrivals.speed goes with mode trace"
    if arrivals.mode == "trace" and load.kind not in ("azure", "mooncake"):
        yield ("arrivals", "mode"), f"arrivals.mode trace needs a trace, the load is {load.kind}"
    if arrivals.mode in ("trace", "at_once") and load.kind == "agent":
        yield ("arrivals", "mode"), f"arrivals.mode {arrivals.mode} does not fit sessions; use closed or open"
