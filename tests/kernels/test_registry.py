"""The registry: complete, explicit, never a silent fallback."""

from __future__ import annotations

import inspect

import pytest

from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, resolve, why_not


class Fours(dict):
    """Every named size is 4, so that a new dimension needs no line here."""

    def __missing__(self, key: str) -> int:
        return 4


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_operation_has_a_reference_and_a_cost(name):
    spec = OPS[name]
    assert any(i.backend == "reference" for i in IMPLEMENTATIONS[name])
    assert spec.bytes(Fours()) > 0 and spec.flops(Fours()) >= 0
    assert spec.summary and spec.inputs
    # the first parameter is bound: the numerics, or the operations that a composed one is made of
    signatures = {tuple(inspect.signature(i.fn).parameters)[1:] for i in IMPLEMENTATIONS[name]}
    assert len(signatures) == 1, "all implementations of an operation share one signature"


@pytest.mark.parametrize("mode", sorted(NUMERICS))
def test_every_operation_resolves_for_every_numerics_on_cpu(mode):
    ops = resolve(mode, "cpu")
    assert set(ops.chosen) == set(OPS)
    assert ops.numerics.mode == mode


def test_a_forced_backend_that_cannot_serve_is_refused_with_the_reason():
    with pytest.raises(KernelError, match="honours fast numerics, not reference"):
        resolve("reference", "cpu", {"moe_experts": "torch"})
    with pytest.raises(KernelError, match="no backend 'tilelang'"):
        resolve("fast", "cpu", {"rms_norm": "tilelang"})
    with pytest.raises(KernelError, match="triton: runs on sm100, sm90, not on cpu"):
        resolve("fast", "cpu", {"rms_norm": "triton"})
    with pytest.raises(KeyError, match="unknown operations"):
        resolve("fast", "cpu", {"rms_nrom": "reference"})
    with pytest.raises(KernelError, match="not on ascend950"):
        resolve("fast", "ascend950")


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(AttributeError, match="rms_norm"):
        _ = resolve("fast", "cpu").rms_nrom


def test_reasons_are_sentences():
    grouped = next(i for i in IMPLEMENTATIONS["moe_experts"] if i.backend == "torch")
    assert why_not(grouped, "fast", "cpu") is None
    assert "runs on" in (why_not(grouped, "fast", "ascend950") or "")


def test_triton_comes_first_on_gpus_and_gives_way_until_its_kernels_are_built(tmp_path):
    assert IMPLEMENTATIONS["rms_norm"][0].backend == "triton"
    for invariant in (False, True):
        ops = resolve("fast", "sm90", batch_invariant=invariant, cache=tmp_path)
        assert "triton" not in {i.backend for i in ops.chosen.values()}
    with pytest.raises(KernelError, match="triton"):
        resolve("fast", "sm90", {"rms_norm": "triton"}, cache=tmp_path)
