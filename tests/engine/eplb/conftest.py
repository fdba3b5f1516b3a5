"""Small routing statistics with the structure planners live on, shared by the tests of this folder."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.eplb import traces

_SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "eplb"


@functools.cache
def _decode(
    experts: int = 48, layers: int = 2, ranks: int = 8, steps: int = 240, seed: int = 5, tokens: int = 200
) -> np.ndarray:
    """Decode-like counts [steps, layers, experts]: skewed, correlated, drifting."""
    spec = traces.TraceSpec(
        experts=experts,
        layers=layers,
        ranks=ranks,
        top_k=4,
        tokens_per_rank=tokens,
        requests=256,
        lifetime_steps=100.0,
        skew=0.8,
        hot_experts=2,
        hot_boost=0.8,
        topics=24,
        topic_tilt=0.9,
        shock=0.06,
        shock_rank=3,
        domain_drift=0.002,
        domain_swing=1.5,
    )
    counts = traces.synthetic(spec, steps, seed)
    counts.flags.writeable = False
    return counts


@pytest.fixture(scope="session")
def decode():
    """Maker of decode-like counts, see ``_decode``."""
    return _decode


@pytest.fixture
def recorded_routing() -> tuple[Path, ...]:
    """Real DeepSeek-V2-Lite routing files; skips with the reason where they are absent."""
    files = tuple(_SHARED / f"esft_dsv2lite_{name}.npz" for name in ("law", "intent"))
    for path in files:
        if not path.exists():
            pytest.skip(f"no recorded routing: {path.name} is not beside the repository in shared/data/eplb")
    return files
