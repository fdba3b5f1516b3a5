"""On a device, forward and sampling only launch: the host never waits inside them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Request, SamplingParams
from tests.tiny_model import write_tiny_model

SETS = ("sched.max_context_tokens=512", "cache.hbm_tokens_per_rank=4096", "numerics.mode=fast")


@pytest.mark.gpu
def test_no_host_wait_in_forward_or_sampling(tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    rng = random.Random(1)
    sampling = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": True, "top_logprobs": 2, "seed": 2},
    )
    work = [
        Request(
            str(i),
            tuple(rng.randrange(3, 370) for _ in range(rng.randrange(5, 120))),
            SamplingParams(max_tokens=12, ignore_eos=True, **sampling[i % 3]),
        )
        for i in range(6)
    ]
    tokens = {}
    for overlap in ("false", "true"):
        profile = load_profile("cpu-nano", [*SETS, f"sched.overlap={overlap}"]).profile
        hardware = profile.hardware.model_copy(update={"platform": "sm90"})
        profile = profile.model_copy(update={"hardware": hardware})
        with Engine.open(profile, model, device="cuda") as engine:
            engine.generate(work[:1])  # first use of a library may wait while it sets itself up
            forward, sample = engine.runner.forward, engine.runner.sample

            def watched(call):
                def run(*args):
                    torch.cuda.set_sync_debug_mode("error")
                    try:
                        return call(*args)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")

                return run

            engine.runner.forward, engine.runner.sample = watched(forward), watched(sample)
            tokens[overlap] = [c.token_ids for c in engine.generate(work)]
    assert tokens["true"] == tokens["false"]
