"""Element formats, quantisers and records against the recorded vectors: bytes must be equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.reference import attention, hyper, norm
from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import resolve

FORMAT = Path(__file__).resolve().parents[1] / "vectors" / "format"


@pytest.fixture(scope="module")
def v() -> dict[str, torch.Tensor]:
    return load_file(FORMAT / "format_vectors.safetensors")


@pytest.fixture(scope="module")
def meta() -> dict:
    return json.loads((FORMAT / "format_vectors.json").read_text())


def test_every_element_code_has_its_value(v):
    assert torch.equal(q.e2m1_value(torch.arange(16, dtype=torch.uint8)), v["formats/e2m1_all_codes_f32"])
    assert torch.equal(q.e2m1_encode(v["formats/e2m1_encode_in"]), v["formats/e2m1_encode_codes"])
    bytes_ = torch.arange(256, dtype=torch.uint8)
    e4m3 = q.e4m3_value(bytes_)
    assert torch.isnan(e4m3[[0x7F, 0xFF]]).all()
    assert torch.equal(torch.nan_to_num(e4m3, nan=1e9), v["formats/e4m3_all_bytes_f32"])
    assert torch.equal(q.e8m0_value(bytes_[1:255]), v["formats/e8m0_bytes_1_to_254_f32"])
    assert q.e8m0_value(bytes_[:1]) == 2.0**-127 and torch.isnan(q.e8m0_value(bytes_[255:]))


@pytest.mark.parametrize("name", ["q8", "q4m", "q4n"])
def test_quantisers_give_the_recorded_bytes_and_values(v, meta, name):
    rows = v["quant/input"][meta["q4n_rows"]] if name == "q4n" else v["quant/input"]
    codes, scale = getattr(q, f"quantise_{name}")(rows)
    assert torch.equal(codes, v[f"quant/{name}/{'codes' if name == 'q8' else 'packed'}"])
    assert torch.equal(scale, v[f"quant/{name}/scale"])
    values = getattr(q, f"dequantise_{name}")(codes, scale)
    assert torch.equal(values, v[f"quant/{name}/dequant_f32"])
    assert torch.equal(values.bfloat16(), v[f"quant/{name}/dequant_bf16"])


def test_scale_exponents_of_the_published_examples():
    for amax, limit, k in (
        (448, 448, 0), (449, 448, 1), (1, 448, -8), (224, 448, -1), (1e-4, 448, -22),
        (6, 6, 0), (6.01, 6, 1), (3, 6, -1),
    ):  # fmt: skip
        assert int(q.ceil_pow2_exponent(torch.tensor([float(amax)]), limit)) == k


def test_global_scale_is_clamped_where_e4m3_would_overflow():
    codes, scale = q.quantise_q4n(torch.full((1, 16), 1e30))
    assert q.e4m3_value(scale).item() == 448.0
    assert torch.isfinite(q.dequantise_q4n(codes, scale)).all()


@pytest.mark.parametrize("name, group", [("q8", 32), ("q4m", 32), ("q4n", 16)])
def test_a_group_with_nan_reads_back_as_nan_and_an_infinity_as_its_format_can(name: str, group: int):
    torch.manual_seed(0)
    x = torch.randn(5, 2 * group)
    clean = getattr(q, f"dequantise_{name}")(*getattr(q, f"quantise_{name}")(x))
    x[1, 3], x[2, group], x[3, 2], x[4, :] = float("nan"), -float("nan"), float("inf"), float("-inf")
    codes, scale = getattr(q, f"quantise_{name}")(x)
    back = getattr(q, f"dequantise_{name}")(codes, scale)
    assert back[1, :group].isnan().all() and back[2, group:].isnan().all()
    assert torch.equal(back[0], clean[0])
    assert torch.equal(back[1, group:], clean[1, group:]) and torch.equal(back[2, :group], clean[2, :group])
    if name == "q4n":  # 448, the largest scale, times 6, the largest element
        assert back[3, 2] == 2688 and bool((back[4] == -2688).all())
    else:
        assert back[3, :group].isnan().all() and torch.equal(back[3, group:], clean[3, group:])
        assert back[4].isnan().all()
    if name == "q8":  # the element itself too, whatever the sign of the NaN
        assert codes[1, 3] == codes[2, group] == codes[3, 2] == 0x7F


def test_weight_formats_decode_exactly(v):
    fp8 = q.dequantise_fp8_tiles(v["weights/fp8/weight"], v["weights/fp8/scale"])
    assert torch.equal(fp8, v["weights/fp8/dequant_f32"])
    fp4 = q.dequantise_mxfp4(v["weights/mxfp4/weight"], v["weights/mxfp4/scale"])
    assert torch.equal(fp4, v["weights/mxfp4/dequant_f32"])
    rows = q.dequantise_rows(v["weights/engram_rows/weight"], v["weights/engram_rows/scale"])
    assert torch.equal(rows, v["weights/engram_rows/dequant_f32"])
    assert torch.equal(fp8.bfloat16().float(), fp8) and torch.equal(fp4.bfloat16().float(), fp4)


@pytest.mark.parametrize("shape", [(64, 96), (72, 100), (1, 32)])
def test_quantised_weights_are_fixed_points(shape):
    torch.manual_seed(0)
    w = torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    tiles = q.quantise_fp8_tiles(w)
    once = q.dequantise_fp8_tiles(*tiles)
    assert torch.equal(q.dequantise_fp8_tiles(*q.quantise_fp8_tiles(once)), once)
    assert (once - w).abs().max() <= w.abs().max() / 16
    if shape[1] % 32 == 0:
        once = q.dequantise_mxfp4(*q.quantise_mxfp4(w))
        assert torch.equal(q.dequantise_mxfp4(*q.quantise_mxfp4(once)), once)


def test_records_have_the_official_sizes_and_round_trip():
    torch.manual_seed(1)
    for kind, width, size in (("window", 512, 528), ("global", 512, 288), ("index", 128, 68)):
        rows = torch.randn(5, width)
        record = getattr(q, f"pack_{kind}")(rows)
        assert record.shape == (5, size) and record.dtype == torch.uint8
        quantiser = {"window": "q8", "global": "q4n", "index": "q4m"}[kind]
        expected = getattr(q, f"dequantise_{quantiser}")(*getattr(q, f"quantise_{quantiser}")(rows))
        assert torch.equal(getattr(q, f"unpack_{kind}")(record), expected)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        q.quantise_q8(torch.zeros(1, 33))


def test_quantised_linears_give_the_recorded_outputs(v):
    ops = resolve("reference", "cpu")
    for name, kind in (("fp8", "fp8"), ("mxfp4", "fp4")):
        weight = ops.prepare_weight(v[f"weights/{name}/weight"], v[f"weights/{name}/scale"], kind)
        expected = v[f"gemm/{'L8' if kind == 'fp8' else 'L4'}_out_bf16"]
        assert torch.equal(ops.linear(v["gemm/input"], weight), expected)


@pytest.mark.parametrize("table", ["plain_64", "yarn_64", "yarn_16_tiny", "yarn_8_tiny"])
def test_rope_tables_and_rotation(v, meta, table):
    r, ops = meta["rope"][table], resolve("float", "cpu")
    yarn = (r["factor"], r["beta_fast"], r["beta_slow"], r["original"]) if r["original"] else None
    frequencies = norm.rope_frequencies(r["dim"], r["theta"], yarn)
    assert torch.equal(frequencies, v[f"rope/{table}/inv_freq"])
    cos, sin = ops.rope_angles(torch.tensor(meta["rope_positions"]), frequencies)
    y = ops.rope(v[f"rope/{table}/x"], cos, sin)
    scale = v[f"rope/{table}/x"].abs().max()
    assert (y - v[f"rope/{table}/y"]).abs().max() <= 1e-6 * scale
    assert (ops.rope(y, cos, sin, inverse=True) - v[f"rope/{table}/x"]).abs().max() <= 1e-6 * scale


def test_hyper_connection_coefficients(v):
    m, base, scale = v["mhc/mixes"], v["mhc/base"], v["mhc/scale"]
    comb = hyper.sinkhorn((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)), 1e-6, 20)
    assert (comb - v["mhc/comb"]).abs().max() <= 1e-6
    # the whole operation: a projection that picks the recorded mixes, on streams of unit mean square
    ops = resolve("float", "cpu")
    X = torch.ones(5, 4, 8)
    for t in range(5):
        fn = (m[t] / 32).unsqueeze(1).expand(24, 32)
        pre, post, comb = ops.mhc_mixes(X[t : t + 1], fn, base, scale, rms_eps=1e-20, hc_eps=1e-6, iters=20)
        for mine, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
            assert (mine[0] - v[f"mhc/{name}"][t]).abs().max() <= 2e-6


def test_expand_applies_comb_transposed():
    ops = resolve("float", "cpu")
    X = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 2)
    comb = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]], dtype=torch.float32).unsqueeze(0)
    out = ops.mhc_expand(X, torch.zeros(1, 2), torch.zeros(1, 4), comb)
    assert out[0, :, 0].tolist() == [3.0, 0.0, 1.0, 2.0]


def test_router_selects_by_biased_and_weighs_by_unbiased_scores(v):
    ops = resolve("float", "cpu")
    eye = torch.eye(16)
    ids, weights = ops.gate_topk(
        v["router/logits"], eye, v["router/bias"], k=4, normalise=True, scale=1.5, temperature=1.0
    )
    order = v["router/selected"].argsort(-1)
    assert torch.equal(ids, v["router/selected"].gather(1, order).long())
    assert (weights - v["router/weights"].gather(1, order)).abs().max() <= 1e-6


@pytest.mark.parametrize("n", ["n1", "n28", "n70", "n140"])
def test_one_softmax_with_sink(v, n):
    query, keys, sink = (v[f"merge_softmax/{n}/{part}"] for part in ("q", "kv", "sink"))
    mask = torch.ones(1, len(keys), dtype=torch.bool)
    exact = attention.attend(NUMERICS["float"], query[None].float(), keys[None].float(), mask, sink, 64**-0.5)[0]
    assert (exact - v[f"merge_softmax/{n}/out_exact_f32"]).abs().max() <= 2e-6
    tiled = attention.attend(NUMERICS["reference"], query[None], keys[None], mask, sink, 64**-0.5)[0]
    recorded = v[f"merge_softmax/{n}/out_ref_bf16"]
    ulp = recorded.float().abs().clamp(min=2.0**-126).log2().floor().exp2() * 2.0**-7
    assert ((tiled.float() - recorded.float()).abs() <= ulp).all()


def test_attention_without_any_key_is_zero_and_masked_keys_do_not_matter():
    torch.manual_seed(2)
    query, keys, sink = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(3)
    mask = torch.tensor([[True, True, False, False, True], [False] * 5])
    for mode in ("float", "reference", "fast"):
        num = NUMERICS[mode]
        act = num.act
        out = attention.attend(num, query.to(act), keys.to(act), mask, sink, 0.3)
        assert (out[1] == 0).all()
        poisoned = torch.where(mask.unsqueeze(-1), keys, 1e4).to(act)
        assert torch.equal(attention.attend(num, query.to(act), poisoned, mask, sink, 0.3), out)
