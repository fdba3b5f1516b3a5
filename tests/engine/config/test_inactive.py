"""No key of a profile is neither honoured nor named as inactive."""

from __future__ import annotations

from deepinfer_engine.config.inactive import NOT_BUILT
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.schema import LABELS, leaves

#: Keys that change what runs, and the module that reads them.
HONOURED = {
    "launch": ("hardware.platform", "hardware.gpus", "hardware.gpus_per_node", "hardware.hbm_gib"),
    "model.load": (
        "parallel.ep", "parallel.redundant_experts_per_rank", "cache.engram_placement", "eplb.plan_path",
        "eplb.replica_choice",
    ),
    "engine": (
        "parallel.dp", "numerics.mode", "numerics.batch_invariant", "sched.max_rows_per_rank",
        "sched.prefill_chunk_tokens", "sched.max_context_tokens", "sched.step_budget_ms", "sched.overlap",
        "cache.hbm_tokens_per_rank", "kernels.backend", "kernels.overrides", "kernels.cache_dir",
        "grammar.workers", "grammar.timeout_s", "grammar.cache_mib", "spec.draft_tokens", "spec.mode",
        "spec.verify", "spec.confidence_temperatures", "spec.curve_ttl_s",
        "eplb.window_steps", "eplb.period_steps", "eplb.max_bytes_per_step",
    ),
    "cache.open_tiers": (
        "cache.prefix", "cache.host_gib_per_rank", "cache.swa_pool_gib_per_rank", "cache.swa_pool_ttl_s",
        "cache.strict_lineage", "cache.tenant", "cache.store.backend", "cache.store.path",
        "cache.store.capacity_gib", "cache.store.ttl_s.chat", "cache.store.fetch_deadline_ms",
    ),
    "cache.replay": ("replay.decoder", "replay.encoder"),
    "dist.transport": ("parallel.transport",),
    "dist.rendezvous": ("deadlines.load_s", "deadlines.step_s"),
}  # fmt: skip


def test_every_key_is_honoured_or_listed_as_not_built():
    honoured = {key for keys in HONOURED.values() for key in keys}
    listed = [entry.key for entry in NOT_BUILT]
    for key in leaves(load_profile("cpu-nano").profile):
        if key in ("schema_version", *LABELS) or key in honoured:
            continue
        assert any(key == e or (e.endswith(".*") and key.startswith(e[:-1])) for e in listed), key
