"""Profiles: every broken one is refused with place and sentence, every good one is traceable and reproducible."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from broken_profiles import BROKEN, GOOD

from deepinfer_cli.main import main
from deepinfer_engine.config import resources
from deepinfer_engine.config.profile import Profile, load_profile, load_profile_text, render_yaml
from deepinfer_engine.config.rules import check_against_model
from deepinfer_engine.config.schema import describe_key, leaves
from deepinfer_engine.errors import ProfileError

SHIPPED = resources.profile_names()


def _complete(loaded) -> str:
    return render_yaml(loaded, [k for k in loaded.origins if k != "extends"], {})


def test_corpus_is_large_enough_and_its_base_is_good():
    assert len(BROKEN) >= 60
    assert len({name for name, _, _ in BROKEN}) == len(BROKEN)
    assert load_profile_text(GOOD, where="good.yaml").profile.parallel.ep == 8


@pytest.mark.parametrize(("text", "fragment"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_profile_is_refused_with_place_and_exit_code_2(text, fragment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["profile", "validate", "p.yaml"]) == 2
    captured = capsys.readouterr()
    assert fragment.replace("@", "p.yaml") in captured.err
    assert "Traceback" not in captured.err
    assert "invalid" in captured.out


def test_all_problems_are_reported_at_once_with_their_lines():
    text = "schema_version: 1\nname: mine\nrole: x\nsched:\n  overlap: 3\n  max_rows: 1\n"
    with pytest.raises(ProfileError) as info:
        load_profile_text(text, where="p.yaml")
    for part in ("p.yaml: 3 problems", "p.yaml:3:7: role", "p.yaml:5:12: sched.overlap", "p.yaml:6:3: unknown key"):
        assert part in info.value.message


@pytest.mark.parametrize(
    ("sets", "fragment"),
    [
        (["sched.overlap"], "has no '='"),
        (["sched.overlap="], "has no value"),
        (["sched.overlp=true"], "--set sched.overlp=true: unknown key 'overlp' in sched; nearest is 'overlap'"),
        (["shed.overlap=true"], "unknown key 'shed'; nearest is 'sched'"),
        (["sched=1"], "sched is a section"),
        (["sched.overlap.x=1"], "sched.overlap has no keys"),
        (["=1"], "unknown key ''"),
        (["sched.overlap=yes"], "--set sched.overlap=yes: sched.overlap is the text 'yes', expected true or false"),
        (["sched.max_rows_per_rank=1e3"], "is the number 1000.0, expected an integer"),
        (["parallel.ep=64", "parallel.ep=32"], "parallel.ep is already set by --set parallel.ep=64"),
        (["name=other"], "name belongs to the file"),
        (["extends=cpu-nano"], "extends belongs to the file"),
        (["kernels.overrides={a: cpu}"], "a section cannot be set as a whole"),
        (["kernels.overrides.a.b=cpu"], "kernels.overrides has no keys"),
        (["parallel.ep=64"], "--set parallel.ep=64: ep 64 needs 64 ranks, the mesh has 8"),
        (["sched.overlap=true\nx: 1"], "the value must be one line"),
        (["sched.overlap=*a"], "aliases are not accepted"),
    ],
)
def test_bad_set_is_refused_by_name(sets, fragment):
    with pytest.raises(ProfileError) as info:
        load_profile_text(GOOD, where="p.yaml", sets=sets)
    assert fragment in info.value.message
    assert info.value.exit_code == 2


def test_set_is_typed_like_a_file_and_has_its_own_origin():
    sets = [
        "sched.overlap=true",
        "numerics.mode=float",
        "hardware.hbm_gib=0x60",
        "kernels.overrides.rms_norm=triton",
        "spec.confidence_temperatures=[1.0, 1.1, 1, 1, 1]",
        'cache.tenant="1e5"',
        "network.interface=null",
    ]
    loaded = load_profile_text(GOOD, where="p.yaml", sets=sets)
    p = loaded.profile
    assert p.sched.overlap is True
    assert p.numerics.mode == "float"
    assert p.hardware.hbm_gib == 96.0
    assert p.kernels.overrides == {"rms_norm": "triton"}
    assert p.spec.confidence_temperatures == (1.0, 1.1, 1.0, 1.0, 1.0)
    assert p.cache.tenant == "1e5"
    assert all(loaded.origins[text.split("=")[0]] == "--set" for text in sets)
    assert loaded.origins["parallel.ep"] == "p.yaml:9"


def test_origins_name_base_file_and_defaults():
    loaded = load_profile("decode-ep128", ["sched.max_rows_per_rank=8"])
    assert loaded.origins["parallel.ep"].startswith("decode-ep128.yaml:")
    assert loaded.origins["hardware.platform"].startswith("decode-ep64.yaml:")
    assert loaded.origins["sched.max_rows_per_rank"] == "--set"
    assert loaded.origins["kernels.backend"] == "default"
    line = int(loaded.origins["parallel.ep"].split(":")[1])
    text = resources.profile_path("decode-ep128").read_text().splitlines()[line - 1]
    assert text.strip().startswith("ep: 128")


def test_role_changes_defaults_only():
    text = GOOD + "role: decode\n"
    loaded = load_profile_text(text, where="p.yaml")
    assert (loaded.profile.eplb.period_steps, loaded.origins["eplb.period_steps"]) == (10_000, "default (role decode)")
    stated = load_profile_text(text + "eplb:\n  period_steps: 0\n", where="p.yaml")
    assert stated.profile.eplb.period_steps == 0
    alone = load_profile_text("schema_version: 1\nname: a\nrole: decode\n", where="p.yaml")
    assert alone.profile.eplb.period_steps == 0, "one rank has nothing to rebalance"


@pytest.mark.parametrize("name", SHIPPED)
def test_resolved_output_reloaded_gives_the_same_digest_and_values(name):
    loaded = load_profile(name)
    again = load_profile_text(_complete(loaded), where="again.yaml")
    assert again.digest == loaded.digest
    assert leaves(again.profile) | {"extends": None} == leaves(loaded.profile) | {"extends": None}
    assert not [k for k, origin in again.origins.items() if origin.startswith("default") and k != "extends"]


def test_digest_moves_with_every_setting_and_not_with_labels():
    base = load_profile_text(GOOD, where="p.yaml").digest
    assert load_profile_text(GOOD.replace("name: mine", "name: other"), where="q.yaml").digest == base
    assert load_profile_text(GOOD, where="p.yaml", sets=["sched.max_rows_per_rank=32"]).digest == base, "the default"
    assert load_profile_text(GOOD, where="p.yaml", sets=["sched.max_rows_per_rank=33"]).digest != base


@pytest.mark.parametrize(
    "tenant", ["off", "1e5", "true", "null", "a b", " x", "ü\u2028\x85", "#", "'", '"\\', "\U0001f600", "010", "\ufeff"]
)
def test_any_text_survives_the_round_trip(tenant):
    import json

    loaded = load_profile_text(GOOD + f"cache:\n  tenant: {json.dumps(tenant)}\n", where="p.yaml")
    assert loaded.profile.cache.tenant == tenant
    assert load_profile_text(_complete(loaded), where="q.yaml").profile.cache.tenant == tenant


def test_extends_a_file_relative_to_the_child_and_blames_the_base_for_its_own_problems(tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD + "sched:\n  overlap: true  # hides host work\n")
    child = tmp_path / "child.yaml"
    child.write_text("schema_version: 1\nname: child\nextends: ./base.yaml\nsched:\n  max_rows_per_rank: 4\n")
    loaded = load_profile(child)
    assert (loaded.profile.sched.overlap, loaded.profile.sched.max_rows_per_rank) == (True, 4)
    assert loaded.reasons["sched.overlap"] == "hides host work"
    (tmp_path / "base.yaml").write_text(GOOD + "sched:\n  overlap: maybe\n")
    with pytest.raises(ProfileError, match=r"base\.yaml:12:12: sched\.overlap is the text 'maybe'"):
        load_profile(child)


def test_unknown_name_offers_the_nearest():
    with pytest.raises(ProfileError, match="'cpu-nan'; nearest is 'cpu-nano'"):
        load_profile("cpu-nan")


def test_every_key_is_described():
    for key in leaves(load_profile("cpu-nano").profile):
        assert describe_key(key), key


def test_profile_is_frozen():
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        load_profile("cpu-nano").profile.sched.overlap = True


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_is_named_after_its_file_and_gives_a_reason_per_value(name):
    loaded = load_profile(name)
    assert loaded.profile.name == name
    assert loaded.profile.description
    labels = {"schema_version", "name", "description", "extends", "role"}
    assert not [k for k in loaded.stated if k not in labels and not loaded.reasons.get(k)]


def test_shipped_profiles_carry_the_published_values():
    assert set(SHIPPED) == {
        "cpu-nano", "h200x1-nano", "h200x8", "prefill-ep4", "prefill-ep8", "decode-ep8", "decode-ep64",
        "decode-ep128", "prefill-ep8-ascend950", "decode-ep64-ascend950",
    }  # fmt: skip
    for name in SHIPPED:
        p = load_profile(name).profile
        if p.role == "prefill":
            assert (p.parallel.redundant_experts_per_rank, p.eplb.window_steps, p.eplb.period_steps) == (4, 100, 1000)
            assert (p.sched.prefill_chunk_tokens, p.replay.decoder, p.cache.swa_pool_ttl_s) == (32768, "bounded", 180)
            assert (p.cache.store.ttl_s.agent, p.cache.store.ttl_s.chat) == (3 * 86400, 7 * 86400)
        if p.role == "decode":
            assert (p.parallel.redundant_experts_per_rank, p.eplb.window_steps, p.eplb.period_steps) == (1, 1000, 10000)
            assert (p.sched.max_rows_per_rank, p.spec.verify, p.spec.draft_tokens) == (60, "adaptive", 5)
        assert p.parallel.ep == p.parallel.dp
        assert not check_against_model(p, 384, max_position_embeddings=1 << 20, window=128, draft_tokens=5)
    cpu = load_profile("cpu-nano").profile
    assert (cpu.parallel.ep, cpu.spec.verify, cpu.eplb.period_steps, cpu.replay.decoder) == (1, "off", 0, "off")
    assert (cpu.hardware.platform, cpu.numerics.mode, cpu.cache.prefix) == ("cpu", "fast", False)
    assert load_profile("decode-ep128").profile.hardware.platform == "sm100"


def _ep(ep: int, redundant: int, **sections) -> Profile:
    return Profile(schema_version=1, name="x", parallel={"ep": ep, "redundant_experts_per_rank": redundant}, **sections)


@pytest.mark.parametrize(
    ("ep", "redundant", "experts", "fragment"),
    [
        (64, 1, 64, None),
        (61, 0, 384, None),  # uneven: 7 slots on each of 61 ranks hold 384 experts
        (128, 1, 64, None),
        (1, 0, 8, None),
        (2, 5, 8, "9 slots per rank for 8 experts; a rank would hold two copies of one"),
        (64, 2, 8, "192 slots for 8 experts, up to 24 copies of one; at most 16 are supported"),
        (128, 0, 8, None),  # 16 copies of each, the most
        (256, 0, 8, "up to 32 copies"),
    ],
)
def test_ep_legality_follows_slots_and_copies(ep, redundant, experts, fragment):
    bad = check_against_model(_ep(ep, redundant), experts)
    assert (bad == []) if fragment is None else (len(bad) == 1 and fragment in bad[0])


def test_model_limits_are_sentences_with_both_numbers():
    p = _ep(1, 0, sched={"max_context_tokens": 4096, "prefill_chunk_tokens": 200},
            spec={"verify": "fixed", "draft_tokens": 7}, replay={"decoder": "bounded"})  # fmt: skip
    bad = check_against_model(p, 8, max_position_embeddings=1024, window=128, draft_tokens=5)
    assert bad[0] == "sched.max_context_tokens 4096 exceeds the model's 1024 positions"
    assert bad[1] == "spec.draft_tokens 7 exceeds the 5 the model drafts"
    assert "needs 262 tokens (window 128 + rollback 6 + block 128)" in bad[2]
    assert check_against_model(p, 8, draft_tokens=0) == ["spec.verify is fixed, the model has no draft blocks"]
