"""Cases of test_triton.py: from logits to emitted tokens. Every id is compared with the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from deepinfer_kernels.reference.sample import uniforms
from deepinfer_kernels.reference.speculate import NO_TOKEN, StepRows
from deepinfer_kernels.triton import launch, noise
from tests.kernels.packing import packed
from tests.kernels.triton_cases import DEVICE, REFERENCE, TRITON, check, on_device
from tests.kernels.triton_step_cases import INF, NAN, run, same


def filters(B: int, **given: Any) -> dict[str, Tensor]:
    """Parameters of B rows; numbers are the same for all."""
    base: dict[str, Any] = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) | given
    kinds = dict(top_k=torch.int64, seed=torch.int64, position=torch.int64)
    out = {}
    for name, value in base.items():
        kind = kinds.get(name, torch.float32)
        out[name] = value.to(kind) if isinstance(value, Tensor) else torch.full((B,), value, dtype=kind)
    return out


def various(B: int) -> dict[str, Tensor]:
    """Every kind of row: greedy, plain, each filter alone, all together."""
    i = torch.arange(B)
    return filters(
        B,
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3, 0.6, 2.0, 0.05])[i % 7],
        top_k=torch.tensor([0, 1, 5, 40, 10_000])[i % 5],
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.01])[i % 4],
        min_p=torch.tensor([0.0, 0.1, 0.0])[i % 3],
        seed=torch.randint(-(1 << 62), 1 << 62, (B,)),
        position=torch.randint(0, 1 << 20, (B,)),
    )


def beyond(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Bool [B, V]: tokens behind all but 1e-12 of a row's mass, which f64 sums keep or drop as they happen to round."""
    x = logits.double() / torch.where(given["temperature"] == 0, 1, given["temperature"]).unsqueeze(1)
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    limit = torch.where(given["top_k"] > 0, given["top_k"], x.shape[1]).unsqueeze(1)
    p = order.values.masked_fill(torch.arange(x.shape[1]) >= limit, -INF).softmax(-1)
    return torch.zeros_like(x, dtype=torch.bool).scatter_(1, order.indices, p.cumsum(-1) - p > 1 - 1e-12)


@pytest.mark.parametrize("V", [20_000, 40_001])
def test_greedy_tokens_of_a_row_in_parts(V: int):
    torch.manual_seed(V)
    logits = torch.randint(-9, 9, (6, V)).float()  # the best is there many times, in every part
    logits[1, 16_384:], logits[2, V - 1] = -20.0, 20.0
    adjusted = logits.masked_fill(torch.rand(6, V) < 0.5, -INF)
    adjusted[3] = -INF
    raw = logits.clone()
    raw[4, V - 1], raw[5, 3] = NAN, INF
    same("next_tokens", logits, None, None)
    assert same("next_tokens", raw, adjusted, None).tolist()[3:] == [-2, -1, -1]
    same("next_tokens", raw, None, None)


@triton.jit
def _estimate(OUT, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, noise.noise_about((i << 8).to(tl.uint32)))  # pyright: ignore[reportAttributeAccessIssue]


def test_estimated_noise_is_close_to_that_of_every_word():
    block = 1 << (18 if launch.INTERPRETED else 12)
    found = torch.empty(1 << 24, device=DEVICE)
    launch.launch(_estimate, ((1 << 24) // block,), found, BLOCK=block)
    exact = -torch.log(-torch.log((torch.arange(1 << 24).double() + 0.5) * 2.0**-24))
    assert (found.cpu().double() - exact).abs().max() < 5e-6


def test_scores_too_close_for_an_estimate_are_told_apart():
    """Logits that make up for the noise: the scores of some tokens of a row agree to the rounding of its logits."""
    B, V = 3, 9000
    given = filters(B, temperature=torch.tensor([1.0, 0.5, 1.0]), seed=torch.arange(B), position=torch.arange(B) + 9)
    u = uniforms(given["seed"], given["position"], 0, V)
    scores = torch.full((B, V), 20.0).masked_fill(torch.arange(V) % 300 > 0, 19.0)
    logits = ((scores + torch.log(-torch.log(u))) * given["temperature"].unsqueeze(1)).float()
    same("next_tokens", logits, None, given)
    logits[0], logits[1] = 3.25, -INF  # scores are the noise, which some tokens share
    logits[1, 8999] = 0.0
    assert same("next_tokens", torch.zeros(B, V), logits, given).tolist()[1] == 8999


@pytest.mark.parametrize("V", [8192, 12_345])
def test_tokens_of_rows_in_parts_are_those_of_the_reference(V: int):
    torch.manual_seed(V)
    logits = torch.randn(7, V) * 3
    logits[1, 5000:] = -INF
    logits[2] = -INF
    logits[2, V - 1] = -7.0
    logits[3] = 0.5
    logits[4] = torch.randint(0, 3, (V,)).float()
    some = dict(top_k=9, top_p=0.9), dict(top_p=0.9), dict(min_p=0.02), dict(top_k=V - 1, top_p=0.6, min_p=0.2)
    for given in (filters(7, seed=torch.arange(7)), various(7), *(filters(7, **one) for one in some)):
        raw = torch.zeros(7, V)
        assert same("next_tokens", raw, logits, given).tolist()[2] == V - 1
        ids, law = run("draft_sample", logits, **given, coupled=True)
        expected_ids, expected = REFERENCE.draft_sample(logits, **given, coupled=True)
        assert torch.equal(ids, expected_ids)
        told = ~beyond(logits, given)
        assert torch.equal(law.isfinite() & told, expected.isfinite() & told)


@pytest.mark.parametrize("V", [1, 70, 1100] if launch.INTERPRETED else [1, 3, 70, 1000, 5003, 129280])
def test_tokens_are_those_of_the_reference(V: int):
    torch.manual_seed(V)
    B = 12 if launch.INTERPRETED else 84 if V < 100_000 else 14
    for spread in (3.0,) if launch.INTERPRETED or V > 100_000 else (0.5, 4.0, 30.0):
        logits = torch.randn(B, V) * spread
        given = various(B)
        same("next_tokens", logits, None, given)
        for coupled in (False,) if launch.INTERPRETED else (True, False):
            ids, law = run("draft_sample", logits, **given, coupled=coupled)
            expected_ids, expected = REFERENCE.draft_sample(logits, **given, coupled=coupled)
            assert torch.equal(ids, expected_ids)
            told = ~beyond(logits, given)
            assert torch.equal(law.isfinite() & told, expected.isfinite() & told)
            both = law.isfinite() & expected.isfinite()
            torch.testing.assert_close(law[both], expected[both], rtol=1e-6, atol=1e-6)
    same("next_tokens", logits, None, None)


@pytest.mark.parametrize(
    "given",
    [dict(top_k=7), dict(top_p=0.5), dict(top_p=0.3, top_k=50), dict(min_p=0.3), dict(top_p=0.97, min_p=0.01)],
    ids=str,
)
def test_equal_logits_are_kept_by_ascending_id(given: dict[str, Any]):
    torch.manual_seed(1)
    logits = torch.randint(-3, 4, (5, 200)).float()
    logits[1] = 0.25
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    where = filters(5, seed=torch.arange(5), position=torch.arange(5) * 3, **given)
    ids, law = run("draft_sample", logits, **where, coupled=True)
    expected_ids, expected = REFERENCE.draft_sample(logits, **where, coupled=True)
    assert torch.equal(law.isfinite(), expected.isfinite()) and torch.equal(ids, expected_ids)


def test_hidden_tokens_are_never_drawn_and_rows_without_a_token_say_so():
    torch.manual_seed(2)
    logits = torch.randn(8, 300)
    adjusted = logits.masked_fill(torch.rand(8, 300) < 0.9, -INF)
    adjusted[1], adjusted[2, 5:], adjusted[2, 3] = -INF, -INF, 1.0
    raw = logits.clone()
    raw[3, 7], raw[4, 299], raw[5, 0] = NAN, INF, -INF
    for given in (None, various(8), filters(8, top_p=0.9, top_k=400)):
        ids = same("next_tokens", raw, adjusted, given)
        assert ids.tolist()[1] == -2 and ids.tolist()[3:6] == [-1] * 3
        assert all(adjusted[b, ids[b]] > -INF for b in (0, 2, 6, 7))
        same("next_tokens", raw[:, :299], None, given)
        same("next_tokens", raw[:0], None, None if given is None else {k: v[:0] for k, v in given.items()})


@pytest.mark.parametrize("V", [200, 9000])
def test_a_row_draws_the_same_alone_and_in_any_batch(V: int):
    torch.manual_seed(3)
    logits, given = torch.randn(8, V) * 3, various(8)
    whole = run("next_tokens", logits, None, given)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 8)):
        part = run("next_tokens", logits[rows], None, {k: v[rows] for k, v in given.items()})
        assert torch.equal(part, whole[rows])


def none(dtype: torch.dtype) -> Tensor:
    return torch.zeros(0, dtype=dtype)


@pytest.mark.parametrize("V", [1, 31, 32, 1500])
def test_logits_are_adjusted_to_the_bit(V: int):
    torch.manual_seed(V)
    logits = torch.randn(6, V) * 10
    where = torch.randperm(6 * V)[: min(200, 3 * V)]
    pairs = dict(row=where // V, token=where % V, count=torch.randint(0, 4, where.shape).float())
    P = len(where)
    pairs |= dict(presence=torch.rand(P), frequency=torch.rand(P), repetition=torch.rand(P) + 0.5)
    where = torch.randperm(6 * V)[: min(50, V)]
    biases = dict(bias_row=where // V, bias_token=where % V, bias=torch.randn(len(where)) * 5)
    biases["bias"][0] = -INF
    masks = dict(mask_row=torch.tensor([4, 0]), mask=torch.randint(-(1 << 31), 1 << 31, (2, -(-V // 32))).int())
    masks["mask"][1] = 0
    no_pairs = {k: none(torch.int64 if k in ("row", "token") else torch.float32) for k in pairs}
    no_biases = {k: none(torch.float32 if k == "bias" else torch.int64) for k in biases}
    no_masks = dict(mask_row=none(torch.int64), mask=torch.zeros(0, 1, dtype=torch.int32))
    for p in (pairs, no_pairs):
        for b in (biases, no_biases):
            for m in (masks, no_masks):
                same("adjust_logits", logits, **p, **b, **m)


@pytest.mark.parametrize("V", [3, 40, 1500])
def test_verify_logits_are_adjusted_to_the_bit(V: int):
    torch.manual_seed(V)
    B, J = 6, 4
    length = torch.tensor([4, 0, 2, 4, 1, 3])
    first, _, _ = packed(length, int(length.sum()) + B)
    logits = torch.randn(int(length.sum()) + B + 2, V) * 10
    drafts = torch.randint(0, min(V, 5), (B, J))  # drafts repeat, and some are known
    drafts[3, 2:] = -1
    where = torch.randperm(B * V)[: min(100, 2 * V)]
    pairs = dict(row=where // V, token=where % V, count=torch.randint(0, 4, where.shape).float())
    penalties = dict(presence=torch.rand(B), frequency=torch.rand(B), repetition=torch.rand(B) + 0.5)
    penalties["repetition"][1] = 1.0
    where = torch.randperm(B * V)[: min(20, V)]
    biases = dict(bias_row=where // V, bias_token=where % V, bias=torch.randn(len(where)) * 5)
    words = -(-V // 32)
    masks = dict(mask_row=torch.tensor([5, 0]), mask=torch.randint(-(1 << 31), 1 << 31, (2, J + 1, words)).int())
    no_pairs = dict(row=none(torch.int64), token=none(torch.int64), count=none(torch.float32))
    no_biases = {k: none(torch.float32 if k == "bias" else torch.int64) for k in biases}
    no_masks = dict(mask_row=none(torch.int64), mask=torch.zeros(0, J + 1, 1, dtype=torch.int32))
    for p in (pairs, no_pairs):
        for b, m in ((biases, masks), (no_biases, masks), (biases, no_masks)):
            block = dict(drafts=drafts, first=first, length=length)
            same("adjust_verify_logits", logits, **block, **p, **penalties, **b, **m)


@pytest.mark.parametrize("V", [1, 20, 3000, 9000])
def test_log_probabilities_of_tokens_and_the_best(V: int):
    torch.manual_seed(V)
    logits = torch.randn(9, V) * 5
    logits[3] = torch.randint(0, 3, (V,)).float()  # equal ones by ascending id
    logits[4, V // 2 :] = -INF
    logits[4, 0] = 1.0
    logits[5, min(5, V) :] = -INF  # fewer than are asked for
    logits[6] = 0.25
    ids = torch.randint(0, V, (9,))
    ids[4:6] = 0
    for top in (0, 1, 7, 20):
        got, expected = run("token_logprobs", logits, ids, top=top), REFERENCE.token_logprobs(logits, ids, top=top)
        assert torch.equal(got[1], expected[1])
        check("token_logprobs", got[::2], expected[::2])


# --------------------------------------------------------------------- speculate


def test_confidences_are_calibrated_by_regime():
    torch.manual_seed(4)
    for B in (0, 1, 70):
        args = torch.randn(B, 5) * 20, torch.rand(3, 5) + 0.2, torch.randint(0, 3, (B,))
        check("dspark_confidence", run("dspark_confidence", *args), REFERENCE.dspark_confidence(*args))


@pytest.mark.parametrize("B", [1, 3, 20] if launch.INTERPRETED else [1, 3, 64, 150])
@pytest.mark.parametrize("J", [1, 5])
def test_a_budget_goes_to_the_largest_survivals(B: int, J: int):
    torch.manual_seed(B)
    for kind in ("random", "ties", "wrong"):
        confidence = torch.rand(B, J) if kind == "random" else torch.randint(0, 3, (B, J)) / 2
        if kind == "wrong":
            confidence[::2, 0], confidence[1::3] = NAN, 1.5
            confidence[-1] = -INF
        cap, admission = torch.randint(0, J + 1, (B,)), torch.randperm(B) * 7 - 3
        for budget in (0, 1, B * J // 2, B * J + 3):
            length = same("dspark_split", confidence, cap, admission, torch.tensor(budget))
            assert int(length.sum()) == min(budget, int(cap.sum()))
    many = torch.rand(4, 3, B, J), torch.randint(0, J + 1, (4, 3, B)), torch.argsort(torch.rand(4, 3, B), -1)
    same("dspark_split", *many, torch.randint(0, B * J, (4, 3)))


@pytest.mark.parametrize("J", [1, 5, 7])
def test_drafts_that_were_drawn_stand_and_emitting_ends_at_stops_failures_and_length(J: int):
    torch.manual_seed(J)
    for B in (1, 40):
        length = torch.randint(0, J + 1, (B,))
        first, row, offset = packed(length, int(length.sum()) + B)
        drafts = torch.randint(0, 3, (B, J))
        drafts[torch.rand(B, J) < 0.05] = -1
        wanted = drafts[row, offset.clamp(max=J - 1)]
        drawn = torch.where(torch.rand(len(row)) < 0.7, wanted, torch.randint(-2, 3, wanted.shape))
        tokens, accepted = same("accept_drawn", drawn, drafts, first, length)
        for stop in (torch.tensor([[2, NO_TOKEN]]).expand(B, -1), torch.zeros(B, 0, dtype=torch.int64)):
            for room in (torch.randint(0, J + 3, (B,)), torch.full((B,), 99)):
                same("truncate_emitted", tokens, accepted, stop=stop, room=room)


@pytest.mark.parametrize("F", [1, 5, 70])
@pytest.mark.parametrize("budgeted", [False, True])
def test_floating_rows_are_put_where_their_sequences_are(F: int, budgeted: bool):
    torch.manual_seed(F)
    S, J, N, P = F + 9, 5, 3, 4
    slot = 1 + torch.randperm(S - 1)[:F]
    built = torch.randint(0, J + 1, (F,))
    shares = built[torch.randperm(F)] if budgeted else None
    count = built + 1
    T = int(count.sum())

    def some(*shape: int) -> Tensor:
        return torch.randint(-9, 9, shape)

    rows = StepRows(
        slot, torch.randint(1, 300, (F,)), some(F), count.cumsum(0) - count, count, torch.randint(0, 99, (F + 2, P)),
        some(T + 3), some(T + 3), some(T + 3), some(T + 3, N), some(T + 3), some(T + 3), some(T + 3),
    )  # fmt: skip
    length = torch.randint(1, 600, (S,))  # some beyond the blocks of the table
    tables = torch.randint(-1, 99, (S, N)), torch.randint(0, 99, (S, J)), length
    sizes = dict(tokens=T, ring=134, pair_ring=7, block_tokens=128)
    mine = StepRows(*(t.clone().to(DEVICE) for t in rows))
    TRITON.settle_rows(mine, *on_device((*tables, shares)), **sizes)
    REFERENCE.settle_rows(rows, *tables, shares, **sizes)
    for name, a, b in zip(StepRows._fields, mine, rows, strict=True):
        assert torch.equal(a.cpu(), b), name
    floating = torch.tensor([-1, *range(F), -1])
    at = torch.arange(F + 2)
    first, under_test, token = same("sampled_rows", floating, at + 50, at * 2, rows.first, rows.count)
    assert under_test.tolist()[0] == 0 and first.tolist()[-1] == F + 51
    emitted = torch.randint(-2, 99, (F, J + 1))
    given = (emitted, 1 + torch.randint(0, J + 1, (F,)).minimum(under_test[1:-1]), token[1:-1], slot)
    kept = (torch.zeros(S).long(), torch.zeros(S, N).long(), torch.zeros(S).long())
    there = tuple(t.clone().to(DEVICE) for t in kept)
    step = torch.randint(0, 3, (F,)), rows.pos, rows.lags
    TRITON.commit_rows(*on_device((*given, *step)), *there)
    REFERENCE.commit_rows(*given, *step, *kept)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, kept, strict=True))


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="expected float32"):
        TRITON.next_tokens(torch.zeros(2, 5).bfloat16(), None, None)
    with pytest.raises(ValueError, match="top_k"):
        wrong = filters(2) | {"top_k": torch.zeros(2)}
        TRITON.next_tokens(torch.zeros(2, 5), None, wrong)
    with pytest.raises(ValueError, match="no token was drawn"):
        one = torch.zeros(1, dtype=torch.int64)
        TRITON.accept_drawn(one[:0], one.unsqueeze(1), one, one)
    with pytest.raises(ValueError, match="budget"):
        TRITON.dspark_split(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), torch.zeros(1))
