"""The families of compiled operations: what each library computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from deepinfer_kernels.cpu import (
    attention,
    cache,
    compress,
    engram,
    hyper,
    index,
    linear,
    moe,
    norm,
    permute,
    places,
)
from deepinfer_kernels.cpu.binary import Library


class Family(NamedTuple):
    """One C++ source: its library, and the Python side of its operations by name."""

    binary: Library
    operations: dict[str, Callable[..., Any]]


FAMILIES: dict[str, Family] = {
    module.LIBRARY.family: Family(module.LIBRARY, {fn.__name__: fn for fn in module.OPERATIONS})
    for module in (attention, cache, compress, engram, hyper, index, linear, moe, norm, permute, places)
}
