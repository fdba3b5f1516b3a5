"""Speculation changes nothing: token for token when coupled, in distribution with rejection, on small vocabularies.

The chi-square test is itself tested: verify lengths that depend on the drawn tokens make it fail.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from deepinfer_engine.sample.sampler import NON_FINITE, NOTHING_ALLOWED, Sampler, token_bits
from deepinfer_engine.spec.accept import FAILED, FULL, GOES_ON, STOPPED, DraftBlock, draft_token, verify
from deepinfer_engine.spec.budget import split_budget
from deepinfer_engine.types import Request, SamplingParams, Sequence
from deepinfer_kernels.registry import resolve
from tests.kernels.packing import packed

OPS = resolve("float", "cpu")
V, J = 6, 3
RNG = np.random.default_rng(11)
#: next-token logits of a target and a drafter that know the last token only
TARGET = torch.from_numpy(RNG.normal(0, 1.5, (V, V)).astype(np.float32))
DRAFTER = TARGET + torch.from_numpy(RNG.normal(0, 1.0, (V, V)).astype(np.float32))

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {1: 1.5, 4: -2.0}, "banned_token_ids": (0,)},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": -0.5},
]


def sequences(n: int, seed0: int = 0, **settings) -> list[Sequence]:
    params = SamplingParams(**settings)
    request = Request("r", (2, 5), params)
    return [Sequence(request, [2, 5], 2, seed0 + i, uid=i) for i in range(n)]


def no_successor(token: int) -> np.ndarray:
    """A toy grammar: a token is never followed by the next number."""
    return token_bits(V, None, ((token + 1) % V,))


def draft(rows: list[Sequence], filters, mode) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A block of drafts, each from the drafter's law after the one before it."""
    ids, laws = [], []
    last = torch.tensor([s.token_ids[-1] for s in rows])
    for place in range(J):
        last, law = draft_token(OPS, DRAFTER[last], filters, place=place, mode=mode)
        ids.append(last)
        laws.append(law)
    return torch.stack(ids, 1), None if laws[0] is None else torch.stack(laws, 1)


def speculate(rows, lengths, *, mode: str, grammar: bool = False, room=None, stops=None, logits_of=None):
    """One verify step over all rows: ``lengths(drafts)`` gives how many drafts are under test; returns the verdict."""
    sampler = Sampler(OPS, V, "cpu")
    probe = sampler.prepare(rows, {}).filters
    ids, laws = draft(rows, probe, mode)
    masks = {}
    if grammar:
        for b, seq in enumerate(rows):
            masks[seq.uid] = np.stack([no_successor(t) for t in [seq.token_ids[-1], *ids[b].tolist()]])
    room = room or [s.max_len - len(s.token_ids) for s in rows]
    inputs = sampler.prepare_verify(rows, masks, places=J + 1, stops=stops or [()] * len(rows), room=room)
    length = torch.as_tensor(lengths(ids))
    total = int(length.sum()) + len(rows) + 2
    first, row, offset = packed(length, total)
    known = torch.cat((torch.tensor([[s.token_ids[-1]] for s in rows]), ids), 1)
    logits = TARGET[known[row.clamp(min=0), offset]]
    if logits_of is not None:
        logits = logits_of(logits)
    return verify(OPS, logits, DraftBlock(ids, laws), first, length, inputs, mode=mode)


def commit(rows, verdict) -> None:
    for seq, tokens, count in zip(rows, verdict.tokens.tolist(), verdict.count.tolist(), strict=True):
        seq.token_ids.extend(tokens[:count])


def plain(rows, steps: int, *, grammar: bool = False) -> None:
    sampler = Sampler(OPS, V, "cpu")
    for _ in range(steps):
        masks = {s.uid: no_successor(s.token_ids[-1]) for s in rows} if grammar else {}
        logits = TARGET[torch.tensor([s.token_ids[-1] for s in rows])]
        for seq, token in zip(rows, sampler.draw(logits, sampler.prepare(rows, masks)).ids.tolist(), strict=True):
            seq.token_ids.append(token)


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(s))
def test_coupled_output_is_plain_output_whatever_the_verify_lengths(settings: dict, grammar: bool):
    expected = sequences(6, max_tokens=30, **settings)
    plain(expected, 30, grammar=grammar)
    rng = np.random.default_rng(0)
    rows = sequences(6, max_tokens=30, **settings)
    accepted = 0
    while live := [s for s in rows if s.num_generated < 30]:
        verdict = speculate(live, lambda ids: rng.integers(0, J + 1, len(ids)), mode="coupled", grammar=grammar)
        commit(live, verdict)
        accepted += int(verdict.num_accepted.sum())
    assert [s.token_ids for s in rows] == [s.token_ids for s in expected]
    assert accepted > 15  # of 180 tokens: drafts did take part


def exact(known: list[int], p: SamplingParams, grammar: bool) -> np.ndarray:
    """The law of the next token, by arithmetic alone."""
    x = TARGET[known[-1]].double().tolist()
    answer = known[2:]
    for t in range(V):
        if t in known:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= p.frequency_penalty * answer.count(t) + (p.presence_penalty if t in answer else 0)
        x[t] += dict(p.logit_bias).get(t, 0.0)
        if t in p.banned_token_ids or (grammar and t == (known[-1] + 1) % V):
            x[t] = -math.inf
    order = sorted(range(V), key=lambda t: (-x[t], t))
    order = order[: p.top_k or V]
    mass = [math.exp((x[t] - x[order[0]]) / p.temperature) for t in order]
    total, before, kept = sum(mass), 0.0, {}
    for t, m in zip(order, mass, strict=True):
        if before / total < p.top_p and m >= p.min_p * mass[0]:
            kept[t] = m
        before += m
    out = np.zeros(V)
    for t, m in kept.items():
        out[t] = m / sum(kept.values())
    return out


def joint(tokens: int, p: SamplingParams, grammar: bool) -> np.ndarray:
    """Probability of every answer of this length, [V^tokens]."""
    law = {(): 1.0}
    for _ in range(tokens):
        step = {}
        for answer, mass in law.items():
            following = exact([2, 5, *answer], p, grammar)
            step |= {(*answer, t): mass * following[t] for t in range(V)}
        law = step
    return np.array([law[a] for a in itertools.product(range(V), repeat=tokens)])


def chi_square(rows: list[Sequence], expected: np.ndarray, tokens: int) -> tuple[float, float]:
    """(statistic, its 99.9 % quantile) of the first answer tokens; cells that expect fewer than 8 are one cell."""
    codes = np.array([s.token_ids[2 : 2 + tokens] for s in rows]) @ (V ** np.arange(tokens - 1, -1, -1))
    observed = np.bincount(codes, minlength=V**tokens)
    assert not observed[expected == 0].any(), "a token that the target excludes was emitted"
    expected = expected * len(rows)
    small = expected < 8
    cells = [(observed[~small], expected[~small])]
    if expected[small].sum() >= 8:
        cells.append((observed[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    o, e = (np.concatenate(x) for x in zip(*cells, strict=True))
    freedom = len(e) - 1
    # Wilson and Hilferty's approximation of the quantile, 3.09 standard deviations
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((o - e) ** 2 / e).sum()), limit


def generate(n: int, tokens: int, lengths, *, grammar: bool = False, seed0: int = 0, **settings) -> list[Sequence]:
    rows = sequences(n, seed0, max_tokens=tokens + J + 1, **settings)
    while live := [s for s in rows if s.num_generated < tokens]:
        commit(live, speculate(live, lengths, mode="rejection", grammar=grammar))
    return rows


def off(ids):
    return np.zeros(len(ids), dtype=np.int64)


def fixed(ids):
    return np.full(len(ids), J)


def adaptive(ids):
    """Budget by a confidence that is a function of the tokens before each draft, as the confidence head's is."""
    table = np.random.default_rng(5).random(V).astype(np.float32)
    before = np.concatenate((np.full((len(ids), 1), 5), ids.numpy()[:, :-1]), 1)
    n = len(ids)
    return split_budget(table[before], np.full(n, J), np.arange(n), n * J // 2)


def biased(ids):
    """The same budget by a score of the drawn tokens themselves: how much the target likes them."""
    before = torch.cat((torch.full((len(ids), 1), 5), ids[:, :-1]), 1)
    ratio = (TARGET.softmax(-1) / DRAFTER.softmax(-1)).clamp(max=1)[before, ids]
    n = len(ids)
    return split_budget(ratio.numpy(), np.full(n, J), np.arange(n), n * J // 2)


@pytest.mark.parametrize("lengths", [off, fixed, adaptive])
def test_rejection_output_follows_the_target_with_drafts_on_and_off(lengths):
    p = SamplingParams(temperature=1.0)
    rows = generate(8000, 3, lengths, temperature=1.0)
    statistic, limit = chi_square(rows, joint(3, p, False), 3)
    assert statistic < limit


def test_verify_lengths_that_depend_on_the_drawn_tokens_are_caught():
    rows = generate(8000, 3, biased, temperature=1.0)
    statistic, limit = chi_square(rows, joint(3, SamplingParams(temperature=1.0), False), 3)
    assert statistic > 2 * limit


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("settings", [s for s in SETTINGS[1:] if s["temperature"]], ids=lambda s: ",".join(s))
def test_rejection_follows_the_processed_distribution(settings: dict, grammar: bool):
    rng = np.random.default_rng(2)
    rows = generate(2500, 2, lambda ids: rng.integers(0, J + 1, len(ids)), grammar=grammar, **settings)
    statistic, limit = chi_square(rows, joint(2, SamplingParams(**settings), grammar), 2)
    assert statistic < limit


def test_greedy_rows_are_plain_rows_in_rejection_mode_too():
    expected = sequences(8, max_tokens=30)
    plain(expected, 30)
    # one sampled row beside the greedy ones, so that filters are there
    for extra in ([], [Sequence(Request("s", (2, 5), SamplingParams(temperature=1.0)), [2, 5], 2, 9, uid=99)]):
        rows = sequences(8, max_tokens=30)
        while live := [s for s in rows if s.num_generated < 30]:
            commit([*live, *extra], speculate([*live, *extra], fixed, mode="rejection"))
        assert [s.token_ids for s in rows] == [s.token_ids for s in expected]


def test_equal_draft_and_target_are_always_accepted():
    global DRAFTER
    kept, DRAFTER = DRAFTER, TARGET
    try:
        for mode in ("coupled", "rejection"):
            verdict = speculate(sequences(300, temperature=1.0), fixed, mode=mode)
            assert (verdict.num_accepted == J).float().mean() > (0.99 if mode == "rejection" else 0.999)
    finally:
        DRAFTER = kept


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_stops_length_and_failures_end_a_row_where_plain_sampling_would(mode):
    rows = sequences(400, temperature=1.0)
    stops = [(3,)] * 200 + [()] * 200
    room = [1 + i % 4 for i in range(400)]
    verdict = speculate(rows, fixed, mode=mode, stops=stops, room=room)
    for b in range(400):
        out = verdict.tokens[b, : int(verdict.count[b])].tolist()
        assert 1 <= len(out) <= room[b] and 3 not in (out[:-1] if b < 200 else [])
        end = STOPPED if b < 200 and out[-1] == 3 else FULL if len(out) == room[b] else GOES_ON
        assert int(verdict.ended[b]) == end
        assert int(verdict.num_accepted[b]) in (len(out), len(out) - 1)
    assert {STOPPED, FULL, GOES_ON} == set(verdict.ended.tolist())

    def broken(logits):
        logits = logits.clone()
        logits[1::3] = float("nan")
        return logits

    verdict = speculate(rows, fixed, mode=mode, logits_of=broken)
    failed = verdict.ended == FAILED
    assert failed.any() and not failed.all()
    ends = verdict.tokens.gather(1, (verdict.count - 1).unsqueeze(1)).squeeze(1)
    assert (ends[failed] == NON_FINITE).all() and (ends[~failed] >= 0).all()

    masks = {s.uid: np.zeros((J + 1, 1), dtype=np.int32) for s in rows[:5]}
    sampler = Sampler(OPS, V, "cpu")
    inputs = sampler.prepare_verify(rows, masks, places=J + 1, stops=[()] * 400, room=[9] * 400)
    ids, laws = draft(rows, inputs.filters, mode)
    length = torch.zeros(400, dtype=torch.int64)
    verdict = verify(
        OPS, TARGET[[5] * 400], DraftBlock(ids, laws), torch.arange(400), length, inputs, mode=mode
    )  # fmt: skip
    assert verdict.tokens[:5, 0].tolist() == [NOTHING_ALLOWED] * 5 and (verdict.tokens[5:, 0] >= 0).all()
