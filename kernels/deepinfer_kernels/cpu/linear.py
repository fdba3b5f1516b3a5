"""Matrix products of few rows with prepared weights: bf16 operands, f32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library("linear", linear_bf16="pppiii", linear_f32="pppiii", linear_grouped="pppiiii", head_logits="pppiii")


def _fits(inner: int, weight: Tensor) -> None:
    if weight.shape[-1] != inner:
        raise ValueError(f"input of width {inner}, weight {tuple(weight.shape)}")


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] bf16; kind f32 computes and returns f32."""
    if weight.kind == "f32":
        x, w, call = f32(x), f32(weight.dense), LIBRARY.linear_f32
    else:
        x, w, call = bf16(x), bf16(weight.dense), LIBRARY.linear_bf16
    outs, inner = w.shape
    _fits(x.shape[-1], w)
    y = torch.empty(*x.shape[:-1], outs, dtype=x.dtype)
    call(x.data_ptr(), w.data_ptr(), y.data_ptr(), x.numel() // inner, outs, inner)
    return y


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[T, G, in] · [G, out, in] → [T, G, out]."""
    x, w = bf16(x), bf16(weight.dense)
    groups, outs, inner = w.shape
    _fits(x.shape[-1], w)
    y = torch.empty(x.shape[0], groups, outs, dtype=x.dtype)
    LIBRARY.linear_grouped(x.data_ptr(), w.data_ptr(), y.data_ptr(), x.shape[0], groups, outs, inner)
    return y


def head_logits(num: Numerics, h: Tensor, weight: Weight) -> Tensor:
    """f32 logits [T, V] of normed hidden states [T, H]; products of bf16 are exact in f32."""
    h, w = bf16(h), bf16(weight.dense)
    _fits(h.shape[-1], w)
    y = torch.empty(h.shape[0], w.shape[0], dtype=torch.float32)
    LIBRARY.head_logits(h.data_ptr(), w.data_ptr(), y.data_ptr(), h.shape[0], w.shape[0], w.shape[1])
    return y


OPERATIONS = (linear, linear_grouped, head_logits)
