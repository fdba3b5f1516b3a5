"""Prepared weights as vendor libraries want them, converted once each and kept as long as the weight lives.

Bytes of the checkpoint are taken over where a weight still has them. A weight that was prepared as a matrix is
quantised again, which is exact: its values are codes times powers of two, and the smallest scale that holds a group
has every one of them among its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.linear import Weight

#: E8M0 byte of the scale 1, for groups that hold nothing
_ONE = 127

_kept: dict[str, WeakTensorKeyDictionary] = {}


def kept(form: str, weight: Weight, make: Callable[[Weight], Any]) -> Any:
    """``make(weight)``, made once per weight and ``form``."""
    of_form = _kept.setdefault(form, WeakTensorKeyDictionary())
    if weight.data not in of_form:
        of_form[weight.data] = make(weight)
    return of_form[weight.data]


def codes(weight: Weight) -> tuple[Tensor, Tensor]:
    """(bytes, E8M0 bytes [..., out, in/32]) of an fp8 or fp4 weight: one E4M3 per byte, or two E2M1 in order."""
    if weight.kind == "fp8":
        data, tiles = (weight.data, None) if weight.scale is None else weight.stored
        if tiles is None:
            if data.dim() > 2:
                parts = [codes(Weight(part, "fp8")) for part in data]
                return torch.stack([c for c, _ in parts]), torch.stack([s for _, s in parts])
            data, tiles = q.quantise_fp8_tiles(data.float())
        return data.view(torch.uint8), tiles.repeat_interleave(32, -2)[..., : data.shape[-2], :]
    assert weight.kind == "fp4", weight.kind
    if weight.scale is None:
        return q.quantise_mxfp4(weight.data.float())
    packed, scale = weight.stored
    return packed.view(torch.uint8), scale.view(torch.uint8)


def padded(x: Tensor, multiple: int, dim: int = -1, value: int = 0) -> Tensor:
    """x with ``value`` behind the end of ``dim`` up to a multiple; x itself where it is one already."""
    short = -x.shape[dim] % multiple
    if short == 0:
        return x
    behind = [0, 0] * (-dim - 1 if dim < 0 else x.dim() - 1 - dim) + [0, short]
    if x.element_size() == 1:
        return F.pad(x.view(torch.uint8), behind, value=value).view(x.dtype)
    return F.pad(x, behind, value=value)


def packed_scales(scale: Tensor) -> Tensor:
    """E8M0 bytes [..., rows, n] as int32 [..., rows, ceil(n/4)]: four bytes of a row in one word, first byte lowest,
    words of consecutive rows next to each other, columns on 16 bytes (strides 1 and rows rounded up to 4)."""
    words = padded(scale.view(torch.uint8), 4, value=_ONE).contiguous().view(torch.int32)
    rows, n = words.shape[-2:]
    # allocated, because a tensor with one column says that it is contiguous whatever its strides are
    columns = words.new_zeros((*words.shape[:-2], n, -(-rows // 4) * 4))
    columns[..., :rows] = words.mT
    return columns[..., :rows].mT


def dense(weight: Weight, rows: int, columns: int) -> Tensor:
    """The matrix in bf16, rows and columns padded with zeros to multiples; exact for every kind but f32."""
    matrix = weight.dense.to(torch.bfloat16)
    return padded(padded(matrix, columns), rows, -2).contiguous()
