"""Where things are: slots of index entries, places of window rows, angles of positions, rows of the embedding."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64, uint8
from triton.language.extra import libdevice

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import INTERPRETED, bf16, widened
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two


@triton.jit(do_not_specialize=["K", "P", "per_block"])
def _entry_slots(ENTRIES, ROWS, TABLE, SLOTS, K, P, per_block, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = k.to(tl.int64)
    if ENTRIES is not None:
        entry = tl.load(ENTRIES + row * K + k, mask=k < K, other=-1)
    real = (entry >= 0) & (k < K)
    # a floating row's last position is an upper bound, which may lie beyond the blocks it was given
    place = tl.minimum(tl.maximum(entry, 0) // per_block, P - 1)
    block = tl.load(TABLE + tl.load(ROWS + row) * P + place, mask=real, other=0)
    tl.store(SLOTS + row * K + k, tl.where(real, block * per_block + entry % per_block, -1), mask=k < K)


def entry_slots(
    num: Numerics, entries: Tensor | None, rows: Tensor, table: Tensor, *, per_block: int, count: int
) -> Tensor:
    """Slots int64 [n, count] of entries [n, count] (None: 0, 1, 2, …) of batch rows [n]; −1 stays −1."""
    n, P = rows.shape[0], table.shape[1]
    entries = None if entries is None else contiguous(entries)
    if entries is not None and (entries.shape != (n, count) or entries.dtype is not int64):
        raise ValueError(f"{n} rows of {count} entries, got {tuple(entries.shape)} {entries.dtype}")
    slots = empty((n, count), dtype=int64, device=rows.device)
    arguments = (entries, contiguous(rows), contiguous(table), slots, count, P, per_block)
    launch(_entry_slots, (blocks(count, 256), n), *arguments, BLOCK=256)
    return slots


@triton.jit(do_not_specialize=["T", "W", "ring"])
def _window(POS, ROW, SPANS, RINGS, OUT, T, W, ring, BT: tl.constexpr, BW: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    j = tl.program_id(1) * BW + tl.arange(0, BW)[None, :]
    pos = tl.load(POS + t, mask=t < T, other=0)
    row = tl.load(ROW + t, mask=t < T, other=0)
    floor = tl.load(SPANS + 3 * row)[:, None]
    start = tl.load(SPANS + 3 * row + 1)[:, None]
    first = tl.load(SPANS + 3 * row + 2)[:, None]
    u = pos[:, None] - (W - 1 - j)
    place = u + (first - start)
    if RINGS is not None:
        base = tl.load(RINGS + row)[:, None] * ring
        place = tl.where(u < start, -2 - base - tl.maximum(u, 0) % ring, place)
    place = tl.where((u >= floor) & (u >= 0), place, -1)
    tl.store(OUT + t.to(tl.int64)[:, None] * W + j, place, mask=(t < T)[:, None] & (j < W))


def window_places(
    num: Numerics, position: Tensor, row: Tensor, spans: Tensor, rings: Tensor | None, *, width: int, ring: int
) -> Tensor:
    """Where the ``width`` window rows up to each query are, int64 [T, width]; as ``attend_cached`` reads them.

    position, row int64 [T]; spans int64 [B, 3]: lowest visible position, first position of this step, its row in the
    step; rings int64 [B]: ring slot of each row, of ``ring`` records (None: no query sees an older row).
    """
    T = position.shape[0]
    if spans.shape[1:] != (3,) or any(t.dtype is not int64 for t in (position, row, spans)):
        raise ValueError(f"spans {tuple(spans.shape)} {spans.dtype}, expected int64 [B, 3]")
    out = empty((T, width), dtype=int64, device=position.device)
    arguments = (contiguous(position), contiguous(row), contiguous(spans), rings, out, T, width, ring)
    launch(_window, (blocks(T, 8), blocks(width, 128)), *arguments, BT=8, BW=128)
    return out


@triton.jit(do_not_specialize=["n", "ring"])
def _pairs(
    SECOND, RINGED, POSITION, ROW, RINGS, BLOCKS, PARTNER, SLOT, FIRST, ENTRY, n, ring, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    second = tl.load(SECOND + i, mask=mask, other=0)
    ringed = tl.load(RINGED + i, mask=mask, other=0) != 0
    first = tl.load(POSITION + second, mask=mask, other=1) - 1
    slot = tl.load(RINGS + tl.load(ROW + second, mask=mask, other=0), mask=mask, other=0) * ring
    slot += (first + ring) % ring  # the first position before 0 is −1
    entry = tl.load(BLOCKS + second, mask=mask, other=-1)
    tl.store(PARTNER + i, tl.where(ringed, second, second - 1), mask=mask)
    tl.store(SLOT + i, slot, mask=mask)
    tl.store(FIRST + i, first, mask=mask)
    tl.store(ENTRY + i, tl.where(((first & 1) == 1) | (entry < 0), -1, entry // 2), mask=mask)


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
    given = [contiguous(t) for t in (second, from_ring, position, row, rings, blocks)]
    if from_ring.dtype is not torch.bool or any(t.dtype is not int64 for i, t in enumerate(given) if i != 1):
        raise TypeError(f"rows, positions and slots are int64 and from_ring bool, got {[t.dtype for t in given]}")
    given[1] = given[1].view(uint8)
    n = second.shape[0]
    partner, slot, first, entry = (empty(n, dtype=int64, device=second.device) for _ in range(4))
    launch(_pairs, (-(-n // 128),), *given, partner, slot, first, entry, n, ring, BLOCK=128)
    return partner, slot, first, entry


@triton.jit(do_not_specialize=["size"])
def _angles(POSITION, FREQUENCY, COS, SIN, size, HALF: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(POSITION + i // HALF, mask=i < size, other=0).to(tl.float32)
    angle = position * tl.load(FREQUENCY + i % HALF)
    if INTERPRETED:
        cos, sin = tl.cos(angle), tl.sin(angle)
    else:
        cos, sin = libdevice.cos(angle), libdevice.sin(angle)  # angles of a million turns: not the fast ones
    tl.store(COS + i, cos, mask=i < size)
    tl.store(SIN + i, sin, mask=i < size)


def rope_angles(num: Numerics, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) f32 [T, dim/2] of the f32 products position · frequency."""
    positions, frequencies = contiguous(positions), contiguous(frequencies)
    T, half = positions.shape[0], frequencies.shape[0]
    if positions.dtype is not int64 or frequencies.dtype is not float32:
        raise TypeError(f"positions are int64 and frequencies float32, got {positions.dtype} and {frequencies.dtype}")
    cos, sin = (empty((T, half), dtype=float32, device=positions.device) for _ in range(2))
    size = T * half
    launch(_angles, (blocks(size, 256),), positions, frequencies, cos, sin, size, HALF=half, BLOCK=256)
    return cos, sin


@triton.jit
def _embed(IDS, TABLE, X, PRE, H: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = bf16(widened(tl.load(TABLE + tl.load(IDS + t) * H + h, mask=h < H, other=0.0)))
    for c in tl.static_range(C):
        tl.store(X + (t * C + c) * H + h, row, mask=h < H)
    if PRE is not None:
        c = tl.arange(0, BC)
        tl.store(PRE + t * C + c, (c == 0).to(tl.float32), mask=c < C)


def _embedded(ids: Tensor, table: Tensor, streams: int, with_pre: bool) -> tuple[Tensor, Tensor | None]:
    ids, table = contiguous(ids), contiguous(table)
    if ids.dtype is not int64 or table.dtype not in (bfloat16, float32):
        raise TypeError(f"token ids are int64 and the table bfloat16 or float32, got {ids.dtype} and {table.dtype}")
    T, H = ids.shape[0], table.shape[1]
    x = empty((T, streams, H), dtype=bfloat16, device=ids.device)
    pre = empty((T, streams), dtype=float32, device=ids.device) if with_pre else None
    block = min(2048, power_of_two(H))
    sizes = dict(H=H, C=streams, BC=power_of_two(streams), BLOCK=block)
    launch(_embed, (T, blocks(H, block)), ids, table, x, pre, **sizes)
    return x, pre


def embed(num: Numerics, ids: Tensor, table: Tensor) -> Tensor:
    """Rows bf16 [T, H] of the embedding [V, H] for ids int64 [T]."""
    return _embedded(ids, table, 1, False)[0].squeeze(1)


def embed_streams(num: Numerics, ids: Tensor, table: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """(C copies of the rows bf16 [T, C, H], the pre-mix f32 [T, C] that takes the first) for ids int64 [T]."""
    x, pre = _embedded(ids, table, streams, True)
    assert pre is not None
    return x, pre
