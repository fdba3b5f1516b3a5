"""Adjustment, acceptance and truncation of a verify step against loops in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer_kernels.reference import sample as sampling
from deepinfer_kernels.reference import speculate
from deepinfer_kernels.registry import resolve
from tests.kernels.packing import packed

OPS = resolve("float", "cpu")
V = 23


@pytest.mark.parametrize("seed", range(12))
def test_adjusting_verify_logits_is_adjusting_each_row_behind_its_drafts(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, width = rng.randint(1, 5), rng.randint(1, 5)
    length = torch.tensor([rng.randint(0, width) for _ in range(rows)])
    total = int(length.sum()) + rows + rng.randint(0, 3)
    first, _, _ = packed(length, total)
    logits = torch.randn(total, V)
    drafts = torch.randint(0, 6, (rows, width))
    prompt = [[rng.randrange(8) for _ in range(4)] for _ in range(rows)]
    answer = [[rng.randrange(8) for _ in range(rng.randint(0, 6))] for _ in range(rows)]
    penal = [(0.0, 0.0, 1.0) if rng.random() < 0.3 else (0.7, 0.3, 1.5) for _ in range(rows)]
    bias = [(b, rng.randrange(V), rng.uniform(-2, 2)) for b in range(rows) if rng.random() < 0.5]
    masked = [b for b in range(rows) if rng.random() < 0.5]
    allowed = torch.rand(len(masked), width + 1, V) < 0.6
    words = torch.zeros(len(masked), width + 1, 32, dtype=torch.int64)
    words[..., :V] = allowed.long() << torch.arange(V)
    words = words.sum(-1, keepdim=True).int()
    pairs = [(b, t) for b in range(rows) if penal[b][2] != 1.0 for t in sorted({*prompt[b], *answer[b]})]
    adjusted = OPS.adjust_verify_logits(
        logits, drafts=drafts, first=first, length=length,
        row=torch.tensor([b for b, _ in pairs], dtype=torch.int64),
        token=torch.tensor([t for _, t in pairs], dtype=torch.int64),
        count=torch.tensor([float(answer[b].count(t)) for b, t in pairs]),
        presence=torch.tensor([p[0] for p in penal]), frequency=torch.tensor([p[1] for p in penal]),
        repetition=torch.tensor([p[2] for p in penal]),
        bias_row=torch.tensor([b for b, _, _ in bias], dtype=torch.int64),
        bias_token=torch.tensor([t for _, t, _ in bias], dtype=torch.int64),
        bias=torch.tensor([v for _, _, v in bias], dtype=torch.float32),
        mask_row=torch.tensor(masked, dtype=torch.int64), mask=words,
    )  # fmt: skip
    for b in range(rows):
        for i in range(int(length[b]) + 1):
            known = answer[b] + drafts[b, :i].tolist()
            mine = sorted({*prompt[b], *known}) if penal[b][2] != 1.0 else []
            n = len(mine)
            own_bias = [(t, v) for at, t, v in bias if at == b]
            expected = OPS.adjust_logits(
                logits[first[b] + i].unsqueeze(0), row=torch.zeros(n, dtype=torch.int64),
                token=torch.tensor(mine, dtype=torch.int64),
                count=torch.tensor([float(known.count(t)) for t in mine]),
                presence=torch.full((n,), penal[b][0]), frequency=torch.full((n,), penal[b][1]),
                repetition=torch.full((n,), penal[b][2]), bias_row=torch.zeros(len(own_bias), dtype=torch.int64),
                bias_token=torch.tensor([t for t, _ in own_bias], dtype=torch.int64),
                bias=torch.tensor([v for _, v in own_bias], dtype=torch.float32),
                mask_row=torch.zeros(int(b in masked), dtype=torch.int64),
                mask=words[masked.index(b), i].unsqueeze(0) if b in masked else words[:0, 0],
            )  # fmt: skip
            assert torch.equal(adjusted[first[b] + i], expected[0])
    used = int(length.sum()) + rows
    assert torch.equal(adjusted[used:], logits[used:])


def test_drafts_stand_while_they_equal_what_was_drawn():
    drafts = torch.tensor([[7, 4, 9], [1, 2, 3], [5, 5, 5], [8, 8, 8]])
    length = torch.tensor([3, 3, 0, 2])
    first, _, _ = packed(length, 12)
    drawn = torch.tensor([7, 4, 2, 6, 1, 2, 3, 4, 5, 8, -1, 8])
    tokens, accepted = OPS.accept_drawn(drawn, drafts, first, length)
    no = speculate.NO_TOKEN
    assert tokens.tolist() == [[7, 4, 2, no], [1, 2, 3, 4], [5, no, no, no], [8, -1, no, no]]
    assert accepted.tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_truncation_is_a_loop_over_the_tokens(seed):
    rng = random.Random(seed)
    for _ in range(60):
        rows, width = rng.randint(1, 6), rng.randint(1, 5)
        accepted = [rng.randint(0, width) for _ in range(rows)]
        no = speculate.NO_TOKEN
        tokens = []
        for n in accepted:
            emitted = [rng.randrange(6) for _ in range(n + 1)]
            if rng.random() < 0.1:
                emitted[-1] = -rng.randint(1, 2)
            tokens.append(emitted + [no] * (width - n))
        stop = [[rng.randrange(6), no] if rng.random() < 0.5 else [no, no] for _ in range(rows)]
        room = [rng.randint(0, width + 2) for _ in range(rows)]
        given = {"stop": torch.tensor(stop), "room": torch.tensor(room)}
        count, kept, ended = OPS.truncate_emitted(torch.tensor(tokens), torch.tensor(accepted), **given)
        for b in range(rows):
            out, end = [], 0
            for token in tokens[b][: accepted[b] + 1]:
                if len(out) == room[b]:
                    break
                out.append(token)
                if token < 0 or token in stop[b]:
                    end = 3 if token < 0 else 1
                    break
            if not end and len(out) == room[b]:
                end = 2
            assert (int(count[b]), int(ended[b])) == (len(out), end)
            assert int(kept[b]) == min(accepted[b], len(out))


def test_without_drafts_rejection_draws_what_plain_sampling_draws():
    torch.manual_seed(0)
    n = 500
    filters = {
        "temperature": torch.rand(n) * 2, "top_k": torch.randint(0, 9, (n,)), "top_p": torch.rand(n) * 0.5 + 0.5,
        "min_p": torch.rand(n) * 0.1, "seed": torch.arange(n), "position": torch.randint(0, 99, (n,)),
    }  # fmt: skip
    logits = torch.randn(n, V)
    tokens, accepted = OPS.accept_rejection(
        logits, drafts=torch.zeros(n, 2, dtype=torch.int64), draft_logprobs=torch.zeros(n, 2, V),
        failed=torch.zeros(n, dtype=torch.int64), first=torch.arange(n), length=torch.zeros(n, dtype=torch.int64),
        **filters,
    )  # fmt: skip
    assert torch.equal(tokens[:, 0], OPS.next_tokens(logits, None, filters))
    assert not accepted.any() and (tokens[:, 1:] == speculate.NO_TOKEN).all()


def test_accept_coins_are_uniform_and_of_another_stream():
    seed, position = torch.arange(50_000), torch.full((50_000,), 7)
    u = speculate.accept_coins(seed, position)
    assert ((u > 0) & (u < 1)).all()
    observed = torch.bincount((u * 20).long(), minlength=20).double()
    assert ((observed - 2500) ** 2 / 2500).sum() < 43.8  # 99.9 % quantile at 19 degrees of freedom
    for stream in (sampling.TARGET, sampling.DRAFT):
        other = sampling.uniforms(seed, position, stream, 1)[:, 0]
        assert abs(torch.corrcoef(torch.stack((u, other)))[0, 1]) < 0.02


def test_a_row_is_judged_the_same_alone_and_among_others():
    torch.manual_seed(1)
    rows, width = 37, 5
    length = torch.randint(0, width + 1, (rows,))
    total = int(length.sum()) + rows
    first, row, _ = packed(length, total)
    logits, drafts = torch.randn(total, V), torch.randint(0, V, (rows, width))
    q = torch.randn(rows, width, V)
    filters = {
        "temperature": torch.rand(rows) + 0.5, "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows), "min_p": torch.zeros(rows), "seed": torch.arange(rows),
        "position": torch.arange(rows),
    }  # fmt: skip
    failed = torch.zeros(total, dtype=torch.int64)
    tokens, accepted = OPS.accept_rejection(
        logits, drafts=drafts, draft_logprobs=q, failed=failed, first=first, length=length, **filters
    )
    for b in range(rows):
        one = {k: v[b : b + 1] for k, v in filters.items()}
        alone, n = OPS.accept_rejection(
            logits[row == b], drafts=drafts[b : b + 1], draft_logprobs=q[b : b + 1], failed=failed[row == b],
            first=torch.zeros(1, dtype=torch.int64), length=length[b : b + 1], **one,
        )  # fmt: skip
        assert torch.equal(alone[0], tokens[b]) and n[0] == accepted[b]


def test_no_operation_waits_for_the_device():
    """Tensors without data: whatever has to look at a value (item, nonzero, a boolean index) raises."""
    rows, width, total, vocab = 4, 5, 20, 40
    with torch.device("meta"):

        def whole(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        filters = {
            "temperature": torch.ones(rows), "top_k": whole(rows), "top_p": torch.ones(rows),
            "min_p": torch.zeros(rows), "seed": whole(rows), "position": whole(rows),
        }  # fmt: skip
        conf = OPS.dspark_confidence(torch.zeros(rows, width), torch.ones(3, width), whole(rows))
        length = OPS.dspark_split(conf, whole(rows), whole(rows), whole())
        first, drafts, laws = whole(rows), whole(rows, width), torch.zeros(rows, width, vocab)
        OPS.draft_sample(torch.zeros(rows, vocab), **filters, coupled=False)
        logits = OPS.adjust_verify_logits(
            torch.zeros(total, vocab), drafts=drafts, first=first, length=length, row=whole(7), token=whole(7),
            count=torch.zeros(7), presence=torch.ones(rows), frequency=torch.ones(rows), repetition=torch.ones(rows),
            bias_row=whole(2), bias_token=whole(2), bias=torch.ones(2), mask_row=whole(2),
            mask=torch.zeros(2, width + 1, 2, dtype=torch.int32),
        )  # fmt: skip
        tokens, accepted = OPS.accept_rejection(
            logits, drafts=drafts, draft_logprobs=laws, failed=whole(total), first=first, length=length, **filters
        )
        coupled, _ = OPS.accept_drawn(whole(total), drafts, first, length)
        count, _, ended = OPS.truncate_emitted(tokens, accepted, stop=whole(rows, 2), room=whole(rows))
        assert tokens.shape == coupled.shape == (rows, width + 1)
        assert count.shape == ended.shape == accepted.shape == (rows,)
        for look in (torch.Tensor.item, torch.Tensor.nonzero, lambda x: torch.zeros(1)[x > 0]):
            with pytest.raises(RuntimeError):
                look(whole(1))
