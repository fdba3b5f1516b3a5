"""Where things are: slots of index entries, places of window rows, partners of pairs, rows of the embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, i64, u8
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "places",
    entry_slots="ppppiiiii",
    window_places="pppppiiii",
    pair_places="ppppppppppiiii",
    embed="ppppiiii",
)


def entry_slots(
    num: Numerics, entries: Tensor | None, rows: Tensor, table: Tensor, *, per_block: int, count: int
) -> Tensor:
    """Slots int64 [n, count] of entries [n, count] (None: 0, 1, 2, …) of batch rows [n]; −1 stays −1."""
    rows, table = i64(rows), i64(table)
    n, (B, P) = rows.shape[0], table.shape
    if entries is not None and entries.shape != (n, count):
        raise ValueError(f"{n} rows of {count} entries, got {tuple(entries.shape)}")
    if per_block < 1:
        raise ValueError(f"blocks of {per_block} entries")
    slots = torch.empty(n, count, dtype=torch.int64)
    given = None if entries is None else i64(entries)
    at = (0 if given is None else given.data_ptr(), rows.data_ptr(), table.data_ptr(), slots.data_ptr())
    bad = LIBRARY.entry_slots(*at, n, count, B, P, per_block)
    if bad >= 0:
        raise IndexError(f"row {int(rows[bad])} is not in a table of {B} rows of {P} blocks")
    return slots


def window_places(
    num: Numerics, position: Tensor, row: Tensor, spans: Tensor, rings: Tensor | None, *, width: int, ring: int
) -> Tensor:
    """Where the ``width`` window rows up to each query are, int64 [T, width]; as ``attend_cached`` reads them."""
    position, row, spans = i64(position), i64(row), i64(spans)
    slots = None if rings is None else i64(rings)
    T, B = position.shape[0], spans.shape[0]
    if row.shape != (T,) or spans.shape != (B, 3) or (slots is not None and slots.shape != (B,)):
        raise ValueError(f"{T} queries, rows {tuple(row.shape)}, spans {tuple(spans.shape)}, rings of {B}")
    if ring < 1:
        raise ValueError(f"a ring of {ring} records")
    places = torch.empty(T, width, dtype=torch.int64)
    at = (position.data_ptr(), row.data_ptr(), spans.data_ptr(), 0 if slots is None else slots.data_ptr())
    bad = LIBRARY.window_places(*at, places.data_ptr(), T, B, width, ring)
    if bad >= 0:
        raise IndexError(f"row {int(row[bad])} is not among {B} spans")
    return places


def pair_places(
    num: Numerics,
    second: Tensor,
    from_ring: Tensor,
    position: Tensor,
    row: Tensor,
    rings: Tensor,
    blocks: Tensor,
    *,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row of the first token, its slot in the pair ring, its position, entry slot of the pair), int64 [n] each."""
    given = [i64(second), u8(from_ring), i64(position), i64(row), i64(rings), i64(blocks)]
    n, T, B = second.shape[0], position.shape[0], rings.shape[0]
    if [t.shape for t in given] != [(n,), (n,), (T,), (T,), (B,), (T,)]:
        raise ValueError(f"pairs, tokens, rows and blocks {[tuple(t.shape) for t in given]}")
    if ring < 1:
        raise ValueError(f"a ring of {ring} pairs")
    partner, slot, first, entry = torch.empty(4, n, dtype=torch.int64)
    at = [t.data_ptr() for t in (*given, partner, slot, first, entry)]
    bad = LIBRARY.pair_places(*at, n, T, B, ring)
    if bad >= 0:
        raise IndexError(f"pair {bad} names token {int(second[bad])} of {T}, or its row is not among {B}")
    return partner, slot, first, entry


def _embedded(ids: Tensor, table: Tensor, streams: int, pre: Tensor | None) -> Tensor:
    ids, table = i64(ids), bf16(table)
    (T,), (V, H) = ids.shape, table.shape
    X = torch.empty(T, streams, H, dtype=torch.bfloat16)
    at = (ids.data_ptr(), table.data_ptr(), X.data_ptr(), 0 if pre is None else pre.data_ptr())
    bad = LIBRARY.embed(*at, T, V, streams, H)
    if bad >= 0:
        raise IndexError(f"token {int(ids[bad])} is not in a vocabulary of {V}")
    return X


def embed(num: Numerics, ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the embedding [V, H] for ids [T]."""
    return _embedded(ids, table, 1, None).squeeze(1)


def embed_streams(num: Numerics, ids: Tensor, table: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """(C copies of the rows [T, C, H], the pre-mix f32 [T, C] that takes the first)."""
    pre = torch.empty(ids.shape[0], streams)
    return _embedded(ids, table, streams, pre), pre


OPERATIONS = (entry_slots, window_places, pair_places, embed, embed_streams)
