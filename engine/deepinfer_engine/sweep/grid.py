"""Cells of a sweep: the product of its axes, less what is excluded, in a fixed order. Pure; no torch.

An axis is one key with its values, or several keys that advance together (zipped). The first axis varies slowest.
Every repeat of the grid runs before the next one begins, odd repeats backwards, so that a drift of the machine
(heat, a neighbour) falls on all cells alike.

Worked example: axes ``{a: [1, 2]}`` and ``{b: [1, 2], c: [x, y]}`` without ``{a: 2, b: 1}`` give three cells:
(a=1 b=1 c=x), (a=1 b=2 c=y), (a=2 b=2 c=y).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Scalar = str | int | float | bool | None
#: Values by key, all lists equally long.
Axis = Mapping[str, Sequence[Scalar]]

#: Keys of the workload carry this prefix; all others are profile keys.
WORKLOAD = "workload."


@dataclass(frozen=True)
class Cell:
    """One point of the grid: its number from 1 and the value of every swept key, in axis order."""

    number: int
    values: Mapping[str, Scalar]

    @property
    def profile(self) -> dict[str, Scalar]:
        """Swept profile keys."""
        return {key: value for key, value in self.values.items() if not key.startswith(WORKLOAD)}

    @property
    def workload(self) -> dict[str, Scalar]:
        """Swept workload keys, without their prefix."""
        return {key[len(WORKLOAD) :]: value for key, value in self.values.items() if key.startswith(WORKLOAD)}

    def __str__(self) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in self.values.items()) or "the only cell"


def _shown(value: Scalar) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def expand(axes: Sequence[Axis], exclude: Sequence[Mapping[str, Scalar | Sequence[Scalar]]] = ()) -> tuple[Cell, ...]:
    """All cells, numbered. A grid without axes is one cell; it is empty when everything is excluded."""
    steps = [[dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)] for axis in axes]
    points = ({k: v for part in parts for k, v in part.items()} for parts in product(*steps))
    kept = [point for point in points if not any(matches(point, rule) for rule in exclude)]
    return tuple(Cell(number, point) for number, point in enumerate(kept, 1))


def matches(point: Mapping[str, Scalar], rule: Mapping[str, Scalar | Sequence[Scalar]]) -> bool:
    """Whether every key of the rule has (one of) its values at this point; 1 and true are different values."""
    return all(any(same(point[key], v) for v in as_values(wanted)) for key, wanted in rule.items())


def as_values(wanted: Scalar | Sequence[Scalar]) -> Sequence[Scalar]:
    """A value or list of values as a list."""
    return wanted if isinstance(wanted, list | tuple) else (wanted,)  # pyright: ignore[reportReturnType]


def same(a: Scalar, b: Scalar) -> bool:
    """Equality that does not take true for 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def order(cells: Sequence[Cell], repeats: int) -> Iterator[tuple[Cell, int]]:
    """Every (cell, repeat) in running order; repeats count from 1, every second pass runs backwards."""
    for repeat in range(1, repeats + 1):
        for cell in cells if repeat % 2 else reversed(cells):
            yield cell, repeat
