"""What of DeepEP's transport can be checked without the library: the probe, and the arithmetic around its two calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from deepinfer_engine.dist.deepep import DeepEpMesh, open_buffer, probe
from deepinfer_engine.dist.mesh import LocalMesh
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.share import Share
from deepinfer_engine.errors import NotReadyError
from deepinfer_kernels.registry import resolve


def test_a_placeholder_is_refused_by_what_it_lacks():
    assert "placeholder" in probe(SimpleNamespace(__version__="1.0.0")).reason
    half = SimpleNamespace(EPBuffer=type("EPBuffer", (), {"dispatch": lambda self: None}))
    assert "no combine" in probe(half).reason
    whole = type("EPBuffer", (), {"dispatch": lambda self: None, "combine": lambda self: None})
    assert probe(SimpleNamespace(EPBuffer=whole)).buffer is whole


def test_asking_for_it_without_the_library_is_refused():
    if probe().buffer is not None:
        pytest.skip("DeepEP is installed here")
    with pytest.raises(NotReadyError, match=r"parallel\.transport deepep"):
        open_buffer(cast(dist.ProcessGroup, None), tokens=8, hidden=8, choices=2)


class Alone:
    """The exchange of one process: every token arrives as it was sent."""

    def dispatch(self, x, *, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, do_cpu_sync):
        return x, topk_idx, topk_weights, "handle", None

    def combine(self, x, handle):
        assert handle == "handle"
        return x, None, None


def test_rows_and_sums_are_those_of_the_local_mesh():
    ops = resolve("fast", "cpu")
    placement = Placement.static(1, 6, ranks=2, redundant_per_rank=1)
    local = LocalMesh(placement, 6)
    group = cast(dist.ProcessGroup, None)
    mesh = DeepEpMesh(placement, 6, Share(2, 2), group, Alone(), "cpu", tokens=16)
    g = torch.Generator().manual_seed(0)
    x, shared = (torch.randn(9, 32, generator=g).bfloat16() for _ in range(2))
    experts = torch.rand(9, 6, generator=g).argsort(1)[:, :3].sort(1).values
    weights, key = torch.rand(9, 3, generator=g), torch.arange(9)
    here, there = (m.dispatch(ops, 0, x, experts, weights, key) for m in (local, mesh))
    assert torch.equal(here.counts, there.counts) and torch.equal(here.rows, there.rows)
    assert torch.equal(here.weight, there.weight)
    a = local.combine(ops, here.rows * 2, here, shared).float()
    b = mesh.combine(ops, there.rows * 2, there, shared).float()
    assert float((a - b).norm() / a.norm()) < 5e-3
