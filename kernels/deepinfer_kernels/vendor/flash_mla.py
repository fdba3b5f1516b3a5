"""FlashMLA: sparse attention of 64 or 128 heads over rows of 512.

Two calls, both with −1 for a hidden place and a sink logit per head:

* ``flash_mla_sparse_fwd``: BF16 rows kv [rows, 1, 512] and places int32 [T, 1, K] in them, K a multiple of 128. Serves
  SM90 (state of April 2026) and SM100. Records are widened to BF16 first, which is exact.
* ``flash_mla_with_kvcache``: records in place, uint8 [pages, page, 1, bytes], 528 bytes as the main or 288 as the extra
  cache; since September 2026, on SM100 and Ascend 950 only. They are this repository's records byte for byte; rows of
  the current step, which are not stored yet, are packed and put before the ring, a copy of both.

Heads and dimensions are padded with zeros to what the library has; zeros add nothing to a score or a value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_kernels.reference import cache
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.vendor import libraries

_WIDTH = 512
#: keys are padded to this many: the kernel takes two blocks of 64 at a time
_KEYS = 128
#: rows of one page; records are dense, so any size addresses them, and 64 is what the library is tested with
_PAGE = 64
#: gathered key elements per pass; bounds the memory of a long prefill chunk
_TILE = 1 << 28


def _call(name: str) -> Any:
    return libraries.function("flash_mla", name)


def _heads(q: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, 64 or 128, 512] in bf16 and sinks f32 of as many heads."""
    heads, width = q.shape[1:]
    if heads > 128 or width > _WIDTH:
        raise ValueError(f"flash_mla attends with at most 128 heads of {_WIDTH}, these are {heads} of {width}")
    more = -heads % 64
    wide = F.pad(q.to(torch.bfloat16), (0, _WIDTH - width, 0, more)).contiguous()
    return wide, F.pad(sink.float(), (0, more)).contiguous()


def _places(places: Tensor, multiple: int) -> Tensor:
    """int32 places [T, K] with −1 behind the end up to a multiple."""
    return F.pad(places, (0, -places.shape[1] % multiple), value=-1).to(torch.int32).contiguous()


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
    """``attend`` of q [T, N, D] over rows widened to BF16, as the reference's; see there for the places."""
    T, heads, width = q.shape
    if T == 0:
        return torch.empty_like(q)
    wide, sinks = _heads(q, sink)
    per_pass = max(1, _TILE // (_WIDTH * (window.shape[1] + (0 if slots is None else slots.shape[1]))))
    out = []
    for start in range(0, T, per_pass):
        part = slice(start, start + per_pass)
        rows, places = _rows(num, local, window[part], ring, None if slots is None else slots[part], entries)
        kv = F.pad(rows.to(torch.bfloat16), (0, _WIDTH - width)).unsqueeze(1).contiguous()
        at = _places(places, _KEYS).unsqueeze(1)
        got, *_ = _call("flash_mla_sparse_fwd")(wide[part], kv, at, scale, attn_sink=sinks)
        out.append(got[:, :heads, :width])
    return num.round(torch.cat(out))


def _rows(
    num: Numerics, local: Tensor, window: Tensor, ring: Tensor | None, slots: Tensor | None, entries: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(rows [R, D], place of each key of each query [T, K], −1 hidden) of all that these queries may see.

    A store is widened as a whole where it has fewer rows than the queries ask for, else row by row as asked.
    """
    rows, places = [local], torch.where(window >= 0, window, -1)
    base = local.shape[0]
    if ring is not None:
        more, at = _widened(num, ring, torch.where(window < -1, -2 - window, -1), "window")
        places = torch.where(at >= 0, at + base, places)
        rows.append(more)
        base += more.shape[0]
    if slots is not None and entries is not None:
        more, at = _widened(num, entries, slots, "global")
        places = torch.cat((places, torch.where(at >= 0, at + base, -1)), 1)
        rows.append(more)
    return torch.cat(rows), places


def _widened(num: Numerics, store: Tensor, slots: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if store.shape[0] <= slots.numel():
        return cache.unpack_rows(num, store, kind), slots
    own = torch.arange(slots.numel(), device=slots.device).view_as(slots)
    return cache.load_rows(num, store, slots.flatten(), kind), torch.where(slots >= 0, own, -1)


def attend_records(
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
    """``attend`` of q [T, N, D] over records as they are stored: window rows as the main, global ones as the extra
    cache. D is 512."""
    T, heads, width = q.shape
    if width != _WIDTH:
        raise ValueError(f"flash_mla reads records of {_WIDTH} values, these rows have {width}")
    if T == 0:
        return torch.empty_like(q)
    wide, sinks = _heads(q, sink)
    main, places = _window_records(num, local, window, ring)
    extra = {}
    if slots is not None and entries is not None and slots.shape[1]:
        extra = {"extra_k_cache": _pages(entries), "extra_indices_in_kvcache": _places(slots, _KEYS).unsqueeze(1)}
    meta, _ = _call("get_mla_metadata")()
    got, _ = _call("flash_mla_with_kvcache")(
        wide.unsqueeze(1), _pages(main), None, None, _WIDTH, meta, softmax_scale=scale, is_fp8_kvcache=True,
        indices=_places(places, _KEYS).unsqueeze(1), attn_sink=sinks, **extra,
    )  # fmt: skip
    return num.round(got[:, 0, :heads])


def _window_records(num: Numerics, local: Tensor, window: Tensor, ring: Tensor | None) -> tuple[Tensor, Tensor]:
    """(records uint8 [R, 528], place of each key): rows of this step, then the ring."""
    packed = cache.pack_rows(num, local, "window")
    if ring is None:
        return packed, torch.where(window >= 0, window, -1)
    older = torch.where(window < -1, -2 - window + local.shape[0], -1)
    return torch.cat((packed, ring)), torch.where(window >= 0, window, older)


def _pages(records: Tensor) -> Tensor:
    """Records [R, bytes] as [pages, page, 1, bytes]; the last page is completed with zeros, in a copy."""
    return F.pad(records, (0, 0, 0, -records.shape[0] % _PAGE)).view(-1, _PAGE, 1, records.shape[1])
