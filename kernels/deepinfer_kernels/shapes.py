"""The sizes of a model that GPU kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_kernels.reference.linear import Kind


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model that kernels are made for.

    ``routers``: (experts, choices, slots of this process, expert width) of the backbone and of draft blocks;
    ``all_slots``: their slots of all processes; ``normalise``: whether weights of choices add up to one.
    ``products``: (outputs, inputs, kind) of every projection; ``rows``: widths that are normed. ``hash``: (n-gram
    orders, heads, width of a table row) of the hash memory, None without one; ``heads``: (outputs, inputs) of products
    with f32 results; ``tables``: widths of embeddings; ``choice``: (entries, entries of a block, blocks) that index
    sources select; ``drafts``: tokens of a draft block, 0 without one.
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
    all_slots: tuple[int, ...]
    normalise: bool
    products: tuple[tuple[int, int, Kind], ...]
    rows: tuple[int, ...]
    V: int
    hash: tuple[int, int, int] | None
    heads: tuple[tuple[int, int], ...]
    tables: tuple[int, ...]
    choice: tuple[int, int, int]
    drafts: int
