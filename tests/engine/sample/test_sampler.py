"""Drawing: exact distribution (chi-square), penalties and masks against plain loops, failures of single rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.sample.sampler import NON_FINITE, NOTHING_ALLOWED, Sampler, choice_seed, token_bits
from deepinfer_engine.types import Request, SamplingParams, Sequence
from deepinfer_kernels.registry import resolve

V = 40
OPS = resolve("float", "cpu")


def row(prompt: list[int], answer: list[int], uid: int = 0, seed: int = 1, **settings) -> Sequence:
    request = Request(str(uid), tuple(prompt), SamplingParams(**settings))
    return Sequence(request, [*prompt, *answer], len(prompt), seed, uid=uid)


def exact(logits: np.ndarray, prompt: list[int], answer: list[int], p: SamplingParams) -> np.ndarray:
    """The distribution, token by token, with no library but arithmetic."""
    x = [float(v) for v in logits]
    for t in range(len(x)):
        if t in prompt or t in answer:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        count = answer.count(t)
        x[t] -= p.frequency_penalty * count + (p.presence_penalty if count else 0)
        x[t] += dict(p.logit_bias).get(t, 0.0)
        if t in p.banned_token_ids or (p.allowed_token_ids is not None and t not in p.allowed_token_ids):
            x[t] = -math.inf
    x = [v / p.temperature for v in x]
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if p.top_k:
        order = order[: p.top_k]
    top = x[order[0]]
    mass = [math.exp(x[t] - top) for t in order]
    total = sum(mass)
    kept, before = {}, 0.0
    for t, m in zip(order, mass, strict=True):
        if before / total < p.top_p and m >= p.min_p * mass[0]:
            kept[t] = m
        before += m
    out = np.zeros(len(x))
    for t, m in kept.items():
        out[t] = m / sum(kept.values())
    return out


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 9: -100.0}, "banned_token_ids": (0, 1)},
    {"temperature": 1.5, "allowed_token_ids": (2, 3, 5, 7, 11), "top_p": 0.95},
]


@pytest.mark.parametrize("settings", CASES, ids=lambda s: ",".join(s))
def test_drawn_tokens_follow_the_exact_distribution(settings: dict):
    n, prompt, answer = 20_000, [3, 4, 5], [5, 6, 6, 6]
    logits = np.random.default_rng(7).normal(0, 2, V).astype(np.float32)
    expected = exact(logits, prompt, answer, SamplingParams(**settings))
    sampler = Sampler(OPS, V, "cpu")
    inputs = sampler.prepare([row(prompt, answer, **settings)], {})
    once = torch.from_numpy(logits).unsqueeze(0)
    adjusted = once if inputs.adjust is None else OPS.adjust_logits(once, **inputs.adjust)
    # one stream, many positions: the noise of a position is independent of the others'
    filters = {k: v.expand(n) for k, v in inputs.filters.items()} | {"position": torch.arange(n)}
    ids = OPS.next_tokens(once.expand(n, V), adjusted.expand(n, V), filters)
    seen = torch.bincount(ids, minlength=V).numpy()
    assert seen[expected == 0].sum() == 0
    big = expected * n >= 5
    chi = float((((seen - n * expected) ** 2)[big] / (n * expected[big])).sum())
    dof = int(big.sum()) - 1
    assert chi < dof + 4 * math.sqrt(2 * dof) + 4, (chi, dof)


def test_noise_of_streams_seeds_and_positions_is_independent():
    logits = torch.zeros(1, 2).expand(4096, 2)
    one = torch.ones(4096)
    base = {"temperature": one, "top_k": one.long() * 0, "top_p": one, "min_p": one * 0}
    by_position = OPS.next_tokens(logits, None, base | {"seed": one.long(), "position": torch.arange(4096)}).double()
    by_seed = OPS.next_tokens(logits, None, base | {"seed": torch.arange(4096), "position": one.long()}).double()
    for bits in (by_position, by_seed):
        assert abs(float(bits.mean()) - 0.5) < 4 * 0.5 / 64
        lagged = ((bits[1:] - 0.5) * (bits[:-1] - 0.5)).mean()
        assert abs(float(lagged)) < 4 * 0.25 / 64


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_row_draws_the_same_alone_and_among_others(seed: int, others: int):
    rng = np.random.default_rng(seed)
    rows = [
        row(
            rng.integers(0, V, 5).tolist(),
            rng.integers(0, V, 4).tolist(),
            uid=i,
            seed=int(rng.integers(0, 2**62)),
            **CASES[int(rng.integers(0, len(CASES)))] | ({"temperature": 0.0} if i % 3 == 2 else {}),
        )
        for i in range(others + 1)
    ]
    logits = torch.from_numpy(rng.normal(0, 3, (len(rows), V)).astype(np.float32))
    together = Sampler(OPS, V, "cpu")
    ids = together.draw(logits, together.prepare(rows, {})).ids
    for i, seq in enumerate(rows):
        alone = Sampler(OPS, V, "cpu")
        assert alone.draw(logits[i : i + 1], alone.prepare([seq], {})).ids.tolist() == [int(ids[i])]


def test_greedy_takes_the_lowest_id_of_equals_and_sees_penalties():
    logits = torch.zeros(2, V)
    logits[:, [5, 9]] = 2.0
    sampler = Sampler(OPS, V, "cpu")
    rows = [row([1], [], uid=0), row([1], [5], uid=1, frequency_penalty=1.0)]
    assert sampler.draw(logits, sampler.prepare(rows, {})).ids.tolist() == [5, 9]


def test_a_row_with_bad_logits_fails_alone():
    logits = torch.zeros(4, V)
    logits[1, 3], logits[2, 0] = math.nan, math.inf
    rows = [row([1], [], uid=i, temperature=0.5 * (i == 3)) for i in range(4)]
    sampler = Sampler(OPS, V, "cpu")
    ids = sampler.draw(logits, sampler.prepare(rows, {})).ids.tolist()
    assert ids[1:3] == [NON_FINITE, NON_FINITE] and ids[0] == 0 and ids[3] >= 0


def test_masks_restrict_and_an_empty_one_is_told_apart():
    logits = torch.arange(V, dtype=torch.float32).expand(3, V)
    rows = [row([1], [], uid=i, banned_token_ids=(7,) if i == 0 else ()) for i in range(3)]
    masks = {0: token_bits(V, (3, 7), ()), 1: token_bits(V, (), ())}
    sampler = Sampler(OPS, V, "cpu")
    assert sampler.draw(logits, sampler.prepare(rows, masks)).ids.tolist() == [3, NOTHING_ALLOWED, V - 1]


def test_logprobs_are_the_models_own():
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(3))
    logits[0, 4] = logits[0, 6] = logits[0].max() + 1
    rows = [
        row([1], [], uid=0, logprobs=True, top_logprobs=3, banned_token_ids=(4,)),
        row([1], [], uid=1),
    ]
    sampler = Sampler(OPS, V, "cpu")
    draws = sampler.draw(logits, sampler.prepare(rows, {}))
    assert draws.ids[0] == 6 and draws.wanted.tolist() == [0]
    own = torch.log_softmax(logits[0].double(), 0)
    assert abs(float(draws.logprob[0]) - float(own[6])) < 1e-5
    assert draws.top_ids[0, :2].tolist() == [4, 6]
    assert torch.allclose(draws.top_values[0].double(), own[draws.top_ids[0]], atol=1e-5)


def test_answer_counts_continue_where_they_stopped():
    sampler = Sampler(OPS, V, "cpu")
    seq = row([1, 2], [3], frequency_penalty=0.5)
    for _ in range(3):
        inputs = sampler.prepare([seq], {})
        counts = dict(zip(inputs.adjust["token"].tolist(), inputs.adjust["count"].tolist(), strict=True))
        assert counts == {t: seq.token_ids[2:].count(t) for t in set(seq.token_ids[2:])}
        seq.token_ids += [3, 4]


def test_choices_have_streams_of_their_own():
    assert choice_seed(5, 0) == 5
    seeds = {choice_seed(s, i) for s in range(100) for i in range(20)}
    assert len(seeds) == 2000 and all(0 <= s < 2**64 for s in seeds)
