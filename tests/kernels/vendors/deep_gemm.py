"""What DeepGEMM documents of its operands, in plain torch; every rule it asserts is asserted, the rest is poisoned."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _align(n, to):
    return -(-n // to) * to


def _exponents(word, count):
    """E8M0 bytes of int32 words, the lowest byte first."""
    bytes_ = torch.stack([(word.long() >> 8 * j) & 255 for j in range(4)], -1)
    return torch.exp2(bytes_.flatten(-2)[..., :count].float() - 127)


def _values(data):
    if data.dtype == torch.float8_e4m3fn:
        return data.float()
    assert data.dtype == torch.int8
    byte = data.long() & 255
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    return E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0)


def _operand(pair):
    data, scale = pair
    value = _values(data)
    rows, k = value.shape[-2:]
    assert data.is_contiguous() and scale.dtype == torch.int32
    assert scale.shape == (*value.shape[:-1], -(-k // 128))
    assert scale.stride(-2) == 1 or rows == 1
    assert scale.stride(-1) == _align(rows, 4)
    if scale.dim() == 3:
        assert scale.stride(0) == scale.stride(-1) * scale.shape[-1]
    return value * _exponents(scale, -(-k // 32)).repeat_interleave(32, -1)[..., :k]


def _bf16(x):
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[-1] % 64 == 0
    return x.float()


def bf16_gemm_nt(a, b, d, c=None):
    assert d.dtype == torch.bfloat16 and d.is_contiguous() and d.shape[-1] * 2 % 16 == 0
    d.copy_(_bf16(a) @ _bf16(b).mT)


def fp8_fp4_gemm_nt(a, b, d, c=None, recipe=None):
    assert recipe == (1, 1, 32) and d.dtype == torch.bfloat16
    d.copy_(_operand(a) @ _operand(b).mT)


def einsum(expr, a, b, d):
    assert expr == "bhr,hdr->bhd"
    d.copy_(torch.einsum(expr, _bf16(a), _bf16(b)))


def get_mk_alignment_for_contiguous_layout():
    return 128


def _grouped(a, b, d, ends):
    assert ends.dtype == torch.int32 and ends.shape == (b.shape[0],) and a.shape[0] % 128 == 0
    d.fill_(float("nan"))
    begin = 0
    for group, end in enumerate(ends.tolist()):
        assert begin <= end <= a.shape[0]
        d[begin:end] = (a[begin:end] @ b[group].mT).to(d.dtype)
        begin = _align(end, 128)


def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, use_psum_layout=False):
    assert use_psum_layout
    _grouped(_bf16(a), _bf16(b), d, grouped_layout)


def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None, use_psum_layout=False):
    assert use_psum_layout and recipe == (1, 1, 32)
    _grouped(_operand(a), _operand(b), d, grouped_layout)


def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    (queries, q_scale), (keys, k_scale) = q, kv
    rows, heads = queries.shape[:2]
    assert queries.is_contiguous() and keys.is_contiguous() and not clean_logits and max_seqlen_k > 0
    assert weights.dtype == torch.float32 and weights.shape == (rows, heads)
    x, y = _values(queries), _values(keys)
    if q_scale is None:  # FP8, as on SM90
        assert heads in (32, 64) and x.shape[-1] in (32, 64, 128)
        assert queries.dtype == torch.float8_e4m3fn and k_scale.dtype == torch.float32
        y = y * k_scale.unsqueeze(-1)
    else:
        assert heads in (8, 16, 32, 64) and x.shape[-1] in (64, 128)
        assert q_scale.shape == (rows, heads) and k_scale.shape == y.shape[:1] and k_scale.dtype == torch.int32
        groups = x.shape[-1] // 32
        x = x * _exponents(q_scale.unsqueeze(-1), groups).repeat_interleave(32, -1)
        y = y * _exponents(k_scale.unsqueeze(-1), groups).repeat_interleave(32, -1)
    out = torch.full((rows, max_seqlen_k), float("nan"))
    bounds = zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)
    assert cu_seq_len_k_start.dtype == cu_seq_len_k_end.dtype == torch.int32
    for row, (first, last) in enumerate(bounds):
        dots = (x[row] @ y[first:last].mT).relu()
        out[row, : last - first] = (dots * weights[row].unsqueeze(-1)).sum(0)
    return out


def tf32_hc_prenorm_gemm(a, b, d, sqr_sum):
    assert b.dtype == torch.float32 and b.shape[0] % 8 == 0 and b.shape[0] <= 32 and b.is_contiguous()
    short = ((b.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)  # TF32 keeps 10 of 23 bits
    d.copy_(_bf16(a) @ short.mT)
    sqr_sum.copy_(_bf16(a).square().sum(-1))
