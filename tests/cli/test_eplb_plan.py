"""``deepinfer eplb-plan``: what stands on stdout, what is written, and which exit code bad input ends with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from deepinfer_cli.commands.eplb_plan import command
from deepinfer_engine.eplb import foreign_plans, plot, traces
from deepinfer_engine.eplb import plan as plans
from deepinfer_engine.eplb.stats import ExpertStats, write_stats
from deepinfer_engine.errors import DeepInferError, NotReadyError

ROOT = Path(__file__).resolve().parents[2]
app = typer.Typer()
app.command("eplb-plan")(command)

SPEC = traces.TraceSpec(
    experts=24,
    layers=2,
    ranks=4,
    top_k=4,
    tokens_per_rank=150,
    requests=64,
    lifetime_steps=60.0,
    skew=0.9,
    shock=0.05,
    domain_drift=0.004,
)
COUNTS = traces.synthetic(SPEC, 240, 3)


@pytest.fixture
def stats(tmp_path) -> Path:
    path = tmp_path / "stats.npz"
    write_stats(
        ExpertStats(COUNTS[:120].copy(), (3, 4), top_k=4, ep=4, config_digest="cfg", layer_kinds=("full", "reuse")),
        path,
    )
    return path


@pytest.fixture
def later(tmp_path) -> Path:
    path = tmp_path / "later.npz"
    write_stats(ExpertStats(COUNTS[120:].copy(), (3, 4), top_k=4, ep=4, config_digest="cfg"), path)
    return path


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """Statistics of quite other traffic."""
    path = tmp_path / "elsewhere.npz"
    write_stats(ExpertStats(traces.synthetic(SPEC, 120, 8), (3, 4), top_k=4, ep=4, config_digest="cfg"), path)
    return path


def run(*args, loop: str = "numpy") -> Any:
    """stdout of a run that succeeds, or the DeepInferError it ends with."""
    result = CliRunner().invoke(app, [str(a) for a in args] + (["--loop", loop] if loop else []))
    if result.exception is None:
        return result.stdout
    if isinstance(result.exception, SystemExit):
        return result
    if not isinstance(result.exception, DeepInferError):
        raise result.exception
    return result.exception


def test_the_file_alone_is_enough(stats):
    out = run(stats)
    plan = plans.read_plan(stats.with_name("stats.plan.json"))
    assert (plan.ranks, plan.slots_per_rank, plan.layer_ids, plan.digests.config) == (4, 7, (3, 4), "cfg")
    for text in (
        "2 layers x 24 experts on 4 ranks x 7 slots",
        "numpy loop",
        "noise floor",
        "3 full",
        "redundancy",
        "moves from the identity",
        "use this plan",
    ):
        assert text in out
    assert sorted(p.name for p in stats.parent.iterdir()) == ["stats.npz", "stats.plan.json"]


def test_same_bytes_every_time_on_any_number_of_threads(stats, tmp_path):
    outs = []
    for k, threads in enumerate((1, 3, 1)):
        run(stats, "--threads", threads, "--out", tmp_path / f"{k}.json")
        outs.append((tmp_path / f"{k}.json").read_bytes())
    assert outs[0] == outs[1] == outs[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++ is not on the path")
def test_compiled_loop_writes_the_same_file(stats, tmp_path):
    out = run(stats, "--out", tmp_path / "a.json", "--cache-dir", tmp_path / "cache", loop="compiled")
    run(stats, "--out", tmp_path / "b.json")
    assert "compiled loop" in out and (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_auto_says_why_it_runs_numpy(stats, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-g++")
    cache = ("--cache-dir", tmp_path / "cache")
    assert "note: numpy loop (same plan, slower): no C++ compiler" in run(stats, *cache, loop="auto")
    e = run(stats, *cache, loop="compiled")
    assert isinstance(e, NotReadyError) and e.exit_code == 3 and "g++" in (e.hint or "")


def test_json_is_strict_and_complete(stats):
    value = json.loads(run(stats, "--format", "json"), parse_constant=lambda name: pytest.fail(name))
    assert set(value) >= {
        "shape",
        "windows",
        "layers",
        "ladder",
        "moves",
        "colocations",
        "verdict",
        "economics",
        "notes",
        "plan",
        "plan_digest",
    }
    assert value["windows"]["holdout"]["moe_lb"] > 1 and value["windows"]["holdout"]["excess"] is not None
    assert value["plan_digest"] == plans.read_plan(Path(value["plan"])).digest()
    assert any("assumed, not given" in note for note in value["notes"])


def test_silent_layer_is_null_in_json(tmp_path):
    counts = COUNTS[:60].copy()
    counts[:, 0] = 0
    np.savez(tmp_path / "s.npz", counts=counts)
    value = json.loads(run(tmp_path / "s.npz", "--ranks", 4, "--format", "json"))
    assert (
        value["layers"][0]["train"] is None
        and not value["layers"][0]["signal"]
        and any("no signal" in n for n in value["notes"])
    )
    assert plans.read_plan(tmp_path / "s.plan.json").moe_lb_L[0] is None


def test_replan_with_caps_and_exports(stats, elsewhere, tmp_path):
    run(stats)
    old = stats.with_name("stats.plan.json")
    files = {
        kind: tmp_path / f"out.{kind}.{'yaml' if kind == 'trtllm' else 'npz' if kind == 'npz' else 'json'}"
        for kind in foreign_plans.EXPORTS
    }
    args = [a for kind, path in files.items() for a in ("--export", f"{kind}:{path}")]
    out = run(elsewhere, "--old", old, "--move-price", 0, "--max-moves", 5, *args)
    plan = plans.read_plan(elsewhere.with_name("elsewhere.plan.json"))
    moves = plan.moves(plans.read_plan(old))
    assert plan.epoch == 1 and len(moves) > 0 and max(sum(m.layer == k for m in moves) for k in range(2)) <= 5
    assert "moves from the old plan" in out and "--ep-num-redundant-experts 4" in out
    for kind, path in files.items():
        back = foreign_plans.read_any_plan(path, 4, 24)
        assert (back.slot_expert_LRS[-2:] == plan.slot_expert_LRS).all(), kind


def test_keep_writes_the_old_plan(stats, later):
    run(stats)
    old = stats.with_name("stats.plan.json")
    out = run(later, "--old", old, "--move-price", 0, "--moe-ms", 1e-6)
    assert "keep the old plan: gain" in out
    assert later.with_name("later.plan.json").read_bytes() == old.read_bytes()


def test_a_peer_plan_can_be_the_old_one(stats, later, tmp_path):
    run(stats, "--export", f"trtllm:{tmp_path / 'old.yaml'}")
    value = json.loads(run(later, "--old", tmp_path / "old.yaml", "--format", "json", "--no-ladder"))
    assert value["moves"]["mean_per_layer"] < 20 and value["ladder"] == []


def test_failure_keeps_the_dead_rank_empty(stats, later):
    run(stats, "--slots-per-rank", 9)
    out = run(later, "--old", stats.with_name("stats.plan.json"), "--alive", "0-1,3")
    plan = plans.read_plan(later.with_name("later.plan.json"))
    assert (
        plan.dead_ranks == (2,) and plan.slots_per_rank == 9 and "on 3 ranks x 9 slots" in out and "does not fit" in out
    )


def test_physical_counts_under_their_plan(stats, tmp_path):
    run(stats)
    plan = plans.read_plan(stats.with_name("stats.plan.json"))
    physical = np.zeros((120, 2, 28), np.int64)
    for k in range(2):
        seen = set()
        for p, e in enumerate(plan.slot_expert_LRS[k].reshape(-1).tolist()):
            if e not in seen:
                physical[:, k, p] = COUNTS[:120, k, e]
                seen.add(e)
    np.save(tmp_path / "physical.npy", physical)
    run(tmp_path / "physical.npy", "--recorded-under", stats.with_name("stats.plan.json"))
    again = plans.read_plan(tmp_path / "physical.plan.json")
    assert again.same_slots(plan) and again.layer_ids == (3, 4)


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--ranks", 3, "--slots-per-rank", 7], 2, "21 slots for 24 experts"),
        (["--ranks", 2, "--slots-per-rank", 999], 2, "more than 16 replicas"),
        (["--slots-per-rank", 7, "--redundant-per-rank", 1], 2, "both set the slots"),
        (["--alive", "0-9"], 2, "alive rank 4 does not exist"),
        (["--alive", "0,x"], 2, "'x' is not a rank"),
        (["--alive", "3-1"], 2, "'3-1' is not a rank or a range"),
        (["--nodes", 3], 2, "divisor of the 4 ranks"),
        (["--groups", 3, "--nodes", 2], 2, "multiple of the 2 nodes"),
        (["--holdout", 2], 2, "holdout is 2.0"),
        (["--window", 0], 2, "window is 0"),
        (["--window", 999], 2, "the file has 120 steps"),
        (["--move-price", -1], 2, "move price is -1"),
        (["--max-moves", 3], 2, "--max-moves caps moves away from an old plan"),
        (["--threads", 0], 2, "threads is 0"),
        (["--link-gb-s", 0], 2, "link-gb-s is 0"),
        (["--horizon-steps", -5], 2, "horizon-steps is -5"),
        (["--export", "vllm:x"], 2, "expected KIND:PATH"),
        (["--export", "sglang"], 2, "expected KIND:PATH"),
        (["--old", "absent.json"], 2, "absent.json does not exist"),
        (["--bench", "r.yaml"], 2, "makes its own statistics"),
        (["--input", "trtllm"], 2, "is not a folder"),
    ],
)
def test_options_that_cannot_be_honoured(stats, args, code, text):
    e = run(stats, *args)
    assert isinstance(e, DeepInferError) and e.exit_code == code and text in e.message
    assert [p.name for p in stats.parent.iterdir()] == ["stats.npz"]


def test_no_file_at_all():
    e = run()
    assert isinstance(e, DeepInferError) and e.exit_code == 2 and e.hint == "deepinfer eplb-plan stats.npz"


def test_bad_contents_end_with_exit_4(tmp_path, stats):
    bad = COUNTS[:60].astype(np.float64)
    bad[7, 1, 5] = np.nan
    np.savez(tmp_path / "nan.npz", counts=bad, ep=np.int64(4))
    (tmp_path / "cut.npz").write_bytes(stats.read_bytes()[:300])
    (tmp_path / "plan.json").write_text('{"format": "deepinfer.expert_plan"')
    for args, text in (
        ([tmp_path / "nan.npz"], "counts at step 7, layer 1, expert 5 is nan"),
        ([tmp_path / "cut.npz"], "damaged"),
        ([stats, "--old", tmp_path / "plan.json"], "not JSON"),
    ):
        e = run(*args)
        assert isinstance(e, DeepInferError) and e.exit_code == 4 and text in e.message


def test_statistics_of_another_model_end_with_exit_4(stats, tmp_path):
    run(stats)
    write_stats(ExpertStats(COUNTS[:60].copy(), (3, 4), ep=4, config_digest="other"), tmp_path / "o.npz")
    e = run(tmp_path / "o.npz", "--old", stats.with_name("stats.plan.json"))
    assert isinstance(e, DeepInferError) and e.exit_code == 4 and "another model" in e.message


@pytest.mark.parametrize("option", ["--out", "--export"])
def test_inputs_are_not_overwritten(stats, option):
    before = stats.read_bytes()
    e = run(stats, option, stats if option == "--out" else f"npz:{stats}")
    assert isinstance(e, DeepInferError) and e.exit_code == 2 and "is one of the inputs" in e.message
    assert stats.read_bytes() == before


def test_folder_that_cannot_be_written_ends_with_exit_3(stats, tmp_path):
    e = run(stats, "--out", tmp_path / "absent" / "plan.json")
    assert isinstance(e, NotReadyError) and e.exit_code == 3 and "cannot write" in e.message


def test_plot_without_matplotlib_names_the_extra(stats, tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    e = run(stats, "--plot", tmp_path / "x.png")
    assert isinstance(e, NotReadyError) and e.exit_code == 3 and e.hint == "pip install 'deepinfer-cli[plot]'"
    assert not stats.with_name("stats.plan.json").exists()


def test_plot_writes_a_picture(stats, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run(stats, "--plot", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_prints_the_comparison(tmp_path):
    recipe = ROOT / "recipes" / "eplb" / "decode-ep64.yaml"
    text = (
        recipe.read_text().replace("train_steps: 1000", "train_steps: 60").replace("next_steps: 1000", "next_steps: 40")
    )
    text = text.replace("layers: 8", "layers: 1").replace("seeds: [11, 12, 13, 14, 15, 16]", "seeds: [1]")
    (tmp_path / "r.yaml").write_text(text)
    out = run("--bench", tmp_path / "r.yaml", "--out", tmp_path / "r.json")
    assert "deepinfer (numpy)" in out and "longest-first on totals" in out and "noise floor" in out
    value = json.loads((tmp_path / "r.json").read_text())
    assert {row["planner"] for row in value["rows"]} >= {
        "deepinfer (numpy)",
        "greedy on observed peaks",
        "identity layout",
    }


def test_planning_imports_no_torch(stats):
    code = (
        "import sys\nfrom pathlib import Path\nfrom deepinfer_cli.commands.eplb_plan import command\n"
        "import deepinfer_engine.eplb.policy, deepinfer_engine.eplb.plan, deepinfer_engine.eplb.planner\n"
        "from deepinfer_engine.eplb import planner, stats\n"
        f"planner.run_job(planner.Job(stats.read_stats(Path({str(stats)!r}))))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib', 'deepinfer_kernels')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}"},
    )
    assert done.stdout.strip() == "[]", done.stderr
