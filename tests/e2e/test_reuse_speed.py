"""What replays and prefix hits save on the embedded model, beside the ratio of rows × layers that the plan predicts.

On CPU the time is the process's own, so that other work on the machine does not count; on CUDA it is wall time.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
import torch

from deepinfer_engine.cache.replay import ReplayShape, plan_prefill
from deepinfer_engine.config.model import ModelConfig, load_model_config
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Completion, Request, SamplingParams
from deepinfer_engine.verify.yoco import forced_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [(1024, 5), (4096, 3), (16_000, 1)]
NANO = model_dir("nano")
CONFIG: ModelConfig = load_model_config(NANO)


def open_engine(device: str, **changes: str) -> Engine:
    name = "cpu-nano" if device == "cpu" else "h200x1-nano"
    sets = [f"{key}={value}" for key, value in {"sched.overlap": "false", **changes}.items()]
    return Engine.open(load_profile(name, sets).profile, Path(NANO), device=device)


def timed(engine: Engine, device: str, name: str, ids: list[int]) -> tuple[float, Completion]:
    """Seconds of one prefill and first token."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    (done,) = engine.generate([Request(name, tuple(ids), SamplingParams(max_tokens=1, ignore_eos=True))])
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, done


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "rounds"), LENGTHS)
def test_prefill_with_off_exact_and_bounded(device, length, rounds, capsys):
    ids = forced_tokens(NANO, CONFIG, length)
    engines = {mode: open_engine(device, **{"replay.decoder": mode}) for mode in ("off", "exact", "bounded")}
    for mode, engine in engines.items():
        timed(engine, device, f"warm-{mode}", ids[:300])
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for turn in range(rounds):
        for mode, engine in engines.items():
            seconds[mode].append(timed(engine, device, f"{mode}-{turn}", ids)[0])
    off = statistics.median(seconds["off"])
    with capsys.disabled():
        for mode in engines:
            work = plan_prefill(ReplayShape.of(CONFIG, decoder=mode), length).row_layers  # pyright: ignore
            share, ratio = work / (length * CONFIG.num_hidden_layers), statistics.median(seconds[mode]) / off
            print(f"\n{device} {length} {mode}: {off * ratio:.3f} s, ratio {ratio:.3f}, predicted {share:.3f}", end="")
    assert statistics.median(seconds["bounded"]) < off


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "rounds"), LENGTHS[1:])
def test_start_after_a_hit_of_96_percent(device, length, rounds, capsys):
    ids = forced_tokens(NANO, CONFIG, length)
    shared = length * 96 // 100 // 128 * 128
    settings = {"cache.prefix": "true", "cache.swa_pool_gib_per_rank": "0.1", "replay.decoder": "bounded"}
    cold, hit, done = [], [], None
    for turn in range(rounds):
        with open_engine(device, **settings, **{"replay.encoder": "bounded"}) as engine:
            rng = random.Random(turn)
            cold.append(timed(engine, device, "cold", ids)[0])
            tail = [rng.randrange(300, 1900) for _ in range(length - shared)]
            seconds, done = timed(engine, device, "hit", [*ids[:shared], *tail])
            hit.append(seconds)
    assert done is not None and done.usage.cached == shared
    shape = ReplayShape.of(CONFIG, decoder="bounded", encoder="bounded")
    saved = plan_prefill(shape, length).row_layers / plan_prefill(shape, length, hit=shared).row_layers
    ratio = statistics.median(cold) / statistics.median(hit)
    with capsys.disabled():
        print(f"\n{device} {length}: cold {statistics.median(cold):.3f} s, after a hit of {shared} tokens "
              f"(replayed {done.usage.replayed}) {statistics.median(hit):.3f} s: {ratio:.2f} times, "
              f"predicted {saved:.2f}", end="")  # fmt: skip
    assert ratio > 1
