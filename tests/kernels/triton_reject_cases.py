"""Cases of test_triton.py: acceptance by rejection. Every length and id is compared with the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels.reference.speculate import NO_TOKEN
from deepinfer_kernels.triton import launch
from tests.kernels.packing import packed
from tests.kernels.triton_cases import REFERENCE, TRITON
from tests.kernels.triton_draw_cases import filters, various
from tests.kernels.triton_step_cases import INF, NAN, run, same

#: sequences of a case that differ in their seed alone
SEEDS = 5 if launch.INTERPRETED else 32


def block(B: int, J: int, V: int, *, spread: float, apart: float, spare: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Verify logits, and drafts drawn of logits that differ by ``apart`` from those; ``spare`` rows behind the last."""
    length = torch.randint(0, J + 1, (B,))
    first, row, _ = packed(length, int(length.sum()) + B + spare)
    logits = torch.randn(len(row), V) * spread
    drafts, laws = torch.zeros(B, J, dtype=torch.int64), torch.zeros(B, J, V)
    given = various(B)
    for k in range(J):
        at = (first + k).clamp(max=len(row) - 1)
        of_draft = logits[at] + torch.randn(B, V) * apart
        where = {**given, "position": given["position"] + k}
        drafts[:, k], laws[:, k] = REFERENCE.draft_sample(of_draft, **where, coupled=False)
    failed = torch.zeros(len(row), dtype=torch.int64)
    return logits, dict(drafts=drafts, draft_logprobs=laws, failed=failed, first=first, length=length, **given)


@pytest.mark.parametrize("V", [1, 70, 5003] if launch.INTERPRETED else [1, 3, 70, 1000, 5003, 8192, 129280])
def test_drafts_stand_and_tokens_follow_as_in_the_reference(V: int):
    torch.manual_seed(V)
    B = 14 if V < 1000 or not launch.INTERPRETED else 7
    logits, given = block(B, 5, V, spread=3.0, apart=0.5, spare=2)
    _, accepted = same("accept_rejection", logits, **given)
    length = given["length"]
    assert (accepted <= length).all()
    assert V == 1 or (((accepted < length).any() or launch.INTERPRETED) and (accepted > 0).any())
    given["draft_logprobs"] = torch.randn(B, 5, V) * 3  # any distribution, not yet normalised
    same("accept_rejection", logits, **given)
    for J in (0, 1) if V > 1 else ():
        logits, given = block(B, J, V, spread=3.0, apart=0.5)
        same("accept_rejection", logits, **given)


def single(p: Tensor, q: Tensor, draft: int, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    """``SEEDS`` sequences of one draft by logits p [V] and the log-distribution q [V], of other seeds."""
    B = SEEDS
    first = torch.arange(B) * 2
    rows = dict(first=first, length=torch.ones(B, dtype=torch.int64), failed=torch.zeros(2 * B, dtype=torch.int64))
    law = dict(drafts=torch.full((B, 1), draft), draft_logprobs=q.expand(B, 1, -1).contiguous())
    where = filters(B, seed=torch.arange(B) * 7919 - 9, position=torch.arange(B), **given)
    return p.expand(2 * B, -1).contiguous(), rows | law | where


def point(V: int, at: int) -> Tensor:
    return torch.full((V,), -INF).index_fill(0, torch.tensor(at), 0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_points_masks_and_distributions_that_are_none(temperature: float):
    torch.manual_seed(5)
    V = 90
    p = torch.randn(V) * 2
    best = int(p.argmax())
    hidden = p.masked_fill(torch.rand(V) < 0.7, -INF)
    hidden[best], hidden[3] = p[best], -INF
    one = {"temperature": temperature}
    law = (p.double() / (temperature or 1.0)).log_softmax(-1).float() if temperature else point(V, best)
    never = law.clone()
    never[7] = -INF
    #: (logits, the draft's law, the draft, how many stand; None: some)
    cases = [
        (p, point(V, 7), 7, 0 if not temperature else None),  # all mass of the draft on a token
        (point(V, 4), point(V, 4), 4, SEEDS),  # of both on the same one
        (point(V, 4), point(V, 5), 5, 0),  # on different ones
        (p, law, best, SEEDS),  # the law of both is the same
        (p, never, 7, 0),  # a token that the draft could not have drawn
        (hidden, law, 3, 0),  # one that is not allowed
        (hidden, torch.full((V,), -INF), best, 0),  # no law at all
        (hidden, torch.full((V,), NAN), best, 0),
        (p, torch.randn(V).index_fill(0, torch.tensor(5), NAN), best, 0),
        (p, torch.zeros(V).index_fill(0, torch.tensor(5), INF), best, 0),
        (p, law, -1, 0),  # no draft
        (torch.full((V,), -INF), law, best, 0),  # nothing allowed, and nobody said so
    ]
    for number, (logits, q, draft, stands) in enumerate(cases):
        given = single(logits, q, draft, **one)
        tokens, accepted = same("accept_rejection", given[0], **given[1])
        assert stands is None or int(accepted.sum()) == stands, number
        assert ((tokens >= 0).sum(1) == accepted + 1).all(), number


def test_rows_draw_from_the_target_where_the_laws_differ_by_rounding_alone():
    """The token is one the draft could not have drawn, so it is refused, and p − q holds no more than rounding."""
    torch.manual_seed(6)
    V = 5000 if launch.INTERPRETED else 40_001
    p = torch.randn(V)
    q = p.clone()
    q[V - 1] = -INF
    p[V - 1] = -80.0  # e^-80 of excess: below what counts as mass
    logits, given = single(p, q, V - 1)
    tokens, accepted = same("accept_rejection", logits, **given)
    assert not accepted.any() and (tokens[:, 0] < V - 1).all() and len(set(tokens[:, 0].tolist())) > 1


def test_a_run_ends_at_a_row_that_cannot_be_sampled():
    torch.manual_seed(7)
    B, J, V = 6, 3, 60
    length = torch.tensor([3, 3, 3, 0, 2, 3])
    logits, (first, _, _) = torch.randn(20, V), packed(length, 20)
    law = torch.zeros(B, J, V)
    law[:, :, 5] = -9.0  # a token that the target prefers
    given = dict(drafts=torch.full((B, J), 5), draft_logprobs=law, failed=torch.zeros(20, dtype=torch.int64))
    given |= dict(first=first, length=length, **filters(B, seed=torch.arange(B)))
    for b, place, why in ((0, 0, -1), (1, 1, -2), (2, 3, -1), (3, 0, -2)):
        row = int(first[b]) + place
        given["failed"][row] = why
        logits[row] = NAN if why == -1 else -INF
    tokens, accepted = same("accept_rejection", logits, **given)
    assert tokens[0].tolist() == [-1] + [NO_TOKEN] * 3 and tokens[1, :2].tolist() == [5, -2]
    assert accepted.tolist()[:4] == [0, 1, 3, 0] and tokens[2, 3] == -1 and tokens[3, 0] == -2


def test_a_sequence_is_judged_the_same_alone_and_in_any_batch():
    torch.manual_seed(8)
    B, J, V = 8, 3, 200
    logits, given = block(B, J, V, spread=3.0, apart=0.4)
    tokens, accepted = run("accept_rejection", logits, **given)
    for b in range(B):
        rows = slice(int(given["first"][b]), int(given["first"][b] + given["length"][b]) + 1)
        one = {k: v[b : b + 1] for k, v in given.items()} | {"failed": given["failed"][rows]}
        one["first"] = torch.zeros(1, dtype=torch.int64)
        alone, n = run("accept_rejection", logits[rows], **one)
        assert torch.equal(alone[0], tokens[b]) and n[0] == accepted[b]
    none = {k: v[:0] for k, v in given.items()}
    assert [t.shape[0] for t in run("accept_rejection", logits[:0], **none)] == [0, 0]


def test_wrong_shapes_and_types_are_refused():
    logits, given = block(2, 2, 5, spread=1.0, apart=1.0)
    for name, wrong in (
        ("draft_logprobs", given["draft_logprobs"].double()),
        ("draft_logprobs", given["draft_logprobs"][:, :1]),
        ("failed", given["failed"][:1]),
        ("top_k", torch.zeros(2)),
        ("first", torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            TRITON.accept_rejection(logits, **given | {name: wrong})
    with pytest.raises(ValueError, match=r"^logits"):
        TRITON.accept_rejection(logits.bfloat16(), **given)
