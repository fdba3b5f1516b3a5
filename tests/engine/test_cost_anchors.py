"""The published rows: that they are met, that a worse model does not meet them, and what the fit claims of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer_engine.cost import published
from deepinfer_engine.cost.anchors import Anchor, anchors
from deepinfer_engine.cost.steptime import DecodeTime
from deepinfer_engine.sim.models import release_config

CONFIG = release_config()


def test_every_published_row_is_met():
    found = anchors(CONFIG)
    assert [a.quantity for a in found if not a.holds] == []
    assert {a.id for a in found} >= {
        "prefill-rate", "decode-user", "decode-gpu", "wide-ep", "dspark", "account", "hits", "p-to-d", "store", "block",
    }  # fmt: skip
    assert len({(a.id, a.quantity) for a in found}) == len(found)


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_wrong_decode_law_misses_rows(monkeypatch, factor):
    law = published._EP64
    scaled = DecodeTime(law.base_s * factor, law.token_s * factor, law.row_s * factor)
    monkeypatch.setattr(published, "_EP64", scaled)
    missed = {a.id for a in anchors(CONFIG) if not a.holds}
    assert {"decode-gpu", "decode-user"} <= missed


def test_a_wrong_prefill_curve_misses_rows(monkeypatch):
    monkeypatch.setattr(published, "PREFILL_STEPS", ((4096, 0.080), (65536, 0.740)))
    assert "prefill-rate" in {a.id for a in anchors(CONFIG) if not a.holds}


def test_another_model_misses_the_arithmetic_rows():
    small = replace(CONFIG, sliding_window=64)
    assert {"replay"} <= {a.id for a in anchors(small) if not a.holds}


def worst(law: DecodeTime, monkeypatch) -> float:
    """Largest error of the fitted decode rows over its bound, EP8 left out because it is solved for."""
    monkeypatch.setattr(published, "_EP64", law)
    rows = [a for a in anchors(CONFIG) if a.id in ("decode-gpu", "decode-user", "dspark", "wide-ep")]
    return max(abs(a.error) / a.bound for a in rows if "EP8" not in a.quantity and a.bound)


def test_no_neighbour_on_the_grid_fits_better(monkeypatch):
    law = published._EP64
    here = worst(law, monkeypatch)
    assert here < 0.85
    for base, token, row in ((1e-4, 0, 0), (0, 4e-7, 0), (0, 0, 2e-6)):
        for sign in (-1, 1):
            near = DecodeTime(law.base_s + sign * base, law.token_s + sign * token, law.row_s + sign * row)
            assert worst(near, monkeypatch) >= here - 1e-9


def test_errors_are_per_cent_or_points():
    assert Anchor("a", "b", "ms", 200.0, 190.0, 4.0, "fitted").error == pytest.approx(-5)
    points = Anchor("a", "b", "%", -1.5, 0.5, 1.5, "fitted")
    assert points.error == pytest.approx(2.0) and not points.holds
    assert Anchor("a", "b", "ms", 200.0, 1.0, None, "predicted").holds
    assert Anchor("a", "b", "tokens", 128, 128, 0.0, "arithmetic").holds
