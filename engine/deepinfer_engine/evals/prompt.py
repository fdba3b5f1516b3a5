"""What is asked: one user message per sample, its seed, and for choices the order they are shown in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.errors import UsageError
from deepinfer_engine.evals.choice import listed, shown_order
from deepinfer_engine.evals.items import Item
from deepinfer_engine.evals.task import Sampling, Task, fill


@dataclass(frozen=True)
class Prompt:
    """One sample to draw. ``key`` is ``item/sample``; ``order[p]`` is the choice at position p (0 is the right one)."""

    key: str
    item: Item
    sample: int
    seed: int
    text: str
    order: tuple[int, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices in the order shown."""
        every = (self.item.answer, *self.item.wrong)
        return tuple(every[i] for i in self.order)

    @property
    def right(self) -> int:
        """Position of the right choice; -1 without choices."""
        return self.order.index(0) if self.order else -1

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """How one run asks: sampling in force, samples per question, and the seed of each sample number."""

    sampling: Sampling
    seeds: tuple[int, ...]

    @property
    def k(self) -> int:
        return len(self.seeds)


def plan_for(
    task: Task,
    *,
    embedded: bool,
    k: int | None = None,
    seed: int = 0,
    sampling: Mapping[str, Any] | None = None,
) -> Plan:
    """The recipe's sampling, the embedded model's overrides where it answers, then what the caller gives.

    Sample j has the seed ``seed + j``. ``UsageError`` when several samples would be drawn greedily and so be equal.
    """
    base = task.sampling.model_dump()
    if embedded:
        base |= {key: value for key, value in task.embedded.model_dump().items() if key != "k" and value is not None}
    base |= {key: value for key, value in (sampling or {}).items() if value is not None}
    used = Sampling.model_validate(base)
    count = k or (task.embedded.k if embedded else None) or task.k
    if count > 1 and used.temperature == 0:
        raise UsageError(f"k is {count} at temperature 0: all samples of a question would be equal", hint="--k 1")
    return Plan(used, tuple(range(seed, seed + count)))


def prompts(task: Task, items: Sequence[Item], plan: Plan) -> Iterator[Prompt]:
    """Every sample of a run, sample by sample over all questions, so that a stopped run has seen them all evenly."""
    for sample, seed in enumerate(plan.seeds):
        for item in items:
            yield _prompt(task, item, sample, seed)


def _prompt(task: Task, item: Item, sample: int, seed: int) -> Prompt:
    order: tuple[int, ...] = ()
    values = {"question": item.question}
    if item.wrong:
        order = shown_order(item.id, 1 + len(item.wrong), seed)
        every = (item.answer, *item.wrong)
        values["choices"] = listed([every[i] for i in order])
    return Prompt(f"{item.id}/{sample}", item, sample, seed, fill(task.prompt, values), order)
