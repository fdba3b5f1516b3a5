"""Cache rows: quantise and store, load and dequantise. Slots are flat row numbers; a slot of −1 is not written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.norm import rms_norm, rope
from deepinfer_kernels.reference.numerics import Numerics

#: record kind → (pack, unpack)
_RECORDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "window": (q.pack_window, q.unpack_window),
    "global": (q.pack_global, q.unpack_global),
    "index": (q.pack_index, q.unpack_index),
}


def pack_rows(num: Numerics, rows: Tensor, kind: str) -> Tensor:
    """Rows [..., D] as stored: an official record (uint8) or f32."""
    return _RECORDS[kind][0](rows) if num.records else rows.float()


def unpack_rows(num: Numerics, stored: Tensor, kind: str) -> Tensor:
    """Stored rows back to values [..., D], in the activation dtype (records are exact in bf16)."""
    return num.round(_RECORDS[kind][1](stored)) if num.records else stored


def store_rows(num: Numerics, store: Tensor, slots: Tensor, packed: Tensor) -> None:
    """store[slots[i]] = packed[i] for slots >= 0, in place. store [R, bytes], slots [T] int64, packed [T, bytes].

    Slots are distinct. Row 0 of ``store`` is never addressed by a real slot, so PAD rows are sent there: one masked
    scatter without a data-dependent shape.
    """
    store.index_copy_(0, slots.clamp(min=0), packed)


def copy_rows(num: Numerics, target: Tensor, at: Tensor, source: Tensor, rows: Tensor) -> None:
    """target[at[i]] = source[rows[i]], in place; at and rows [n] int64, no row is both read and written."""
    target.index_copy_(0, at, source.index_select(0, rows))


def load_rows(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> Tensor:
    """Values [..., D] of the rows ``slots`` [...] (−1 reads row 0; the caller masks it)."""
    flat = store.index_select(0, slots.clamp(min=0).flatten())
    return unpack_rows(num, flat, kind).unflatten(0, slots.shape)


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised, or unchanged in ``float``."""
    if not num.records:
        return iq
    return num.round(q.dequantise_q4m(*q.quantise_q4m(iq)))


def window_rows(
    num: Numerics, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """(window rows as every reader sees them [T, D], as stored) of x [T, D]: normed, rotated, quantised."""
    packed = pack_rows(num, rope(num, rms_norm(num, x, weight, eps), cos, sin), "window")
    return unpack_rows(num, packed, "window"), packed


def store_entries(
    num: Numerics,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: Tensor,
    slots: Tensor,
    kind: str,
) -> Tensor:
    """Normed x [T, D]; their rotated rows go, packed, to ``slots`` [T] of ``store`` as ``store_rows`` does it."""
    normed = rms_norm(num, x, weight, eps)
    store_rows(num, store, slots, pack_rows(num, rope(num, normed, cos, sin), kind))
    return normed


def store_pairs(num: Numerics, store: Tensor, slots: Tensor, value: Tensor, gate: Tensor) -> None:
    """store[slots[i]] = (value[i], gate[i]), f32 [R, 2, D], as ``store_rows`` does it."""
    store_rows(num, store, slots, torch.stack((value, gate), 1))


def entry_slots(
    num: Numerics, entries: Tensor | None, rows: Tensor, table: Tensor, *, per_block: int, count: int
) -> Tensor:
    """Flat slots int64 [n, count] of the entries [n, count] (None: 0, 1, 2, …) of batch rows [n]; −1 stays −1.

    table [B, P]: blocks of each row, of ``per_block`` entries. An entry beyond them is looked for in the last one.
    """
    if entries is None:
        entries = torch.arange(count, device=rows.device).expand(rows.shape[0], -1)
    e = entries.clamp(min=0)
    place = (e // per_block).clamp(max=table.shape[1] - 1)
    block = table[rows.unsqueeze(1), place]
    return torch.where(entries < 0, -1, block * per_block + e % per_block)


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
    """Of pairs whose second tokens are rows ``second`` [n] of the step, int64 [n] each:

    the row of the first token (the second's own where ``from_ring``), its slot in the pair ring, its position, and the
    pair's entry slot, −1 where it is not kept or the second token has an even position. position, row, blocks [T]:
    position, batch row and ratio-1 entry slot of every token; rings [B]: ring slot of a row, of ``ring`` pairs.
    """
    first = position[second] - 1
    slot = rings[row[second]] * ring + first % ring
    entry = blocks[second]
    entry = torch.where((first % 2 == 1) | (entry < 0), -1, entry // 2)
    return torch.where(from_ring, second, second - 1), slot, first, entry


def window_places(
    num: Numerics,
    position: Tensor,
    row: Tensor,
    spans: Tensor,
    rings: Tensor | None,
    *,
    width: int,
    ring: int,
) -> Tensor:
    """Where the ``width`` window rows up to each query are, int64 [T, width]; as ``attend_cached`` reads them.

    position, row [T] of the queries. spans [B, 3]: lowest visible position of a row, its first position in this step,
    and where that is in the step. rings [B]: its ring slot, of ``ring`` records (None: no query sees an older row).
    """
    floor, start, first = spans[row].unbind(-1)
    u = position.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=position.device)
    places = u + (first - start).unsqueeze(1)
    if rings is not None:
        older = -2 - (rings[row] * ring).unsqueeze(1) - u % ring
        places = torch.where(u < start.unsqueeze(1), older, places)
    return torch.where(u >= floor.clamp(min=0).unsqueeze(1), places, -1)
