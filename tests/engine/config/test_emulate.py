"""Emulation keeps the mesh and the policies, replaces what the machine lacks, and lists every difference."""

from __future__ import annotations

import pytest

from deepinfer_engine.config.emulate import Machine, emulate, hardware_is_present, require_fit
from deepinfer_engine.config.inactive import NOT_BUILT, inactive_features
from deepinfer_engine.config.profile import load_profile, load_profile_text
from deepinfer_engine.config.resources import data_dir, profile_names
from deepinfer_engine.config.rules import ModelFacts
from deepinfer_engine.config.schema import leaves
from deepinfer_engine.errors import CapacityError, NotReadyError

LAPTOP = Machine("cpu", gpus=0, hbm_gib=0.0, ram_gib=16.0, cores=2)
H200 = Machine("sm90", gpus=1, hbm_gib=139.0, ram_gib=128.0, cores=16)
NANO = ModelFacts(
    n_routed_experts=64, max_position_embeddings=16384, window=128, draft_tokens=5,
    weights_bytes=15_000_000, kv_bytes_per_token=400, row_bytes=300_000,
)  # fmt: skip
KEPT = ("role", "parallel.", "eplb.", "spec.", "replay.", "numerics.", "sched.overlap", "sched.prefill_chunk_tokens")


@pytest.mark.parametrize("machine", [LAPTOP, H200], ids=["laptop", "h200"])
@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_runs_with_the_embedded_model(name, machine):
    asked = load_profile(name).profile
    used, replaced = emulate(asked, machine, NANO)
    before, after = leaves(asked), leaves(used)
    differing = {key for key in before if before[key] != after[key]}
    assert differing == {r.key for r in replaced}, "what is listed is exactly what changed"
    assert all((before[r.key], after[r.key]) == (r.requested, r.used) and r.reason for r in replaced)
    assert not [key for key in differing if key.startswith(KEPT)]
    if hardware_is_present(asked, machine):
        assert used is asked and replaced == []
        return
    assert used.hardware.platform == machine.platform
    assert used.sched.max_context_tokens <= NANO.max_position_embeddings
    tokens = used.cache.hbm_tokens_per_rank or used.sched.max_rows_per_rank * used.sched.max_context_tokens
    per_rank = used.sched.max_rows_per_rank * NANO.row_bytes + tokens * NANO.kv_bytes_per_token
    assert NANO.weights_bytes + used.ranks * per_rank <= machine.device_gib * 2**30
    assert tokens >= used.sched.max_context_tokens


def test_wide_decode_on_a_laptop_keeps_64_ranks_and_says_what_it_replaced():
    used, replaced = emulate(load_profile("decode-ep64").profile, LAPTOP, NANO)
    assert (used.parallel.ep, used.parallel.dp, used.slots_per_rank(64)) == (64, 64, 2)
    by_key = {r.key: r for r in replaced}
    assert by_key["hardware.platform"].used == "cpu"
    assert by_key["sched.max_context_tokens"].used == 16384
    assert "64 ranks share 4.0 GiB" in by_key["cache.hbm_tokens_per_rank"].reason
    assert by_key["cache.hbm_tokens_per_rank"].used % 128 == 0


def test_kernel_choices_of_an_absent_platform_become_auto():
    sets = ["kernels.backend=triton", "kernels.overrides.rms_norm=flash_mla", "kernels.overrides.rope=reference"]
    used, replaced = emulate(load_profile("decode-ep8", sets).profile, LAPTOP, NANO)
    assert used.kernels.backend == "auto"
    assert used.kernels.overrides == {"rms_norm": "auto", "rope": "reference"}
    assert {"kernels.backend", "kernels.overrides.rms_norm"} <= {r.key for r in replaced}


def test_emulation_is_pure_and_idempotent():
    asked = load_profile("prefill-ep8").profile
    first = emulate(asked, LAPTOP, NANO)
    assert first == emulate(asked, LAPTOP, NANO)
    assert emulate(first[0], LAPTOP, NANO) == (first[0], [])


def test_a_machine_too_small_for_the_mesh_is_refused_with_need_and_have():
    tiny = Machine("cpu", gpus=0, hbm_gib=0.0, ram_gib=0.03, cores=1)
    with pytest.raises(
        CapacityError, match=r"128 virtual ranks do not fit: need 0\.\d+ GiB, this machine has 0\.03"
    ) as e:
        emulate(load_profile("decode-ep128").profile, tiny, NANO)
    assert e.value.exit_code == 3 and "parallel.ep" in (e.value.hint or "")


def test_own_weights_fit_or_are_refused_with_need_have_and_knob():
    profile = load_profile("h200x8").profile
    require_fit(profile, H200, 100 * 2**30)
    with pytest.raises(CapacityError) as info:
        require_fit(profile, H200, 510_286_023_000)
    assert info.value.message == (
        "weights do not fit: need 475.2 GiB, have 139.0 GiB (memory of one sm90 device, 8 ranks in one process)"
    )
    assert "sched.max_rows_per_rank" in (info.value.hint or "") and info.value.exit_code == 3
    with pytest.raises(CapacityError, match=r"have 16\.0 GiB \(host memory\)"):
        require_fit(load_profile("cpu-nano").profile, LAPTOP, 20 * 2**30)


def test_the_plain_laptop_profile_asks_for_nothing_inactive():
    assert inactive_features(load_profile("cpu-nano").profile) == []


def test_inactive_keys_are_the_requested_ones_with_value_and_reason():
    found = {i.key: i for i in inactive_features(load_profile("prefill-ep8").profile)}
    assert found["role"].value == "prefill"
    assert "eplb.period_steps" not in found
    assert "cache.prefix" not in found and "spec.verify" not in found
    assert all(i.reason for i in found.values())
    sets = ["kernels.overrides.rope=cpu", "network.interface=ib*", "requires.cann_min='9.2'"]
    keys = [i.key for i in inactive_features(load_profile("cpu-nano", sets).profile)]
    assert keys == ["network.interface", "requires.cann_min"]


def test_every_entry_of_the_inactive_table_names_a_real_key():
    known = leaves(load_profile("cpu-nano").profile)
    for entry in NOT_BUILT:
        key = entry.key.removesuffix(".*")
        assert any(k == key or k.startswith(key + ".") for k in known), entry.key


def test_defaults_request_nothing_inactive():
    assert inactive_features(load_profile_text("schema_version: 1\nname: a\n", where="x").profile) == []


def test_a_missing_data_folder_says_what_to_do(monkeypatch, tmp_path):
    from deepinfer_engine.config import resources

    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "a")
    monkeypatch.setattr(resources, "_SOURCE_TREE", tmp_path)
    with pytest.raises(NotReadyError, match="no recipes folder"):
        data_dir("recipes")
    (tmp_path / "recipes").mkdir()
    assert data_dir("recipes") == tmp_path / "recipes"
    (tmp_path / "a" / "data" / "recipes").mkdir(parents=True)
    assert data_dir("recipes") == tmp_path / "a" / "data" / "recipes", "the installed files win over a source tree"
