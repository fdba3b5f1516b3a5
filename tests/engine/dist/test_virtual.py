"""Virtual ranks change where experts live, never what is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.dist.share import Share
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import UsageError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import Request, SamplingParams
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_model import write_tiny_model

SIZES = (1, 2, 4, 8, 64, 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_greedy_tokens_are_equal_for_every_expert_parallel_size(model):
    requests = [
        Request(str(i), tuple((5 * i + 11 * j) % 350 + 4 for j in range(9 + 4 * i)), SamplingParams(max_tokens=5))
        for i in range(4)
    ]
    answers = {}
    for ep in SIZES:
        sets = [f"parallel.ep={ep}", f"parallel.dp={ep}", "sched.max_rows_per_rank=2", "sched.max_context_tokens=128"]
        with Engine.open(load_profile("cpu-nano", sets).profile, model, device="cpu") as engine:
            answers[ep] = [c.token_ids for c in engine.generate(requests)]
    assert all(answers[ep] == answers[1] for ep in SIZES)
    assert len(set(answers[1])) > 3


@pytest.mark.parametrize(("mode", "choice"), [("float", "hash"), ("fast", "least_load")])
def test_logits_have_the_same_bits_for_every_expert_parallel_size(model, mode, choice):
    checkpoint = Checkpoint.open(model)
    tokenizer, ops = Tokenizer.from_dir(model), resolve(mode, "cpu", batch_invariant=True)
    layout = KVLayout.of(checkpoint.config, records=ops.numerics.records)
    texts = [[(7 * i + 3 * j) % 350 + 4 for j in range(30 + 9 * i)] for i in range(3)]
    expected = None
    for ep in SIZES:
        sets = [f"parallel.ep={ep}", f"eplb.replica_choice={choice}"]
        loaded = load_model(checkpoint, tokenizer, ops, load_profile("cpu-nano", sets).profile)
        kv = KVState(layout, ops, slots=3, blocks=3)
        rows = [RowInput(t, 0, len(t), i + 1, [i + 1], logits="all") for i, t in enumerate(texts)]
        batch = build_batch(rows, layout, ngram=checkpoint.config.engram_max_ngram_size)
        out = loaded.model.forward(batch, kv, ops, loaded.mesh)
        expected = out if expected is None else expected
        assert torch.equal(out.logits, expected.logits), ep
        assert torch.equal(out.load_LE, expected.load_LE), ep


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_every_rank_is_hosted_by_exactly_one_process(size, width, group):
    ep = size * width * group
    for dp in (d for d in range(1, ep + 1) if ep % d == 0):
        shares = [Share(ep, dp, rank, size) for rank in range(size)]
        assert [r for s in shares for r in s.ranks] == list(range(ep))
        assert [d for s in shares for d in s.dp_ranks] == list(range(dp))
        assert all(shares[0].of(d) == s.rank for s in shares for d in s.dp_ranks)


def test_processes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(UsageError, match="8 expert-parallel ranks do not divide over 3 processes"):
        Share(8, 8, 0, 3)
