"""Vendor adapters against the reference on a GPU, where their libraries are: run by path, as in

``python -m pytest tests/kernels/vendor_cases.py`` with the libraries on the import path. A case whose library is
absent says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import cache, quantise
from deepinfer_kernels.reference.linear import Weight, in_tiles
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS
from deepinfer_kernels.vendor.families import ADAPTERS, Adapter

FAST = NUMERICS["fast"]
SIZES = (1, 7, 64, 300)


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda")


def fp8(*shape: int) -> Weight:
    data, scale = quantise.quantise_fp8_tiles(torch.randn(*shape, device="cuda") * shape[-1] ** -0.5)
    tiles, scales = in_tiles(data, scale, "fp8")
    return Weight(tiles, "fp8", scales, shape=(shape[-2], shape[-1]))


def fp4(*shape: int) -> Weight:
    data, scale = quantise.quantise_mxfp4(torch.randn(*shape, device="cuda") * shape[-1] ** -0.5)
    tiles, scales = in_tiles(data, scale, "fp4")
    return Weight(tiles, "fp4", scales, shape=(shape[-2], shape[-1]))


def angles(T: int, half: int) -> tuple[Tensor, Tensor]:
    angle = uniform(T, half) * 100
    return angle.cos(), angle.sin()


def attention(T: int, heads: int, width: int) -> tuple[Any, ...]:
    local = cache.unpack_rows(FAST, cache.pack_rows(FAST, bf(T, width), "window"), "window")
    window = torch.randint(-52, T, (T, 128), device="cuda")
    window[0] = -1  # only the sink, or selected rows
    slots = torch.randint(-60, 900, (T, 512), device="cuda").clamp(min=-1)
    ring = cache.pack_rows(FAST, bf(51, width), "window")
    entries = cache.pack_rows(FAST, bf(900, width), "global")
    return bf(T, heads, width), local, window, ring, slots, entries, torch.randn(heads, device="cuda"), width**-0.5


def inputs(op: str, T: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of an operation for T rows, at sizes of V4.1-Flash and at odd ones."""
    mix: dict[str, Any] = dict(rms_eps=1e-20, hc_eps=1e-6, iters=20)
    if op == "linear":
        return [((bf(T, 1280), fp8(4096, 1280)), {}), ((bf(T, 160), fp8(100, 160)), {})]
    if op == "linear_grouped":
        return [((bf(T, 8, 4096), fp8(8 * 1024, 4096).grouped(8)), {}), ((bf(T, 2, 96), fp8(64, 96).grouped(2)), {})]
    if op == "shared_expert":
        return [((bf(T, 5120), fp8(2304, 5120), fp8(2304, 5120), fp8(5120, 2304), 10.0), {})]
    if op == "moe_experts":
        made = []
        for E, H, width in ((12, 1280, 576), (12, 160, 96)):
            counts = torch.bincount(torch.randint(0, E - 2, (T * 3,), device="cuda"), minlength=E)
            bank = ExpertBank(fp4(E, width, H), fp4(E, width, H), fp4(E, H, width))
            made.append(((bf(T * 3, H), counts, bank, uniform(T * 3), 2.0), {}))
        return made
    if op == "index_scores":
        made = []
        for heads, width in ((32, 128), (4, 32)):
            query = cache.quantise_index_query(FAST, bf(2, T, heads, width))
            keys = cache.unpack_rows(FAST, cache.pack_rows(FAST, bf(2, 700, width), "index"), "index")
            visible = torch.randint(0, 701, (2, T), device="cuda")
            made.append(((query, bf(2, T, heads), keys, visible), {}))
        return made
    if op == "mhc_mixes":
        fn = torch.randn(24, 4 * 5120, device="cuda") / 143
        return [((bf(T, 4, 5120), fn, torch.randn(24, device="cuda"), uniform(3)), mix)]
    if op == "attend_cached":
        return [(attention(T, 64, 512), {}), (attention(T, 5, 64), {})]
    if op == "pack_rows":
        wide = torch.exp2(torch.randint(-30, 15, (T, 1), device="cuda").float()).bfloat16()
        return [((bf(T, 512) * wide, kind), {}) for kind in ("window", "global")] + [((bf(T, 128) * wide, "index"), {})]
    if op == "quantise_index_query":
        return [((bf(T, 32, 128),), {})]
    if op == "rope":
        cos, sin = angles(T, 32)
        return [((bf(T, 64, 512), cos, sin), {}), ((bf(T, 512), cos, sin, True), {})]
    if op == "mhc_expand":
        return [((bf(T, 4, 5120), bf(T, 5120), uniform(T, 4), uniform(T, 4, 4)), {})]
    if op == "gate_topk":
        choice: dict[str, Any] = dict(k=6, scale=1.5, temperature=1.0)
        gate = (bf(T, 5120), torch.randn(384, 5120, device="cuda") * 0.02, uniform(384))
        return [(gate, {**choice, "normalise": normalise}) for normalise in (True, False)]
    if op == "engram_hash":
        classes = torch.randint(-1, 90000, (T, 4), device="cuda")
        primes = torch.randint(15_000_000, 16_000_000, (3, 8), device="cuda")
        multipliers = torch.randint(1 << 20, 1 << 44, (4,), device="cuda")
        return [((classes, 2, multipliers, primes, torch.arange(24, device="cuda").view(3, 8) * 16_000_000), {})]
    if op == "engram_gate":
        dead = torch.arange(T, device="cuda") % 3 == 1
        return [((bf(T, 4, 5120), bf(T, 5 * 5120), bf(4, 5120), bf(4, 5120), dead, 1e-20), {})]
    raise AssertionError(f"no inputs for {op}")


def label(adapter: Adapter) -> str:
    return f"{adapter.library}-{adapter.form}"


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=label)
def test_agrees_with_the_reference(adapter, T):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    platform = "sm{}{}".format(*torch.cuda.get_device_capability())
    if platform not in adapter.platforms:
        pytest.skip(f"runs on {', '.join(sorted(adapter.platforms))}, not on {platform}")
    reason = adapter.missing()
    if reason is not None:
        pytest.skip(reason)
    reference = next(i.fn for i in IMPLEMENTATIONS[adapter.op] if i.backend == "reference")
    operation = adapter.operation(reference)
    for mode in adapter.numerics:
        torch.manual_seed(T)
        for arguments, options in inputs(adapter.op, T):
            expected = reference(NUMERICS[mode], *_plain(arguments), **options)
            torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody writes holds NaN
            try:
                got = operation(NUMERICS[mode], *arguments, **options)
            finally:
                torch.use_deterministic_algorithms(False)
            pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
            for have, want in pairs:
                _same(have, want, adapter, tuple(OPS[adapter.op].outputs))


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Weights as the reference prepares them: matrices."""

    def plain(x: Any) -> Any:
        if isinstance(x, Weight):
            return Weight(x.dense, x.kind)
        return ExpertBank(plain(x.w1), plain(x.w3), plain(x.w2)) if isinstance(x, ExpertBank) else x

    return tuple(plain(x) for x in arguments)


def _same(have: Tensor, want: Tensor, adapter: Adapter, names: tuple[str, ...]) -> None:
    assert have.shape == want.shape and have.dtype == want.dtype, names
    if adapter.tolerance.exact or not want.is_floating_point():
        assert torch.equal(have, want), f"{int((have != want).sum())} of {want.numel()} differ"
        return
    hidden = want.isneginf()
    assert torch.equal(have.isneginf(), hidden)
    a, b = have.float().masked_fill(hidden, 0), want.float().masked_fill(hidden, 0)
    error = float((a - b).norm() / b.norm().clamp(min=1e-30))
    print(f"{label(adapter)} {tuple(want.shape)} relative error {error:.2e}")
    assert error <= adapter.tolerance.relative, f"relative error {error:.2e}"
