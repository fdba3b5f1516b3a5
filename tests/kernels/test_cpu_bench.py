"""Decoding speed of the embedded model with torch and with compiled operations, interleaved in one process.

``pytest tests/kernels/test_cpu_bench.py --run-bench -s`` prints one JSON object per number of rows. Windows of steps
alternate torch, compiled, compiled, torch, so that a neighbour's load meets both; the ratio is the median over such
quadruples. CPU time is that of this thread, which a neighbour disturbs less than wall time.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Request, SamplingParams

STEPS = 8  # of a window


def _decoding(cache: Path, rows: int) -> Engine:
    """An engine in the middle of decoding ``rows`` answers, at positions from 128 on (a full window)."""
    sets = [f"kernels.cache_dir={cache}", "sched.max_rows_per_rank=64"]
    engine = Engine.open("cpu-nano", sets=sets)
    for i in range(rows):
        prompt = tuple(5 + (i * 7 + j * 13) % 1500 for j in range(128))
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=400, ignore_eos=True)))
    while engine.scheduler.waiting or engine.steps < 6:
        engine.step()
    return engine


def _window(engine: Engine) -> tuple[float, float]:
    """(wall, CPU) milliseconds per step."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - wall) / STEPS * 1e3, (time.thread_time() - cpu) / STEPS * 1e3


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_decoding_is_faster_with_compiled_operations(kernel_cache: Path, tmp_path: Path, rows: int):
    with _decoding(tmp_path, rows) as plain, _decoding(kernel_cache, rows) as compiled:
        times: dict[str, list[tuple[float, float]]] = {"torch": [], "compiled": []}
        ratios = []
        for _ in range(8):
            quad = [_window(plain), _window(compiled), _window(compiled), _window(plain)]
            times["torch"] += [quad[0], quad[3]]
            times["compiled"] += quad[1:3]
            ratios.append([(quad[0][i] + quad[3][i]) / (quad[1][i] + quad[2][i]) for i in (0, 1)])
    result = {"rows": rows, "threads": torch.get_num_threads(), "windows": 2 * len(ratios), "steps_per_window": STEPS}
    for name, values in times.items():
        wall, cpu = (median(v[i] for v in values) for i in (0, 1))
        result |= {f"{name}_wall_ms": round(wall, 2), f"{name}_cpu_ms": round(cpu, 2)}
        result |= {f"{name}_tok_s": round(rows / wall * 1e3, 1), f"{name}_tok_cpu_s": round(rows / cpu * 1e3, 1)}
    result |= {f"ratio_{name}": round(median(r[i] for r in ratios), 2) for i, name in enumerate(("wall", "cpu"))}
    print(json.dumps(result))
    assert result["ratio_cpu"] > 1.5
