"""Reference planners to compare with, written from their published descriptions.

* ``totals_rule``: replicas by total ÷ copies and longest-first placement. What DeepSeek EPLB (global), vLLM and
  TensorRT-LLM do, apart from ties and from our refusal to put an expert twice on a rank.
* ``peak_rule``: replicas where they lower the sum over steps of the largest load per copy; then each replica, heaviest
  first, to the rank that adds least to Σ_steps max_rank. The rule of the upstream engine's planner.
"""

from __future__ import annotations

import numpy as np

from deepinfer_engine.eplb.placement import longest_first, replica_counts


def totals_rule(counts_ME: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Slots [R, S] balanced on window totals."""
    total_E = counts_ME.sum(axis=0)
    return longest_first(total_E, replica_counts(total_E, ranks, ranks * slots), ranks)


def peak_rule(counts_ME: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Slots [R, S] balanced greedily on the observed peaks of every step; ties to the lowest expert and rank."""
    steps, experts = counts_ME.shape
    rows = np.arange(steps)
    load_ME = counts_ME.astype(np.float64)
    share_ME = load_ME.copy()
    copies_E = np.ones(experts, np.int64)
    for _ in range(ranks * slots - experts):
        top_M = share_ME.argmax(axis=1)
        peak_M = share_ME[rows, top_M]
        once = share_ME.copy()
        once[rows, top_M] = load_ME[rows, top_M] / (copies_E[top_M] + 1)
        gain_E = np.bincount(top_M, weights=peak_M - once.max(axis=1), minlength=experts)
        e = int(gain_E.argmax())
        copies_E[e] += 1
        share_ME[:, e] = load_ME[:, e] / copies_E[e]
    items = np.repeat(np.arange(experts), copies_E)
    items = items[np.argsort(-share_ME.sum(axis=0)[items], kind="stable")]
    rank_MR = np.zeros((steps, ranks))
    peak_M, used_R = np.zeros(steps), np.zeros(ranks, np.int64)
    slot_RS = np.full((ranks, slots), -1, np.int64)
    for e in items.tolist():
        cost_R = np.maximum(peak_M[:, None], rank_MR + share_ME[:, e, None]).sum(axis=0)
        cost_R[used_R >= slots] = np.inf
        r = int(cost_R.argmin())
        slot_RS[r, used_R[r]] = e
        used_R[r] += 1
        rank_MR[:, r] += share_ME[:, e]
        peak_M = np.maximum(peak_M, rank_MR[:, r])
    return slot_RS
