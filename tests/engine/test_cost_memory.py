"""Bytes of a rank against the tensor plan, the cache layout and hand arithmetic; what fits against its definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cost import memory as m
from deepinfer_engine.cost import work
from deepinfer_engine.sim.models import release_config
from deepinfer_engine.weights.plan import parameter_summary, tensor_families

CONFIG = release_config()
ONE = m.Deployment(ranks=1, slots_per_rank=384, ranks_per_host=1, rows=1, kv_tokens=128, context=128, chunk=128)
EP64 = m.Deployment(
    ranks=64, slots_per_rank=7, ranks_per_host=4, rows=60, kv_tokens=8_388_608, context=1_048_576, chunk=4096, drafts=5
)


def total_of(plan, *names):
    return sum(plan.of(name) for name in names)


def test_weights_of_one_rank_are_every_stored_byte_but_vision():
    plan = m.plan_memory(CONFIG, replace(ONE, drafts=5))
    names = ("dense weights", "routed experts", "n-gram projections", "draft blocks", "n-gram tables")
    stored = parameter_summary(CONFIG, groups=("backbone", "draft", "engram")).nbytes
    assert total_of(plan, *names) == stored == 510_286_023_000 - 970_536_960


def test_expert_bytes_are_those_of_the_tensor_plan():
    (family,) = [f for f in tensor_families(CONFIG) if f.component == "routed experts" and f.place == "0"]
    assert m.expert_bytes(CONFIG) == family.nbytes // 384 == 18_800_640
    assert m.expert_bytes(CONFIG, 2) == 35_389_440 * 2


def test_ranks_share_experts_and_draft_experts_by_slots():
    plan = m.plan_memory(CONFIG, EP64)
    assert plan.of("routed experts") == 7 * 40 * 18_800_640
    dense = m.dense_bytes(CONFIG, groups=("draft",))
    assert plan.of("draft blocks") == dense + 2 * 3 * 18_800_640  # 128 draft experts over 64 ranks, not replicated
    assert m.plan_memory(CONFIG, replace(EP64, ranks=61, slots_per_rank=8)).of("draft blocks") == (
        dense + 3 * 3 * 18_800_640
    )
    assert m.plan_memory(CONFIG, replace(EP64, drafts=0)).of("draft blocks") == 0


def test_tables_lie_where_they_are_placed():
    tables = 768_022_850 * 264  # rows x (256 values + 8 scales)
    host = m.plan_memory(CONFIG, EP64)
    assert [(i.where, i.nbytes) for i in host.items if i.name == "n-gram tables"] == [("host", tables)]
    device = m.plan_memory(CONFIG, replace(EP64, engram="device"))
    assert [(i.where, i.nbytes) for i in device.items if i.name == "n-gram tables"] == [("device", -(-tables // 64))]
    assert device.host_bytes == 0


def test_kv_is_the_layouts():
    plan, layout = m.plan_memory(CONFIG, EP64), KVLayout.of(CONFIG, records=True, draft=True)
    assert plan.of("block KV") == 8_388_608 // 128 * 113_920
    assert plan.of("window KV") == 60 * layout.slot_bytes
    wide = m.plan_memory(CONFIG, replace(EP64, records=False))
    assert wide.of("block KV") == 8_388_608 // 128 * 320 * 4 * (512 + 128)  # 320 entries of f32 rows and keys
    kept = m.plan_memory(CONFIG, replace(EP64, replicas=2))
    assert kept.of("window replicas") == 60 * 2 * 20 * 128 * 528  # encoder windows of 1.29 MiB, twice
    tiers = m.plan_memory(CONFIG, replace(EP64, host_kv_bytes=5, pool_bytes=7))
    assert tiers.host_bytes - plan.host_bytes == 4 * (5 + 7)


def test_working_space_follows_the_largest_step():
    assert m.step_tokens(EP64) == 4096
    assert m.step_tokens(replace(EP64, rows=1000)) == 6000
    small, large = (m.plan_memory(CONFIG, replace(EP64, chunk=c)).of("activations") for c in (8192, 32_768))
    tile = m.GIB  # index scores, whatever the chunk
    assert (large - tile) == 4 * (small - tile)
    assert m.plan_memory(CONFIG, EP64).of("logits") == 360 * 129_280 * 4


def test_gathered_keys_count_where_attention_is_not_fused():
    fused = m.plan_memory(CONFIG, replace(EP64, chunk=32_768))
    plain = m.plan_memory(CONFIG, replace(EP64, chunk=32_768, fused=False))
    assert plain.of("activations") > fused.of("activations")


def test_one_rank_exchanges_nothing():
    assert m.plan_memory(CONFIG, ONE).of("exchange buffers") == 0
    assert m.plan_memory(CONFIG, EP64).of("exchange buffers") == 4096 * 6 * 5120 * 3


def test_dense_weights_hold_their_elements():
    wide = m.dense_bytes(CONFIG, groups=("backbone",), weight_bytes=2)
    elements = sum(
        f.parameters for f in tensor_families(CONFIG)
        if f.specs[0].group == "backbone" and f.component != "routed experts"
    )  # fmt: skip
    f32 = sum(
        s.numel * f.count for f in tensor_families(CONFIG) for s in f.specs
        if s.dtype == "F32" and s.group == "backbone"
    )  # fmt: skip
    assert wide == 2 * elements + 2 * f32  # f32 tensors stay what they are


def test_packed_experts_are_as_stored_beside_dense_weights():
    dense, stored = (m.plan_memory(CONFIG, replace(ONE, weight_bytes=w)) for w in (2, 0))
    packed = m.plan_memory(CONFIG, replace(ONE, weight_bytes=2, packed_experts=True))
    assert packed.of("routed experts") == stored.of("routed experts") < dense.of("routed experts")
    assert packed.of("dense weights") == dense.of("dense weights") > stored.of("dense weights")


def test_allowances_are_called_assumed():
    plan = m.plan_memory(CONFIG, replace(EP64, graphs=11))
    assert {i.name for i in plan.items if i.source == "assumed"} == {"graphs", "runtime"}
    assert {i.source for i in plan.items} == {"computed", "assumed"}


# ------------------------------------------------------------------- frontier


@given(
    rows=st.integers(1, 400), context=st.sampled_from([4096, 65_536, 1_048_576]), gib=st.integers(20, 180),
    chunk=st.sampled_from([128, 8192, 65_536]),
)  # fmt: skip
@settings(max_examples=30)
def test_frontier_is_the_largest_that_fits(rows, context, gib, chunk):
    d, have = replace(EP64, rows=rows, chunk=chunk), gib * m.GIB

    def need(n, length):
        tokens = n * -(-length // 128) * 128
        return m.plan_memory(CONFIG, replace(d, rows=n, kv_tokens=tokens, context=length)).device_bytes

    most = m.max_rows(CONFIG, d, have, context)
    assert most == 0 or need(most, context) <= have
    assert most == 65_536 or need(most + 1, context) > have
    longest = m.max_context(CONFIG, d, have, rows)
    assert longest % 128 == 0 and (longest == 0 or need(rows, longest) <= have)
    assert longest == 1_048_576 or need(rows, longest + 128) > have


def test_kv_capacity_is_what_is_left():
    have = 60 * m.GIB
    tokens = m.max_kv_tokens(CONFIG, EP64, have)
    assert m.plan_memory(CONFIG, replace(EP64, kv_tokens=tokens)).device_bytes <= have
    assert m.plan_memory(CONFIG, replace(EP64, kv_tokens=tokens + 128)).device_bytes > have
    assert m.max_kv_tokens(CONFIG, EP64, m.GIB) == 0


def test_rows_share_the_configured_kv():
    have = 40 * m.GIB
    rows = m.max_rows_beside_kv(CONFIG, EP64, have)
    assert m.plan_memory(CONFIG, replace(EP64, rows=rows)).device_bytes <= have
    assert m.plan_memory(CONFIG, replace(EP64, rows=rows + 1)).device_bytes > have


# ----------------------------------------------------------------------- work


def test_flops_are_those_of_the_model_definition():
    """By hand, GFLOP: 38 layers with 640 keys and 2 with 128, 7 experts, 4 full and 4 reindex sources, 2 n-gram."""
    layers = 40 * (2 * 126_615_552 + 2 * 7 * 35_389_440 + 2 * 384 * 5120 + 2 * 2 * 24 * 4 * 5120)
    core = 4 * 64 * 512 * (38 * 640 + 2 * 128)
    sources = 2 * (3 * 2 + 1) * 512 * 5120 + 4 * 2 * 128 * 512
    indexer = 8 * 2 * (32 * 128 * 1280 + 32 * 5120) + 4 * 2 * 32 * 128 * 16_384
    engram, head = 2 * 2 * 5120 * 5 * 24 * 256, 2 * 129_280 * 5120
    decode = work.decode_flops(CONFIG)
    assert decode.flat == layers + core + sources + indexer + engram + head
    assert decode.flat / 1e9 == pytest.approx(35.5 + 0.54, rel=0.01)
    assert decode.per_context == 20_480
    replayed = work.prefill_flops(CONFIG, decoder_replay=True)
    assert replayed.flat / 1e9 == pytest.approx(17.3, rel=0.01) and replayed.per_context == 12_288
    every = work.prefill_flops(CONFIG, decoder_replay=False)
    assert every.flat == decode.flat - head and every.per_context == 20_480


def test_flops_of_a_prompt_add_up_row_by_row():
    """Far from the start a row costs what a prompt token does; a plan that leaves rows out costs as much less."""
    far, length = 40_000, 40_100  # beyond the window, the selection and the candidates: every layer is at its largest
    rows = work.prompt_flops(CONFIG, length, start=far) - 2 * CONFIG.vocab_size * CONFIG.hidden_size
    every = work.prefill_flops(CONFIG, decoder_replay=False)
    scans = sum((p + 1) // r for p in range(far, length) for r in (2, 2, 2, 1)) * 2 * 32 * 128
    assert rows == 100 * every.flat + scans
    tail = work.prompt_flops(CONFIG, length, start=far, pivot=length - 1)
    decoder = [work.layer_flops(CONFIG, layer).flat for layer in range(CONFIG.cut, CONFIG.num_hidden_layers)]
    keys = 2 * 512 * 5120 * 2 + 2 * 128 * 512
    scan_at_cut = sum(p + 1 for p in range(far, length - 1)) * 2 * 32 * 128
    assert rows - tail + 2 * CONFIG.vocab_size * CONFIG.hidden_size == 99 * (sum(decoder) - keys) + scan_at_cut
    assert work.prompt_flops(CONFIG, 1) < every.flat, "the first row sees itself only"


def test_index_keys_read_per_context_token():
    assert work.index_bytes_per_context(CONFIG) == 68 * (3 / 2 + 1) == 170


# --------------------------------------------------------------------- engine


def test_plan_is_what_the_engine_holds(tmp_path: Path):
    """Bytes of all tensors that opening the embedded model leaves behind, against weights and KV of its plan."""
    import gc
    import warnings

    import torch

    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.config.resources import model_dir
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.sim.deployment import deployment_of
    from deepinfer_engine.sim.models import EMBEDDED, find_model

    def storages():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some module attributes warn when they are looked at
            tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    profile = load_profile("cpu-nano", [f"kernels.cache_dir={tmp_path}"]).profile  # nothing compiled: experts dense
    before = storages()
    engine = Engine.open(profile, model_dir(EMBEDDED))
    held = sum(nbytes for pointer, nbytes in storages().items() if pointer not in before)
    engine.close()
    config = find_model(EMBEDDED).config
    plan = m.plan_memory(config, deployment_of(profile, config))
    names = ("dense weights", "routed experts", "n-gram projections", "n-gram tables", "block KV", "window KV")
    assert held == pytest.approx(total_of(plan, *names), rel=0.02)
