"""Sparse latent attention: one softmax over window rows, selected global rows and a sink, records read in place.

A block answers one query for up to 64 heads, which share every key, in tiles of 64 keys with a running softmax. Few
queries are divided over blocks by key tiles, whose parts a second program joins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, bfloat16, empty, float32, int64, uint8

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.tilelang.launch import launch, platform

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes

#: keys of a tile, as in the programs
_BK = 64
#: width of keys and heads of a block of ``attend_wide``
_WIDE, _HEADS = 512, 64
#: blocks that fill a device
_PROCESSORS = 132


def attend_cached(
    num: Numerics,
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """``attend`` of bf16 q [T, N, D] over rows of this step and records, read where they are (see the reference)."""
    return _attended(q, local, window, ring, slots, entries, sink, scale, invariant=False)


def attend_cached_invariant(
    num: Numerics,
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """``attend_cached`` with every query in one part, however few there are."""
    return _attended(q, local, window, ring, slots, entries, sink, scale, invariant=True)


def _attended(
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    invariant: bool,
) -> Tensor:
    q, local, window, sink = (x.contiguous() for x in (q, local, window, sink))
    T, N, D = q.shape
    if slots is None or entries is None or not slots.shape[1] or not entries.shape[0]:
        slots = entries = None
    _check(q, local, window, ring, slots, entries, sink)
    if not T:
        return torch.empty_like(q)
    tiles = -(-window.shape[1] // _BK) + (0 if slots is None else -(-slots.shape[1] // _BK))
    parts = 1 if invariant else _parts(T, tiles)
    each = max(1, -(-tiles // parts))
    parts = max(1, -(-tiles // each))
    o = torch.empty_like(q)
    wide = D == _WIDE and N > 16 and platform() == "sm90"
    sizes: dict[str, int | str] = dict(N=N, D=D, SPLIT=parts > 1)
    if not wide:
        sizes["HEADS"] = 16 if N <= 16 else _HEADS
    if not local.shape[0]:
        local = _nothing(q.device, bfloat16, 1, D)
    rings = _nothing(q.device, uint8, 1, D + D // 32) if ring is None else ring.view(uint8).contiguous()
    if slots is None or entries is None:
        found, slots, entries = 0, _nothing(q.device, int64, 1, 1), _nothing(q.device, uint8, 1, D * 9 // 16)
    else:
        found, slots, entries = slots.shape[1], slots.contiguous(), entries.view(uint8).contiguous()
    stores = (local, window, rings, slots, entries, sink)
    program = "attention.attend_wide" if wide else "attention.attend"
    # attend_wide goes over its jobs in as many blocks as run at a time
    grid = (min(T * -(-N // _HEADS) * parts, _processors(q.device)),) if wide else ()
    if parts == 1:
        nothing = _nothing(q.device, float32, 1, 1, 1, 2)
        launch(program, sizes, q, *stores, o, nothing, float(scale), found, each, *grid)
        return o
    part = empty((parts, T, N, D), dtype=float32, device=q.device)
    state = empty((parts, T, N, 2), dtype=float32, device=q.device)
    launch(program, sizes, q, *stores, part, state, float(scale), found, each, *grid)
    launch("attention.join", dict(N=N, D=D), part, state, o)
    return o


def _parts(T: int, tiles: int) -> int:
    """Parts per query that fill a device, of two tiles or more."""
    return max(1, min(_PROCESSORS // T, -(-tiles // 2)))


@functools.cache
def _processors(device: torch.device) -> int:
    return _PROCESSORS if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """What stands for an absent argument, never read."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _check(
    q: Tensor,
    local: Tensor,
    window: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    entries: Tensor | None,
    sink: Tensor,
) -> None:
    """Refuse shapes and types that the programs do not read; they check the rest themselves."""
    T, N, D = q.shape
    if window.shape[0] != T or not window.shape[1] or local.shape[1] != D or sink.shape != (N,):
        shapes = [tuple(t.shape) for t in (local, window, sink)]
        raise ValueError(f"queries {(T, N, D)}, local rows, window and sink {shapes}")
    if q.dtype is not bfloat16 or local.dtype is not bfloat16 or window.dtype is not int64 or sink.dtype is not float32:
        got = f"{q.dtype}, {local.dtype}, {window.dtype}, {sink.dtype}"
        raise TypeError(f"queries and rows are bfloat16, places int64, sinks float32; got {got}")
    if D % 64:
        raise ValueError(f"queries of width {D}, which is not a multiple of 64")
    if slots is not None and (slots.shape[0] != T or slots.dtype is not int64):
        raise ValueError(f"{T} queries, slots {tuple(slots.shape)} {slots.dtype}")
    for store, kind, size in ((ring, "window", D + D // 32), (entries, "global", D // 2 + D // 16)):
        if store is not None and store.shape[1] != size:
            raise ValueError(f"queries of width {D}, {kind} records of {store.shape[1]} bytes, not {size}")


def calls(shapes: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A few queries, which are divided, and many."""
    N, D = shapes.N, shapes.D
    for T in (1, 4096):
        q, local = (empty(*shape, dtype=bfloat16, device="meta") for shape in ((T, N, D), (T, D)))
        window = empty(T, 8 * _BK, dtype=int64, device="meta")
        yield "attend_cached", (q, local, window, None, None, None, empty(N, device="meta"), 1.0), {}
