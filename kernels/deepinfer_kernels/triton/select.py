"""Selection of index entries: the best of a row by bisecting the bits of their scores, without a sort.

Scores become integers that order like them. Four passes over a row, each with a histogram of one byte of the numbers
that agree so far with the one wanted, find the k-th best; a fifth writes what is above it, and as many of its equals
as there is room for, in order. One program per row, for rows of any length.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, bool, empty, float32, int32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16
from deepinfer_kernels.triton.launch import blocks, contiguous, launch, power_of_two

#: numbers of −∞, +∞ and NaN; what the lowest entry of all is compared with
_LOWEST, _HIGHEST, _NAN = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)


@triton.jit
def number(x):
    """int32 that orders like the f32 x; both zeros are equal, NaN is the highest."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x != x, _NAN, key)


@triton.jit
def _numbers(SCORES, row, j, n, NUMBERED: tl.constexpr):
    """Of the entries j of a row, which may be ``NUMBERED`` already."""
    if NUMBERED:
        return tl.load(SCORES + row * n + j, mask=j < n, other=_LOWEST)
    else:
        return number(tl.load(SCORES + row * n + j, mask=j < n, other=float("-inf")))


@triton.jit
def kth_best(SCORES, row, n, k, NUMBERED: tl.constexpr, BLOCK: tl.constexpr):
    """(number of the k-th best, how many of its equals there is room for) of k items or more."""
    bins = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    want = k
    for digit in tl.static_range(4):
        found = tl.zeros((256,), dtype=tl.int32)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            u = _numbers(SCORES, row, j, n, NUMBERED).to(tl.uint32, bitcast=True) ^ 0x80000000
            here = j < n
            if digit > 0:
                here = here & ((u >> (32 - 8 * digit)) == prefix)
            found += tl.histogram(((u >> (24 - 8 * digit)) & 255).to(tl.int32), 256, mask=here)
        behind = tl.sum(found, 0) - tl.cumsum(found, 0)  # items of higher digits
        chosen = tl.sum((behind + found >= want).to(tl.int32), 0) - 1
        want -= tl.sum(tl.where(bins == chosen, behind, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    kth = (prefix ^ 0x80000000).to(tl.int32, bitcast=True)
    # NaN is never taken but has its place among the best, as in a sort: its places are left to equals of the k-th
    above = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = _numbers(SCORES, row, j, n, NUMBERED)
        above += tl.sum(((key > kth) & (key < _NAN) & (j < n)).to(tl.int32), 0)
    return kth, k - above


@triton.jit(do_not_specialize=["n", "k"])
def _select(SCORES, IDS, n, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.minimum(n, k)
    kth, room = tl.full((), _LOWEST, tl.int32), tl.full((), 0, tl.int32)
    if n > k:
        kth, room = kth_best(SCORES, row, n, k, False, BLOCK)
    taken = tl.full((), 0, tl.int32)
    equals = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = _numbers(SCORES, row, j, n, False)
        real = (key > _LOWEST) & (key < _NAN) & (j < n)
        equal = real & (key == kth)
        nth = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (real & (key > kth)) | (equal & (nth <= room))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(IDS + row * width + place, j.to(tl.int64), mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(IDS + row * width + i, tl.full((BLOCK,), -1, tl.int64), mask=(i >= taken) & (i < width))


def _block(n: int) -> int:
    """Entries of a step: few where a row has few."""
    return 1024 if n <= 1024 else 4096


def select_topk(num: Numerics, scores: Tensor, *, k: int) -> Tensor:
    """Ascending indices [..., min(k, n)] int64 of the k best scores f32 [..., n], padded with −1 at the end."""
    scores = contiguous(scores)
    if scores.dtype is not float32 or k < 1:
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}, {k} of them; expected float32 and 1 or more")
    n = scores.shape[-1]
    ids = empty((*scores.shape[:-1], min(k, n)), dtype=int64, device=scores.device)
    rows = scores.numel() // n if n else 0
    launch(_select, (rows,), scores, ids, n, k, warps=4 if n <= 1024 else 8, BLOCK=_block(n))
    return ids


@triton.jit(do_not_specialize=["n"])
def _block_numbers(SCORES, VISIBLE, OUT, n, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Number of the best entry of each block; the newest visible block has that of +∞."""
    row = tl.program_id(1).to(tl.int64)
    visible = tl.load(VISIBLE + row).to(tl.int32)
    newest = tl.where(visible > 0, (visible - 1) // GROUP, -1)
    items = (n + GROUP - 1) // GROUP
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, SIZE)[None, :]
    at = j[:, None] * GROUP + i
    known = (i < GROUP) & (at < n)
    best = tl.max(number(tl.load(SCORES + row * n + at, mask=known, other=float("-inf"))), 1)
    tl.store(OUT + row * items + j, tl.where(j == newest, _HIGHEST, best), mask=j < items)


@triton.jit(do_not_specialize=["items", "keep"])
def _candidates(NUMBERS, KEPT, items, keep, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    kth, room = tl.full((), _LOWEST, tl.int32), tl.full((), 0, tl.int32)
    if items > keep:
        kth, room = kth_best(NUMBERS, row, items, keep, True, BLOCK)
    equals = tl.full((), 0, tl.int32)
    for start in range(0, items, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = _numbers(NUMBERS, row, j, items, True)
        real = (key > _LOWEST) & (key < _NAN) & (j < items)
        equal = real & (key == kth)
        nth = equals + tl.cumsum(equal.to(tl.int32), 0)
        kept = (real & (key > kth)) | (equal & (nth <= room))
        tl.store(KEPT + row * items + j, kept.to(tl.uint8), mask=j < items)
        equals += tl.sum(equal.to(tl.int32), 0)


def candidate_blocks(num: Numerics, scores: Tensor, visible: Tensor, *, block: int, keep: int) -> Tensor:
    """Bool [..., ceil(n/block)]: the ``keep`` best blocks of each query row by their maximum score, newest pinned."""
    scores, visible = contiguous(scores), contiguous(visible)
    if scores.dtype is not float32 or visible.dtype is not int64 or visible.shape != scores.shape[:-1]:
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}, visible {tuple(visible.shape)} {visible.dtype}")
    n = scores.shape[-1]
    items, rows, size = blocks(n, block), visible.numel(), power_of_two(block)
    kept = empty((*scores.shape[:-1], items), dtype=bool, device=scores.device)
    numbers = empty((rows, items), dtype=int32, device=scores.device)
    sizes = dict(GROUP=block, SIZE=size, BLOCK=max(16, 2048 // size))
    launch(_block_numbers, (blocks(items, sizes["BLOCK"]), rows), scores, visible, numbers, n, **sizes)
    launch(_candidates, (rows,), numbers, kept.view(uint8), items, keep, warps=8, BLOCK=_block(items))
    return kept


@triton.jit(do_not_specialize=["n"])
def _restrict(SCORES, KEPT, OUT, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(KEPT + row * ((n + GROUP - 1) // GROUP) + j // GROUP, mask=j < n, other=0)
    score = tl.load(SCORES + row * n + j, mask=(j < n) & (kept != 0), other=float("-inf"))
    tl.store(OUT + row * n + j, score, mask=j < n)


def restrict_to_candidates(num: Numerics, scores: Tensor, blocks: Tensor, *, block: int) -> Tensor:
    """Scores f32 [..., n] with −inf outside the kept blocks, bool [..., ceil(n/block)], of the same row."""
    scores, kept = contiguous(scores), contiguous(blocks)
    n = scores.shape[-1]
    if kept.dtype is not bool or kept.shape != (*scores.shape[:-1], -(-n // block)):
        raise ValueError(f"scores {tuple(scores.shape)}, blocks of {block} {tuple(kept.shape)} {kept.dtype}")
    out = empty(scores.shape, dtype=scores.dtype, device=scores.device)
    rows = scores.numel() // n if n else 0
    launch(_restrict, (-(-n // 1024), rows), scores, kept.view(uint8), out, n, GROUP=block, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["size"])
def _scaled(X, Y, size, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Y + i, bf16(x * factor), mask=i < size)


def index_weights(num: Numerics, projected: Tensor, head_dim: int) -> Tensor:
    """Head weights bf16 [T, ih] of the projection: times head_dim^-½ · ih^-½."""
    x = contiguous(projected)
    y = empty(x.shape, dtype=bfloat16, device=x.device)
    factor = head_dim**-0.5 * x.shape[-1] ** -0.5
    launch(_scaled, (blocks(x.numel(), 1024),), x, y, x.numel(), factor, BLOCK=1024)
    return y
