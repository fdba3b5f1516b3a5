"""A profile drawn up from hardware alone: the published defaults of the role, with the KV that the memory leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.config.profile import LoadedProfile, load_profile_text
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.cost.memory import GIB, max_kv_tokens, plan_memory
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.sim.deployment import deployment_of
from deepinfer_engine.sim.models import PlannedModel

#: Usable memory of one device where none is given, GiB: what the driver leaves of 141 and 192 GB, and the vendor's 144.
_HBM_GIB = {"sm90": 139.0, "sm100": 178.0, "ascend950": 134.0}
#: Hosts of eight are the common ones.
_GPUS_PER_NODE = 8
#: The published production point.
_ROWS = 60
#: Memory that stays free: a plan is an estimate.
_MARGIN = 0.05

_CHUNKS = {"prefill": 32_768, "decode": 4096, "both": 8192}


@dataclass(frozen=True)
class Hardware:
    """What ``plan`` was told of the machines."""

    platform: str
    gpus: int
    hbm_gib: float | None
    role: str


def draft_profile(
    hardware: Hardware, model: PlannedModel, *, rows: int | None = None, context: int | None = None
) -> LoadedProfile:
    """The profile for some hardware: every GPU one rank, rows and context as asked or as far as they fit.

    Raises ``CapacityError`` when not one row of the context fits, ``UsageError`` for hardware that has no default.
    """
    if hardware.platform not in _HBM_GIB:
        raise UsageError(
            f"--platform {hardware.platform} has no accelerators to plan for", hint=f"use one of {', '.join(_HBM_GIB)}"
        )
    if hardware.gpus < 1:
        raise UsageError(f"--gpus {hardware.gpus}: at least one is needed")
    if rows is not None and rows < 1:
        raise UsageError(f"--rows {rows}: at least one is needed")
    limit = model.config.max_position_embeddings
    if context is not None and context > limit:
        raise UsageError(f"--context {context} exceeds the model's {limit} positions")
    wanted = context or limit
    first = load_profile_text(_text(hardware, rows or _ROWS, wanted, 0), where="the planned profile")
    tokens = _kv_tokens(first.profile, model.config, wanted)
    return load_profile_text(_text(hardware, rows or _ROWS, wanted, tokens), where="the planned profile")


def _kv_tokens(profile: Profile, config: ModelConfig, context: int) -> int:
    """Block KV that fits with a margin, no more than every row's full context, no less than one."""
    d = replace(deployment_of(profile, config), kv_tokens=0)
    have = int(profile.hardware.hbm_gib * GIB)
    left = max_kv_tokens(config, d, int(have * (1 - _MARGIN)))
    one = -(-context // BLOCK_TOKENS) * BLOCK_TOKENS
    if left < one:
        need = plan_memory(config, replace(d, kv_tokens=one)).device_bytes
        raise CapacityError(
            f"not one row of {context:,} tokens fits: a rank needs {need / GIB:.1f} GiB, "
            f"{have * (1 - _MARGIN) / GIB:.1f} GiB are usable of {profile.hardware.hbm_gib:g}",
            hint="use more GPUs (--gpus), fewer rows (--rows) or a shorter --context",
        )
    return min(left, profile.sched.max_rows_per_rank * one)


def _text(h: Hardware, rows: int, context: int, tokens: int) -> str:
    """The profile as YAML; the reasons stand beside the values, as in the shipped ones."""
    prefills, decodes = h.role != "decode", h.role != "prefill"
    redundant = 0 if h.gpus == 1 else 4 if h.gpus <= 8 and prefills else 1
    place = "device" if h.platform == "ascend950" else "host"
    window, period = ((100, 1000) if prefills else (1000, 10_000)) if h.gpus > 1 else (100, 0)
    lines = [
        "schema_version: 1",
        f"name: {h.platform}x{h.gpus}-{h.role}",
        f"description: planned for {h.gpus} x {h.platform}",
        f"role: {h.role}",
        "hardware:",
        f"  platform: {h.platform}  # as asked",
        f"  gpus: {h.gpus}  # as asked",
        f"  gpus_per_node: {math.gcd(h.gpus, _GPUS_PER_NODE)}  # whole hosts of up to eight",
        f"  hbm_gib: {h.hbm_gib if h.hbm_gib is not None else _HBM_GIB[h.platform]}  # usable memory of one",
        "parallel:",
        f"  ep: {h.gpus}  # every GPU is a rank",
        f"  dp: {h.gpus}  # attention is data parallel, as many ranks as ep",
        f"  redundant_experts_per_rank: {redundant}  # published start for this role and width",
        "numerics:",
        "  mode: fast  # official weights and cache records",
        "sched:",
        f"  max_rows_per_rank: {rows}  # as asked, or the published production point",
        f"  prefill_chunk_tokens: {_CHUNKS[h.role]}  # long for prefill, short where decode rows wait",
        f"  max_context_tokens: {context}  # as asked, or the model's limit",
        f"  overlap: {str(decodes).lower()}  # short decode steps must hide host work",
        "cache:",
        f"  hbm_tokens_per_rank: {tokens}  # what the memory leaves, less 5 %; 0: every row's full context",
        f"  prefix: {str(prefills).lower()}  # prompts are computed where prefill runs",
        f"  engram_placement: {place}  # tables of 189 GiB; no gather from host memory on Ascend",
        "replay:",
        "  decoder: bounded  # nearly halves prefill",
        f"  encoder: {'bounded' if prefills else 'off'}  # a hit without its window costs one window",
        "spec:",
        f"  verify: {'adaptive' if decodes else 'off'}  # drafts pay where rows decode",
        "eplb:",
        f"  window_steps: {window}  # published for the role",
        f"  period_steps: {period}  # published for the role; 0 on one rank",
    ]
    return "\n".join(lines) + "\n"
