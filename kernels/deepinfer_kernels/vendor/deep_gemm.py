"""DeepGEMM: D = A · Bᵀ with both operands along K; grouped products over experts; index scores; mHC mixes.

Layouts, from its repository at the commit in ``libraries``:

* BF16 operands are row-major with K a multiple of 64; D is row-major.
* An FP8 operand is E4M3 [rows, K], an FP4 operand int8 [rows, K/2] with two E2M1 per byte, even index low. On SM100 a
  scale covers 32 of K: int32 [rows, K/128], four E8M0 bytes per word, columns of rows on 16 bytes. On SM90 scales are
  f32 of 128 of K, and FP4 is refused; weights with a scale per 32 × 32 do not fit that, so SM90 gets BF16 only.
* Grouped rows: the rows of an expert begin on a multiple of the alignment the library names; int32 [experts] says where
  each one's rows end. Rows between are computed with and thrown away.
* Index scores: queries [rows, heads, width] and keys [n, width] with a range of keys per row. SM100: FP4 and one
  int32 of four E8M0 bytes each. SM90: E4M3 with one f32 per key; a query's scale goes into its head weight.

Products with quantised inputs are those of ``reference`` numerics; BF16 products are ``fast``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.reference import hyper, moe
from deepinfer_kernels.reference import linear as ref_linear
from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.index import NEG_INF
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import Numerics
from deepinfer_kernels.vendor import libraries, operands

#: scale per row and 32 of K, for both operands
_RECIPE = (1, 1, 32)
#: K is padded to this many values, one word of scales; outputs to this many, so that rows begin on 16 bytes
_K, _N = 128, 8
#: most heads and dimensions of an index query
_HEADS, _WIDTH = 64, 128


def _call(name: str) -> Any:
    return libraries.function("deep_gemm", name)


# ------------------------------------------------------------------------ linear


def linear(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """[..., in] → [..., out] as the reference's, through BF16 products; kind f32 is the reference's own."""
    if weight.kind == "f32":
        return ref_linear.linear(num, x, weight)
    flat = x.reshape(-1, x.shape[-1])
    dense = operands.kept("deep_gemm bf16", weight, lambda w: operands.dense(w, _N, _K))
    y = flat.new_empty((flat.shape[0], dense.shape[0]), dtype=torch.bfloat16)
    if flat.shape[0]:
        _call("bf16_gemm_nt")(operands.padded(flat.to(torch.bfloat16), _K).contiguous(), dense, y)
    return num.round(y[:, : weight.sizes[0]]).unflatten(0, x.shape[:-1])


def linear_quantised(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """``linear`` with inputs in FP8 per 32, as ``reference`` numerics define FP8 and FP4 kinds; SM100."""
    if weight.kind not in ("fp8", "fp4"):
        return ref_linear.linear(num, x, weight)
    flat = x.reshape(-1, x.shape[-1])
    data, scale, outs = operands.kept("deep_gemm mx", weight, _operand)
    y = flat.new_empty((flat.shape[0], data.shape[-2]), dtype=torch.bfloat16)
    if flat.shape[0]:
        _call("fp8_fp4_gemm_nt")(_activations(flat), (data, scale), y, recipe=_RECIPE)
    return num.round(y[:, :outs]).unflatten(0, x.shape[:-1])


def linear_grouped(num: Numerics, x: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal projection [T, G, in] · [G, out, in] → [T, G, out]; the input is not quantised."""
    dense = operands.kept("deep_gemm bf16", weight, lambda w: operands.dense(w, _N, _K))
    y = x.new_empty((x.shape[0], x.shape[1], dense.shape[-2]), dtype=torch.bfloat16)
    if x.shape[0]:
        a = operands.padded(x.to(torch.bfloat16), _K).contiguous()
        _call("einsum")("bhr,hdr->bhd", a, dense, y)
    return num.round(y[..., : weight.sizes[0]])


def _operand(weight: Weight) -> tuple[Tensor, Tensor, int]:
    """(E4M3 or packed E2M1, scales, outputs) of a weight, padded: zeros behind K and behind the outputs."""
    data, scale = operands.codes(weight)
    outs, per_byte = data.shape[-2], 2 if weight.kind == "fp4" else 1
    data = operands.padded(operands.padded(data, _K // per_byte), _N, -2).contiguous()
    scale = operands.padded(operands.padded(scale, _K // 32, value=127), _N, -2, value=127)
    kind = torch.int8 if weight.kind == "fp4" else torch.float8_e4m3fn
    return data.view(kind), operands.packed_scales(scale), outs


def _activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 [M, K], scales) of rows [M, in], as the reference quantises them."""
    data, scale = q.quantise_q8(operands.padded(x, 32))
    return operands.padded(data, _K).contiguous().view(torch.float8_e4m3fn), operands.packed_scales(scale)


def shared_expert(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert through ``linear``. [T, H] → [T, H]."""
    return linear(num, moe.swiglu(num, linear(num, x, w1), linear(num, x, w3), limit), w2)


def shared_expert_quantised(num: Numerics, x: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float) -> Tensor:
    """The always-on expert through ``linear_quantised``. [T, H] → [T, H]."""
    a = moe.swiglu(num, linear_quantised(num, x, w1), linear_quantised(num, x, w3), limit)
    return linear_quantised(num, a, w2)


# --------------------------------------------------------------------------- moe


def spread(counts: Tensor, rows: int, align: int) -> tuple[Tensor, Tensor, int]:
    """(place int64 [rows] of each sorted row, ends int32 [S] of each slot's rows, rows in all).

    A slot's rows begin on a multiple of ``align``. The number of rows in all is a bound that holds for any counts, so
    that nothing waits for the device.
    """
    total = rows + min(rows, counts.shape[0]) * (align - 1)
    total += -total % align
    ends = counts.cumsum(0)
    taken = (counts + align - 1) // align * align
    begin = taken.cumsum(0) - taken
    row = torch.arange(rows, device=counts.device)
    slot = torch.searchsorted(ends, row, right=True).clamp(max=counts.shape[0] - 1)
    return row + (begin - ends + counts)[slot], (begin + counts).to(torch.int32), total


def moe_experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float) -> Tensor:
    """Expert outputs [M, H] through BF16 grouped products; the experts' weights are held in BF16."""
    return _experts(num, rows, counts, bank, weight, limit, _grouped_bf16)


def moe_experts_quantised(
    num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float
) -> Tensor:
    """Expert outputs [M, H] with inputs in FP8 per 32 and the experts' weights as they are stored; SM100."""
    return _experts(num, rows, counts, bank, weight, limit, _grouped_quantised)


def _experts(num: Numerics, rows: Tensor, counts: Tensor, bank: ExpertBank, weight: Tensor, limit: float, product: Any):
    if rows.shape[0] == 0:
        return torch.empty_like(rows)
    align = _call("get_mk_alignment_for_contiguous_layout")()
    at, ends, total = spread(counts, rows.shape[0], align)

    def times(x: Tensor, w: Weight) -> Tensor:
        apart = x.new_zeros((total, x.shape[-1]), dtype=torch.bfloat16).index_copy_(0, at, x.to(torch.bfloat16))
        return num.round(product(apart, w, ends).index_select(0, at)[:, : w.sizes[0]])

    a = moe.swiglu(num, times(rows, bank.w1), times(rows, bank.w3), limit, weight)
    return times(a, bank.w2).contiguous()


def _grouped_bf16(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    dense = operands.kept("deep_gemm bf16", weight, lambda w: operands.dense(w, _N, _K))
    y = x.new_empty((x.shape[0], dense.shape[-2]))
    a = operands.padded(x, _K).contiguous()
    _call("m_grouped_bf16_gemm_nt_contiguous")(a, dense, y, ends, use_psum_layout=True)
    return y


def _grouped_quantised(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    data, scale, _ = operands.kept("deep_gemm mx", weight, _operand)
    y = x.new_empty((x.shape[0], data.shape[-2]))
    call = _call("m_grouped_fp8_fp4_gemm_nt_contiguous")
    call(_activations(x), (data, scale), y, ends, recipe=_RECIPE, use_psum_layout=True)
    return y


# ------------------------------------------------------------------------- index


def index_scores(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] as the reference's, queries and keys as FP4 again (they come from it, so it is exact)."""
    return _scores(iq, iw, keys, visible, _fp4_rows)


def index_scores_fp8(num: Numerics, iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """f32 scores [B, C, n] as the reference's, through E4M3 with one scale per row; SM90.

    FP4 values of a row fit E4M3 exactly while the scales of its groups lie within a factor of 2^14; beyond that the
    smallest ones lose bits that the largest hide.
    """
    return _scores(iq, iw, keys, visible, _fp8_rows)


def _scores(iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor, convert: Any) -> Tensor:
    B, C, heads, width = iq.shape
    n = keys.shape[1]
    if 0 in (B, C, n):
        return iq.new_empty((B, C, n), dtype=torch.float32)
    if heads > _HEADS or width > _WIDTH:
        raise ValueError(f"deep_gemm scores at most {_HEADS} index heads of {_WIDTH}, these are {heads} of {width}")
    # heads without a weight and dimensions of zeros add nothing
    more = 32 - heads if heads < 32 else -heads % 64 if heads > 32 else 0
    wide = _WIDTH - width if width > 64 else 64 - width
    q_rows = torch.nn.functional.pad(iq, (0, wide, 0, more)).flatten(0, 1)
    k_rows = torch.nn.functional.pad(keys, (0, wide)).flatten(0, 1)
    weights = torch.nn.functional.pad(iw.float(), (0, more)).flatten(0, 1)
    queries, kv, weights = convert(q_rows, k_rows, weights)
    first = torch.arange(B, device=iq.device, dtype=torch.int32).mul_(n).repeat_interleave(C)
    last = first + visible.flatten().clamp(0, n).to(torch.int32)
    call = _call("fp8_fp4_mqa_logits")
    got = call(queries, kv, weights.contiguous(), first, last, clean_logits=False, max_seqlen_k=n)
    entry = torch.arange(n, device=iq.device)
    return got.unflatten(0, (B, C)).masked_fill(entry >= visible.unsqueeze(-1), NEG_INF)


def _fp4_rows(queries: Tensor, keys: Tensor, weights: Tensor) -> tuple[Any, Any, Tensor]:
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        packed, scale = q.quantise_q4m(x)
        words = operands.padded(scale, 4, value=127).contiguous().view(torch.int32).squeeze(-1)
        return packed.view(torch.int8), words

    return rows(queries), rows(keys), weights


def _fp8_rows(queries: Tensor, keys: Tensor, weights: Tensor) -> tuple[Any, Any, Tensor]:
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        exponent = q.ceil_pow2_exponent(wide.abs().amax(-1).clamp(min=2.0**-100), q.E4M3_MAX)
        scale = q.exp2i(exponent)
        return q.e4m3_encode(wide / scale.unsqueeze(-1)).view(torch.float8_e4m3fn), scale

    (codes, scale), kv = rows(queries), rows(keys)
    return (codes, None), kv, weights * scale


# ------------------------------------------------------------------------- hyper


def mhc_mixes(
    num: Numerics, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb) as the reference's; the product in TF32, which keeps 11 significant bits of ``fn``."""
    T, C, H = X.shape
    if fn.shape[0] > 32:
        raise ValueError(f"deep_gemm mixes at most 32 coefficients of a token, {C} streams have {fn.shape[0]}")
    flat = operands.padded(X.flatten(1).to(torch.bfloat16), 64).contiguous()
    weight = operands.padded(operands.padded(fn.float(), 64), 8, -2).contiguous()
    mixes = flat.new_empty((T, weight.shape[0]), dtype=torch.float32)
    squares = flat.new_empty((T,), dtype=torch.float32)
    if T:
        _call("tf32_hc_prenorm_gemm")(flat, weight, mixes, squares)
    m = mixes[:, : fn.shape[0]] * torch.rsqrt(squares.unsqueeze(-1) / (C * H) + rms_eps)
    pre = torch.sigmoid(m[:, :C] * scale[0] + base[:C]) + hc_eps
    post = 2 * torch.sigmoid(m[:, C : 2 * C] * scale[1] + base[C : 2 * C])
    comb = (m[:, 2 * C :] * scale[2] + base[2 * C :]).unflatten(-1, (C, C))
    return pre, post, hyper.sinkhorn(comb, hc_eps, iters)
