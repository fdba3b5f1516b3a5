"""Batch-invariant operations: an output row has the same bits whatever else is in the call.

Three things make a library's result depend on the batch: a matrix product picks its code by the number of rows, a sum
over keys runs in another order when other rows have more keys, and a vectorised function leaves the last few elements
to scalar code that rounds differently. So every operation here runs on tiles of one fixed shape, padded with zeros:

* row-wise operations and matrix products on ``ROWS`` = 32 rows at a time; 32 times any width is a whole number of
  vector steps (2 × 16 f32), and a tile of at most 2^15 elements is never divided between threads;
* attention first moves each row's visible keys to the front, then takes 64 keys at a time with a running softmax, so
  that a row's sum has the same order in any batch and tiles beyond its own keys add exact zeros;
* index scores on 32 queries × 64 entries.

Bits may change with the machine, the torch release and the number of threads; not with batch, chunk or position in it.
``float`` and ``fast`` numerics only: under ``reference`` the tiles of the softmax are part of the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_kernels.reference import engram, hyper, moe, norm
from deepinfer_kernels.reference import linear as ref_linear
from deepinfer_kernels.reference.attention import gathered
from deepinfer_kernels.reference.compress import pool_pairs as ref_pool_pairs
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics

#: rows of a tile; see above
ROWS = 32
#: keys of an attention tile and entries of a scoring tile
KEYS = 64
#: elements that torch never divides between threads
_GRAIN = 32768

NEG_INF = float("-inf")


def _rows_for(width: int) -> int:
    """Rows of a tile of ``width`` elements each: 32, fewer where the tile would be divided between threads."""
    rows = ROWS
    while rows > 1 and rows * width > _GRAIN and (rows // 2) * width % 32 == 0:
        rows //= 2
    return rows


def tiled(fn: Callable[..., Any], *inputs: Tensor, rows: int = ROWS) -> Any:
    """``fn`` over tiles of exactly ``rows`` rows of all ``inputs`` [T, ...], zeros behind the last; results joined."""
    total = inputs[0].shape[0]
    if total == 0:
        return fn(*inputs)
    parts = []
    for start in range(0, total, rows):
        tile = [x[start : start + rows] for x in inputs]
        short = rows - tile[0].shape[0]
        if short:
            tile = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, short)) for x in tile]
        parts.append(fn(*tile))
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(column)[:total] for column in zip(*parts, strict=True))
    return parts[0][:total] if len(parts) == 1 else torch.cat(parts)[:total]


def _matmul(x: Tensor, dense: Tensor) -> Tensor:
    """x [T, in] · denseᵀ [in, out] on tiles of 32 rows."""
    return tiled(lambda t: ref_linear.matmul(t, dense), x)


# ------------------------------------------------------------------------ linear


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """As the reference, on tiles of rows."""
    flat = x.reshape(-1, x.shape[-1])
    if weight.kind == "f32":
        y = _matmul(flat.float(), weight.dense)
    else:
        y = num.round(_matmul(ref_linear.quantised_input(num, flat, weight.kind), weight.dense))
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """As the reference, on tiles of rows."""
    return tiled(lambda t: ref_linear.linear_grouped(num, t, weight), x)


def head_logits(num: Numerics, h: Tensor, weight: Weight) -> Tensor:
    """As the reference, on tiles of rows."""
    return _matmul(h.float(), weight.dense.float())


# -------------------------------------------------------------------------- norm


def rms_norm(num: Numerics, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, on tiles of rows."""
    flat = x.reshape(-1, x.shape[-1])
    return tiled(lambda t: norm.rms_norm(num, t, weight, eps), flat).view(x.shape)


def rope_angles(num: Numerics, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, on tiles of rows."""
    return tiled(lambda p: norm.rope_angles(num, p, frequencies), positions)


# ------------------------------------------------------------------------- hyper


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, on tiles of rows."""
    return tiled(lambda t: hyper.mhc_mixes(num, t, fn, base, scale, rms_eps=rms_eps, hc_eps=hc_eps, iters=iters), X)


def mhc_collapse(num: Numerics, X: Tensor, pre: Tensor) -> Tensor:
    """As the reference, on tiles of rows."""
    return tiled(lambda t, p: hyper.mhc_collapse(num, t, p), X, pre)


def mhc_expand(num: Numerics, X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference, on tiles of rows."""
    return tiled(lambda *t: hyper.mhc_expand(num, *t), X, y, post, comb)


# --------------------------------------------------------------------------- moe


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """As the reference, on tiles of rows. ``bias`` may be one per row (image tokens) or one for all."""

    def gate(t: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return moe.gate_topk(num, t, weight, b, k=k, normalise=normalise, scale=scale, temperature=temperature)

    if bias.dim() == 2:
        return tiled(gate, x, bias)
    return tiled(lambda t: gate(t, bias), x)


def _swiglu(num: Numerics, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    rows = _rows_for(gate.shape[1])
    if weight is None:
        return tiled(lambda g, u: moe.swiglu(num, g, u, limit), gate, up, rows=rows)
    return tiled(lambda g, u, w: moe.swiglu(num, g, u, limit, w), gate, up, weight, rows=rows)


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """As the reference, with tiles of rows inside each slot. Reads the counts on the host."""
    source: list[int] = []  # row of each padded row; padding repeats a row and is dropped at the end
    slots: list[int] = []  # slot of each tile
    start = 0
    for slot, count in enumerate(counts.tolist()):
        tiles = -(-count // ROWS)
        source += range(start, start + count)
        source += [start] * (tiles * ROWS - count)
        slots += [slot] * tiles
        start += count
    index = torch.tensor(source, dtype=torch.int64, device=rows.device)
    x = rows.index_select(0, index)

    def product(x: Tensor, dense: Tensor) -> Tensor:
        parts = [ref_linear.matmul(t, dense[slot]) for t, slot in zip(x.split(ROWS), slots, strict=True)]
        return num.round(torch.cat(parts))

    a = _swiglu(num, product(x, bank.w1.dense), product(x, bank.w3.dense), limit, weight.index_select(0, index))
    # a repeated row is written with the same value again
    return torch.empty_like(rows).index_copy_(0, index, product(a, bank.w2.dense))


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """As the reference, on tiles of rows."""
    return linear(num, _swiglu(num, linear(num, x, w1), linear(num, x, w3), limit), w2)


# --------------------------------------------------------------------- attention


def attend(num: Numerics, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """As the reference, with each row's visible keys in front and a running softmax over tiles of 64."""
    pad = -keys.shape[1] % KEYS
    front = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices
    keys = keys.gather(1, front.unsqueeze(-1).expand_as(keys))
    mask = mask.gather(1, front)
    if pad or not keys.shape[1]:
        keys, mask = F.pad(keys, (0, 0, 0, pad or KEYS)), F.pad(mask, (0, pad or KEYS))
    N = q.shape[1]
    rows = _rows_for(N * KEYS) if N * _rows_for(N * KEYS) % 32 == 0 else ROWS
    return tiled(lambda a, k, m: num.round(_attend_tile(a, k, m, sink, scale)), q, keys, mask, rows=rows)


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
    """As the reference, over this module's ``attend``."""
    return gathered(num, attend, q, local, window, ring, slots, entries, sink, scale)


def _attend_tile(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    q32 = q.float()
    T, N, D = q.shape
    best = q32.new_full((T, N), NEG_INF)
    den = q32.new_zeros((T, N))
    acc = q32.new_zeros((T, N, D))
    for start in range(0, keys.shape[1], KEYS):
        seen = mask[:, start : start + KEYS]
        if not q.is_cuda and not bool(seen.any()):
            break  # what is left adds exact zeros; only where looking costs nothing
        k = keys[:, start : start + KEYS].float()
        logits = (torch.bmm(q32, k.mT) * scale).masked_fill(~seen.unsqueeze(1), NEG_INF)
        new = torch.maximum(best, logits.amax(-1))
        safe = new.masked_fill(new == NEG_INF, 0.0)
        keep = torch.exp(best - safe)
        p = torch.exp(logits - safe.unsqueeze(-1))
        den = den * keep + p.sum(-1)
        acc = acc * keep.unsqueeze(-1) + torch.bmm(p, k)
        best = new
    empty = best == NEG_INF
    den = den + torch.exp(sink - best.masked_fill(empty, 0.0))
    return torch.where(empty.unsqueeze(-1), torch.zeros_like(acc), acc / den.unsqueeze(-1))


def pool_pairs(num: Numerics, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """As the reference, on tiles of rows."""
    rows = _rows_for(2 * first[0].shape[1])
    return tiled(lambda a, b, c, d: ref_pool_pairs(num, (a, b), (c, d)), *first, *second, rows=rows)


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """As the reference, on tiles of 32 queries and 64 entries."""
    B, C = iq.shape[:2]
    n = keys.shape[1]
    wide = F.pad(keys, (0, 0, 0, -n % KEYS))
    row = torch.arange(B, device=iq.device).repeat_interleave(C)

    def score(q: Tensor, w: Tensor, r: Tensor) -> Tensor:
        q32, w32 = q.float(), w.float().unsqueeze(-1)
        parts = []
        for start in range(0, wide.shape[1], KEYS):
            dot = torch.bmm(q32, wide[r, start : start + KEYS].float().mT)
            parts.append((dot.relu() * w32).sum(1))
        return torch.cat(parts, 1)

    out = tiled(score, iq.flatten(0, 1), iw.flatten(0, 1), row)[:, :n].unflatten(0, (B, C))
    entry = torch.arange(n, device=iq.device)
    return out.masked_fill(entry >= visible.unsqueeze(-1), NEG_INF)


# ------------------------------------------------------------------------ engram


def engram_gate(
    num: Numerics, X: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference, on tiles of rows."""
    if dead is None:
        return tiled(lambda x, p: engram.engram_gate(num, x, p, q_weight, k_weight, None, eps), X, projected)
    return tiled(lambda x, p, d: engram.engram_gate(num, x, p, q_weight, k_weight, d, eps), X, projected, dead)


#: what this module computes, by operation
OPERATIONS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        linear,
        linear_grouped,
        head_logits,
        rms_norm,
        rope_angles,
        mhc_mixes,
        mhc_collapse,
        mhc_expand,
        gate_topk,
        moe_experts,
        shared_expert,
        attend_cached,
        pool_pairs,
        index_scores,
        engram_gate,
    )
}
#: operations whose reference moves, compares or combines elements one by one with exact or correctly rounded
#: arithmetic in a fixed order (or works on whole rows in f64), so that the batch cannot matter
AS_THEY_ARE = frozenset({
    "prepare_weight", "embed", "embed_streams", "rope", "dispatch_permute", "dispatch_rows",
    "count_choices", "moe_combine", "quantise_index_query", "index_weights",
    "candidate_blocks", "restrict_to_candidates", "select_topk", "pack_rows", "unpack_rows", "store_rows", "load_rows",
    "store_pairs", "copy_rows", "entry_slots", "window_places", "pair_places",
    "engram_hash", "token_classes", "dequantise_table", "engram_lookup", "next_tokens",
    "adjust_logits", "token_logprobs",
    "dspark_confidence", "dspark_split", "settle_rows", "sampled_rows", "commit_rows", "draft_sample",
    "adjust_verify_logits", "accept_drawn",
    "accept_rejection", "truncate_emitted",
})  # fmt: skip
