"""The split of the verify budget against an exhaustive oracle, and the device operation against the CPU decider."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from deepinfer_engine.errors import UsageError
from deepinfer_engine.spec.budget import split_budget
from deepinfer_kernels.registry import resolve

OPS = resolve("float", "cpu")


def device_split(conf, cap, admission, budget) -> np.ndarray:
    given = (torch.as_tensor(np.asarray(x)) for x in (conf, cap, admission, budget))
    return OPS.dspark_split(*given).numpy()


def greedy_oracle(conf, cap, admission, budget: int) -> list[int]:
    """Ranks every eligible draft by the words of the rule and admits them one at a time."""
    drafts = []
    for row, values in enumerate(conf):
        running = np.float32(1)
        for k, c in enumerate(values):
            c = np.float32(c)
            running = running * (np.float32(0) if not np.isfinite(c) else min(max(c, np.float32(0)), np.float32(1)))
            if k < cap[row]:
                drafts.append((-running, k, admission[row], row))
    out = [0] * len(conf)
    for *_, row in sorted(drafts)[:budget]:
        out[row] += 1
    return out


def cases(n: int, rows: int, width: int, seed: int):
    """Random instances; half of them from a few discrete confidences, so that survivals tie."""
    rng = np.random.default_rng(seed)
    levels = np.array([0.0, 0.25, 0.5, 1.0, 1.0], dtype=np.float32)
    for i in range(n):
        conf = rng.random((rows, width), dtype=np.float32)
        if i % 2:
            conf = levels[rng.integers(0, len(levels), (rows, width))]
        yield (
            conf,
            rng.integers(0, width + 1, rows),
            rng.permutation(10 * rows)[:rows].astype(np.int64) * 10**9,
            int(rng.integers(0, rows * width + 2)),
        )


def test_the_documented_example():
    conf = np.array([[0.9, 0.8, 0.5], [0.95, 0.2, 0.9]], dtype=np.float32)
    assert split_budget(conf, np.array([3, 3]), np.array([1, 2]), 4).tolist() == [3, 1]


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (4, 5), (7, 3), (24, 5), (2, 16)])
def test_split_is_the_oracle_and_the_device_split_is_the_split(rows, width):
    for conf, cap, admission, budget in cases(100, rows, width, seed=rows):
        expected = greedy_oracle(conf, cap, admission, budget)
        assert split_budget(conf, cap, admission, budget).tolist() == expected
        assert device_split(conf, cap, admission, budget).tolist() == expected


@pytest.mark.parametrize(("rows", "width", "n"), [(3, 2, 60_000), (2, 5, 40_000)])
def test_exhaustive_search_finds_no_other_split_in_1e5_cases(rows, width, n):
    """Every split of every instance, by expected tokens; of equal ones the lowest positions, then earliest rows."""
    rng = np.random.default_rng(rows)
    levels = np.array([0.25, 0.5, 1.0, 0.0], dtype=np.float32)
    conf = rng.random((n, rows, width), dtype=np.float32)
    conf[::2] = levels[rng.integers(0, 4, (n // 2, rows, width))]
    admission = rng.random((n, rows)).argsort(1)
    cap = rng.integers(0, width + 1, (n, rows))
    budget = rng.integers(0, rows * width + 1, n)
    scores = np.cumprod(conf, axis=2, dtype=np.float32).astype(np.float64)
    splits = np.array(list(itertools.product(range(width + 1), repeat=rows)))
    inside = np.arange(width) < splits[:, :, None]  # [splits, rows, width]
    # exact sums: a product of up to five f32 in [0, 1] and their sums are compared after rounding off the last bits
    value = np.round(np.einsum("nrk,srk->ns", scores, inside), 12)
    place = np.arange(width) * rows + admission[:, :, None]  # order of the tie rule
    prefer = np.einsum("nrk,srk->ns", 2.0 ** (rows * width - 1 - place), inside)
    size = np.minimum(budget, cap.sum(1))
    allowed = (splits.sum(1) == size[:, None]) & (splits[None] <= cap[:, None]).all(-1)
    tied = allowed & (value == np.where(allowed, value, -1).max(1, keepdims=True))
    best = splits[np.where(tied, prefer, -1).argmax(1)]
    assert np.array_equal(split_budget(conf, cap, admission, budget), best)
    assert np.array_equal(device_split(conf, cap, admission, budget), best)


def test_edges():
    nan, inf = float("nan"), float("inf")
    conf = np.array([[nan, 1, 1], [1, inf, 1], [2.0, -1.0, 0.5], [0, 0, 0]], dtype=np.float32)
    admission = np.arange(4)
    full = np.full(4, 3)
    for budget in (0, 1, 2, 5, 12, 100):
        found = split_budget(conf, full, admission, budget)
        assert found.tolist() == device_split(conf, full, admission, budget).tolist()
        assert found.sum() == min(budget, 12)
    assert split_budget(conf, full, admission, 2).tolist() == [0, 1, 1, 0]
    assert split_budget(conf, np.zeros(4, dtype=int), admission, 9).tolist() == [0, 0, 0, 0]
    assert split_budget(np.zeros((0, 3)), np.zeros(0), np.zeros(0), 3).tolist() == []
    with pytest.raises(UsageError, match="verify budget is -1"):
        split_budget(conf, full, admission, -1)


def test_the_order_of_rows_does_not_matter_and_lengths_depend_on_no_later_draft():
    rng = np.random.default_rng(3)
    for conf, cap, admission, budget in cases(200, 9, 5, seed=5):
        base = split_budget(conf, cap, admission, budget)
        order = rng.permutation(9)
        assert np.array_equal(split_budget(conf[order], cap[order], admission[order], budget), base[order])
        # confidences behind the first unverified draft of a row are news about tokens nobody looked at
        changed = conf.copy()
        behind = np.arange(5) > base[:, None]
        changed[behind] = rng.random(int(behind.sum()), dtype=np.float32)
        row = int(rng.integers(0, 9))
        one = conf.copy()
        one[row] = changed[row]
        assert split_budget(one, cap, admission, budget)[row] == base[row]
