"""Placements and virtual ranks: the model's output does not depend on where experts live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.mesh import LocalMesh, Placement
from deepinfer_engine.errors import UsageError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve
from hypothesis import given, settings
from hypothesis import strategies as st

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "v41-tiny-a"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 24), st.integers(0, 3))
def test_every_expert_has_a_slot_and_no_rank_holds_two_copies_when_avoidable(experts, ranks, redundant):
    placement = Placement.static(2, experts, ranks=ranks, redundant_per_rank=redundant)
    placement.check(experts)
    per_rank = -(-experts // ranks) + redundant
    assert placement.slot_expert.shape == (2, ranks * per_rank)
    for row in placement.slot_expert[0].reshape(ranks, per_rank):
        assert len(set(row.tolist())) == min(per_rank, experts)
    copies = np.bincount(placement.slot_expert[0], minlength=experts)
    assert copies.min() >= 1


def test_a_placement_without_some_expert_is_refused():
    with pytest.raises(UsageError, match=r"experts \[3\] have no slot"):
        LocalMesh(Placement(1, 4, np.array([[0, 1, 2, 2]], dtype=np.int32)), 4)


def test_replicas_are_chosen_by_position_alone():
    mesh = LocalMesh(Placement.static(1, 4, ranks=2, redundant_per_rank=1), 4)
    ops = resolve("float", "cpu")
    position = torch.arange(100)
    experts = torch.zeros(100, 1, dtype=torch.int64)
    x, w = torch.randn(100, 8), torch.ones(100, 1)

    def slots(part: slice) -> list[int]:
        sent = mesh.dispatch(ops, 0, x[part], experts[part], w[part], position[part])
        at = torch.repeat_interleave(torch.arange(6), sent.counts)
        return at[sent.order].tolist()

    together = slots(slice(None))
    assert together[10:20] == slots(slice(10, 20))
    assert set(together) == {s for s in range(6) if mesh.placement.slot_expert[0, s] == 0}
    share = min(together.count(s) for s in set(together)) / 100
    assert share > 0.3


@pytest.mark.parametrize(("ep", "redundant"), [(2, 0), (4, 1), (16, 1), (24, 0)])
def test_logits_do_not_depend_on_the_expert_parallel_size(ep, redundant):
    ids = [0, 151, 17, 313, 219, 246, 245, 187, 306, 138, 59, 317, 82, 83, 71, 9, 4, 200]
    # a replica computes what the original does; only the order of rows inside one expert's product may change
    assert (logits(ids, ep, redundant) - logits(ids, 1, 0)).abs().max() <= 1e-5


def logits(ids: list[int], ep: int, redundant: int) -> torch.Tensor:
    checkpoint = Checkpoint.open(VECTORS / "checkpoint")
    ops = resolve("float", "cpu")
    profile = load_profile("cpu-nano").profile
    parallel = profile.parallel.model_copy(update={"ep": ep, "redundant_experts_per_rank": redundant})
    profile = profile.model_copy(update={"parallel": parallel})
    loaded = load_model(checkpoint, Tokenizer.from_dir(VECTORS / "checkpoint"), ops, profile)
    layout = KVLayout.of(checkpoint.config, records=False)
    kv = KVState(layout, ops, slots=1, blocks=1)
    batch = build_batch([RowInput(ids, 0, len(ids), 1, [1], logits="all")], layout, ngram=4)
    return loaded.model.forward(batch, kv, ops, loaded.mesh).logits
