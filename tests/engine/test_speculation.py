"""Answers with drafts are the answers without, token for token, whatever is drafted and however much is accepted.

A scripted drafter knows the answer and is wrong where a random pattern wants it, so every number of accepted drafts
occurs at every phase of windows (16 tokens), pairs and blocks (128 tokens). ``float`` numerics: only real faults flip
a token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.model.draft import Proposals
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.spec.planner import BudgetPlanner, Choice
from deepinfer_engine.types import Completion, Request, SamplingParams
from tests.tiny_model import write_tiny_model

GOLDEN = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
BASE = ("sched.max_context_tokens=1024", "cache.hbm_tokens_per_rank=32768", "cache.prefix=false", "sched.overlap=false")


@dataclass
class Scripted:
    """Drafts the known answer of whoever holds the slot, with mistakes after a random number of tokens."""

    inner: Any
    engine: Engine
    answers: Mapping[str, tuple[int, ...]]
    rng: random.Random
    confident: bool = False
    planned: Counter[int] = field(default_factory=Counter)

    def write_context(self, taps, position, ring_slot, kv, ops) -> None:
        self.inner.write_context(taps, position, ring_slot, kv, ops)

    def propose(self, anchors, kv, ops, choose, tokens=None) -> Proposals:
        holder = {seq.slot: seq for seq in list(self.engine.scheduler.running.values())}
        assert tokens is not None
        rows = []
        for slot, position in zip(anchors.ring_slot.tolist(), anchors.position.tolist(), strict=True):
            seq = holder.get(slot)
            known = () if seq is None else (*seq.request.token_ids, *self.answers[seq.request.id])
            right = self.rng.randrange(tokens + 1)
            self.planned[right] += 1
            row = [known[p] if p < len(known) else 3 for p in range(position + 1, position + 1 + tokens)]
            for k in range(right, tokens):
                if k == right or self.rng.random() < 0.5:
                    row[k] = (row[k] + 1 + self.rng.randrange(300)) % 360
            rows.append(row)
        drafts = torch.tensor(rows)
        confidence = torch.zeros(drafts.shape)
        if self.confident:  # of any size: it decides how the budget is shared, and nothing else
            confidence.copy_(torch.tensor([[self.rng.gauss(0, 3) for _ in row] for row in rows]))
        return Proposals(drafts, confidence, torch.zeros(*drafts.shape, 1), torch.zeros(0))


def work(count: int, new: int, prompts: int, **sampling: Any) -> list[Request]:
    rng = random.Random(prompts)
    params = SamplingParams(**{"max_tokens": new, "ignore_eos": True, **sampling})
    return [
        Request(f"r{i}", tuple(rng.randrange(3, 350) for _ in range(rng.randrange(1, 140))), params)
        for i in range(count)
    ]


def open_engine(model: Path = GOLDEN, *sets: str) -> Engine:
    merged = dict(text.split("=", 1) for text in (*BASE, *sets))
    return Engine.open(
        load_profile("cpu-nano", [f"{k}={v}" for k, v in merged.items()]).profile,
        model,
        device="cpu",
        lane=ThreadLane(),
    )


def plain_answers(requests: list[Request], *sets: str) -> dict[str, Completion]:
    return _plain(tuple(requests), sets)


@cache
def _plain(requests: tuple[Request, ...], sets: tuple[str, ...]) -> dict[str, Completion]:
    with open_engine(GOLDEN, "numerics.mode=float", *sets) as engine:
        return {c.request_id: c for c in engine.generate(requests)}


def scripted(engine: Engine, answers: Mapping[str, tuple[int, ...]], seed: int = 1) -> Scripted:
    spec = engine.runner.speculation
    assert spec is not None
    script = Scripted(spec.drafter, engine, answers, random.Random(seed))
    spec.drafter = script
    return script


@pytest.mark.parametrize(
    ("rows", "new"),
    [(32, 64), pytest.param(64, 160, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["2k", "10k"],
)
def test_scripted_acceptance_gives_the_tokens_of_plain_decoding(rows, new):
    requests = work(rows, new, rows)
    rows_set = f"sched.max_rows_per_rank={rows}"
    plain = {k: c.token_ids for k, c in plain_answers(requests, rows_set).items()}
    for overlap in ("false", "true"):
        sets = ("numerics.mode=float", rows_set, "spec.verify=fixed", f"sched.overlap={overlap}")
        with open_engine(GOLDEN, *sets) as engine:
            script = scripted(engine, plain)
            done = {c.request_id: c for c in engine.generate(requests)}
        assert {k: c.token_ids for k, c in done.items()} == plain
        assert set(script.planned) == set(range(6))
        accepted = sum(c.usage.accepted for c in done.values())
        drafted = sum(c.usage.drafted for c in done.values())
        assert 0.2 < accepted / drafted < 0.6
        assert engine.drafts.accepted == accepted
        assert 2.0 < engine.drafts.tokens_per_row < 4.0
        assert engine.steps < new * 0.75


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
MIXED: tuple[dict[str, Any], ...] = (
    {},
    SAMPLED,
    {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logprobs": True, "top_logprobs": 2, "logit_bias": {"17": 3.0}},
    {**SAMPLED, "top_k": 20, "min_p": 0.02, "logprobs": True, "stop_token_ids": tuple(range(40, 70))},
    {"ignore_eos": False, "stop": ("e", "the")},
    {**SAMPLED, "banned_token_ids": (5, 6, 7), "max_tokens": 1},
    {"max_tokens": 2},
)


def mixed(new: int, seed: int = 3) -> list[Request]:
    return [
        Request(r.id, r.token_ids, SamplingParams(**{"max_tokens": new, "ignore_eos": True, **MIXED[i % len(MIXED)]}))
        for i, r in enumerate(work(2 * len(MIXED), new, seed))
    ]


def same(got: Completion, want: Completion) -> None:
    for name in ("token_ids", "finish_reason", "stop_reason", "text", "tail", "error"):
        assert getattr(got, name) == getattr(want, name), (got.request_id, name)
    assert got.usage.generated == want.usage.generated
    assert (got.logprobs is None) == (want.logprobs is None)
    for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_mixed_batch_answers_as_without_drafts(overlap):
    """Seeds, penalties, filters, stops and limits in one batch; the model's own blocks draft."""
    requests = mixed(30)
    want = plain_answers(requests)
    with open_engine(GOLDEN, "numerics.mode=float", "spec.verify=fixed", f"sched.overlap={overlap}") as engine:
        done = engine.generate(requests)
    for completion in done:
        same(completion, want[completion.request_id])
    assert sum(c.usage.accepted for c in done) > 0
    assert all(c.usage.accepted <= c.usage.drafted for c in done)


class AnyBudget:
    """Chooses none, all or any number of drafts for every step."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.observed = 0
        self.ways: Counter[str] = Counter()

    def observe(self, survival_BJ) -> None:
        assert survival_BJ.shape[1] == 5 and (np.diff(survival_BJ, axis=1) <= 0).all()
        self.observed += 1

    def outcome(self, hoped: float, accepted: int) -> None:
        assert hoped >= 0 and accepted >= 0

    def plan(self, rows: int) -> Choice:
        way = self.rng.choice(("off", "fixed", "adaptive", "adaptive"))
        self.ways[way] += 1
        return Choice(way, self.rng.randrange(0, 5 * rows + 1), 0.0)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_any_budget_shared_out_on_the_device_gives_the_same_answers(overlap):
    requests = mixed(30)
    want = plain_answers(requests)
    with open_engine(GOLDEN, "numerics.mode=float", "spec.verify=fixed", f"sched.overlap={overlap}") as engine:
        planner = AnyBudget()
        engine.scheduler.planner = cast(BudgetPlanner, planner)
        answers = {k: c.token_ids for k, c in want.items()}
        script = scripted(engine, answers)
        script.confident = True
        done = engine.generate(requests)
    for completion in done:
        same(completion, want[completion.request_id])
    assert planner.observed > 5 and min(planner.ways.values()) > 3
    assert 0 < sum(c.usage.accepted for c in done) < sum(c.usage.drafted for c in done)


def test_adaptive_measures_its_curve_once_and_keeps_it(tmp_path):
    requests = work(3, 12, 5)
    want = {k: c.token_ids for k, c in plain_answers(requests).items()}
    sets = ("numerics.mode=float", "spec.verify=adaptive", "sched.max_rows_per_rank=3", f"kernels.cache_dir={tmp_path}")
    curves = []
    for _ in range(2):
        with open_engine(GOLDEN, *sets) as engine:
            assert engine.scheduler.planner is not None
            curve = engine.scheduler.planner.curve
            curves.append(curve)
            assert curve.rows == (1, 2, 3) and curve.drafts[-1] == 5
            assert {c.request_id: c.token_ids for c in engine.generate(requests)} == want
    assert len(list(tmp_path.glob("curve-*.json"))) == 1
    assert curves[0] == curves[1], "a second measurement would differ"


@pytest.mark.parametrize("vector", ["[1,1,0,1,1]", "[1,1,1]"])
def test_confidence_temperatures_are_checked(vector):
    with pytest.raises(DeepInferError) as refused:
        open_engine(GOLDEN, "spec.verify=fixed", f"spec.confidence_temperatures={vector}")
    assert refused.value.exit_code == 2


def test_a_seed_that_adaptive_rejection_cannot_keep_is_refused():
    with open_engine(GOLDEN, "spec.verify=fixed", "spec.mode=rejection") as engine:
        spec = engine.profile.spec.model_copy(update={"verify": "adaptive"})
        engine.profile = engine.profile.model_copy(update={"spec": spec})
        with pytest.raises(DeepInferError, match=r"spec\.mode rejection and spec\.verify adaptive") as refused:
            engine.submit(work(1, 4, 1, temperature=1.0, seed=3)[0])
        assert refused.value.exit_code == 2


def test_rejection_answers_every_request():
    """The law is tested with the operations; here, that the loop feeds them: filters, penalties, limits, stops."""
    requests = mixed(24)
    plain = plain_answers(requests)
    with open_engine(
        GOLDEN, "numerics.mode=float", "spec.verify=fixed", "spec.mode=rejection", "sched.overlap=true"
    ) as engine:
        done = engine.generate(requests)
    assert sum(c.usage.accepted for c in done) > 0
    for request, completion in zip(requests, done, strict=True):
        if request.sampling.temperature == 0:
            same(completion, plain[request.id])
        assert len(completion.token_ids) <= request.sampling.max_tokens and completion.error is None
        assert not set(completion.token_ids) & set(request.sampling.banned_token_ids)


@pytest.mark.parametrize("tokens", [1, 3])
def test_fewer_drafts_than_the_block_holds(tokens):
    requests = work(6, 20, 9, **SAMPLED)
    want = plain_answers(requests)
    sets = ("numerics.mode=float", "spec.verify=fixed", f"spec.draft_tokens={tokens}", "sched.overlap=true")
    with open_engine(GOLDEN, *sets) as engine:
        answers = {k: c.token_ids for k, c in want.items()}
        scripted(engine, answers)
        assert {c.request_id: c.token_ids for c in engine.generate(requests)} == answers


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_preemption_and_abort_in_the_middle_change_no_other_answer(overlap):
    """Two rows grow to three blocks each and there are four; one request is aborted on its way."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(range(9 + i, 119 + 4 * i)), params) for i in range(3)]
    want = {k: c.token_ids for k, c in plain_answers(requests).items()}
    sets = (
        "numerics.mode=float",
        "spec.verify=fixed",
        f"sched.overlap={overlap}",
        "cache.hbm_tokens_per_rank=512",
        "sched.max_context_tokens=384",
    )
    with open_engine(GOLDEN, *sets) as engine:
        scripted(engine, want)
        for request in requests:
            engine.submit(request)
        done: dict[str, Completion] = {}
        while engine.busy:
            done |= {e.request_id: e for e in engine.step() if isinstance(e, Completion)}
            if any(q.request.id == "r2" and q.num_generated > 20 for q in engine.scheduler.running.values()):
                done |= {c.request_id: c for c in engine.abort("r2")}
        preempted = engine.scheduler.preemptions
    assert preempted > 0
    assert done["r2"].finish_reason == "abort"
    cut = done.pop("r2").token_ids
    assert cut == want.pop("r2")[: len(cut)]
    assert {k: c.token_ids for k, c in done.items()} == want


def test_shared_prefixes_and_replay_under_drafts(tmp_path):
    """Batch-invariant ``fast`` is bitwise: a second round that reuses blocks and windows answers the same."""
    model = write_tiny_model(tmp_path / "tiny")
    sets = ("cache.prefix=true", "cache.swa_pool_gib_per_rank=0.01", "cache.host_gib_per_rank=0.01",
            "replay.decoder=exact", "numerics.batch_invariant=true", "numerics.mode=fast")  # fmt: skip
    rng = random.Random(5)
    options: dict[str, Any] = {"ignore_eos": True, "banned_token_ids": tuple(range(378, 388))}
    first = [
        Request(f"a{i}", tuple(rng.randrange(11, 370) for _ in range(250)), SamplingParams(**options, max_tokens=40))
        for i in range(3)
    ]
    rounds = {}
    for verify in ("off", "fixed"):
        with open_engine(model, *sets, f"spec.verify={verify}", "sched.overlap=true") as engine:
            one = engine.generate(first)
            again = [
                Request(f"b{i}", (*r.token_ids, *c.token_ids, 20 + i), SamplingParams(**options, max_tokens=30))
                for i, (r, c) in enumerate(zip(first, one, strict=True))
            ]
            two = engine.generate(again)
            rounds[verify] = ([c.token_ids for c in one], [c.token_ids for c in two])
            assert all(c.usage.cached >= 128 for c in two)
    assert rounds["fixed"] == rounds["off"]


def test_a_checkpoint_without_draft_blocks_runs_without_speculation_only(tmp_path):
    whole = write_tiny_model(tmp_path / "whole")
    without = tmp_path / "without"
    _copy_without(whole, without, lambda name: name.startswith("mtp."))
    requests = work(1, 4, 1)
    with open_engine(without, "spec.verify=off") as engine:
        assert len(engine.generate(requests)[0].token_ids) == 4
    with pytest.raises(DeepInferError, match="holds no draft weights") as refused:
        open_engine(without, "spec.verify=fixed")
    assert refused.value.exit_code == 4
    partly = tmp_path / "partly"
    _copy_without(whole, partly, lambda name: name == "mtp.1.norm.weight")
    for verify in ("off", "fixed"):
        with pytest.raises(DeepInferError, match=r"mtp\.1\.norm\.weight") as refused:
            open_engine(partly, f"spec.verify={verify}")
        assert refused.value.exit_code == 4


def _copy_without(source: Path, target: Path, gone: Any) -> None:
    """The checkpoint in one shard, without some tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir()
    tensors = {}
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as shard:
                tensors |= {name: shard.get_tensor(name) for name in shard.keys() if not gone(name)}  # noqa: SIM118
        elif not file.name.endswith("index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors")
