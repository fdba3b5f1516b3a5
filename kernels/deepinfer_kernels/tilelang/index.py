"""Lightning indexer: scores on the tensor cores, tiles of 128 keys against the heads of a block's queries.

Heads that do not fill the tensor cores' columns are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, bfloat16, empty, float32, int64

from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.tilelang.launch import launch, platform

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] of iq [B, C, ih, Di], iw [B, C, ih], keys [B, n, Di]; −inf from visible [B, C] on."""
    (B, C, N, D), n = iq.shape, keys.shape[1]
    if not _fits(N, D):
        raise ValueError(f"TileLang has no index scores of {N} heads of {D}: 8 to 256 heads of 64 or 128")
    iq, iw, keys, visible = (x.contiguous() for x in (iq, iw, keys, visible))
    if iw.shape != (B, C, N) or keys.shape != (B, n, D) or visible.shape != (B, C):
        shapes = [tuple(t.shape) for t in (iw, keys, visible)]
        raise ValueError(f"index queries {tuple(iq.shape)}, weights, keys and visible {shapes}")
    if (iq.dtype, keys.dtype, visible.dtype) != (bfloat16, bfloat16, int64):
        raise TypeError(
            f"index queries and keys are bfloat16, visible int64, got {iq.dtype}, {keys.dtype}, {visible.dtype}"
        )
    scores = empty((B, C, n), dtype=float32, device=iq.device)
    if not scores.numel():
        return scores
    new = platform() == "sm100"
    QB = _queries(N, C, 128 if new else 256)
    # two waves of blocks, none of more than 64 tiles, because blocks whose entries are hidden end at once
    tiles = -(-n // 128)
    chunks = min(tiles, max(-(-tiles // 64), 264 // (B * -(-C // QB))))
    launch(
        "index.index_scores_blackwell" if new else "index.index_scores", dict(HEADS=N, D=D, QB=QB),
        iq.view(B, C * N, D), iw.to(bfloat16).view(B, C * N), keys, visible, scores, -(-tiles // max(1, chunks)),
    )  # fmt: skip
    return scores


def _fits(heads: int, width: int) -> bool:
    """Whether the programs have heads of a width."""
    return heads in (8, 16, 32, 64, 128, 256) and width in (64, 128)


def outside(shapes: Shapes) -> str | None:
    """Why there are no programs for a model, None where there are."""
    N, D = shapes.index_heads, shapes.Di
    return None if _fits(N, D) else f"has no programs for {N} index heads of {D}, only for 8 to 256 of 64 or 128"


def _queries(heads: int, queries: int, widest: int) -> int:
    """Queries of a block: as many as there are, at most what fills the widest product; a power of two."""
    found = 1
    while found < queries and 2 * found * heads <= widest:
        found *= 2
    return found


def calls(shapes: Shapes) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every number of queries of a block."""
    N, D = shapes.index_heads, shapes.Di
    if not _fits(N, D):
        return
    for C in (1, 2, 4, 8, 16, 32):
        q, w, keys = (empty(*s, dtype=bfloat16, device="meta") for s in ((1, C, N, D), (1, C, N), (1, 9, D)))
        yield "index_scores", (q, w, keys, empty(1, C, dtype=int64, device="meta")), {}
