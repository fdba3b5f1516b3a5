"""Rows of logits read in parts by many programs; what parts found is put together in their order."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.triton.launch import power_of_two
from deepinfer_kernels.triton.select import number

#: numbers of −∞ and +∞, and the largest integer
LOWEST, INFINITE, LAST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)


def part_size(V: int) -> int:
    """Tokens of a part of a row: they follow from V alone, as do the sums and draws of parts."""
    return min(4096, max(128, power_of_two(V)))


@triton.jit
def value(key):
    """The f32 of a number."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def part_of(LOGITS, row, part, V: tl.constexpr, EACH: tl.constexpr):
    """(ids [EACH/4, 4] of a part of a row, their logits, their numbers); −∞ behind the last."""
    quad, place = tl.arange(0, EACH // 4)[:, None], tl.arange(0, 4)[None, :]
    j = part * EACH + quad * 4 + place
    x = tl.load(LOGITS + row * V + j, mask=j < V, other=float("-inf"))
    return j, x, number(x)


@triton.jit
def look(LOGITS, RAW, row, part, V: tl.constexpr, EACH: tl.constexpr):
    """(ids, logits and numbers of a part, number of the best, its lowest id, 1 where the raw logits are finite)."""
    j, x, key = part_of(LOGITS, row, part, V, EACH)
    best = tl.max(tl.max(key, 1), 0)
    id = tl.min(tl.min(tl.where(key == best, j, LAST), 1), 0)
    raw = key
    if RAW is not None:
        raw = number(tl.load(RAW + row * V + j, mask=j < V, other=0.0))
    wrong = ((raw >= INFINITE) | (raw <= LOWEST)) & (j < V)
    return j, x, key, best, id, 1 - tl.max(tl.max(wrong.to(tl.int32), 1), 0)


@triton.jit
def keep(FOUND, row, part, PARTS: tl.constexpr, best, id, finite):
    """FOUND [row, part]: what ``look`` found of a part."""
    to = FOUND + (row * PARTS + part) * 3
    tl.store(to, best)
    tl.store(to + 1, id)
    tl.store(to + 2, finite)


@triton.jit
def whole(FOUND, row, PARTS: tl.constexpr):
    """(number of the best of a row, its lowest id, 1 where raw logits are finite) of FOUND [row, part]."""
    i = tl.arange(0, triton.next_power_of_2(PARTS))
    at, mask = FOUND + (row * PARTS + i) * 3, i < PARTS
    key = tl.load(at, mask=mask, other=-0x80000000)
    best = tl.max(key, 0)
    id = tl.min(tl.where((key == best) & mask, tl.load(at + 1, mask=mask, other=0), LAST), 0)
    return best, id, tl.min(tl.load(at + 2, mask=mask, other=1), 0)
