"""Selection laws of the indexer: exact sets, canonical ties, pinned block."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kernels.reference.index import topk_mask
from deepinfer_kernels.registry import resolve

OPS = resolve("float", "cpu")
NEG = float("-inf")


def brute(scores: list[float], k: int) -> list[int]:
    """Sort by score descending, then index; never an invisible entry."""
    order = sorted((i for i, s in enumerate(scores) if s > NEG), key=lambda i: (-scores[i], i))
    return sorted(order[:k])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([NEG, -1.0, 0.0, 0.5, 2.0, float("inf")]), min_size=1, max_size=40), st.integers(1, 12))
def test_selection_is_the_k_best_with_lowest_index_first(scores, k):
    chosen = OPS.select_topk(torch.tensor([scores]), k=k)[0]
    assert chosen[chosen >= 0].tolist() == brute(scores, k)
    assert chosen.shape[-1] == min(k, len(scores))
    assert topk_mask(torch.tensor([scores]), k)[0].nonzero().flatten().tolist() == brute(scores, k)


def test_newest_block_is_pinned_even_when_its_scores_are_lowest():
    best = torch.full((1, 1, 20), 0.0)
    best[..., :8], best[..., 8:16], best[..., 16:] = 5.0, 9.0, 1.0
    blocks = OPS.candidate_blocks(best, torch.tensor([[20]]), block=8, keep=2)
    assert blocks[0, 0].tolist() == [False, True, True]


def test_candidates_never_hold_a_block_without_visible_entries():
    scores = torch.randn(1, 3, 24)
    visible = torch.tensor([[0, 5, 24]])
    scores = scores.masked_fill(torch.arange(24) >= visible.unsqueeze(-1), NEG)
    blocks = OPS.candidate_blocks(scores, visible, block=8, keep=3)
    assert blocks.tolist() == [[[False] * 3, [True, False, False], [True] * 3]]
    kept = OPS.restrict_to_candidates(scores, blocks, block=8)
    assert torch.equal(kept, scores)


def test_scores_rectify_the_product_not_the_weight():
    iq = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    iw = torch.tensor([[[-2.0, 3.0]]])
    keys = torch.tensor([[[2.0, 1.0], [-1.0, -1.0]]])
    out = OPS.index_scores(iq, iw, keys, torch.tensor([[2]]))
    assert out.tolist() == [[[-2.0 * 2 + 3.0 * 1, 0.0]]]
