"""Plans of profiles: mesh, fit and refusal, predictions and their absence, re-forming, drafted profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer_engine.config.profile import load_profile, load_profile_text
from deepinfer_engine.config.resources import profile_names
from deepinfer_engine.cost.account import Workload
from deepinfer_engine.cost.memory import GIB
from deepinfer_engine.errors import ArtefactError, CapacityError, NotReadyError, ProfileError, UsageError
from deepinfer_engine.sim.deployment import Slo, plan_deployment, reform
from deepinfer_engine.sim.draft_profile import Hardware, draft_profile
from deepinfer_engine.sim.models import RELEASE, PlannedModel, find_model, release_config

MODEL = find_model(RELEASE)
WORKLOAD = Workload(77_000, 500, 0.96)


def plan(name, *sets, model=MODEL, slo=None, hbm=None, workload=WORKLOAD):
    profile = load_profile(name, sets).profile
    return plan_deployment(profile, model, workload=workload, slo=slo or Slo(), hbm_gib=hbm)


def figures(found):
    return {f.name: f.value for f in found.predictions}


def test_release_config_is_the_vector_of_the_weights_tests():
    vector = Path(__file__).resolve().parents[2] / "vectors" / "v41-flash-config.json"
    assert find_model(str(vector)).config == release_config()


def test_mesh_counts_slots_and_replicas():
    mesh = plan("decode-ep64").mesh
    assert (mesh.ranks, mesh.hosts, mesh.slots_per_rank, mesh.replicas) == (64, 16, 7, 64)
    uneven = plan("decode-ep64", *reform(load_profile("decode-ep64").profile, 61)).mesh
    assert (uneven.ranks, uneven.slots_per_rank, uneven.replicas) == (61, 8, 61 * 8 - 384)


@pytest.mark.parametrize("name", [n for n in profile_names() if "nano" not in n])
def test_every_shipped_profile_of_the_release_fits_and_is_predicted(name):
    found = plan(name)
    found.require_fit()
    assert found.free_bytes is not None and found.free_bytes > 0
    assert {f.source for f in found.predictions} == {"simulated"}
    assert all(f.value > 0 for f in found.predictions)
    assert found.fits[-1].asked == "context" and found.fits[-1].context >= found.deployment.context


def test_release_on_one_device_is_refused_with_need_have_and_the_knob():
    found = plan("h200x1-nano")
    with pytest.raises(CapacityError, match=r"a rank needs 476\.1 GiB, it has 139\.0 GiB") as caught:
        found.require_fit()
    assert caught.value.exit_code == 3 and "parallel.ep" in str(caught.value.hint)
    assert {f.rows for f in found.fits if f.asked == "rows"} == {0}


def test_the_knob_is_the_one_that_helps():
    def hint(*sets):
        with pytest.raises(CapacityError) as caught:
            plan("h200x8", *sets).require_fit()
        return str(caught.value.hint)

    assert hint("cache.hbm_tokens_per_rank=134217728").startswith("lower cache.hbm_tokens_per_rank to ")
    assert hint("cache.engram_placement=device", "hardware.hbm_gib=75.0") == "set cache.engram_placement to host"
    assert "parallel.ep" in hint("cache.engram_placement=device", "hardware.hbm_gib=30.0")
    assert "numerics.mode to fast" in hint("numerics.mode=reference")
    assert "sched.prefill_chunk_tokens" in hint("sched.prefill_chunk_tokens=524288")
    assert "sched.max_rows_per_rank" in hint("sched.max_rows_per_rank=40000")


@pytest.mark.parametrize(
    "asked",
    ["cache.hbm_tokens_per_rank=134217728", "sched.prefill_chunk_tokens=524288", "sched.max_rows_per_rank=40000"],
)
def test_the_value_in_the_hint_fits_and_the_next_one_does_not(asked):
    with pytest.raises(CapacityError) as caught:
        plan("h200x8", asked).require_fit()
    key, value = asked.partition("=")[0], int(str(caught.value.hint).rsplit(" ", 1)[1])
    assert key in str(caught.value.hint)
    plan("h200x8", f"{key}={value}").require_fit()
    more = value + (1 if "rows" in key else 128)
    with pytest.raises(CapacityError):
        plan("h200x8", f"{key}={more}").require_fit()


def test_a_model_that_cannot_honour_the_profile_is_a_profile_error():
    small = PlannedModel("small", dataclasses.replace(release_config(), n_routed_experts=4))
    with pytest.raises(ProfileError, match="128 slots for 4 experts, up to 32 copies of one"):
        plan("decode-ep64", model=small)


def test_cpu_is_one_process_with_dense_weights():
    found = plan("cpu-nano", "parallel.ep=4", "parallel.dp=4", hbm=2000.0)
    d = found.deployment
    assert (d.ranks, d.slots_per_rank, d.rows, d.weight_bytes) == (1, 384, 64, 2)
    assert found.memory.host_bytes == 0  # host and device are one memory
    assert found.predictions == () and any("nothing is published for cpu" in n for n in found.notes)
    unknown = plan("cpu-nano")
    assert unknown.fits == () and unknown.have_bytes is None
    unknown.require_fit()  # nothing is known, nothing is refused


def test_other_shapes_have_memory_but_no_speeds():
    other = PlannedModel("other", dataclasses.replace(release_config(), num_attention_heads=32))
    found = plan("decode-ep64", model=other)
    assert found.predictions == () and "not for other" in found.notes[-1]


def test_reference_numerics_hold_weights_in_four_bytes():
    tiers = ("cache.host_gib_per_rank=0", "cache.swa_pool_gib_per_rank=0")  # f32 rows are never kept
    found = plan("h200x8", "numerics.mode=float", *tiers)
    assert found.deployment.weight_bytes == 4 and not found.deployment.records


def test_prefill_to_decode_ratio_is_the_published_one():
    found = figures(plan("decode-ep64"))
    assert found["prefill GPUs per decode GPU"] == pytest.approx(1.0, abs=0.1)


def test_tpot_limit_sets_the_rows_and_an_impossible_one_says_so():
    fast, slow = (figures(plan("decode-ep64", slo=Slo(tpot_ms=t))) for t in (4.0, 8.0))
    assert fast["TPOT"] <= 4.0 and slow["TPOT"] <= 8.0
    assert fast["decode rows per rank"] < slow["decode rows per rank"]
    none = plan("decode-ep64", slo=Slo(tpot_ms=1.0))
    assert "no row reaches 1 ms" in none.notes[-1] and "TPOT" not in figures(none)


def test_hits_and_replay_cost_what_they_should():
    warm = figures(plan("prefill-ep4"))
    cold = figures(plan("prefill-ep4", workload=Workload(77_000, 500, 0.0)))
    assert cold["prefill per request"] / warm["prefill per request"] == pytest.approx(77_000 / 3208)
    off = figures(plan("prefill-ep4", "replay.decoder=off"))
    assert 1.8 < warm["prefill throughput"] / off["prefill throughput"] < 2


def test_speculation_off_is_slower_at_the_production_point():
    assert (
        figures(plan("decode-ep64"))["decode throughput"]
        > figures(plan("decode-ep64", "spec.verify=off"))["decode throughput"]
    )


# -------------------------------------------------------------------- healthy


@pytest.mark.parametrize("ranks", [61, 56, 48, 8, 1])
def test_every_width_can_be_formed_again(ranks):
    profile = load_profile("decode-ep64").profile
    smaller = load_profile("decode-ep64", reform(profile, ranks)).profile
    assert smaller.ranks == ranks and smaller.hardware.gpus % smaller.hardware.gpus_per_node == 0
    slots = smaller.slots_per_rank(384)
    assert ranks * slots >= 384


@pytest.mark.parametrize(("name", "ranks", "part"), [
    ("decode-ep64", 0, "expected 1 to 64"), ("decode-ep64", 65, "expected 1 to 64"), ("cpu-nano", 1, "is for cpu"),
])  # fmt: skip
def test_no_degradation_is_refused(name, ranks, part):
    with pytest.raises(UsageError, match=part):
        reform(load_profile(name).profile, ranks)


def test_too_few_healthy_ranks_do_not_fit():
    smaller = load_profile("decode-ep64", reform(load_profile("decode-ep64").profile, 1)).profile
    with pytest.raises(CapacityError, match="a rank needs"):
        plan_deployment(smaller, MODEL, workload=WORKLOAD, slo=Slo()).require_fit()


# -------------------------------------------------------------------- drafted


@pytest.mark.parametrize("platform", ["sm90", "sm100", "ascend950"])
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("gpus", [8, 12, 64])
def test_drafted_profiles_fit_with_their_margin(platform, role, gpus):
    loaded = draft_profile(Hardware(platform, gpus, None, role), MODEL)
    found = plan_deployment(loaded.profile, MODEL, workload=WORKLOAD, slo=Slo())
    found.require_fit()
    assert found.memory.device_bytes <= 0.95 * loaded.profile.hardware.hbm_gib * GIB
    assert loaded.profile.role == role and loaded.profile.ranks == gpus


def test_drafted_profile_takes_rows_and_context_as_asked():
    loaded = draft_profile(Hardware("sm90", 8, 100.0, "both"), MODEL, rows=4, context=32_768)
    p = loaded.profile
    assert (p.sched.max_rows_per_rank, p.sched.max_context_tokens, p.cache.hbm_tokens_per_rank) == (
        4,
        32_768,
        4 * 32_768,
    )
    assert p.hardware.hbm_gib == 100.0
    assert set(loaded.reasons) >= {"parallel.ep", "cache.hbm_tokens_per_rank"}


@pytest.mark.parametrize(
    ("hardware", "context", "error", "part"),
    [
        (Hardware("sm90", 1, None, "both"), None, CapacityError, "not one row of 1,048,576 tokens fits"),
        (Hardware("sm90", 8, 40.0, "both"), 131_072, CapacityError, "not one row of 131,072 tokens fits"),
        (Hardware("cpu", 1, None, "both"), None, UsageError, "no accelerators to plan for"),
        (Hardware("sm90", 0, None, "both"), None, UsageError, "at least one"),
        (Hardware("sm90", 8, None, "both"), 2_000_000, UsageError, "exceeds the model's 1048576"),
    ],
)
def test_hardware_that_cannot_is_refused(hardware, context, error, part):
    with pytest.raises(error, match=part):
        draft_profile(hardware, MODEL, context=context)


# --------------------------------------------------------------------- models


def test_models_are_found_by_name_folder_and_file(tmp_path, monkeypatch):
    from deepinfer_engine.sim import models

    source = Path(models.__file__).resolve().parents[1] / "data" / "configs" / f"{RELEASE}.json"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(source.read_text())
    assert find_model(str(tmp_path / "mine")).name == "mine" and find_model(str(tmp_path / "mine")).is_release
    assert find_model(str(tmp_path / "mine" / "config.json")).name == "mine"

    def absent(name):
        raise NotReadyError("not shipped")

    monkeypatch.setattr(models, "model_dir", absent)
    with pytest.raises(NotReadyError):
        find_model("nano")


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ArtefactError, match="no such file"):
        find_model(str(tmp_path / "absent.json"))
    (tmp_path / "v4.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    with pytest.raises(ArtefactError, match="deepseek_v4"):
        find_model(str(tmp_path / "v4.json"))


def test_minimal_profile_is_planned():
    p = load_profile_text("schema_version: 1\nname: tiny\n", where="tiny").profile
    found = plan_deployment(p, MODEL, workload=WORKLOAD, slo=Slo(), hbm_gib=1200.0)
    assert found.mesh.replicas == 0
