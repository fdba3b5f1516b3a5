"""TileKernels: row-wise operations written in TileLang and compiled at their first call.

Signatures from its wheel 2.1.0. Rows are contiguous, widths multiples of 64 or 128, ids int32, scales f32 powers of
two where a record has E8M0 bytes. It has Ascend forms of the same functions, chosen by itself on that device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.reference import cache as ref_cache
from deepinfer_kernels.reference import engram as ref_engram
from deepinfer_kernels.reference import moe, norm
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.vendor import libraries, operands

#: record kind → element format, with a power of two per 32 values; global records, whose scale is E4M3, are not among
#: them, because 32 of 86,400 of its bytes were not the reference's on an H200
_RECORDS = {"window": "e4m3", "index": "e2m1"}
_GROUP = 32
_COLUMNS = 64


def _call(name: str) -> Any:
    return libraries.function("tile_kernels", name)


def pack_rows(num: Numerics, rows: Tensor, kind: str) -> Tensor:
    """Rows [..., D] as stored: an official record (uint8) or f32; global records are the reference's."""
    element = _RECORDS.get(kind)
    if not num.records or element is None:
        return ref_cache.pack_rows(num, rows, kind)
    flat = rows.reshape(-1, rows.shape[-1])
    wide = operands.padded(flat.to(torch.bfloat16), _COLUMNS).contiguous()
    codes, scale = _call("per_token_cast")(wide, element, _GROUP, round_sf=True)
    bytes_ = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # of an f32 power of two, its E8M0 byte
    width = flat.shape[1]
    data = codes.view(torch.uint8)[:, : width // 2 if element == "e2m1" else width]
    return torch.cat((data, bytes_[:, : width // _GROUP]), 1).unflatten(0, rows.shape[:-1])


def quantise_index_query(num: Numerics, iq: Tensor) -> Tensor:
    """Index queries as the scorer sees them: MXFP4 quantise-dequantised, or unchanged in ``float``."""
    return ref_cache.unpack_rows(num, pack_rows(num, iq, "index"), "index") if num.records else iq


def rope(num: Numerics, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last dims of x [T, ..., D]; widths other than 64 and 128 are the reference's."""
    half = cos.shape[-1]
    if half not in (32, 64) or x.shape[0] == 0:
        return norm.rope(num, x, cos, sin, inverse)
    turned = x[..., -2 * half :].reshape(x.shape[0], -1, 2 * half).clone()
    _call("apply_rotary")(turned, torch.cat((cos, sin), -1), interleaved=True, conjugate=inverse)
    return torch.cat((x[..., : -2 * half], turned.view(*x.shape[:-1], 2 * half)), -1)


def mhc_expand(num: Numerics, X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb_ij · X_i → [T, C, H] in bf16."""
    H = X.shape[-1]
    if X.shape[0] == 0:
        return torch.empty_like(X)
    streams, added = (operands.padded(t.to(torch.bfloat16), 128).contiguous().unsqueeze(0) for t in (X, y))
    post, comb = post.contiguous().unsqueeze(0).unsqueeze(-1), comb.contiguous().unsqueeze(0)
    return num.round(_call("mhc_post_fwd")(added, streams, post, comb)[0, :, :, :H])


def gate_topk(
    num: Numerics, x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(expert ids [T, k] ascending int64, weights [T, k] f32); the product with the router is torch's, in f32.

    A bias per token, as image spans have, is the reference's.
    """
    if bias.dim() != 1 or x.shape[0] == 0:
        return moe.gate_topk(num, x, weight, bias, k=k, normalise=normalise, scale=scale, temperature=temperature)
    logits = (x.float() @ weight.float().mT / temperature).contiguous()
    ids, chosen = _call("moe_topk_gate")(logits, k, False, 0, scale, 0, bias=bias.float().contiguous())
    ids, order = ids.sort(-1)
    if normalise and k > 1:
        return ids, chosen.gather(1, order)
    # the library always normalises: weigh the chosen again
    return ids, torch.nn.functional.softplus(logits.gather(1, ids)).sqrt() * scale


def engram_hash(
    num: Numerics, classes: Tensor, pad_class: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Table row ids [T, columns] int64 of the n-grams ending at each token; ids of a table fit 31 bits."""
    blocked = (classes < 0).cumsum(-1) > 0
    tokens = torch.where(blocked, pad_class, classes).to(torch.int32).contiguous()
    sizes, begins = primes.to(torch.int32), offsets.to(torch.int32).flatten()
    rows = _call("engram_hash")(
        tokens, multipliers.view(1, -1).contiguous(), sizes.unsqueeze(0).contiguous(), begins.unsqueeze(0).contiguous()
    )
    return rows[0].long()


def engram_gate(
    num: Numerics, X: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(streams with the memory mixed in [T, C, H], gate [T, C] f32); widths it has no block for are the reference's."""
    T, C, H = X.shape
    if H % 256 or H < 512 or T == 0:
        return ref_engram.engram_gate(num, X, projected, q_weight, k_weight, dead, eps)
    kv = projected.view(T, C + 1, H).to(torch.bfloat16).contiguous()
    fused = (q_weight.float() * k_weight.float()).expand(C, H).contiguous()
    # 1e-6: the clamp under the square root, as the reference has it
    mixed, _, gate, *_ = _call("engram_gate_fwd")(
        X.to(torch.bfloat16).contiguous(), kv, fused, eps, 1e-6, image_token_mask=dead
    )
    # the gate of a dead token is not written
    return num.round(mixed), gate if dead is None else gate.masked_fill(dead.unsqueeze(-1), 0.0)
