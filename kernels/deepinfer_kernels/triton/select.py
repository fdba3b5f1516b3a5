"""Selection of index entries: the best of a row by bisecting the bits of their scores, without a sort.

Scores become integers that order like them. A program holds a row of up to ``_WHOLE`` of them in its registers: 32
counts or fewer find a number that as many items as are wanted reach, and one running sum gives each of them, and as
many of its equals as there is room for, its place in order.

Of a longer row the best k are in k of its groups of neighbours: those with the highest maxima, the first among equals.
For an item of another group has one in each of these before it. So maxima come first, by as many programs as there is
to read; the best groups are selected as a row of their own; then their items are. Example, k = 2 of groups of 3:
[1 5 2 | 5 5 0 | 9 1 1] has maxima 5, 5, 9, the groups 0 and 2 and the items 1 and 6, by their scores 5 and 9.
More than half as many as a program holds are selected by passes over the whole row, each with a histogram of one byte.
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

#: warps of a program by the numbers that it holds, and the most numbers
_BLOCKS, _WHOLE = {1024: 4, 4096: 8, 16384: 32}, 16384
#: keys of a program that finds maxima, and of the widest group, of which it has 16
_READ, _WIDEST = 2048, 128
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


@triton.jit
def _reached(u, want, BLOCK: tl.constexpr):
    """A number that ``want`` of the BLOCK items u reach, or that of the ``want``-th best where more reach that."""
    least, step = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    found = tl.full((), BLOCK, tl.int32)
    while (step != 0) & (found != want):
        count = tl.sum((u >= (least | step)).to(tl.int32), 0)
        enough = count >= want
        least, found = tl.where(enough, least | step, least), tl.where(enough, count, found)
        step = step >> 1
    return least


@triton.jit
def _running(x, BLOCK: tl.constexpr):
    """Sums of BLOCK items up to each: of 32 of a warp, and over these; else each thread adds up those of all warps."""
    rows = tl.reshape(x, (BLOCK // 32, 32))
    total = tl.sum(rows, 1)
    before = tl.cumsum(total, 0) - total
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], (BLOCK,))


@triton.jit(do_not_specialize=["n", "k", "parts"])
def _select(
    KEYS, GROUPS, NANS, IDS, KEPT, n, k, parts, NUMBERED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """The k best of a row of n keys as ids, or as a mask: of the whole row, or of k groups of it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if GROUPS is None:
        j, here = i, i < n
    else:
        group = tl.load(GROUPS + row * k + i // GROUP, mask=i < k * GROUP, other=-1)
        j = group * GROUP + i % GROUP
        here = (group >= 0) & (j < n)
    if NUMBERED:
        key = tl.load(KEYS + row * n + j, mask=here, other=_LOWEST)
    else:
        key = number(tl.load(KEYS + row * n + j, mask=here, other=float("-inf")))
    # NaN is never taken but has its place among the best, as in a sort: its places are left to equals of the k-th
    nans = tl.sum((key == _NAN).to(tl.int32), 0)
    if NANS is not None:
        nans = tl.full((), 0, tl.int32)
        for start in range(0, parts, 256):
            p = start + tl.arange(0, 256)
            nans += tl.sum(tl.load(NANS + row * parts + p, mask=p < parts, other=0), 0)
    key = tl.where(key == _NAN, _LOWEST, key)
    kth = tl.full((), _LOWEST, tl.int32)
    if n > k:
        least = _reached(key.to(tl.uint32, bitcast=True) ^ 0x80000000, k - nans, BLOCK)
        kth = (least ^ 0x80000000).to(tl.int32, bitcast=True)
    above = (key > _LOWEST) & (key > kth)
    equal = (key > _LOWEST) & (key == kth)
    room = k - tl.sum(above.to(tl.int32), 0)
    upto = _running(above.to(tl.int32) + (equal.to(tl.int32) << 16), BLOCK)  # both are at most 16384
    equals = upto >> 16
    chosen = above | (equal & (equals <= room))
    if KEPT is not None:
        tl.store(KEPT + row * n + j, chosen.to(tl.uint8), mask=here)
    if IDS is not None:
        width = tl.minimum(n, k)
        place = (upto & 0xFFFF) + tl.minimum(equals, room) - 1
        tl.store(IDS + row * width + place, j.to(IDS.dtype.element_ty), mask=chosen)
        taken = tl.sum(chosen.to(tl.int32), 0)
        none = tl.full((BLOCK,), -1, IDS.dtype.element_ty)
        tl.store(IDS + row * width + i, none, mask=(i >= taken) & (i < width))


@triton.jit(do_not_specialize=["n", "k"])
def _select_far(KEYS, IDS, KEPT, n, k, NUMBERED: tl.constexpr, BLOCK: tl.constexpr):
    """As ``_select``, of rows of any length: the k best of n keys, more than k, by passes over the row."""
    row = tl.program_id(0).to(tl.int64)
    width = tl.minimum(n, k)
    kth, room = tl.full((), _LOWEST, tl.int32), tl.full((), 0, tl.int32)
    if n > k:
        kth, room = kth_best(KEYS, row, n, k, NUMBERED, BLOCK)
    taken = tl.full((), 0, tl.int32)
    equals = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = _numbers(KEYS, row, j, n, NUMBERED)
        real = (key > _LOWEST) & (key < _NAN) & (j < n)
        equal = real & (key == kth)
        nth = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (real & (key > kth)) | (equal & (nth <= room))
        if KEPT is not None:
            tl.store(KEPT + row * n + j, chosen.to(tl.uint8), mask=j < n)
        if IDS is not None:
            place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(IDS + row * width + place, j.to(tl.int64), mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    if IDS is not None:
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(IDS + row * width + i, tl.full((BLOCK,), -1, tl.int64), mask=(i >= taken) & (i < width))


@triton.jit(do_not_specialize=["n"])
def _maxima(
    KEYS, VISIBLE, NANS, OUT, n, NUMBERED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Number of the best key of each group. With ``VISIBLE`` the newest visible group has that of +∞; with ``NANS``
    they are counted, and have that of −∞."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    items = (n + GROUP - 1) // GROUP
    j = part * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, SIZE)[None, :]
    at = j[:, None] * GROUP + i
    known = (i < GROUP) & (at < n)
    if NUMBERED:
        key = tl.load(KEYS + row * n + at, mask=known, other=_LOWEST)
    else:
        key = number(tl.load(KEYS + row * n + at, mask=known, other=float("-inf")))
    if NANS is not None:
        nan = key == _NAN
        tl.store(NANS + row * tl.num_programs(1) + part, tl.sum(tl.sum(nan.to(tl.int32), 1), 0))
        key = tl.where(nan, _LOWEST, key)
    best = tl.max(key, 1)
    if VISIBLE is not None:
        visible = tl.load(VISIBLE + row).to(tl.int32)
        best = tl.where(j == tl.where(visible > 0, (visible - 1) // GROUP, -1), _HIGHEST, best)
    tl.store(OUT + row * items + j, best, mask=j < items)


def _held(items: int) -> int:
    """Numbers of the program that holds so many items."""
    return next(block for block in _BLOCKS if items <= block)


def _group(k: int) -> int:
    """Items of a group, of which a program holds k."""
    return min(_WIDEST, _WHOLE // power_of_two(k))


def lengths(k: int) -> tuple[int, ...]:
    """Lengths of rows that take every kernel there is for k of their items."""
    group = max(1, _group(k))
    return (*_BLOCKS, *(group * n for n in _BLOCKS if group * n > _WHOLE), group * _WHOLE + 1)


def _in_groups(
    keys: Tensor, rows: int, n: int, group: int, visible: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Numbers of the maxima of groups of keys [rows, n]; how many are NaN by part of a row, if none is ``visible``."""
    size = power_of_two(group)
    items, step = blocks(n, group), max(16, _READ // size)
    parts = blocks(items, step)
    numbers = empty((rows, items), dtype=int32, device=keys.device)
    found = empty((rows, parts), dtype=int32, device=keys.device) if visible is None else None
    sizes = dict(NUMBERED=keys.dtype is int32, GROUP=group, SIZE=size, BLOCK=step)
    launch(_maxima, (rows, parts), keys, visible, found, numbers, n, **sizes)
    return numbers, found


def _best(keys: Tensor, rows: int, n: int, k: int, *, ids: Tensor | None = None, kept: Tensor | None = None) -> None:
    """Fill ids [rows, min(n, k)] or the mask kept [rows, n] with the k best of keys [rows, n], f32 or their numbers."""
    sizes = dict(NUMBERED=keys.dtype is int32)
    if n <= _WHOLE:
        sizes |= dict(GROUP=1, BLOCK=_held(n))
        launch(_select, (rows,), keys, None, None, ids, kept, n, k, 0, warps=_BLOCKS[sizes["BLOCK"]], **sizes)
        return
    group = _group(k)
    if group < 2:
        launch(_select_far, (rows,), keys, ids, kept, n, k, warps=8, **sizes, BLOCK=4096)
        return
    numbers, nans = _in_groups(keys, rows, n, group)
    assert nans is not None
    groups = empty((rows, k), dtype=int32, device=keys.device)
    _best(numbers, rows, numbers.shape[1], k, ids=groups)
    if kept is not None:
        kept.zero_()
    sizes |= dict(GROUP=group, BLOCK=_held(k * group))
    launch(_select, (rows,), keys, groups, nans, ids, kept, n, k, nans.shape[1], warps=_BLOCKS[sizes["BLOCK"]], **sizes)


def select_topk(num: Numerics, scores: Tensor, *, k: int) -> Tensor:
    """Ascending indices [..., min(k, n)] int64 of the k best scores f32 [..., n], padded with −1 at the end."""
    scores = contiguous(scores)
    if scores.dtype is not float32 or k < 1:
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}, {k} of them; expected float32 and 1 or more")
    n = scores.shape[-1]
    ids = empty((*scores.shape[:-1], min(k, n)), dtype=int64, device=scores.device)
    _best(scores, scores.numel() // n if n else 0, n, k, ids=ids)
    return ids


def candidate_blocks(num: Numerics, scores: Tensor, visible: Tensor, *, block: int, keep: int) -> Tensor:
    """Bool [..., ceil(n/block)]: the ``keep`` best blocks of each query row by their maximum score, newest pinned."""
    scores, visible = contiguous(scores), contiguous(visible)
    if scores.dtype is not float32 or visible.dtype is not int64 or visible.shape != scores.shape[:-1]:
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}, visible {tuple(visible.shape)} {visible.dtype}")
    n, rows = scores.shape[-1], visible.numel()
    kept = empty((*scores.shape[:-1], blocks(n, block)), dtype=bool, device=scores.device)
    numbers, _ = _in_groups(scores, rows, n, block, visible)
    _best(numbers, rows, kept.shape[-1], keep, kept=kept.view(uint8))
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
