"""Rows of kind ``simulated``: what the published step-time laws say about a cell, for the released model. No torch.

A closed loop of ``concurrency`` requests is spread evenly over the ranks of the profile; every rank then decodes
``concurrency / ranks`` rows, or prefills chunks of ``sched.prefill_chunk_tokens``. Queues, arrival times and imbalance
are not in it: ``deepinfer plan --simulate`` runs a trace through a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.cost.account import Workload
from deepinfer_engine.cost.steptime import DecodeTime, PrefillTime, decode_point
from deepinfer_engine.errors import NotReadyError, UsageError
from deepinfer_engine.sim.models import PlannedModel
from deepinfer_engine.sim.prediction import speculation_of, times
from deepinfer_engine.sweep.columns import HIT_SHARE
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.series import PER_GPU, PER_USER


@dataclass(frozen=True)
class Load:
    """What of a workload the laws know: mean prompt and answer, share of the prompt cached, requests in flight.

    ``phase`` is set when only one phase is measured.
    """

    input_tokens: int
    output_tokens: int
    hit_rate: float
    concurrency: int
    phase: str | None = None


def simulated_row(profile: Profile, model: PlannedModel, load: Load) -> Row:
    """Speeds of a profile under a load.

    Raises ``NotReadyError`` where nothing was published, ``UsageError`` for a load the ranks cannot hold at once.
    """
    laws = times(profile, model)
    if isinstance(laws, str):
        raise NotReadyError(laws, hint="give a profile for sm90 or sm100; --simulate is for the released model")
    prefill, decode = laws
    row: Row = {"kind": "simulated", "model": model.name, "platform": profile.hardware.platform,
                "gpus": profile.hardware.gpus}  # fmt: skip
    if load.phase != "decode" and profile.role != "decode":
        row |= _prefill_columns(profile, prefill, load, model.config.sliding_window)
    if load.phase != "prefill" and profile.role != "prefill":
        row |= _decode_columns(profile, decode, load)
    if len(row) == 4:
        raise UsageError(
            f"the profile serves {profile.role}, the workload measures {load.phase or 'both phases'} only",
            hint="give a profile of the other role",
        )
    return row


def _prefill_columns(profile: Profile, time: PrefillTime, load: Load, window: int) -> Row:
    chunk = profile.sched.prefill_chunk_tokens
    computed = Workload(load.input_tokens, max(load.output_tokens, 1), load.hit_rate).computed_tokens(window)
    rate = time.tokens_per_s(chunk)
    per_gpu = load.input_tokens / (computed / rate)  # hits count as prompt tokens, as they do in a measurement
    return {
        "prefill_step_ms": time.step_s([(chunk, 0)]) * 1e3,
        "input_tok_s_gpu": per_gpu,
        "input_tok_s": per_gpu * profile.ranks,
        HIT_SHARE: load.hit_rate,
    }


def _decode_columns(profile: Profile, time: DecodeTime, load: Load) -> Row:
    rows = load.concurrency / profile.ranks
    if rows > profile.sched.max_rows_per_rank:
        raise UsageError(
            f"{load.concurrency} requests in flight are {rows:g} rows per rank, the profile has "
            f"{profile.sched.max_rows_per_rank}",
            hint="queues are not simulated here: lower the concurrency or raise sched.max_rows_per_rank",
        )
    point = decode_point(time, speculation_of(profile), rows, load.input_tokens + load.output_tokens / 2)
    verify, committed = speculation_of(profile).at(rows)
    return {
        "rows_per_rank": rows,
        "decode_step_ms": point.step_s * 1e3,
        "tpot_mean_ms": 1e3 / point.tokens_per_s_user,
        "drafts_verified_per_step": verify,
        "tokens_per_step": committed,
        PER_USER: point.tokens_per_s_user,
        PER_GPU: point.tokens_per_s_gpu,
        "output_tok_s": point.tokens_per_s_gpu * profile.ranks,
    }
