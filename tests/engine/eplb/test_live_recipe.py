"""The recipe that compares placements on nano: its three placements are judged on the same steps."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_engine.eplb.record import CountChunk
from deepinfer_engine.eplb.score import layer_balance
from recipes.eplb import live


def test_a_small_run_reports_every_placement_by_phase():
    row = live.measure("decode-ep8", rows=2, steps=4, window=4, period=6)
    assert (row["ranks"], row["slots_per_rank"]) == (8, 9)
    assert list(row["moe_lb"]) == ["all", "json", "look-ups", "words"], "the first window is not judged"
    spans = row["moe_lb"]
    assert spans["all"]["steps"] == sum(spans[p]["steps"] for p in ("json", "look-ups", "words"))
    assert all(1 <= s[k] < 8 for s in spans.values() for k in ("off", "static", "live"))
    assert spans["all"]["static"] != spans["all"]["off"]
    assert row["rebalances"][0]["step"] == 4 and "8 ranks x 9 slots" in live.show(row)
    for rebalance in row["rebalances"]:
        rebalance |= {"outcome": "moved", "observed_after": None}
    assert "-> –" in live.show(row), "a run may end before the new placement has been seen"


def test_still_chunks_are_judged_under_one_placement():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (12, 2, 6))
    slots = np.stack([rng.permutation(8) % 6 for _ in range(2)]).reshape(2, 4, 2)
    chunks = [CountChunk(counts, np.full(12, 50), np.repeat([0, 3, 7], 4))]
    got = live.judged(live.still(chunks), {0: slots}, 6)
    want = [layer_balance(counts[:, k], slots[k], np.bincount(slots[k].reshape(-1), minlength=6)) for k in range(2)]
    assert got.moe_lb == pytest.approx(np.mean([w.moe_lb for w in want if w]))
