"""Relations between keys of a profile, and between a profile and a model: one sentence with the numbers each.

``check_profile`` needs the profile only and runs on every load; ``check_against_model`` runs once the model is known.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from deepinfer_engine.config.schema import Profile
from deepinfer_kernels.ops import OPS

#: Most copies of one expert; the planner's integer scores are scaled by lcm(1..16).
MAX_REPLICAS = 16
#: Tokens per block of block KV, the unit of every tier.
BLOCK_TOKENS = 128

_GPU = ("auto", "reference", "triton", "tilelang", "deep_gemm", "flash_mla", "tile_kernels")
_BACKENDS = {
    "cpu": ("auto", "reference", "cpu"),
    "sm90": _GPU,
    "sm100": _GPU,
    "ascend950": ("auto", "reference", "tilelang", "ascend"),
}


@dataclass(frozen=True)
class ModelFacts:
    """What rules and emulation need of a model; sizes are in bytes, ``window`` in tokens.

    ``kv_bytes_per_token`` is the block KV of one token, ``row_bytes`` the window rings and pending state of one
    sequence. ``draft_tokens`` is the checkpoint's block size γ, 0 without draft blocks.
    """

    n_routed_experts: int
    max_position_embeddings: int
    window: int
    draft_tokens: int
    weights_bytes: int
    kv_bytes_per_token: int
    row_bytes: int


def check_profile(p: Profile) -> list[tuple[str, str]]:
    """Every broken relation as (key to blame, sentence); empty when all hold."""
    return [*_hardware(p), *_parallel(p), *_numerics(p), *_cache(p), *_replay_and_spec(p), *_eplb(p), *_kernels(p)]


def check_against_model(
    p: Profile,
    n_routed_experts: int,
    *,
    max_position_embeddings: int | None = None,
    window: int | None = None,
    draft_tokens: int | None = None,
) -> list[str]:
    """What a model cannot honour of the profile, one sentence each; a fact that is None is not checked.

    An EP size is legal when ranks x slots hold every expert, no rank holds two copies of one expert, and no expert
    needs more than 16 copies.
    """
    bad = []
    experts, ranks, slots = n_routed_experts, p.ranks, p.slots_per_rank(n_routed_experts)
    if slots > experts:
        bad.append(
            f"parallel.ep {ranks} with {p.parallel.redundant_experts_per_rank} redundant experts per rank makes "
            f"{slots} slots per rank for {experts} experts; a rank would hold two copies of one"
        )
    elif ranks * slots > MAX_REPLICAS * experts:
        copies = -(-ranks * slots // experts)
        bad.append(
            f"parallel.ep {ranks} with {slots} slots per rank makes {ranks * slots} slots for {experts} experts, "
            f"up to {copies} copies of one; at most {MAX_REPLICAS} are supported"
        )
    if max_position_embeddings is not None and p.sched.max_context_tokens > max_position_embeddings:
        bad.append(
            f"sched.max_context_tokens {p.sched.max_context_tokens} exceeds the model's "
            f"{max_position_embeddings} positions"
        )
    if draft_tokens is not None and p.spec.verify != "off":
        if draft_tokens == 0:
            bad.append(f"spec.verify is {p.spec.verify}, the model has no draft blocks")
        elif p.spec.draft_tokens > draft_tokens:
            bad.append(f"spec.draft_tokens {p.spec.draft_tokens} exceeds the {draft_tokens} the model drafts")
    if window is not None and p.replay.decoder != "off":
        # the final chunk holds a window and the rollback slack, and leaves a block for the one before it
        need = window + (draft_tokens or 0) + 1 + BLOCK_TOKENS
        if p.sched.prefill_chunk_tokens < need:
            bad.append(
                f"sched.prefill_chunk_tokens {p.sched.prefill_chunk_tokens} is too small for replay.decoder "
                f"{p.replay.decoder}: a chunk needs {need} tokens (window {window} + rollback "
                f"{(draft_tokens or 0) + 1} + block {BLOCK_TOKENS})"
            )
    return bad


def _hardware(p: Profile) -> list[tuple[str, str]]:
    hw = p.hardware
    if hw.platform == "cpu":
        return [
            (f"hardware.{key}", f"hardware.{key} is {value} on platform cpu, expected 0")
            for key, value in (("gpus", hw.gpus), ("gpus_per_node", hw.gpus_per_node), ("hbm_gib", hw.hbm_gib))
            if value
        ]
    bad = []
    if hw.gpus == 0:
        bad.append(("hardware.gpus", f"platform {hw.platform} needs hardware.gpus of 1 or more, found 0"))
    if hw.gpus_per_node == 0:
        bad.append(
            ("hardware.gpus_per_node", f"platform {hw.platform} needs hardware.gpus_per_node of 1 or more, found 0")
        )
    if hw.hbm_gib == 0:
        bad.append(("hardware.hbm_gib", f"platform {hw.platform} needs hardware.hbm_gib above 0, found 0"))
    if hw.gpus_per_node and hw.gpus % hw.gpus_per_node:
        bad.append(("hardware.gpus", f"{hw.gpus} gpus do not fill whole nodes of {hw.gpus_per_node}"))
    return bad


def _parallel(p: Profile) -> list[tuple[str, str]]:
    ep, dp, gpus = p.parallel.ep, p.parallel.dp, p.hardware.gpus
    bad = []
    if ep % dp:
        bad.append(("parallel.dp", f"dp {dp} does not divide ep {ep}"))
    if p.hardware.platform != "cpu" and gpus:
        if ep > gpus:
            bad.append(("parallel.ep", f"ep {ep} needs {ep} ranks, the mesh has {gpus}"))
        elif ep < gpus:
            bad.append(("parallel.ep", f"ep {ep} uses {ep} of {gpus} gpus; an instance is one group of all its gpus"))
    if ep == 1 and p.parallel.redundant_experts_per_rank:
        extra = p.parallel.redundant_experts_per_rank
        bad.append(
            (
                "parallel.redundant_experts_per_rank",
                f"{extra} redundant experts on ep 1 would sit beside their originals",
            )
        )
    return bad


def _numerics(p: Profile) -> list[tuple[str, str]]:
    if p.numerics.batch_invariant and p.hardware.platform == "ascend950":
        return [("numerics.batch_invariant", "numerics.batch_invariant is not available on platform ascend950")]
    return []


def _cache(p: Profile) -> list[tuple[str, str]]:
    c, bad = p.cache, []
    if c.hbm_tokens_per_rank % BLOCK_TOKENS:
        bad.append(
            (
                "cache.hbm_tokens_per_rank",
                f"cache.hbm_tokens_per_rank {c.hbm_tokens_per_rank} is not a multiple of the "
                f"{BLOCK_TOKENS}-token block",
            )
        )
    if 0 < c.hbm_tokens_per_rank < p.sched.max_context_tokens:
        bad.append(
            (
                "cache.hbm_tokens_per_rank",
                f"cache.hbm_tokens_per_rank {c.hbm_tokens_per_rank} cannot hold one request of "
                f"sched.max_context_tokens {p.sched.max_context_tokens}",
            )
        )
    tiers = (
        ("cache.host_gib_per_rank", c.host_gib_per_rank),
        ("cache.swa_pool_gib_per_rank", c.swa_pool_gib_per_rank),
        ("cache.store.backend", "" if c.store.backend == "none" else c.store.backend),
    )
    asked = [(key, value) for key, value in tiers if value]
    if not c.prefix:
        bad += [(key, f"{key} is {value}, but cache.prefix is false and nothing would be kept") for key, value in asked]
    elif p.numerics.mode == "float":
        bad += [
            (key, f"{key} is {value}, but it keeps official records and numerics.mode float has f32 rows instead")
            for key, value in asked
        ]
    if c.store.backend != "none" and c.store.path is None:
        bad.append(("cache.store.backend", f"cache.store.backend {c.store.backend} needs cache.store.path"))
    if c.store.backend == "none" and c.store.path is not None:
        bad.append(("cache.store.path", f"cache.store.path is {c.store.path}, but cache.store.backend is none"))
    if c.engram_placement == "device" and p.hardware.platform == "cpu":
        bad.append(
            (
                "cache.engram_placement",
                "cache.engram_placement is device, but platform cpu has no device memory; use host or mmap",
            )
        )
    return bad


def _replay_and_spec(p: Profile) -> list[tuple[str, str]]:
    bad = []
    if p.replay.encoder != "off" and not p.cache.prefix:
        bad.append(
            (
                "replay.encoder",
                f"replay.encoder {p.replay.encoder} replays after a prefix hit, but cache.prefix is false",
            )
        )
    given = len(p.spec.confidence_temperatures)
    if given not in (0, p.spec.draft_tokens):
        bad.append(
            (
                "spec.confidence_temperatures",
                f"spec.confidence_temperatures has {given} values for spec.draft_tokens {p.spec.draft_tokens}",
            )
        )
    return bad


def _eplb(p: Profile) -> list[tuple[str, str]]:
    e, bad = p.eplb, []
    if e.period_steps and e.window_steps > e.period_steps:
        bad.append(
            ("eplb.window_steps", f"eplb.window_steps {e.window_steps} exceeds eplb.period_steps {e.period_steps}")
        )
    if p.parallel.ep == 1:
        wants = (("eplb.period_steps", e.period_steps), ("eplb.plan_path", e.plan_path))
        bad += [(key, f"{key} is {value}, but ep 1 has no ranks to balance") for key, value in wants if value]
    return bad


def _kernels(p: Profile) -> list[tuple[str, str]]:
    legal = _BACKENDS[p.hardware.platform]
    wants = {"kernels.backend": p.kernels.backend}
    wants |= {f"kernels.overrides.{op}": backend for op, backend in p.kernels.overrides.items()}
    bad = [
        (key, f"{key} is {backend}, which does not run on platform {p.hardware.platform}; use {', '.join(legal)}")
        for key, backend in wants.items()
        if backend not in legal
    ]
    for op in p.kernels.overrides:
        if op not in OPS:
            near = difflib.get_close_matches(op, OPS, 1)
            hint = f"; did you mean {near[0]}" if near else f"; known are {', '.join(OPS)}"
            bad.append((f"kernels.overrides.{op}", f"kernels.overrides.{op}: there is no operation {op}{hint}"))
    return bad


def backend_runs_on(backend: str, platform: str) -> bool:
    """Whether a kernel backend exists for a platform at all."""
    return backend in _BACKENDS[platform]
