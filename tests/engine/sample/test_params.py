"""One validation for every entrance: types, ranges, booleans that are no numbers, NaN."""

from __future__ import annotations

import math

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sample.params import sampling_from
from deepinfer_engine.types import SamplingParams

BAD = [
    ("temperature", -0.1), ("temperature", 100.5), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", True), ("temperature", "1"), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", False),
    ("top_k", -1), ("top_k", 1.0), ("top_k", True), ("top_k", "5"),
    ("min_p", -0.1), ("min_p", 1.5), ("min_p", math.nan),
    ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", True), ("max_tokens", 2**40),
    ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("seed", False),
    ("ignore_eos", 1), ("ignore_eos", "yes"),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
    ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": True}), ("logit_bias", [5]),
    ("logit_bias", {"5": 1, 5: 2}), ("logit_bias", {"-5": 1}), ("logit_bias", 3),
    ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 3), ("top_logprobs", True),
    ("allowed_token_ids", []), ("allowed_token_ids", "12"), ("allowed_token_ids", [1, -1]), ("allowed_token_ids", 5),
    ("banned_token_ids", [True]), ("banned_token_ids", [1.0]),
    ("n", 0), ("n", 129), ("n", True), ("n", 1.0),
    ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", 1), ("stop", ["a"] * 65),
    ("stop_token_ids", [None]), ("stop_token_ids", "ab"), ("stop_scope", "thinking"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_by_name_at_every_entrance(name: str, value: object):
    for enter in (lambda: SamplingParams(**{name: value}), lambda: sampling_from({name: value}, SamplingParams())):
        with pytest.raises(UsageError, match=name):
            enter()


def test_good_values_are_normalised():
    p = sampling_from(
        {"temperature": 1, "stop": "END", "logit_bias": {"7": -100, "3": 2}, "seed": None, "max_completion_tokens": 9},
        SamplingParams(seed=5, top_k=4),
    )
    assert (p.temperature, p.stop, p.max_tokens, p.seed, p.top_k) == (1.0, ("END",), 9, 5, 4)
    assert p.logit_bias == ((3, 2.0), (7, -100.0))
    assert SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(1,)).adjusts_logits
    assert not SamplingParams(temperature=0.7, top_p=0.5).adjusts_logits


def test_contradictions_are_refused():
    with pytest.raises(UsageError, match="differ"):
        sampling_from({"max_tokens": 3, "max_completion_tokens": 4}, SamplingParams())
    with pytest.raises(UsageError, match="leaves no token"):
        SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(1, 2, 3))
