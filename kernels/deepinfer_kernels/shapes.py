"""The sizes of a model that GPU kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_kernels.reference.linear import Kind


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model that kernels are made for.

    ``routers``: (experts, choices, slots of this process, expert width) of the backbone and of draft blocks.
    ``products``: (outputs, inputs, kind) of every projection; ``rows``: widths that are normed.
    """

    H: int
    N: int
    D: int
    Dr: int
    groups: int
    group_out: int
    C: int
    sinkhorn: int
    index_heads: int
    Di: int
    routers: tuple[tuple[int, int, int, int], ...]
    products: tuple[tuple[int, int, Kind], ...]
    rows: tuple[int, ...]
