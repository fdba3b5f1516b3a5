"""Experts do not move under a backend that keeps copies of their weights."""

from __future__ import annotations

import pytest

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.errors import UsageError
from deepinfer_engine.runtime.host import check_moves
from deepinfer_kernels.registry import IMPLEMENTATIONS, Ops, resolve


def test_a_backend_that_keeps_copies_of_experts_is_refused_where_they_move():
    plain = resolve("fast", "cpu")
    kept = next(i for i in IMPLEMENTATIONS["moe_experts"] if i.backend == "deep_gemm")
    copying = Ops(plain.numerics, "cpu", plain.chosen | {"moe_experts": kept})
    still = load_profile("decode-ep64", ["eplb.period_steps=0"]).profile
    moving = load_profile("decode-ep64", ["eplb.period_steps=5000"]).profile
    with pytest.raises(UsageError, match=r"deep_gemm computes moe_experts with copies.*eplb\.period_steps 5000"):
        check_moves(moving, copying)
    check_moves(still, copying)
    check_moves(moving, plain)
