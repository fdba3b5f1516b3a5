"""The definitions and measures that level 1 and 2 rest on."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_engine.errors import UsageError
from deepinfer_engine.verify.yoco_level2 import Budget, _gap, measure_drift
from deepinfer_engine.verify.yoco_oracle import Case, Sizes, decoder_rows, expect, pivots
from deepinfer_engine.verify.yoco_play import _accepted
from deepinfer_engine.verify.yoco_subject import mutate

RELEASE = Sizes(window=128, drafts=5, layers=40, cut=20, block=128)


def test_definition_of_the_worked_example():
    want = expect(RELEASE, Case(1000, 896, frozenset(), "bounded", "bounded"))
    assert (want.cap, want.reused, want.start, want.pivot, want.mode) == (768, 768, 640, 872, "replay")
    assert (want.low_encoder, want.low_decoder) == (640, 872)
    assert decoder_rows(RELEASE, "exact") == 2541
    assert pivots(128, 100, 400) == [128, 256, 384] and pivots(128, 128, 255) == []


def test_drift_of_equal_and_of_known_distributions():
    want = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]))
    got = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]))
    same = measure_drift("same", want, want, window=1)
    assert (same.mean_kl, same.top1, same.overlap, same.late_kl) == (0.0, 1.0, 1.0, 0.0)
    drift = measure_drift("moved", got, want, window=1)
    assert drift.max_kl == pytest.approx(0.25 * math.log(2))
    assert drift.mean_kl == pytest.approx(0.125 * math.log(2))
    assert drift.top1 == 0.5 and drift.late_kl == 0.0 and drift.max_logprob == pytest.approx(math.log(2))
    assert same.within(Budget()) and not drift.within(Budget())


def test_a_gap_is_never_hidden_by_nan_or_shape():
    assert _gap(torch.zeros(2), torch.tensor([0.0, math.nan])) == math.inf
    assert _gap(torch.zeros(2), torch.zeros(3)) == math.inf
    assert _gap(torch.zeros(0), torch.zeros(0)) == 0.0


def test_verify_steps_stop_one_short_of_a_pivot_and_cross_it_alone():
    at, starts = 300, []
    while at < 499:
        at += _accepted(at, 500, 5, len(starts))
        starts.append(at)
    assert 383 in starts and starts[starts.index(383) + 1] == 384
    assert at == 499


def test_an_unknown_mutation_is_refused():
    with pytest.raises(UsageError, match="no mutation 'nothing'"):
        mutate("nothing")
