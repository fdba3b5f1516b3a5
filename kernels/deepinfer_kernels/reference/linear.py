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
    32 × 32 tile (fp8), two E2M1 per byte with one per 32 of a row (fp4). ``shape``: the rows and inputs of a matrix
    whose bytes and scales lie as ``in_tiles`` puts them, or with ``panels`` as ``in_panels`` does.
    """

    data: Tensor
    kind: Kind
    scale: Tensor | None = None
    shape: tuple[int, int] | None = None
    panels: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and inputs of the matrix, or of each of a stack."""
        if self.shape is not None:
            return self.shape
        out, inner = self.data.shape[-2:]
        return out, inner * (2 if self.kind == "fp4" and self.scale is not None else 1)

    @property
    def dense(self) -> Tensor:
        """The matrix; bf16, made anew at each use, where the bytes of the checkpoint are kept."""
        if self.scale is None:
            return self.data
        dequantise = q.dequantise_mxfp4 if self.kind == "fp4" else q.dequantise_fp8_tiles
        return dequantise(*self.stored).bfloat16()

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Bytes and scales of an fp8 or fp4 matrix as in the checkpoint."""
        assert self.scale is not None
        if self.shape is None:
            return self.data, self.scale
        if self.panels:
            return out_of_panels(self.data, self.scale)
        return in_rows(self.data, self.scale, self.kind, *self.shape)

    def grouped(self, groups: int) -> Weight:
        """[G · out, in] as [G, out, in], on the same memory."""
        rows = self.data.shape[0] if self.shape is None else self.shape[0]
        tile = PANEL if self.panels else TILE if self.shape is not None else 32 if self.kind == "fp8" else 1
        if self.scale is not None and rows % (groups * tile):
            return Weight(self.dense.unflatten(0, (groups, -1)), self.kind)  # a tile lies across two groups
        scale = None if self.scale is None else self.scale.unflatten(0, (groups, -1))
        shape = None if self.shape is None else (rows // groups, self.shape[1])
        return Weight(self.data.unflatten(0, (groups, -1)), self.kind, scale, shape, self.panels)


#: outputs of a panel: the lanes of f32 in 64 bytes
PANEL = 16


def in_panels(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 bytes [..., out, in/2] and scales [..., out, in/32] by panels of 16 outputs.

    Codes [..., out/16, in/8, 64]: 32 bits of each output with eight inputs, 0, 2, 4, 6 from the lowest bits of the
    lower half on and 1, 3, 5, 7 in the upper half. Scales [..., out/16, in/32, 16].
    """
    words = packed.view(torch.uint8).unflatten(-1, (-1, 4))
    even = words & 15 | (words << 4 & 0xF0).roll(-1, -1)  # of bytes 0 and 2 those that are wanted
    odd = words >> 4 | (words & 0xF0).roll(-1, -1)
    halves = torch.cat((even[..., 0::2], odd[..., 0::2]), -1)
    codes = halves.unflatten(-3, (-1, PANEL)).transpose(-3, -2).flatten(-2)
    return codes.contiguous(), scale.view(torch.uint8).unflatten(-2, (-1, PANEL)).mT.contiguous()


def out_of_panels(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``in_panels``."""
    even, odd = codes.unflatten(-1, (PANEL, 2, 2)).transpose(-4, -3).flatten(-5, -4).unbind(-2)
    low, high = even & 15 | odd << 4, even >> 4 | odd & 0xF0
    return torch.stack((low, high), -1).flatten(-3), scale.mT.flatten(-3, -2).contiguous()


#: tiles of an fp8 or fp4 matrix: rows and inputs of one, its 64 rows as (warp, half, row) and its 64 inputs as (step,
#: half, thread, neighbour): what an operand of the tensor cores looks like
TILE = 64
_ROWS, _INPUTS = (4, 2, 8), (4, 2, 4, 2)
#: where the four codes (half of the step, half of the rows) of half a word of E2M1 have their sign
_SIGN = (15, 11, 5, 9)


def in_tiles(data: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Bytes and scales of the checkpoint in tiles of 64 × 64, filled up with 0.

    Packed E2M1 [..., out, in/2] and scales [..., out, in/32] to [..., out/64, in/64, 2048] and [..., 128] bytes, E4M3
    [..., out, in] and scales [..., out/32, in/32] to 4096 and 8. The 16 or 32 bytes of a thread are neighbours, and
    the codes of a 32-bit word are so mixed that turning and masking it gives two values, sign and size where a bf16
    has them. Scales are where one 32-bit load gets those of a thread.
    """
    per_byte = 2 if kind == "fp4" else 1
    if data.dim() > 2:  # one matrix at a time: codes take up to eight times the memory of what they are packed in
        made = [in_tiles(d, s, kind) for d, s in zip(data.flatten(0, -3), scale.flatten(0, -3), strict=True)]
        tiles, scales = (torch.stack([m[i] for m in made]).unflatten(0, data.shape[:-2]) for i in (0, 1))
        return tiles, scales
    out, inner = data.shape[0], per_byte * data.shape[1]
    blocks, steps = -(-out // TILE), -(-inner // TILE)
    code = data.new_zeros(blocks * TILE, steps * TILE, dtype=torch.int32)
    code[:out, :inner] = q.unpack_nibbles(data) if kind == "fp4" else data.view(torch.uint8)
    code = code.view(blocks, *_ROWS, steps, *_INPUTS)  # block, warp, h, g, step, chunk, kk, t, j
    code = code.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)  # block, step, warp, g, t, chunk, j, kk, h
    if kind == "fp4":
        size, crossed = code & 7, code.flip(-3) & 7
        half = sum(code[..., i // 2, i % 2] >> 3 << _SIGN[i] for i in range(4))
        half = half | size[..., 0, 0] << 6 | size[..., 0, 1] << 2 | crossed[..., 1, 0] << 12
        half = half | (size[..., 1, 1] & 4) << 8 | size[..., 1, 1] & 3
        wide = scale.new_zeros(blocks * TILE, steps * 2)
        wide[:out, : inner // 32] = scale
        scales = wide.view(blocks, *_ROWS, steps, 2).permute(0, 4, 1, 3, 2, 5)  # block, step, warp, g, h, group
    else:
        a, b = code.transpose(-3, -2).unbind(-1)  # block, step, warp, g, t, chunk, kk, j of either half of the rows
        half = (a & 0x80) << 8 | (a & 0x7F) << 4
        half = half | (b & 0x80) << 4 | (b & 0x70) << 8 | b & 0xF
        wide = scale.new_zeros(blocks * 2, steps * 2)
        wide[: scale.shape[0], : inner // 32] = scale
        wide = wide.view(blocks, 2, steps, 2).permute(0, 2, 1, 3)  # block, step, half of the rows, group
        scales = torch.cat((wide, torch.zeros_like(wide)), -1)
    tiles = half.to(torch.int16).contiguous().view(torch.uint8).view(blocks, steps, -1)
    return tiles, scales.reshape(blocks, steps, -1)


def in_rows(tiles: Tensor, scale: Tensor, kind: Kind, out: int, inner: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``in_tiles``."""
    *stack, blocks, steps, _ = tiles.shape
    lead, n = tuple(range(len(stack))), len(stack)
    half = tiles.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    if kind == "fp4":
        half = half.view(*stack, blocks, steps, 4, 8, 4, 4, 2)
        size = [half >> 6 & 7, half >> 2 & 7, (half >> 12 & 7).flip(-1), half >> 8 & 4 | half & 3]
        code = torch.stack([size[i] | (half >> _SIGN[i] & 1) << 3 for i in range(4)], -1).unflatten(-1, (2, 2))
        order = (0, 2, 8, 3, 1, 5, 7, 4, 6)
        scales = scale.view(*stack, blocks, steps, 4, 8, 2, 2).permute(*lead, *(n + i for i in (0, 2, 4, 3, 1, 5)))
    else:
        half = half.view(*stack, blocks, steps, 4, 8, 4, 4, 2, 2)
        b = half >> 4 & 0x80 | half >> 8 & 0x70 | half & 0xF
        code = torch.stack((half >> 8 & 0x80 | half >> 4 & 0x7F, b), -1)
        order = (0, 2, 8, 3, 1, 5, 6, 4, 7)
        scales = scale.view(*stack, blocks, steps, 2, 4)[..., :2].permute(*lead, *(n + i for i in (0, 2, 1, 3)))
    code = code.permute(*lead, *(n + i for i in order))
    code = code.reshape(*stack, blocks * TILE, steps * TILE)[..., :out, :inner].to(torch.uint8)
    scales = scales.reshape(*stack, -1, steps * 2)
    if kind == "fp4":
        return q.pack_nibbles(code), scales[..., :out, : inner // 32].contiguous()
    return code.contiguous(), scales[..., : -(-out // 32), : inner // 32].contiguous()


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
