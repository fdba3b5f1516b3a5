"""Fused operations as their parts: where nothing computes one in a single step, each part in the way chosen for it.

The first argument is the namespace of chosen operations instead of the numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.reference.compress import paired


def window_rows(ops: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Norm, rotation, packing, unpacking."""
    packed = ops.pack_rows(ops.rope(ops.rms_norm(x, weight, eps), cos, sin), "window")
    return ops.unpack_rows(packed, "window"), packed


def mhc_collapse_norm(ops: Any, X: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weighted sum, norm."""
    return ops.rms_norm(ops.mhc_collapse(X, pre), weight, eps)


def store_entries(
    ops: Any,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: Tensor,
    slots: Tensor,
    kind: str,
) -> Tensor:
    """Norm, rotation, packing, storing."""
    normed = ops.rms_norm(x, weight, eps)
    ops.store_rows(store, slots, ops.pack_rows(ops.rope(normed, cos, sin), kind))
    return normed


def store_pairs(ops: Any, store: Tensor, slots: Tensor, value: Tensor, gate: Tensor) -> None:
    """Stacking, storing."""
    ops.store_rows(store, slots, torch.stack((value, gate), 1))


def pool_cached(
    ops: Any,
    value: Tensor,
    gate: Tensor,
    ring: Tensor | None,
    second: Tensor,
    partner: Tensor,
    slot: Tensor,
    from_ring: Tensor,
) -> Tensor:
    """Gathering, pooling."""
    return ops.pool_pairs(*paired(value, gate, ring, second, partner, slot, from_ring))


def dispatch_rows(
    ops: Any, x: Tensor, slots: Tensor, weights: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorting, gathering."""
    token, order, counts = ops.dispatch_permute(slots, num_slots)
    weight = torch.empty_like(weights.flatten()).index_copy_(0, order, weights.flatten())
    return x.index_select(0, token), weight, order, counts


def engram_lookup(ops: Any, weight: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Gathering, dequantising."""
    flat = ids.flatten()
    rows = ops.dequantise_table(weight.index_select(0, flat), scale.index_select(0, flat))
    return rows.view(ids.shape[0], ids.shape[1] * weight.shape[1])


def embed_streams(ops: Any, ids: Tensor, table: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Gathering, copying."""
    x = ops.embed(ids, table)
    pre = torch.zeros((x.shape[0], streams), device=x.device)
    pre[:, 0] = 1
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous(), pre


def index_scores_cached(
    ops: Any,
    iq: Tensor,
    iw: Tensor,
    store: Tensor,
    rows: Tensor,
    table: Tensor,
    visible: Tensor,
    *,
    per_block: int,
    count: int,
) -> Tensor:
    """Finding, gathering, scoring."""
    slots = ops.entry_slots(None, rows, table, per_block=per_block, count=count)
    return ops.index_scores(iq, iw, ops.load_rows(store, slots, "index"), visible)


#: operation → what it is made of here
PARTS: dict[str, tuple[str, ...]] = {
    "window_rows": ("rms_norm", "rope", "pack_rows", "unpack_rows"),
    "mhc_collapse_norm": ("mhc_collapse", "rms_norm"),
    "store_entries": ("rms_norm", "rope", "pack_rows", "store_rows"),
    "store_pairs": ("store_rows",),
    "pool_cached": ("pool_pairs",),
    "dispatch_rows": ("dispatch_permute",),
    "engram_lookup": ("dequantise_table",),
    "embed_streams": ("embed",),
    "index_scores_cached": ("entry_slots", "load_rows", "index_scores"),
}

#: operations that only these call
INNER = frozenset({"unpack_rows", "pool_pairs", "index_scores"})

#: what this module computes, by operation
OPERATIONS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        window_rows,
        mhc_collapse_norm,
        store_entries,
        store_pairs,
        pool_cached,
        dispatch_rows,
        engram_lookup,
        embed_streams,
        index_scores_cached,
    )
}
