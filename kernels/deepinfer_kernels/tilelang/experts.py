"""Routed experts over physical slots of MXFP4 weights in tiles: gate and up with SwiGLU and routing weight, then down.

Rows lie sorted by slot; a block finds its slot from the counts, so nothing waits for the host. Other weights, which
prepare_weight leaves as matrices, are Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, bfloat16, empty, float32, int64, uint8, uint32

from deepinfer_kernels.reference.linear import TILE, Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.tilelang.launch import launch, platform

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes


class Tile(NamedTuple):
    """How a program is cut, see ``experts_cuda``; on Blackwell only ``BT`` counts."""

    BT: int
    TILES: int
    STAGES: int
    ahead: bool = True
    alone: bool = True
    share: int = 1
    GRAIN: int = 16


#: tiles of the two programs by the mean number of rows of a slot: reading weights, decoding them, the tensor cores
_FEW = (Tile(32, 2, 4, False, False, 2), Tile(32, 2, 4, False, False, 2))
_SOME = (Tile(80, 1, 6, False, False, 2), Tile(64, 2, 3, False, False, 2))
_MANY = (Tile(256, 1, 4), Tile(256, 1, 4))
#: mean rows of a slot, one of each class
_MEANS = (1, 25, 200)


def tiles(rows: int, slots: int) -> tuple[Tile, Tile]:
    """Tiles of the two programs for a number of rows."""
    mean = rows / slots
    return _FEW if mean <= 24 else _SOME if mean <= 128 else _MANY


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] of ``rows`` [M, H] sorted by slot; ``counts`` [S] int64 rows per slot; weight [M]."""
    return _experts(rows, counts, bank, weight, limit, tiles(rows.shape[0], counts.shape[0]))


def moe_experts_invariant(
    num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float
) -> Tensor:
    """``moe_experts`` on tiles of one size, whatever the number of rows."""
    return _experts(rows, counts, bank, weight, limit, _SOME)


def _in_tiles(bank: ExpertBank) -> bool:
    """Whether these programs read a bank: MXFP4 in tiles, results of whole 16 bytes."""
    weights = (bank.w1, bank.w3, bank.w2)
    return all(w.kind == "fp4" and w.scale is not None and w.shape is not None and not w.shape[0] % 8 for w in weights)


def _experts(
    x: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float, chosen: tuple[Tile, Tile]
) -> Tensor:
    x, counts, weight = x.contiguous(), counts.contiguous(), weight.contiguous()
    if not _in_tiles(bank):
        kinds = ", ".join(f"{w.kind} {w.sizes}" for w in (bank.w1, bank.w3, bank.w2))
        raise ValueError(f"TileLang's experts are MXFP4 in tiles with a multiple of 8 outputs, the bank is {kinds}")
    (M, H), S, I = x.shape, bank.w1.data.shape[0], bank.w1.sizes[0]  # noqa: E741 — I is the expert width
    if counts.shape != (S,) or weight.shape != (M,):
        shapes = [tuple(t.shape) for t in (counts, weight)]
        raise ValueError(f"{M} rows for {S} slots, counts and routing weights {shapes}")
    for w, expected in ((bank.w1, (I, H)), (bank.w3, (I, H)), (bank.w2, (H, I))):
        if w.sizes != expected or w.data.shape[0] != S:
            raise ValueError(f"rows of width {H}, {S} experts of width {I}, weight {w.data.shape[0]} x {w.sizes}")
    if (x.dtype, counts.dtype, weight.dtype) != (bfloat16, int64, float32):
        got = f"{x.dtype}, {counts.dtype}, {weight.dtype}"
        raise TypeError(f"rows are bfloat16, counts int64, routing weights float32; got {got}")
    y = empty((M, H), dtype=bfloat16, device=x.device)
    if not M:
        return y
    a = empty((M, I), dtype=bfloat16, device=x.device)
    gate_up, down = chosen
    new = platform() == "sm100"
    names = ("experts.gate_up_blackwell", "experts.down_blackwell") if new else ("experts.gate_up", "experts.down")
    launch(
        names[0], _sizes(I, H, gate_up, new), x, counts, *_words(bank.w1), *_words(bank.w3), weight, a,
        float(limit), _most_tiles(M, S, gate_up.BT),
    )  # fmt: skip
    launch(names[1], _sizes(H, I, down, new), a, counts, *_words(bank.w2), y, _most_tiles(M, S, down.BT))
    return y


def _sizes(N: int, K: int, tile: Tile, new: bool) -> dict[str, int | str]:
    if new:
        return dict(N=N, K=K, BT=max(32, min(128, 1 << (tile.BT - 1).bit_length())))
    return dict(N=N, K=K) | tile._asdict()


def _words(weight: Weight) -> tuple[Tensor, Tensor]:
    """A bank's codes, two rows a tile, and its scales, one row."""
    assert weight.scale is not None
    codes, scales = (t.view(uint8).contiguous().view(uint32) for t in (weight.data, weight.scale))
    return codes.view(-1, 256), scales.view(-1, 32)


def _most_tiles(rows: int, slots: int, size: int) -> int:
    """No distribution of the rows over the slots needs more tiles: every slot may have one that is not full."""
    return min(rows, rows // size + slots)


def outside(shapes: Shapes) -> str | None:
    """Why there are no programs for a model, None where there are."""
    odd = next((n for *_, width in shapes.routers for n in (width, shapes.H) if n % 8), None)
    return None if odd is None else f"has no programs for experts with {odd} outputs, only with a multiple of 8"


def calls(shapes: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A number of rows of every class."""

    def fp4(slots: int, outs: int, inner: int) -> Weight:
        stack = (slots, -(-outs // TILE), -(-inner // TILE))
        codes, scales = (torch.empty(*stack, n, dtype=uint8, device="meta") for n in (2048, 128))
        return Weight(codes, "fp4", scales, shape=(outs, inner))

    for _, _, slots, width in shapes.routers if outside(shapes) is None else ():
        bank = ExpertBank(fp4(slots, width, shapes.H), fp4(slots, width, shapes.H), fp4(slots, shapes.H, width))
        for mean in _MEANS:
            rows = mean * slots
            x = empty(rows, shapes.H, dtype=bfloat16, device="meta")
            counts = empty(slots, dtype=int64, device="meta")
            yield "moe_experts", (x, counts, bank, empty(rows, device="meta"), 10.0), {}
