"""Traces with the structure they promise, recipes that are read strictly, and the comparison on recorded routing."""

from __future__ import annotations

import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.eplb import baselines, bench, native, peers, traces
from deepinfer_engine.eplb.loops import NumpyLoops
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError

RECIPES = Path(__file__).resolve().parents[3] / "recipes" / "eplb"


def small(name: str, layers: int, seeds: tuple[int, ...] = (1,)) -> bench.Recipe:
    recipe = bench.read_recipe(RECIPES / f"{name}.yaml")
    assert recipe.trace is not None
    return replace(recipe, trace=replace(recipe.trace, layers=layers), seeds=seeds)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_legal(path):
    recipe = bench.read_recipe(path)
    assert recipe.name == path.stem and recipe.ranks * recipe.slots_per_rank >= (
        recipe.trace.experts if recipe.trace else 64
    )


def test_traces_are_reproducible_and_have_the_tokens_they_promise():
    spec = small("decode-ep64", 1).trace
    assert spec is not None
    a, b, c = (traces.synthetic(spec, 30, seed) for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any()
    assert a.sum(axis=2).mean() == pytest.approx(spec.routed_per_step, rel=0.005)


def test_decode_preset_has_the_published_skew():
    """R1/V3 summary points: hottest expert 6 to 11 means, hottest eighth a quarter to two fifths of the tokens."""
    spec = small("decode-ep64", 12).trace
    assert spec is not None
    totals = traces.synthetic(spec, 40, 3).sum(axis=0)
    ranked = -np.sort(-totals, axis=1)
    assert 5.5 < np.median(ranked[:, 0] / ranked.mean(axis=1)) < 11
    assert 0.26 < np.median(ranked[:, :48].sum(axis=1) / ranked.sum(axis=1)) < 0.42


def test_comparison_ranks_planners_as_measured():
    recipe = replace(small("decode-ep64", 1), train_steps=300, next_steps=200)
    result = bench.run_bench(recipe, NumpyLoops())
    rows = {row.planner: row for row in result.rows}
    ours, greedy, totals = rows["deepinfer (numpy)"], rows["greedy on observed peaks"], rows["longest-first on totals"]
    assert ours.next < greedy.next < totals.next < rows["identity layout"].next and ours.wasted == 0
    assert ours.excess_ratio and ours.excess_ratio < 0.4 and totals.excess_ratio == pytest.approx(1.0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++ is not on the path")
def test_both_loops_are_compared_and_different_plans_are_said(tmp_path, monkeypatch):
    recipe = replace(small("decode-ep64", 1), train_steps=100, next_steps=60)
    result = bench.run_bench(recipe, native.load(tmp_path))
    rows = {row.planner: row for row in result.rows}
    assert rows["deepinfer (compiled)"].next == rows["deepinfer (numpy)"].next
    assert "numpy and compiled loops: the same plans" in result.notes[-1]
    first = NumpyLoops.longest_first
    monkeypatch.setattr(NumpyLoops, "longest_first", staticmethod(lambda w, c, r: first(w, c, r)[::-1]))
    assert "DIFFERENT PLANS" in bench.run_bench(recipe, native.load(tmp_path)).notes[-1]


def test_installed_peers_are_measured_and_absent_ones_named(monkeypatch):
    import torch

    fake = types.ModuleType("eplb")
    fake.__spec__ = types.SimpleNamespace(name="eplb")  # type: ignore[assignment]

    def rebalance_experts(weight, replicas, groups, nodes, gpus):
        rows = [baselines.totals_rule(w[None].numpy(), gpus, replicas // gpus).reshape(-1) for w in weight]
        return torch.from_numpy(np.stack(rows)), None, None

    fake.rebalance_experts = rebalance_experts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "eplb", fake)
    found, missing = peers.installed()
    assert "DeepSeek EPLB" in [p.name for p in found] and all("cannot be imported" in m for m in missing)
    recipe = replace(small("decode-ep64", 1), train_steps=60, next_steps=60)
    rows = {row.planner: row for row in bench.run_bench(recipe, NumpyLoops()).rows}
    assert rows["DeepSeek EPLB"].next == rows["longest-first on totals"].next


def test_a_peer_that_loses_an_expert_is_refused(monkeypatch):
    broken = peers.Peer(
        "broken", "nowhere", lambda counts, ranks, slots: np.zeros((counts.shape[1], ranks, slots), np.int64)
    )
    monkeypatch.setattr(peers, "installed", lambda: ([broken], []))
    with pytest.raises(ArtefactError, match="broken returned an incomplete plan"):
        bench.run_bench(replace(small("decode-ep64", 1), train_steps=10, next_steps=10), NumpyLoops())


REAL = ["real-decode-ep16", "real-decode-ep8-r2", "real-prefill-ep4"]


@pytest.mark.parametrize("name", REAL)
def test_best_on_recorded_routing_of_unseen_sequences(tmp_path, recorded_routing, name):
    for path in recorded_routing:
        shutil.copy(path, tmp_path / path.name)
    shutil.copy(RECIPES / f"{name}.yaml", tmp_path)
    recipe = bench.read_recipe(tmp_path / f"{name}.yaml")
    assert recipe.routing is not None
    steps = min(recipe.train_steps, 200)
    recipe = replace(
        recipe, seeds=(1, 2), train_steps=steps, next_steps=steps, routing=replace(recipe.routing, layer_stride=6)
    )
    rows = {row.planner: row.next for row in bench.run_bench(recipe, NumpyLoops()).rows}
    ours = rows.pop("deepinfer (numpy)")
    assert all(ours < other for other in rows.values())


def test_absent_routing_files_are_asked_for(tmp_path):
    shutil.copy(RECIPES / "real-prefill-ep2.yaml", tmp_path)
    with pytest.raises(NotReadyError, match=r"needs esft_dsv2lite_law\.npz beside the recipe"):
        bench.run_bench(bench.read_recipe(tmp_path / "real-prefill-ep2.yaml"), NumpyLoops())


def test_decode_steps_keep_the_number_of_running_sequences():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 8, (2, n, 3)) for n in (4, 9, 5, 7)]
    spec = traces.RoutingSpec(files=(), ranks=2, mode="decode", tokens_per_step=6)
    a, b = traces.rebatched(spec, sequences, 11, 5, seed=1)
    assert a.shape == (11, 2, 8) and b.shape == (5, 2, 8) and (a.sum(axis=2) == 18).all()
    a, _ = traces.rebatched(replace(spec, mode="prefill"), sequences, 3, 3, seed=1)
    assert (a.sum(axis=2) == 18).all()


GOOD = "name: x\nslots_per_rank: 3\ntrain_steps: 4\nnext_steps: 4\nseeds: [1]\n"
TRACE = (
    "trace: {experts: 8, layers: 1, ranks: 4, top_k: 2, tokens_per_rank: 9, requests: 8, "
    "lifetime_steps: 5.0, skew: 1.0}\n"
)
BAD = {
    "not a mapping": ("[1]", "expected keys"),
    "not yaml": ("a: [", "not YAML"),
    "unknown": (GOOD + TRACE + "extra: 1\n", "unknown key 'extra'"),
    "missing": (TRACE, "name is missing"),
    "negative": (GOOD.replace("rank: 3", "rank: -3") + TRACE, "slots_per_rank is -3"),
    "seeds": (GOOD.replace("[1]", "[]") + TRACE, "seeds is \\[\\]"),
    "neither": (GOOD, "give trace or routing"),
    "unknown field": (GOOD + TRACE.replace("skew", "skews"), "trace: unknown key 'skews'"),
    "type": (GOOD + TRACE.replace("experts: 8", "experts: many"), "trace: experts is 'many', expected int"),
    "incomplete": (GOOD + "trace: {experts: 8}\n", "trace: .*missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_recipes_are_named(tmp_path, name):
    text, message = BAD[name]
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        bench.read_recipe(tmp_path / "r.yaml")
