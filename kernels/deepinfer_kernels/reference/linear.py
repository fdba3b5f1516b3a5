"""Linear layers over official weights, embedding and output head.

A ``Weight`` is made once per model load by ``prepare_weight`` and is opaque to the model; what it holds depends on
the implementation (here: the dequantised matrix in the dtype of the numerics).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.numerics import Numerics

#: fp8 / fp4: input is FP8-quantised per 32 (L8, L4); bf16: LB; f32: LF
Kind = Literal["fp8", "fp4", "bf16", "f32"]


@dataclass(frozen=True)
class Weight:
    """A prepared weight [..., out, in] and the kind that says how its input is treated.

    ``data`` holds the matrix itself, or with a ``scale`` the bytes of the checkpoint: E4M3 with an E8M0 scale per
    32 × 32 tile (fp8), two E2M1 per byte with one per 32 of a row (fp4). ``halves``: a byte of the latter holds the
    codes of inputs k and k + 16 of its 32 instead of neighbours.
    """

    data: Tensor
    kind: Kind
    scale: Tensor | None = None
    halves: bool = False

    @property
    def dense(self) -> Tensor:
        """The matrix; bf16, made anew at each use, where the bytes of the checkpoint are kept."""
        if self.scale is None:
            return self.data
        if self.kind == "fp4":
            packed = in_neighbours(self.data) if self.halves else self.data
            return q.dequantise_mxfp4(packed, self.scale).bfloat16()
        return q.dequantise_fp8_tiles(self.data, self.scale).bfloat16()

    def grouped(self, groups: int) -> Weight:
        """[G · out, in] as [G, out, in], on the same memory."""
        scale = self.scale
        if scale is not None:
            if self.data.shape[0] % (groups * 32) and self.kind == "fp8":
                return Weight(self.dense.unflatten(0, (groups, -1)), self.kind)  # a tile lies across two groups
            scale = scale.unflatten(0, (groups, -1))
        return Weight(self.data.unflatten(0, (groups, -1)), self.kind, scale, self.halves)


def in_halves(packed: Tensor) -> Tensor:
    """Packed E2M1 bytes [..., in/2] with the codes of inputs k and k + 16 of every 32 in one byte."""
    return q.pack_nibbles(q.unpack_nibbles(packed).unflatten(-1, (-1, 2, 16)).mT.flatten(-3))


def in_neighbours(packed: Tensor) -> Tensor:
    """The inverse of ``in_halves``."""
    return q.pack_nibbles(q.unpack_nibbles(packed).unflatten(-1, (-1, 16, 2)).mT.flatten(-3))


def prepare_weight(num: Numerics, data: Tensor, scale: Tensor | None, kind: Kind) -> Weight:
    """Raw checkpoint storage to ``Weight``. fp8/fp4 to bf16 is exact: at most 4 significant bits times 2^k."""
    if kind == "fp8":
        assert scale is not None
        return Weight(q.dequantise_fp8_tiles(data, scale).to(num.weight), kind)
    if kind == "fp4":
        assert scale is not None
        return Weight(q.dequantise_mxfp4(data, scale).to(num.weight), kind)
    return Weight(data.float() if kind == "f32" else data.to(num.weight), kind)


def quantised_input(num: Numerics, x: Tensor, kind: Kind) -> Tensor:
    """The operand an FP8/FP4 linear sees: quantise-dequantised per 32 under ``reference``, ``x`` otherwise."""
    if num.quantise_inputs and kind in ("fp8", "fp4"):
        return q.dequantise_q8(*q.quantise_q8(x))
    return x


def matmul(x: Tensor, dense: Tensor) -> Tensor:
    """x · denseᵀ with f32 accumulation; f32 result unless both operands are bf16."""
    if x.dtype == dense.dtype:
        return x @ dense.mT
    return x.float() @ dense.float().mT


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] in the activation dtype; kind f32 computes and returns f32."""
    if weight.kind == "f32":
        return x.float() @ weight.dense.mT
    return num.round(matmul(quantised_input(num, x, weight.kind), weight.dense))


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal projection [T, G, in] · [G, out, in] → [T, G, out] (``wo_a``); the input is not quantised."""
    w = weight.dense
    if x.dtype != w.dtype:
        x, w = x.float(), w.float()
    return num.round(torch.einsum("tgi,goi->tgo", x, w))


def embed(num: Numerics, ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the embedding [V, H] for ids [T], in the activation dtype."""
    return num.round(table[ids])


def embed_streams(num: Numerics, ids: Tensor, table: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """(the rows of ``embed`` in each of C streams [T, C, H], the pre-mix f32 [T, C] that takes the first)."""
    x = embed(num, ids, table)
    pre = torch.zeros((x.shape[0], streams), device=x.device)
    pre[:, 0] = 1
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous(), pre


def head_logits(num: Numerics, h: Tensor, weight: Weight) -> Tensor:
    """f32 logits [T, V] of normed hidden states [T, H]; both operands are widened to f32."""
    return h.float() @ weight.dense.float().mT
