"""Gated pooling of token pairs, wherever the first of a pair is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, bool, empty, float32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.triton.formats import bf16
from deepinfer_kernels.triton.launch import contiguous, launch, power_of_two


@triton.jit
def _mixed(u0, g0, u1, g1):
    """Softmax of two gates, applied to their values."""
    top = tl.maximum(g0, g1)
    e0, e1 = tl.exp(g0 - top), tl.exp(g1 - top)
    return (e0 / (e0 + e1)) * u0 + (e1 / (e0 + e1)) * u1


@triton.jit
def _pool(U0, G0, U1, G1, Z, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * D + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < D
    u0, g0 = tl.load(U0 + at, mask=mask, other=0.0), tl.load(G0 + at, mask=mask, other=0.0)
    u1, g1 = tl.load(U1 + at, mask=mask, other=0.0), tl.load(G1 + at, mask=mask, other=0.0)
    tl.store(Z + at, bf16(_mixed(u0, g0, u1, g1)), mask=mask)


def pool_pairs(num: Numerics, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Pooled latent bf16 [T, D] of (value, gate) pairs, each f32 [T, D]: a softmax over the two gates per channel."""
    parts = [contiguous(t) for t in (*first, *second)]
    T, D = parts[0].shape
    if any(t.shape != (T, D) or t.dtype is not float32 for t in parts):
        raise ValueError(f"values and gates {[(tuple(t.shape), t.dtype) for t in parts]}, expected float32 ({T}, {D})")
    z = empty((T, D), dtype=bfloat16, device=parts[0].device)
    launch(_pool, (T,), *parts, z, D=D, BLOCK=power_of_two(D))
    return z


@triton.jit
def _pool_cached(VALUE, GATE, RING, SECOND, PARTNER, SLOT, RINGED, Z, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    mask = d < D
    second, first = tl.load(SECOND + row) * D + d, tl.load(PARTNER + row) * D + d
    u1, g1 = tl.load(VALUE + second, mask=mask, other=0.0), tl.load(GATE + second, mask=mask, other=0.0)
    u0, g0 = tl.load(VALUE + first, mask=mask, other=0.0), tl.load(GATE + first, mask=mask, other=0.0)
    if RING is not None:
        ringed = tl.load(RINGED + row) != 0
        old = tl.maximum(tl.load(SLOT + row), 0) * (2 * D) + d
        u0 = tl.where(ringed, tl.load(RING + old, mask=mask & ringed, other=0.0), u0)
        g0 = tl.where(ringed, tl.load(RING + old + D, mask=mask & ringed, other=0.0), g0)
    tl.store(Z + row.to(tl.int64) * D + d, bf16(_mixed(u0, g0, u1, g1)), mask=mask)


def pool_cached(
    num: Numerics, value: Tensor, gate: Tensor, ring: Tensor | None, second: Tensor, partner: Tensor, slot: Tensor,
    from_ring: Tensor,
) -> Tensor:  # fmt: skip
    """``pool_pairs`` bf16 [n, D] of this step's rows ``second`` [n] and their partners, of the step or of the ring.

    value, gate f32 [T, D]; ring f32 [R, 2, D] (None: no partner is there); partner [n] rows of the step, slot [n] of
    the ring where ``from_ring`` bool [n].
    """
    value, gate = contiguous(value), contiguous(gate)
    D = value.shape[1]
    if value.dtype is not float32 or gate.dtype is not float32 or gate.shape != value.shape:
        raise ValueError(f"values {tuple(value.shape)} {value.dtype}, gates {tuple(gate.shape)} {gate.dtype}")
    if ring is not None and (ring.shape[1:] != (2, D) or ring.dtype is not float32 or not ring.is_contiguous()):
        raise ValueError(f"pairs {tuple(ring.shape)} {ring.dtype}, expected contiguous float32 [R, 2, {D}]")
    if from_ring.dtype is not bool or any(t.dtype is not int64 for t in (second, partner, slot)):
        raise TypeError("rows and slots of pairs are int64, from_ring is bool")
    n = second.shape[0]
    z = empty((n, D), dtype=bfloat16, device=value.device)
    places = (contiguous(second), contiguous(partner), contiguous(slot), contiguous(from_ring).view(uint8))
    launch(_pool_cached, (n,), value, gate, ring, *places, z, D=D, BLOCK=power_of_two(D))
    return z


@triton.jit
def _store_pairs(STORE, SLOTS, VALUE, GATE, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    to = STORE + tl.maximum(tl.load(SLOTS + row), 0) * (2 * D) + d
    tl.store(to, tl.load(VALUE + row * D + d, mask=d < D), mask=d < D)
    tl.store(to + D, tl.load(GATE + row * D + d, mask=d < D), mask=d < D)


def store_pairs(num: Numerics, store: Tensor, slots: Tensor, value: Tensor, gate: Tensor) -> None:
    """store[slots[i]] = (value[i], gate[i]) for slots >= 0, in place; others go to row 0. store f32 [R, 2, D]."""
    T, D = value.shape
    if any(t.dtype is not float32 for t in (store, value, gate)) or gate.shape != (T, D) or slots.shape != (T,):
        shapes = [(tuple(t.shape), t.dtype) for t in (store, value, gate, slots)]
        raise ValueError(f"pairs into a store: {shapes}")
    if store.shape[1:] != (2, D) or not store.is_contiguous():
        raise ValueError(f"the store must be contiguous [R, 2, {D}], got {tuple(store.shape)}")
    arguments = (store, contiguous(slots), contiguous(value), contiguous(gate))
    launch(_store_pairs, (T,), *arguments, D=D, BLOCK=power_of_two(D))
