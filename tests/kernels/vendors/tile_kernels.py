"""What TileKernels documents of the functions that are called, in plain torch; one module stands for its parts."""

import sys

import torch

for part in ("engram", "moe", "quant", "mhc", "transform"):
    sys.modules[f"{__name__}.{part}"] = sys.modules[__name__]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def per_token_cast(x, fmt, num_per_channels, round_sf=False):
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 64 == 0 and round_sf
    most, floor = (448.0, 1e-4) if fmt == "e4m3" else (6.0, 6 * 2.0**-126)
    groups = x.float().unflatten(1, (-1, num_per_channels))
    amax = groups.abs().amax(-1).clamp(min=floor)
    # the power of two at or above amax / most, in f64, where the quotient of these is exact enough to compare
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / most))).float()
    value = groups / scale.unsqueeze(-1)
    if fmt == "e4m3":
        return value.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1), scale
    size = value.abs().unsqueeze(-1)  # ties go to the even code
    code = torch.where(torch.arange(7) % 2 == 1, size >= MIDDLES, size > MIDDLES).sum(-1)
    code = (code | torch.where(torch.signbit(value), 8, 0)).flatten(1).to(torch.uint8)
    return (code[:, 0::2] | code[:, 1::2] << 4).view(torch.int8), scale


def engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask=None):
    layers, lags = multipliers.shape
    assert ngram_token_ids.dtype == vocab_sizes.dtype == offsets.dtype == torch.int32
    assert multipliers.dtype == torch.int64 and vocab_sizes.shape[:2] == (layers, lags - 1) and offsets.dim() == 2
    out = []
    for layer in range(layers):
        value, columns = ngram_token_ids[:, 0].long() * multipliers[layer, 0], []
        for lag in range(1, lags):
            value = value ^ (ngram_token_ids[:, lag].long() * multipliers[layer, lag])
            columns.append(value.unsqueeze(1) % vocab_sizes[layer, lag - 1].long())
        out.append(torch.cat(columns, 1) + offsets[layer].long())
    return torch.stack(out).int()


def moe_topk_gate(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, *, bias):
    assert logits.dtype == bias.dtype == torch.float32 and logits.is_contiguous()
    assert not use_shared_as_routed and num_shared_experts == ep_rank == 0
    score = torch.nn.functional.softplus(logits).sqrt()
    ids = torch.sort(score + bias, dim=1, descending=True, stable=True).indices[:, :num_topk]  # best first
    weight = score.gather(1, ids)
    return ids, weight / (weight.sum(1, keepdim=True) + 1e-20) * routed_scaling_factor


def mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix):
    one, n, streams, width = residual.shape
    assert x.dtype == residual.dtype == torch.bfloat16 and x.shape == (one, n, width) and width % 128 == 0
    assert post_layer_mix.shape == (one, n, streams, 1) and comb_res_mix.shape == (one, n, streams, streams)
    mixed = torch.einsum("abmn,abmc->abnc", comb_res_mix, residual.float())
    return (x.float().unsqueeze(-2) * post_layer_mix + mixed).bfloat16()


def apply_rotary(query, cos_sin_cache, interleaved=False, conjugate=False):
    half = cos_sin_cache.shape[1] // 2
    assert interleaved and query.dim() == 3 and query.shape[2] == 2 * half and half in (32, 64)
    cos, sin = cos_sin_cache[:, None, :half], cos_sin_cache[:, None, half:] * (-1 if conjugate else 1)
    a, b = query[..., 0::2].float(), query[..., 1::2].float()
    query[..., 0::2], query[..., 1::2] = (a * cos - b * sin).to(query.dtype), (a * sin + b * cos).to(query.dtype)


def engram_gate_fwd(hidden_states, kv, weight_fused, eps, clamp_value, image_token_mask=None):
    n, streams, width = hidden_states.shape
    assert hidden_states.dtype == kv.dtype == torch.bfloat16 and kv.shape == (n, streams + 1, width)
    assert weight_fused.shape == (streams, width) and weight_fused.dtype == torch.float32
    h, k, v = hidden_states.float(), kv[:, :streams].float(), kv[:, streams].float()
    dot = (h * weight_fused * k).sum(-1) * torch.rsqrt(h.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(k.square().mean(-1) + eps) * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=clamp_value).sqrt(), dot))
    out = (h + gate.unsqueeze(-1) * v.unsqueeze(1)).bfloat16()
    if image_token_mask is not None:
        out = torch.where(image_token_mask[:, None, None], hidden_states, out)
        gate = gate.masked_fill(image_token_mask[:, None], float("nan"))  # not written
    return out, dot, gate, None, None
