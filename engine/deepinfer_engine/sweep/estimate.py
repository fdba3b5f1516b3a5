"""How much a sweep will process and how long it may take, before anything runs. No torch.

Where step times were published (the released model on an accelerator) the time is simulated: prompts at the prefill
law, answers at the decode law, one after the other. Elsewhere it is an allowance per token, the same for every machine,
and says so; the first measured cells tell more.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.bench.prompts import with_tokens
from deepinfer_engine.bench.workload import Workload, load_workload
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.cost.steptime import decode_point
from deepinfer_engine.sim.models import EMBEDDED, PlannedModel, find_model
from deepinfer_engine.sim.prediction import speculation_of, times
from deepinfer_engine.sweep.job import Job
from deepinfer_engine.sweep.run import Task

#: Allowance for the embedded model on a CPU core or two: start of an engine, a prompt token, an output token, a step.
_START_S, _PROMPT_S, _OUTPUT_S, _STEP_S = 1.0, 0.4e-3, 1.2e-3, 8e-3


@dataclass(frozen=True)
class CellEstimate:
    """Tokens of one measurement of a cell and its time; None where not even an allowance fits."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float | None


@dataclass(frozen=True)
class Estimate:
    """Every cell, and one sentence about the whole with the origin of its time."""

    cells: tuple[CellEstimate, ...]
    summary: str


def estimate(job: Job) -> Estimate:
    """Work and time of a job, all repeats in the summary."""
    model = find_model(str(job.model) if job.model is not None else job.model_name)
    cells = tuple(_cell(job, task, model) for task in job.tasks)
    tokens = sum(c.prompt_tokens + c.output_tokens for c in cells) * job.plan.repeats
    known = [c.seconds for c in cells if c.seconds is not None]
    if job.target == "simulate":
        return Estimate(cells, "computed in seconds, nothing runs")
    if len(known) < len(cells):
        return Estimate(cells, f"{tokens:,} tokens; no estimate of the time for {model.name} on this profile")
    origin = "an allowance, not measured" if job.embedded else "simulated from published step times"
    return Estimate(cells, f"{tokens:,} tokens, about {_duration(sum(known) * job.plan.repeats)} ({origin})")


def _cell(job: Job, task: Task, model: PlannedModel) -> CellEstimate:
    workload = load_workload(task.workload)
    if job.target == "engine":
        workload = with_tokens(workload, job.model or model_dir(EMBEDDED), model.config)
    runs = (*workload.requests, *workload.warmup)
    prompt, output = int(workload.input_tokens.sum()), sum(r.output_tokens for r in runs)
    prompt += sum(r.input_tokens or 0 for r in workload.warmup)
    if job.target == "simulate":
        return CellEstimate(len(workload.requests), prompt, output, 0.0)
    seconds = _allowance(workload, prompt, output) if job.embedded else _simulated(task, model, workload)
    return CellEstimate(len(workload.requests), prompt, output, None if seconds is None else round(seconds, 1))


def _allowance(workload: Workload, prompt: int, output: int) -> float:
    steps = output / min(workload.concurrency or len(workload.requests), len(workload.requests))
    return _START_S + _PROMPT_S * prompt + max(_OUTPUT_S * output, _STEP_S * steps)


def _simulated(task: Task, model: PlannedModel, workload: Workload) -> float | None:
    profile = task.profile.profile
    laws = times(profile, model)
    if isinstance(laws, str):
        return None
    prefill, decode = laws
    in_flight = workload.concurrency or len(workload.requests)
    rows = min(in_flight / profile.ranks, float(profile.sched.max_rows_per_rank))
    prompt, output = int(workload.input_tokens.sum()), int(workload.output_tokens.sum())
    context = prompt / len(workload.requests)
    computed = prompt * (1 - (workload.seen_rate or 0.0) if profile.cache.prefix else 1)
    point = decode_point(decode, speculation_of(profile), rows, context)
    rate = prefill.tokens_per_s(profile.sched.prefill_chunk_tokens) * profile.ranks
    return computed / rate + output / (point.tokens_per_s_gpu * profile.ranks)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
