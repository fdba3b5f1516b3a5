"""Predicted speeds of a profile: throughput, TPOT, TTFT, GPU seconds per request and the prefill-to-decode ratio.

Every figure is ``simulated``: the published curves, carried to the profile's mesh and accelerator. Where nothing was
published there is no figure, and a sentence says so.
"""

from __future__ import annotations

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.cost import published
from deepinfer_engine.cost.account import Workload, gpu_split, request_cost
from deepinfer_engine.cost.figure import Figure
from deepinfer_engine.cost.hardware import REFERENCE, Peak, peak_of
from deepinfer_engine.cost.steptime import (
    NO_SPECULATION,
    DecodePoint,
    DecodeTime,
    PrefillTime,
    Speculation,
    decode_point,
    rows_at_speed,
)
from deepinfer_engine.sim.models import PlannedModel

#: The other phase of a profile that serves one: the published production points.
_OTHER_CHUNK = 32_768
_OTHER_ROWS = 60
_OTHER_SLOTS = 7

_MODES: dict[str, Speculation] = {
    "off": NO_SPECULATION,
    "fixed": published.FIXED,
    "adaptive": published.ADAPTIVE,
}


def times(profile: Profile, model: PlannedModel) -> tuple[PrefillTime, DecodeTime] | str:
    """Step-time laws of a profile, or the sentence that says why there are none."""
    if not model.is_release:
        return f"no speeds: step times were published for the released model, not for {model.name}"
    peak = peak_of(profile.hardware.platform, profile.hardware.hbm_gib)
    if peak is None:
        return f"no speeds: nothing is published for {profile.hardware.platform}, and nothing was measured"
    slots = profile.slots_per_rank(model.config.n_routed_experts) if profile.role != "prefill" else _OTHER_SLOTS
    prefill = published.prefill_time(model.config, peak, decoder_replay=profile.replay.decoder != "off")
    return prefill, published.decode_time(model.config, slots, peak)


def speculation_of(profile: Profile) -> Speculation:
    """Verified and committed tokens by load; published for five drafts."""
    return _MODES[profile.spec.verify if profile.role != "prefill" else "adaptive"]


def predict(
    profile: Profile, model: PlannedModel, workload: Workload, *, tpot_ms: float | None, max_rows: int | None
) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """Figures of a profile under a workload, and sentences on what is missing or assumed."""
    laws = times(profile, model)
    if isinstance(laws, str):
        return (), (laws,)
    prefill, decode = laws
    peak = peak_of(profile.hardware.platform, profile.hardware.hbm_gib)
    assert peak is not None
    figures: list[Figure] = []
    window = model.config.sliding_window
    chunk = profile.sched.prefill_chunk_tokens if profile.role != "decode" else _OTHER_CHUNK
    context = workload.input_tokens + workload.output_tokens / 2
    if profile.role != "decode":
        figures += _prefill_figures(prefill, chunk, workload, window)
    rows, point = _operating_point(profile, decode, context, tpot_ms, max_rows)
    if point is None:
        return tuple(figures), (f"no row reaches {tpot_ms:g} ms per token on this mesh",)
    if profile.role != "prefill":
        figures += _decode_figures(profile, decode, point, tpot_ms)
    cost = request_cost(
        workload,
        prefill_tokens_s=prefill.tokens_per_s(chunk),
        decode_tokens_s=point.tokens_per_s_gpu,
        replay_window=window,
    )
    figures += [
        Figure("prefill per request", cost.prefill_gpu_s, "GPU s", "simulated", f"chunks of {chunk:,}"),
        Figure("decode per request", cost.decode_gpu_s, "GPU s", "simulated", f"{rows} rows"),
        Figure("prefill GPUs per decode GPU", cost.prefill_per_decode, "ratio", "simulated", _split(profile, cost)),
    ]
    return tuple(figures), tuple(_assumptions(profile, peak))


def _prefill_figures(time: PrefillTime, chunk: int, workload: Workload, window: int) -> list[Figure]:
    computed = workload.computed_tokens(window)
    hits = workload.input_tokens - computed
    rate = time.tokens_per_s(chunk)
    steps = max(1, -(-int(computed) // chunk))
    alone = steps * time.base_s + time.chunk_s(computed, max(hits, 0.0))
    return [
        Figure("prefill step", time.step_s([(chunk, 0)]) * 1e3, "ms", "simulated", f"a chunk of {chunk:,}"),
        Figure("prefill throughput", rate, "tok/s/GPU", "simulated", "computed tokens"),
        Figure("with hits counted", workload.input_tokens / (computed / rate), "tok/s/GPU", "simulated",
               f"{workload.hit_rate:.0%} of the prompt cached"),
        Figure("TTFT alone", alone * 1e3, "ms", "simulated", "no queue, no fetch; see --simulate"),
    ]  # fmt: skip


def _operating_point(
    profile: Profile, time: DecodeTime, context: float, tpot_ms: float | None, max_rows: int | None
) -> tuple[int, DecodePoint | None]:
    """Rows per rank: the profile's, or the most that the SLO and the memory allow."""
    speculation = speculation_of(profile)
    rows = profile.sched.max_rows_per_rank if profile.role != "prefill" else _OTHER_ROWS
    if tpot_ms is not None:
        limit = min(max_rows or 4096, 4096) if profile.role != "prefill" else 4096
        rows = rows_at_speed(time, speculation, 1e3 / tpot_ms, limit=limit, context=context)
        if rows == 0:
            return 0, None
    return rows, decode_point(time, speculation, rows, context)


def _decode_figures(profile: Profile, time: DecodeTime, point: DecodePoint, tpot_ms: float | None) -> list[Figure]:
    verify, committed = speculation_of(profile).at(point.rows)
    how = f"{verify:.2f} drafts verified, {committed:.2f} tokens a step" if verify else "one token a step"
    source = f"at most {tpot_ms:g} ms per token" if tpot_ms is not None else "the profile's rows"
    return [
        Figure("decode rows per rank", point.rows, "rows", "simulated", source),
        Figure("decode step", point.step_s * 1e3, "ms", "simulated", how),
        Figure("TPOT", 1e3 / point.tokens_per_s_user, "ms", "simulated"),
        Figure("speed per user", point.tokens_per_s_user, "tok/s", "simulated"),
        Figure("decode throughput", point.tokens_per_s_gpu, "tok/s/GPU", "simulated"),
        Figure("decode instance", point.tokens_per_s_gpu * profile.ranks, "tok/s", "simulated",
               f"{profile.ranks} GPUs"),
    ]  # fmt: skip


def _split(profile: Profile, cost) -> str:
    """The split of the instance's GPUs when both phases share them, else how many of the other kind it keeps busy."""
    gpus, ratio = profile.ranks, cost.prefill_per_decode
    if profile.role == "both":
        if gpus < 2:
            return "both phases on one GPU"
        prefill, decode = gpu_split(gpus, ratio)
        return f"as if {prefill} of {gpus} GPUs did prefill and {decode} decode"
    if profile.role == "prefill":
        return f"{gpus} prefill GPUs feed {gpus / ratio:.0f} decode GPUs"
    return f"{gpus} decode GPUs need {gpus * ratio:.0f} prefill GPUs"


def _assumptions(profile: Profile, peak: Peak) -> list[str]:
    notes = []
    if peak != REFERENCE:
        notes.append(
            f"speeds assume the share of peak that was published for {REFERENCE.name}, at the vendor's figures for "
            f"{peak.name}; nothing is published for it"
        )
    if profile.role != "prefill" and profile.ranks not in (8, 64):
        notes.append(f"decode was published for EP8 and EP64; EP{profile.ranks} follows from slots per rank")
    if profile.role == "prefill" and profile.ranks != 4:
        notes.append("prefill was published for EP4")
    if profile.spec.verify != "off" and profile.spec.draft_tokens != 5:
        notes.append(f"verification was published for 5 drafts, the profile has {profile.spec.draft_tokens}")
    return notes
