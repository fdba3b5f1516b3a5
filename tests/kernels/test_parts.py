"""Fused operations made of their parts: the same bits, and each part in the way chosen for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels import parts
from deepinfer_kernels.registry import IMPLEMENTATIONS, Ops, resolve

T, D, H, C = 9, 64, 160, 4
#: arguments by name of the operations that have some
NAMED: dict[str, dict[str, Any]] = {"index_scores_cached": {"per_block": 8, "count": 21}}


def arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments by operation; stores come as zeros and are compared after the call."""
    torch.manual_seed(0)
    angle = torch.rand(T, 8)
    rows = (torch.randn(T, D).bfloat16(), torch.randn(D).bfloat16(), 1e-6, angle.cos(), angle.sin())
    slots = 1 + torch.randperm(20)[:T]
    value, gate = torch.randn(T, D), torch.randn(T, D)
    pair = torch.tensor([1, 3]), torch.tensor([1, 2]), torch.tensor([4, -1]), torch.tensor([True, False])
    streams = torch.randn(T, C, H).bfloat16(), torch.rand(T, C), torch.randn(H).bfloat16(), 1e-6
    places = torch.randperm(3), torch.randint(0, 6, (3, 3)), torch.randint(0, 22, (3, 2))
    table = torch.randint(0, 120, (30, 32), dtype=torch.uint8), torch.full((30, 1), 127, dtype=torch.uint8)
    return {
        "window_rows": rows,
        "mhc_collapse_norm": streams,
        "store_entries": (*rows, torch.zeros(21, 36, dtype=torch.uint8), slots, "global"),
        "store_pairs": (torch.zeros(21, 2, D), slots, value, gate),
        "pool_cached": (value, gate, torch.randn(21, 2, D), *pair),
        "dispatch_rows": (torch.randn(T, H).bfloat16(), torch.randint(0, 6, (T, 3)), torch.rand(T, 3), 6),
        "engram_lookup": (*table, torch.randint(0, 30, (T, 4))),
        "embed_streams": (torch.randint(0, 50, (T,)), torch.randn(50, H).bfloat16(), C),
        "index_scores_cached": (
            torch.randn(3, 2, 4, D).bfloat16(),
            torch.randn(3, 2, 4).bfloat16(),
            torch.randint(90, 130, (48, 34), dtype=torch.uint8),
            *places,
        ),
    }


def after(ops: Ops, name: str) -> list[Tensor]:
    """What the operation returns, and its arguments as it leaves them."""
    args = arguments()[name]
    result = getattr(ops, name)(*args, **NAMED.get(name, {}))
    return [t for t in (*(result if isinstance(result, tuple) else (result,)), *args) if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", sorted(parts.OPERATIONS))
def test_a_composed_operation_has_the_bits_of_the_reference(name: str):
    plain = resolve("fast", "cpu", backend="reference")
    composed = Ops(plain.numerics, "cpu", plain.chosen | {name: _parts(name)})
    assert composed.chosen[name].composed and not plain.chosen[name].composed
    for a, b in zip(after(composed, name), after(plain, name), strict=True):
        assert torch.equal(a, b)


def test_parts_are_computed_as_chosen():
    plain = resolve("fast", "cpu", backend="reference")
    zero = replace(plain.chosen["rms_norm"], fn=lambda num, x, weight, eps: torch.zeros_like(x))
    ops = Ops(plain.numerics, "cpu", plain.chosen | {"rms_norm": zero, "window_rows": _parts("window_rows")})
    assert not after(ops, "window_rows")[0].any()


class Watched:
    """The namespace of chosen operations, with a note of those asked for."""

    def __init__(self, ops: Ops):
        self.ops, self.asked = ops, set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self.ops, name)


@pytest.mark.parametrize("name", sorted(parts.OPERATIONS))
def test_the_parts_of_an_operation_are_those_listed(name: str):
    watched = Watched(resolve("fast", "cpu", backend="reference"))
    parts.OPERATIONS[name](watched, *arguments()[name], **NAMED.get(name, {}))
    assert watched.asked == set(parts.PARTS[name])


def test_a_part_that_is_named_is_not_hidden_in_a_fused_operation():
    for platform in ("cpu", "sm90"):
        for whole, made_of in parts.PARTS.items():
            for part in made_of:
                chosen = resolve("fast", platform, {part: "reference"}, backend="reference").chosen
                assert (chosen[whole].backend, chosen[part].backend) == ("parts", "reference")
                assert (
                    resolve("fast", platform, {part: "reference", whole: "reference"}).chosen[whole].fn
                    is not (parts.OPERATIONS[whole])
                )
                lifted = resolve("fast", platform, {part: "auto"}, backend="reference").chosen
                assert lifted[whole].backend == "reference"


def _parts(name: str) -> Any:
    return next(i for i in IMPLEMENTATIONS[name] if i.backend == "parts")
