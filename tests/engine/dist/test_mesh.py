"""Placements and virtual ranks: the model's output does not depend on where experts live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.mesh import LocalMesh
from deepinfer_engine.dist.placement import Placement, SlotTable
from deepinfer_engine.dist.replica import choose, route_key
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


def test_a_placement_with_an_expert_the_model_lacks_is_refused():
    with pytest.raises(UsageError, match=r"holds expert 4, the model has 0\.\.3"):
        SlotTable.build(Placement(1, 5, np.array([[0, 1, 2, 3, 4]], dtype=np.int32)), 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3))
def test_the_table_lists_every_slot_of_every_expert_once(experts, ranks, redundant):
    placement = Placement.static(2, experts, ranks=ranks, redundant_per_rank=redundant)
    table = SlotTable.build(placement, experts)
    for layer in range(2):
        for e in range(experts):
            slots = table.slot_of[layer, e, : int(table.copies[layer, e])].tolist()
            assert slots == [p for p, held in enumerate(placement.slot_expert[layer]) if held == e]


def test_empty_slots_of_a_dead_rank_get_nothing():
    dead = np.array([[[0, 1], [-1, -1], [1, 2], [3, 0]]])
    table = SlotTable.build(Placement.of(dead), 4)
    experts = torch.arange(4).repeat(50, 1)
    for choice in ("hash", "least_load"):
        slots = choose(table, 0, experts, torch.arange(50), choice)
        assert set(slots.flatten().tolist()) == {0, 1, 4, 5, 6, 7}


def test_replicas_are_chosen_by_the_row_alone():
    mesh = LocalMesh(Placement.static(1, 4, ranks=2, redundant_per_rank=1), 4)
    ops = resolve("float", "cpu")
    key = route_key(torch.arange(100), torch.arange(100) * 7 % 31)
    experts = torch.zeros(100, 1, dtype=torch.int64)
    x, w = torch.randn(100, 8), torch.ones(100, 1)

    def slots(part: slice) -> list[int]:
        sent = mesh.dispatch(ops, 0, x[part], experts[part], w[part], key[part])
        at = torch.repeat_interleave(torch.arange(6), sent.counts)
        return at[sent.order].tolist()

    together = slots(slice(None))
    assert together[10:20] == slots(slice(10, 20))
    assert set(together) == {s for s in range(6) if mesh.placement.slot_expert[0, s] == 0}
    share = min(together.count(s) for s in set(together)) / 100
    assert share > 0.3


def test_rows_at_one_position_spread_over_the_replicas():
    table = SlotTable.build(Placement.static(1, 4, ranks=4, redundant_per_rank=1), 4)
    experts = torch.zeros(200, 1, dtype=torch.int64)
    chosen = choose(table, 0, experts, route_key(torch.full((200,), 57), torch.arange(200)), "hash")
    shares = torch.bincount(chosen.flatten())[table.slot_of[0, 0, : int(table.copies[0, 0])]]
    assert int(shares.min()) > 0.3 * int(shares.max())


def test_least_load_evens_the_ranks_where_hashing_cannot():
    # experts 0 (on ranks 0 and 1) and 1 (on rank 0 alone) get all tokens: the even split loads the ranks 3 : 1
    table = SlotTable.build(Placement.of(np.array([[[0, 1, 2], [0, 3, 4]]])), 5)
    experts = torch.tensor([[0, 1]]).repeat(200, 1)
    key = route_key(torch.arange(200), torch.arange(200))

    def heaviest(choice) -> float:
        slots = choose(table, 0, experts, key, choice)
        return float(torch.bincount((slots // 3).flatten(), minlength=2).max()) / 200

    assert heaviest("hash") > 1.4
    assert heaviest("least_load") < 1.1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.integers(1, 8), st.integers(1, 2), st.integers(1, 200), st.integers(0, 10_000))
def test_least_load_sends_every_token_to_a_slot_of_its_expert(experts, ranks, redundant, tokens, seed):
    placement = Placement.static(1, experts, ranks=ranks, redundant_per_rank=redundant)
    table = SlotTable.build(placement, experts)
    ids = torch.randint(0, experts, (tokens, 3), generator=torch.Generator().manual_seed(seed))
    slots = choose(table, 0, ids, torch.arange(tokens), "least_load")
    assert torch.equal(torch.from_numpy(placement.slot_expert[0]).long()[slots], ids)


def test_a_mesh_switches_to_a_new_table_and_refuses_other_storage():
    mesh = LocalMesh(Placement.static(1, 4, ranks=2, redundant_per_rank=0), 4)
    swapped = SlotTable.build(Placement.of(np.array([[[3, 2], [1, 0]]])), 4, epoch=1)
    mesh.switch(swapped)
    x, w = torch.randn(4, 8), torch.ones(4, 1)
    sent = mesh.dispatch(resolve("float", "cpu"), 0, x, torch.arange(4).view(4, 1), w, torch.arange(4))
    assert sent.order.tolist() == [3, 2, 1, 0]
    assert mesh.table.epoch == 1
    with pytest.raises(AssertionError):
        mesh.switch(SlotTable.build(Placement.static(1, 4, ranks=4, redundant_per_rank=0), 4))


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
