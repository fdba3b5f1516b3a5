"""What measures a cell: our engine through ``bench``, or the step-time laws.

An engine is opened for every measurement and closed after it, so that no cell inherits caches, compiled shapes or a
placement from the one before; what a fresh engine does for the first time belongs into the recipe's warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_engine.bench.metrics import RequestRow
from deepinfer_engine.bench.result import BenchResult
from deepinfer_engine.bench.workload import Workload, load_workload
from deepinfer_engine.launch import Launch
from deepinfer_engine.sim.models import find_model
from deepinfer_engine.sweep.job import Job
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.run import Measure, Measurement, Task
from deepinfer_engine.sweep.simulate import Load, simulated_row


def measure_of(job: Job) -> Measure:
    """The measuring function of a job."""
    return _simulator(job) if job.target == "simulate" else _engine(job.model)


def _simulator(job: Job) -> Measure:
    model = find_model(job.model_name)

    def measure(task: Task) -> Measurement:
        profile = task.profile.profile
        load = load_of(load_workload(task.workload), prefix=profile.cache.prefix)
        return Measurement(simulated_row(profile, model, load))

    return measure


def _engine(model: Path | None) -> Measure:
    from deepinfer_engine.bench.engine_target import EngineTarget
    from deepinfer_engine.bench.run import run_bench
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.launch import prepare

    def measure(task: Task) -> Measurement:
        workload = load_workload(task.workload)
        launch = prepare(task.profile.profile, model)
        engine = Engine.open(launch.profile, launch.checkpoint.directory, device=launch.device)
        target = EngineTarget(engine, task.profile, launch)
        try:
            result = run_bench(workload, target)
        finally:
            target.close()
        if result.status == "interrupted":  # bench keeps what had ended; a sweep measures the cell again
            raise KeyboardInterrupt
        return Measurement(engine_row(result, workload, launch), [_request(r) for r in result.requests])

    return measure


def engine_row(result: BenchResult, workload: Workload, launch: Launch) -> Row:
    """The row of a measurement: what bench says, the model, the platform that ran, and the load per rank."""
    row: Row = {**result.to_row(), "model": launch.checkpoint.directory.name,
                "platform": launch.profile.hardware.platform}  # fmt: skip
    in_flight = min(workload.concurrency or len(workload.requests), len(workload.requests))
    row["rows_per_rank"] = in_flight / launch.profile.parallel.dp
    return row


def load_of(workload: Workload, *, prefix: bool) -> Load:
    """The mean request of a workload; hits need a prefix cache; answers of one token measure prefill only."""
    prompt, output = float(workload.input_tokens.mean()), float(workload.output_tokens.mean())
    return Load(
        input_tokens=round(prompt),
        output_tokens=round(output),
        hit_rate=(workload.seen_rate or 0.0) if prefix else 0.0,
        concurrency=workload.concurrency or len(workload.requests),
        phase="prefill" if output == 1 else None,
    )


def _request(row: RequestRow) -> Mapping[str, Any]:
    """A request without the times of its chunks, which are as many as its tokens."""
    kept = {key: value for key, value in asdict(row).items() if key != "chunks"}
    return kept | {"ttft_s": row.ttft_s, "tpot_s": row.tpot_s, "e2e_s": row.e2e_s}
