"""Rows moved from slot to slot, whatever they hold."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.launch import blocks, contiguous, launch

#: units of a program: rows of experts are megabytes, those of a window a few hundred bytes
_WIDE, _NARROW = 4096, 256


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["AT", "ROWS"])
def _copy_rows(TARGET, AT, SOURCE, ROWS, width, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to, of = tl.load(AT + i) * width, tl.load(ROWS + i) * width
    tl.store(TARGET + to + j, tl.load(SOURCE + of + j, mask=j < width), mask=j < width)


def copy_rows(num: Numerics, target: Tensor, at: Tensor, source: Tensor, rows: Tensor) -> None:
    """target[at[i]] = source[rows[i]], in place; at and rows int64 [n], no row is both read and written."""
    same = target.shape[1:] == source.shape[1:] and target.dtype is source.dtype
    if not same or not (target.is_contiguous() and source.is_contiguous()):
        shapes = [(tuple(t.shape), t.dtype) for t in (target, source)]
        raise ValueError(f"rows of one contiguous store into another of the same kind: {shapes}")
    if at.dtype is not int64 or rows.dtype is not int64 or at.shape != rows.shape or at.dim() != 1:
        raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype} to {tuple(at.shape)} {at.dtype}, expected int64 [n]")
    n, size = at.shape[0], target[:1].nbytes
    if not n or not size:
        return
    unit = int32 if size % 4 == 0 and target.data_ptr() % 4 == 0 and source.data_ptr() % 4 == 0 else uint8
    to, of = (t.view(t.shape[0], -1).view(unit) for t in (target, source))
    width = to.shape[1]
    block = _WIDE if width > _WIDE else _NARROW
    launch(_copy_rows, (n, blocks(width, block)), to, contiguous(at), of, contiguous(rows), width, BLOCK=block)
