"""Router, routed experts over physical slots, shared expert, and their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64
from deepinfer_kernels.reference import linear
from deepinfer_kernels.reference.linear import PANEL, Kind, Weight, in_panels
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "moe",
    gate_topk="pppippiiiiiff",
    moe_experts="ppppppppppiiiif",
    shared_expert="pppppiiif",
    moe_combine="ppppiii",
)


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(expert ids [T, k] ascending int64, weights [T, k] f32). ``bias`` [E], or one row per token."""
    x, weight, bias = bf16(x), f32(weight), f32(bias)
    (T, H), E = x.shape, weight.shape[0]
    if weight.shape[1] != H or bias.shape not in ((E,), (T, E)) or not 0 < k <= E:
        raise ValueError(f"tokens {(T, H)}, router {tuple(weight.shape)}, bias {tuple(bias.shape)}, {k} choices")
    ids, w = torch.empty(T, k, dtype=torch.int64), torch.empty(T, k)
    stride = E if bias.dim() == 2 else 0
    at = (x.data_ptr(), weight.data_ptr(), bias.data_ptr(), stride, ids.data_ptr(), w.data_ptr())
    LIBRARY.gate_topk(*at, T, H, E, k, normalise, scale, temperature)
    return ids, w


def prepare_weight(num: Numerics, data: Tensor, scale: Tensor | None, kind: Kind) -> Weight:
    """Panels of the bytes of the checkpoint for fp4, which only experts have; the reference's matrix for the rest."""
    if kind != "fp4" or data.shape[-2] % PANEL:
        return linear.prepare_weight(num, data, scale, kind)
    assert scale is not None
    codes, scales = in_panels(data, scale)
    return Weight(codes, kind, scales, (data.shape[-2], 2 * data.shape[-1]), panels=True)


def _stack(weight: Weight, *sizes: int) -> tuple[int, int]:
    """Where codes and scales of a stack [S, out, in] of panels are."""
    if not weight.panels or weight.scale is None or (weight.data.shape[0], *weight.sizes) != sizes:
        kept = "panels" if weight.panels else "a matrix"
        raise ValueError(
            f"expert weights {tuple(weight.data.shape[:1])} x {weight.sizes} as {kept}, not {sizes} as panels"
        )
    return weight.data.data_ptr(), weight.scale.data_ptr()


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] of ``rows`` [M, H] sorted by slot; ``counts`` [S] int64 rows per slot; weight [M].

    Weights are decoded where they are multiplied; nothing but what ``prepare_weight`` left is kept of them.
    """
    x, counts, weight = bf16(rows), i64(counts), f32(weight)
    (M, H), S, I = x.shape, bank.w1.data.shape[0], bank.w1.sizes[0]  # noqa: E741 — I is the expert width
    at = (*_stack(bank.w1, S, I, H), *_stack(bank.w3, S, I, H), *_stack(bank.w2, S, H, I))
    if counts.shape != (S,) or weight.shape != (M,):
        shapes = tuple(counts.shape), tuple(weight.shape)
        raise ValueError(f"{M} rows of {S} slots, counts and routing weights {shapes}")
    y = torch.empty_like(x)
    total = LIBRARY.moe_experts(
        x.data_ptr(), counts.data_ptr(), *at, weight.data_ptr(), y.data_ptr(), M, S, H, I, limit
    )
    if total != M:
        raise ValueError(f"{M} rows, but the counts add up to {total}")
    return y


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert. [T, H] → [T, H]."""
    x, a, b, c = bf16(x), bf16(w1.dense), bf16(w3.dense), bf16(w2.dense)
    (T, H), I = x.shape, a.shape[0]  # noqa: E741
    if a.shape != (I, H) or b.shape != (I, H) or c.shape != (H, I):
        raise ValueError(f"tokens {(T, H)}, weights {[tuple(w.shape) for w in (a, b, c)]}")
    y = torch.empty_like(x)
    LIBRARY.shared_expert(x.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(), y.data_ptr(), T, H, I, limit)
    return y


def moe_combine(num: Numerics, y: Tensor, order: Tensor, shared: Tensor, k: int) -> Tensor:
    """[T, H]: Σ over the k expert rows of each token in order, plus the shared expert, rounded once."""
    y, order, shared = bf16(y), i64(order), bf16(shared)
    T, H = shared.shape
    if y.shape != (T * k, H) or order.shape != (T * k,):
        raise ValueError(f"{T} tokens of {k} choices, rows {tuple(y.shape)}, order {tuple(order.shape)}")
    out = torch.empty_like(shared)
    LIBRARY.moe_combine(y.data_ptr(), order.data_ptr(), shared.data_ptr(), out.data_ptr(), T, k, H)
    return out


OPERATIONS = (gate_topk, prepare_weight, moe_experts, shared_expert, moe_combine)
