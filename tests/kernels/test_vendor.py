"""Vendor adapters: the layouts they hand over mean what the reference means; libraries are probed by what they have.

``vendors/`` holds what each library documents of its operands, written from its documentation alone; an adapter's
result through it must be the reference's.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_kernels.reference import attention, cache, engram, hyper, index, linear, moe, norm, quantise
from deepinfer_kernels.reference.linear import Weight, in_tiles
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, resolve
from deepinfer_kernels.vendor import deep_gemm, flash_mla, libraries, tile_kernels
from deepinfer_kernels.vendor.families import ADAPTERS

VENDORS = Path(__file__).parent / "vendors"
FAST, REFERENCE = NUMERICS["fast"], NUMERICS["reference"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts modules on disk and on the import path, as an installer would; nothing of them stays loaded."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    names = [*libraries.LIBRARIES, "flash_mla_other"]

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in names]:
            del sys.modules[name]

    def write(name: str, text: str | None = None, metadata: tuple[str, str] | None = None) -> Path:
        folder = site / name
        folder.mkdir(exist_ok=True)
        if text is None:
            shutil.copy(VENDORS / f"{name}.py", folder / "__init__.py")
        else:
            (folder / "__init__.py").write_text(text)
        if metadata is not None:
            info = site / f"{metadata[0].replace('-', '_')}-{metadata[1]}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata[0]}\nVersion: {metadata[1]}\n")
        importlib.invalidate_caches()
        forget()
        return folder

    forget()
    yield write
    forget()


def close(got, expected, relative):
    assert got.shape == expected.shape and got.dtype == expected.dtype and not got.isnan().any()
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    assert error <= relative, f"relative error {error:.2e}"


def weights(kind: linear.Kind, *shape: int, form: str = "bytes") -> tuple[Weight, Weight]:
    """(as the adapter gets it, as the reference prepares it) of one random checkpoint weight."""
    raw = torch.randn(*shape) * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1)).float())
    if kind == "fp4":
        data, scale = quantise.quantise_mxfp4(raw)
    else:
        data, scale = quantise.quantise_fp8_tiles(raw)
    plain = linear.prepare_weight(REFERENCE, data, scale, kind)
    if form == "matrix":
        return plain, plain
    if form == "tiles":
        tiles, scales = in_tiles(data, scale, kind)
        return Weight(tiles, kind, scales, shape=(shape[-2], shape[-1])), plain
    return Weight(data, kind, scale), plain


# --------------------------------------------------------------------- layouts


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("shape", [(96, 160), (33, 1280), (1, 64)])
@pytest.mark.parametrize(
    ("kind", "form"), [(kind, form) for kind in ("fp8", "fp4") for form in ("bytes", "tiles", "matrix")]
)
def test_quantised_product_is_the_one_of_reference_numerics(install, rows, shape, kind, form):
    install("deep_gemm")
    torch.manual_seed(rows)
    given, plain = weights(kind, *shape, form=form)
    x = (torch.randn(rows, shape[1]) * 3).bfloat16()
    for _ in range(2):  # the second time from the converted weight that was kept
        got = deep_gemm.linear_quantised(REFERENCE, x, given)
        close(got, linear.linear(REFERENCE, x, plain), 5e-3)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_operands_that_are_handed_over_are_the_weights_bit_for_bit(install, kind):
    """Dequantising by the documented layout gives the very matrix, padding gives nothing."""
    install("deep_gemm")
    documented = importlib.import_module("deep_gemm")
    given, plain = weights(kind, 40, 160)
    data, scale, outs = deep_gemm._operand(given)
    value = documented._operand((data, scale))
    assert outs == 40 and torch.equal(value[:40, :160], plain.dense)
    assert not value[40:].any() and not value[:, 160:].any()


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bf16"])
def test_bf16_product(install, kind):
    install("deep_gemm")
    dense = Weight(torch.randn(33, 96).bfloat16(), "bf16")
    given, plain = (dense, dense) if kind == "bf16" else weights(kind, 33, 96)
    x = torch.randn(2, 5, 96).bfloat16()
    close(deep_gemm.linear(FAST, x, given), linear.linear(FAST, x, plain), 5e-3)


def test_product_of_f32_weights_is_the_references(install):
    x, w = torch.randn(3, 8), Weight(torch.randn(4, 8), "f32")
    assert torch.equal(deep_gemm.linear(FAST, x, w), linear.linear(FAST, x, w))
    assert torch.equal(deep_gemm.linear_quantised(REFERENCE, x, w), linear.linear(REFERENCE, x, w))


def test_grouped_projection(install):
    install("deep_gemm")
    given, plain = weights("fp8", 64, 160)
    x = torch.randn(6, 2, 160).bfloat16()
    got = deep_gemm.linear_grouped(FAST, x, given.grouped(2))
    close(got, linear.linear_grouped(FAST, x, Weight(plain.dense.bfloat16(), "fp8").grouped(2)), 5e-3)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [5, 0, 130, 1], [0, 128, 0, 129], [0, 0, 0, 300]])
@pytest.mark.parametrize("form", ["fast", "reference"])
def test_experts_whatever_their_shares(install, counts, form):
    install("deep_gemm")
    S, H, width = len(counts), 96, 64
    sizes = {"w1": (S, width, H), "w3": (S, width, H), "w2": (S, H, width)}
    made = {name: weights("fp4", *shape, form="tiles") for name, shape in sizes.items()}
    given, plain = (ExpertBank(**{n: w[i] for n, w in made.items()}) for i in (0, 1))
    rows = torch.randn(sum(counts), H).bfloat16()
    num = NUMERICS[form]
    arguments = (rows, torch.tensor(counts))
    share = torch.rand(sum(counts))
    call = deep_gemm.moe_experts if form == "fast" else deep_gemm.moe_experts_quantised
    got = call(num, *arguments, given, share, 10.0)
    close(got, moe.moe_experts(num, *arguments, plain, share, 10.0), 5e-3)


def test_shared_expert(install):
    install("deep_gemm")
    made = [weights("fp8", *shape) for shape in ((64, 96), (64, 96), (96, 64))]
    x = torch.randn(5, 96).bfloat16()
    (w1, p1), (w3, p3), (w2, p2) = made
    got = deep_gemm.shared_expert(FAST, x, w1, w3, w2, 10.0)
    close(got, moe.shared_expert(FAST, x, p1, p3, p2, 10.0), 5e-3)
    got = deep_gemm.shared_expert_quantised(REFERENCE, x, w1, w3, w2, 10.0)
    close(got, moe.shared_expert(REFERENCE, x, p1, p3, p2, 10.0), 5e-3)


@pytest.mark.parametrize(("heads", "width"), [(32, 128), (4, 32), (48, 96), (64, 64)])
@pytest.mark.parametrize("call", [deep_gemm.index_scores, deep_gemm.index_scores_fp8])
def test_index_scores(install, call, heads, width):
    install("deep_gemm")
    torch.manual_seed(heads)
    spread = torch.exp2(torch.randint(-4, 5, (2, 3, heads, width // 32)).float()).repeat_interleave(32, -1)
    iq = cache.quantise_index_query(FAST, (torch.randn(2, 3, heads, width) * spread).bfloat16())
    keys = cache.unpack_rows(FAST, cache.pack_rows(FAST, torch.randn(2, 9, width), "index"), "index")
    iw = torch.randn(2, 3, heads).bfloat16()
    visible = torch.tensor([[0, 4, 9], [1, 9, 2]])
    got, expected = call(FAST, iq, iw, keys, visible), index.index_scores(FAST, iq, iw, keys, visible)
    assert torch.equal(got.isneginf(), expected.isneginf())
    close(got.masked_fill(got.isneginf(), 0), expected.masked_fill(expected.isneginf(), 0), 1e-5)


def test_rows_of_zeros_score_zero(install):
    install("deep_gemm")
    zero = torch.zeros(1, 1, 32, 128).bfloat16()
    got = deep_gemm.index_scores_fp8(FAST, zero, torch.ones(1, 1, 32), torch.zeros(1, 3, 128), torch.tensor([[3]]))
    assert torch.equal(got, torch.zeros(1, 1, 3))


@pytest.mark.parametrize("streams", [2, 4])
def test_mhc_mixes(install, streams):
    install("deep_gemm")
    width = 80 * streams
    X, fn = torch.randn(5, streams, 80).bfloat16(), torch.randn(streams * (streams + 2), width) / width**0.5
    base, scale = torch.randn(fn.shape[0]), torch.tensor([0.7, 0.5, 0.9])
    options: dict[str, Any] = dict(rms_eps=1e-20, hc_eps=1e-6, iters=20)
    got = deep_gemm.mhc_mixes(FAST, X, fn, base, scale, **options)
    for have, expected in zip(got, hyper.mhc_mixes(FAST, X, fn, base, scale, **options), strict=True):
        close(have, expected, 2e-3)


def attention_case(T, heads, width, K, with_ring=True, with_entries=True) -> tuple[Any, ...]:
    q = torch.randn(T, heads, width).bfloat16()
    local = cache.unpack_rows(FAST, cache.pack_rows(FAST, torch.randn(T, width), "window"), "window")
    window = torch.randint(-9, T, (T, 12))
    ring = cache.pack_rows(FAST, torch.randn(8, width), "window") if with_ring else None
    if not with_ring:
        window = window.clamp(min=-1)
    entries = cache.pack_rows(FAST, torch.randn(70, width), "global") if with_entries else None
    slots = torch.randint(-20, 70, (T, K)).clamp(min=-1) if with_entries else None
    return q, local, window, ring, slots, entries, torch.randn(heads), width**-0.5


@pytest.mark.parametrize("with_ring", [True, False])
@pytest.mark.parametrize("with_entries", [True, False])
@pytest.mark.parametrize(("heads", "width"), [(64, 512), (4, 64), (65, 512)])
def test_attention_over_widened_rows(install, monkeypatch, with_ring, with_entries, heads, width):
    install("flash_mla")
    case = attention_case(5, heads, width, 20, with_ring, with_entries)
    expected = attention.attend_cached(FAST, *case)
    close(flash_mla.attend_cached(FAST, *case), expected, 5e-3)
    monkeypatch.setattr(flash_mla, "_TILE", 512 * 12)  # one query at a time, and stores larger than what it asks for
    close(flash_mla.attend_cached(FAST, *case), expected, 5e-3)


@pytest.mark.parametrize("with_ring", [True, False])
@pytest.mark.parametrize("with_entries", [True, False])
def test_attention_over_records_in_place(install, with_ring, with_entries):
    install("flash_mla")
    case = attention_case(3, 64, 512, 20, with_ring, with_entries)
    close(flash_mla.attend_records(FAST, *case), attention.attend_cached(FAST, *case), 5e-3)


def test_a_query_that_sees_nothing_gives_zero(install):
    install("flash_mla")
    q, local, window, *rest = attention_case(2, 64, 512, 4, False, False)
    for call in (flash_mla.attend_cached, flash_mla.attend_records):
        assert not call(FAST, q, local, torch.full_like(window, -1), *rest).any()


@pytest.mark.parametrize(
    ("kind", "width"), [("window", 512), ("window", 96), ("index", 128), ("index", 32), ("global", 64)]
)
def test_records_are_the_references_bytes(install, kind, width):
    install("tile_kernels")
    rows = (torch.randn(3, 5, width) * torch.exp2(torch.randint(-20, 20, (3, 5, 1)).float())).bfloat16()
    assert torch.equal(tile_kernels.pack_rows(FAST, rows, kind), cache.pack_rows(FAST, rows, kind))
    if kind == "index":
        assert torch.equal(tile_kernels.quantise_index_query(FAST, rows), cache.quantise_index_query(FAST, rows))


@pytest.mark.parametrize("half", [32, 64, 8])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary(install, half, inverse):
    install("tile_kernels")
    angle = torch.rand(4, half) * 50
    for x in (torch.randn(4, 3, 160).bfloat16(), torch.randn(4, 160).bfloat16()):
        before = x.clone()
        got = tile_kernels.rope(FAST, x, angle.cos(), angle.sin(), inverse)
        assert torch.equal(got, norm.rope(FAST, x, angle.cos(), angle.sin(), inverse)) and torch.equal(x, before)


@pytest.mark.parametrize("width", [256, 100])
def test_streams(install, width):
    install("tile_kernels")
    streams = (torch.randn(5, 4, width).bfloat16(), torch.randn(5, width).bfloat16())
    mix = (torch.rand(5, 4), torch.rand(5, 4, 4))
    close(tile_kernels.mhc_expand(FAST, *streams, *mix), hyper.mhc_expand(FAST, *streams, *mix), 1e-3)


@pytest.mark.parametrize("normalise", [True, False])
def test_router_orders_by_id_and_weighs_as_asked(install, normalise):
    install("tile_kernels")
    options: dict[str, Any] = dict(k=3, normalise=normalise, scale=1.5, temperature=0.7)
    case = (torch.randn(6, 32).bfloat16(), torch.randn(16, 32), torch.rand(16))
    ids, weight = tile_kernels.gate_topk(FAST, *case, **options)
    expected_ids, expected = moe.gate_topk(FAST, *case, **options)
    assert torch.equal(ids, expected_ids)
    close(weight, expected, 1e-6)
    of_tokens = (*case[:2], torch.rand(6, 16))  # the bias of image spans
    for have, want in zip(
        tile_kernels.gate_topk(FAST, *of_tokens, **options), moe.gate_topk(FAST, *of_tokens, **options), strict=True
    ):
        assert torch.equal(have, want)


def test_engram(install):
    install("tile_kernels")
    classes = torch.randint(-1, 900, (6, 4))
    offsets = torch.arange(24).view(3, 8) * 2000
    sizes = (torch.randint(1 << 20, 1 << 40, (4,)), torch.randint(1000, 2000, (3, 8)), offsets)
    assert torch.equal(tile_kernels.engram_hash(FAST, classes, 2, *sizes), engram.engram_hash(FAST, classes, 2, *sizes))
    for width in (512, 96):
        weights_of = (torch.randn(4, width).bfloat16(), torch.randn(4, width).bfloat16())
        case = (torch.randn(3, 4, width).bfloat16(), torch.randn(3, 5 * width).bfloat16(), *weights_of)
        for dead in (None, torch.tensor([False, True, False])):
            got = tile_kernels.engram_gate(FAST, *case, dead, 1e-20)
            for have, want in zip(got, engram.engram_gate(FAST, *case, dead, 1e-20), strict=True):
                close(have, want, 1e-3)


def test_sizes_beyond_a_library_are_refused_with_its_limits(install):
    install("flash_mla")
    q, *rest = attention_case(2, 129, 64, 4)
    with pytest.raises(ValueError, match="at most 128 heads of 512, these are 129 of 64"):
        flash_mla.attend_cached(FAST, q, *rest)
    with pytest.raises(ValueError, match="records of 512 values, these rows have 64"):
        flash_mla.attend_records(FAST, q, *rest)
    with pytest.raises(ValueError, match="at most 64 index heads of 128, these are 65 of 128"):
        deep_gemm.index_scores(FAST, torch.zeros(1, 1, 65, 128), torch.zeros(1, 1, 65), torch.zeros(1, 1, 128),
                               torch.ones(1, 1))  # fmt: skip


# --------------------------------------------------------------------- probing


def test_a_library_counts_by_its_functions(install):
    every = ("bf16_gemm_nt", "einsum")
    install("deep_gemm", "bf16_gemm_nt = einsum = print\n__version__ = '0.0.1'\n")
    assert libraries.missing("deep_gemm", every) is None
    install("deep_gemm", "bf16_gemm_nt = print\n__version__ = '99.0'\n")
    reason = libraries.missing("deep_gemm", every)
    assert reason == "this deep_gemm has no einsum: deepinfer build-kernels --vendor deep_gemm"


def test_absence_and_a_failing_import_are_told_apart(install):
    assert libraries.missing("flash_mla", ("flash_mla_sparse_fwd",)) == (
        "flash_mla is not installed: deepinfer build-kernels --vendor flash_mla"
    )
    install("flash_mla", "raise OSError('libcudart.so.13: cannot open shared object file')\n")
    reason = libraries.missing("flash_mla", ("flash_mla_sparse_fwd",))
    assert reason is not None and "cannot be imported (libcudart.so.13: cannot open" in reason


@pytest.mark.parametrize(
    ("name", "version", "what"),
    [
        ("deep-gemm", "1.0.0", "a snapshot without its sources"),
        ("deepinfer-gemm", "2.8.2", "a copy of deep_gemm by an unknown"),
    ],
)
def test_a_placeholder_is_recognised_before_it_is_imported(install, tmp_path, name, version, what):
    install("deep_gemm", f"open({str(tmp_path / 'ran')!r}, 'w')\n", (name, version))
    reason = libraries.missing("deep_gemm", ("bf16_gemm_nt",))
    assert reason is not None and f"{name} {version} is {what}" in reason and f"pip uninstall {name}" in reason
    assert not (tmp_path / "ran").exists()


def test_a_copy_in_the_kernel_cache_is_found_before_the_environment(install, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    install("deep_gemm", "", ("deep-gemm", "1.0.0"))
    own = libraries.site("deep_gemm", tmp_path / "kernels") / "deep_gemm"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("bf16_gemm_nt = print\n")
    assert libraries.missing("deep_gemm", ("bf16_gemm_nt",), tmp_path / "kernels") is None
    assert sys.modules["deep_gemm"].__file__ == str(own / "__init__.py")


# -------------------------------------------------------------------- registry


def test_adapters_are_taken_by_name_only():
    for adapter in ADAPTERS:
        rows = [i for i in IMPLEMENTATIONS[adapter.op] if i.backend == adapter.library]
        assert rows and not any(i.auto for i in rows), adapter
    for platform in ("sm90", "sm100"):
        for mode in NUMERICS:
            chosen = resolve(mode, platform).chosen.values()
            assert not {i.backend for i in chosen} & set(libraries.LIBRARIES)
            # asked for on all operations, where it has none the usual choice stands
    with pytest.raises(KernelError, match="deep_gemm is not installed: deepinfer build-kernels --vendor deep_gemm"):
        resolve("fast", "sm90", {"linear": "deep_gemm"})


def test_refusals_name_platform_and_numerics():
    with pytest.raises(KernelError, match="runs on sm100, not on sm90"):
        resolve("reference", "sm90", {"linear": "deep_gemm"})
    with pytest.raises(KernelError, match="honours fast numerics, not float"):
        resolve("float", "sm100", {"attend_cached": "flash_mla"})
    with pytest.raises(KernelError, match="no backend 'flash_mla'"):
        resolve("fast", "sm100", {"linear": "flash_mla"})


def test_products_with_quantised_inputs_belong_to_the_numerics_that_quantise_them():
    for adapter in ADAPTERS:
        if "fp8_fp4_gemm" in " ".join(adapter.needs):
            assert all(NUMERICS[mode].quantise_inputs for mode in adapter.numerics), adapter


def test_an_installed_library_waits_for_a_device(install):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    install("deep_gemm")
    with pytest.raises(KernelError, match="there is no CUDA device"):
        resolve("fast", "sm90", {"linear": "deep_gemm"})
