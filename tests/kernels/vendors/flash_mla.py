"""What FlashMLA documents of its two sparse calls, in plain torch, including the bytes of its records."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
fused_norm_rope_attn_rope_cast = object()


def _attend(q, rows, places, scale, sink):
    """One query's heads [h, 512] over the rows at ``places`` that are not −1."""
    keys = rows[places[places >= 0].long()]
    logits = torch.cat((q.float() @ keys.mT * scale, sink.unsqueeze(-1)), -1)
    return (logits.softmax(-1)[:, :-1] @ keys).to(torch.bfloat16)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, *, attn_sink):
    T, heads, width = q.shape
    assert heads in (64, 128) and width == d_v == 512 and q.dtype == kv.dtype == torch.bfloat16
    assert kv.shape[1:] == (1, 512) and indices.dtype == torch.int32 and indices.shape[:2] == (T, 1)
    assert indices.shape[2] % 128 == 0 and attn_sink.dtype == torch.float32 and attn_sink.shape == (heads,)
    rows = kv[:, 0].float()
    out = torch.stack([_attend(q[t], rows, indices[t, 0], sm_scale, attn_sink) for t in range(T)])
    return out, None, None


class FlashMLASchedMeta:
    pass


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def _decoded(cache):
    assert cache.dtype == torch.uint8 and cache.shape[2] == 1 and cache.is_contiguous()
    rows = cache.flatten(0, 2)
    if rows.shape[1] == 528:
        scale = torch.exp2(rows[:, 512:].float() - 127).repeat_interleave(32, 1)
        return rows[:, :512].contiguous().view(torch.float8_e4m3fn).float() * scale
    assert rows.shape[1] == 288
    byte = rows[:, :256].long()
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    scale = rows[:, 256:].contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    return E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0) * scale


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *, softmax_scale, is_fp8_kvcache,
    indices, attn_sink, **extra,
):  # fmt: skip
    T, per_row, heads, width = q.shape
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and block_table is cache_seqlens is None
    assert per_row == 1 and heads in (64, 128) and width == head_dim_v == 512 and is_fp8_kvcache
    assert k_cache.shape[3] == 528 and indices.shape[:2] == (T, 1) and indices.dtype == torch.int32
    rows, places = _decoded(k_cache), indices[:, 0]
    if extra:
        more, entries = extra["extra_indices_in_kvcache"][:, 0], extra["extra_k_cache"]
        assert more.dtype == torch.int32
        places = torch.cat((places, torch.where(more >= 0, more + rows.shape[0], -1)), 1)
        rows = torch.cat((rows, _decoded(entries)))
    out = [_attend(q[t, 0], rows, places[t], softmax_scale, attn_sink) for t in range(T)]
    return torch.stack(out).unsqueeze(1), None
