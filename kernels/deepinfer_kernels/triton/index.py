"""Lightning indexer: scores of keys, or of their records where they are.

The keys are the left operand, the queries with all their heads the right one: the heads of a score lie in the
registers of four neighbouring threads, which add them up in the same order whatever the number of queries. Records are
decoded tile by tile; where many blocks of queries would do so, once into memory before, in the same order of columns,
so that a score has the same bits in both ways.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty, float32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.cache import record
from deepinfer_kernels.triton.formats import dot, e2m1_apart, e2m1_column, e8m0_bf16, spread
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: columns of a product (queries times heads) → warps, stages
TILES = {32: (4, 3), 64: (4, 3), 128: (4, 3), 256: (8, 2)}
#: entries of a product
_ENTRIES = 64
#: programs times columns that keep a device busy; fewer, with more entries each, read their queries less often
_BUSY = 1 << 16
#: blocks of queries that decode a key each by itself: moving it to memory and back takes about as long as six times
_AGAIN = 4


@triton.jit
def _record(ROW, TABLE, P, per_block, j0, BE: tl.constexpr, WHOLE: tl.constexpr):
    """Records of entries j0, j0 + 1, … of a row by its line of the block table: the first one, or each, not ``WHOLE``.

    As for ``entry_slots``, entries beyond the table are looked for in its last block.
    """
    j = j0 if WHOLE else j0 + tl.arange(0, BE)
    block = tl.load(TABLE + ROW * P + tl.minimum(j // per_block, P - 1))
    return tl.maximum(block, 0) * per_block + j % per_block


@triton.jit
def _decoded(STORE, at, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, WHOLE: tl.constexpr):
    """bf16 keys [BE, BD] of records from ``at`` on, or of these, in the order of ``e2m1_column``."""
    size: tl.constexpr = D // 32 * 17
    start = STORE + at * size
    start = (start + tl.arange(0, BE) * size if WHOLE else start)[:, None]
    w, g = tl.arange(0, BD // 8)[None, :], tl.arange(0, BD // 32)[None, :]
    real = w < D // 8
    if size % 4 == 0:
        word = tl.load((start + 4 * w).to(tl.pointer_type(tl.int32), bitcast=True), mask=real, other=0)
    else:
        word = tl.load(start + 4 * w, mask=real, other=0).to(tl.int32)
        for i in tl.static_range(1, 4):
            word |= tl.load(start + 4 * w + i, mask=real, other=0).to(tl.int32) << (8 * i)
    scale = tl.load(start + D // 2 + g, mask=g < D // 32, other=127)
    return e2m1_apart(word, spread(e8m0_bf16(scale), BE, BD // 32, 4), BE, BD // 8)


@triton.jit(do_not_specialize=["n", "P", "per_block"])
def _decode(STORE, ROWS, TABLE, OUT, n, P, per_block, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys of ``BE`` entries of one row from their records."""
    row = tl.program_id(1).to(tl.int64)
    j0 = tl.program_id(0) * BE
    at = _record(tl.load(ROWS + row), TABLE, P, per_block, j0, BE, WHOLE)
    j, d = j0 + tl.arange(0, BE)[:, None], tl.arange(0, BD)[None, :]
    tl.store(OUT + (row * n + j) * BD + d, _decoded(STORE, at, D, BD, BE, WHOLE), mask=j < n)


@triton.jit(do_not_specialize=["C", "n", "each", "P", "per_block"])
def _scores(
    Q, WEIGHT, KEYS, ROWS, TABLE, VISIBLE, OUT, C, n, each, P, per_block, N: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Σ_h w_h · relu(key_j · q_h) of ``BC`` queries with all their heads and ``each`` entries of one row.

    KEYS are keys [B, n, D] or, ``PACKED``, [B, n, BD] in the order of ``e2m1_column``; with a TABLE, records.
    """
    row = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, n)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    visible = tl.load(VISIBLE + row * C + c, mask=c < C, other=0)
    d = tl.arange(0, BD)
    m = tl.arange(0, BC * HEADS)
    mc = tl.program_id(0) * BC + m // HEADS
    real = (mc < C) & (m % HEADS < N)
    at = (row * C + mc) * N + m % HEADS
    of = e2m1_column(d, BD) if PACKED else d
    width: tl.constexpr = BD if PACKED else D
    q = tl.load(Q + at[None, :] * D + of[:, None], mask=real[None, :] & (of < D)[:, None], other=0.0)
    w = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    out = OUT + (row * C + c)[None, :] * n
    seen = tl.minimum(tl.max(visible, 0), last).to(tl.int32)
    if TABLE is not None:
        line = tl.load(ROWS + row)
        place = _record(line, TABLE, P, per_block, first, BE, WHOLE)
    for j0 in range(first, seen, BE):
        j = j0 + tl.arange(0, BE)
        if TABLE is None:
            keys = KEYS + (row * n + j)[:, None] * width + d[None, :]
            keys = tl.load(keys, mask=(j < n)[:, None] & (d < width)[None, :], other=0.0)
        else:
            keys = _decoded(KEYS, place, D, BD, BE, WHOLE)
            place = _record(line, TABLE, P, per_block, j0 + BE, BE, WHOLE)  # on its way while this one is multiplied
        product = dot(keys, q, tl.zeros((BE, BC * HEADS), tl.float32))
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        if N != HEADS:  # a key of infinity times a head that is not there is no number
            product = tl.where(real[None, :], product, 0.0)
        score = tl.sum(product.reshape(BE, BC, HEADS), 2)
        score = tl.where(j[:, None] < visible[None, :], score, float("-inf"))
        tl.store(out + j[:, None], score, mask=(c < C)[None, :] & (j < last)[:, None])
    for j0 in range(first + tl.cdiv(tl.maximum(seen - first, 0), BE) * BE, last, BE):
        j = j0 + tl.arange(0, BE)
        nothing = tl.full((BE, BC), float("-inf"), tl.float32)
        tl.store(out + j[:, None], nothing, mask=(c < C)[None, :] & (j < last)[:, None])


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] of iq [B, C, ih, Di], iw [B, C, ih], keys [B, n, Di]; −inf from visible [B, C] on."""
    if keys.shape[::2] != iq.shape[::3]:
        raise ValueError(f"index queries {tuple(iq.shape)}, keys {tuple(keys.shape)}")
    return _scored(iq, iw, visible, contiguous(keys), keys.shape[1])


def index_scores_cached(
    num: Numerics,
    iq: Tensor,
    iw: Tensor,
    store: Tensor,
    rows: Tensor,
    table: Tensor,
    visible: Tensor,
    *,
    per_block: int,
    count: int,
) -> Tensor:
    """``index_scores`` of the first ``count`` entries of batch rows, their records read where they are."""
    (B, C, N, D), (_, P) = iq.shape, table.shape
    store, rows, table = contiguous(store.view(uint8)), contiguous(rows), contiguous(table)
    if record("index", store.shape[1], stored=True)[2] != D or rows.shape != (B,):
        raise ValueError(f"index queries {tuple(iq.shape)}, records {tuple(store.shape)}, rows {tuple(rows.shape)}")
    if rows.dtype is not int64 or table.dtype is not int64:
        raise TypeError(f"rows and their blocks are int64, got {rows.dtype} and {table.dtype}")
    if blocks(C, _queries(C, N)) <= _AGAIN:
        return _scored(iq, iw, visible, store, count, rows, table, per_block)
    wide = power_of_two(D)
    keys = empty((B, count, wide), dtype=bfloat16, device=iq.device)
    sizes = dict(D=D, BD=wide, BE=_ENTRIES, WHOLE=per_block % _ENTRIES == 0)
    launch(_decode, (blocks(count, _ENTRIES), B), store, rows, table, keys, count, P, per_block, **sizes)
    return _scored(iq, iw, visible, keys, count, packed=True)


def _queries(C: int, heads: int) -> int:
    """Queries of a program: a power of two whose heads fill 32 to 256 columns of a product."""
    heads = power_of_two(heads)
    return min(max(1, 16 // heads, power_of_two(C)), max(1, 256 // heads))


def _scored(
    iq: Tensor,
    iw: Tensor,
    visible: Tensor,
    keys: Tensor,
    n: int,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    per_block: int = _ENTRIES,
    *,
    packed: bool = False,
) -> Tensor:
    """Scores of keys, in the order of packed ones where ``packed``, or of the records of ``rows`` by ``table``."""
    iq, iw, visible = contiguous(iq), contiguous(iw), contiguous(visible)
    B, C, N, D = iq.shape
    if iw.shape != (B, C, N) or visible.shape != (B, C) or visible.dtype is not int64:
        shapes = [tuple(t.shape) for t in (iw, visible)]
        raise ValueError(f"index queries {tuple(iq.shape)}, weights and visible {shapes} {visible.dtype}")
    if iq.dtype is not bfloat16 or (table is None and keys.dtype is not bfloat16):
        raise TypeError(f"index queries and keys are bfloat16, got {iq.dtype} and {keys.dtype}")
    scores = empty((B, C, n), dtype=float32, device=iq.device)
    heads, queries = power_of_two(N), _queries(C, N)
    columns = queries * heads
    warps, stages = TILES[min(max(32, columns), 256)]
    products = B * blocks(C, queries) * blocks(n, _ENTRIES)
    each = _ENTRIES * min(64, max(1, blocks(products * columns, _BUSY)))
    sizes = dict(N=N, D=D, HEADS=heads, BD=max(16, power_of_two(D)), BC=queries, BE=_ENTRIES)
    sizes |= dict(PACKED=packed or table is not None, WHOLE=per_block % _ENTRIES == 0)
    grid = (blocks(C, queries), blocks(n, each), B)
    P = 0 if table is None else table.shape[1]
    places = (keys, rows, table, visible, scores, C, n, each, P, per_block)
    launch(_scores, grid, iq, iw, *places, warps=warps, stages=stages, **sizes)
    return scores
