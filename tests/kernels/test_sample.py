"""Counter-based noise: known answers, independence of the batch, the exact distribution."""

from __future__ import annotations

import torch

from deepinfer_kernels.reference import sample as s
from deepinfer_kernels.registry import resolve

OPS = resolve("float", "cpu")


def params(n: int, **changes) -> dict:
    base = {
        "temperature": torch.ones(n),
        "top_k": torch.zeros(n, dtype=torch.int64),
        "top_p": torch.ones(n),
        "min_p": torch.zeros(n),
        "seed": torch.arange(n),
        "position": torch.full((n,), 9),
    }
    return base | changes


def test_philox_gives_the_published_known_answers():
    def words(value: int) -> list[int]:
        t = torch.tensor([value])
        return s.philox(torch.tensor([-1 if value else 0]), t, t, t, t)[0].tolist()

    assert words(0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniforms_depend_on_seed_position_stream_and_token_only():
    seed, position = torch.tensor([5, 6, 5]), torch.tensor([3, 3, 4])
    u = s.uniforms(seed, position, s.TARGET, 10)
    assert torch.equal(u[1:2], s.uniforms(seed[1:2], position[1:2], s.TARGET, 10))
    assert torch.equal(u[:, :7], s.uniforms(seed, position, s.TARGET, 7))
    assert len({tuple(r.tolist()) for r in (*u, s.uniforms(seed[:1], position[:1], s.DRAFT, 10)[0])}) == 4
    assert ((u > 0) & (u < 1)).all()


def test_a_row_draws_the_same_token_in_any_batch():
    torch.manual_seed(0)
    logits = torch.randn(32, 50)
    together = OPS.next_tokens(logits, None, params(32))
    for i in (0, 7, 31):
        one = {k: v[i : i + 1] for k, v in params(32).items()}
        assert OPS.next_tokens(logits[i : i + 1], None, one).item() == together[i].item()


def test_draws_follow_the_softmax():
    n = 40_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    drawn = OPS.next_tokens(logits.expand(n, -1), None, params(n))
    expected = logits.softmax(0) * n
    observed = torch.bincount(drawn, minlength=5)
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    assert chi2 < 18.5  # 99.9 % quantile at 4 degrees of freedom


def test_temperature_zero_is_the_lowest_id_of_the_best():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert OPS.next_tokens(logits, None, None).tolist() == [1, 0]
    mixed = OPS.next_tokens(logits, None, params(2, temperature=torch.tensor([0.0, 1.0])))
    assert mixed[0].item() == 1


def test_filters_keep_what_they_say():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))

    def kept(**changes) -> list[int]:
        p = params(1, **changes)
        lp = s.target_logprobs(OPS.numerics, logits, p["temperature"], p["top_k"], p["top_p"], p["min_p"])
        assert torch.allclose(lp.exp().sum(-1), torch.ones(1, dtype=torch.float64))
        return torch.isfinite(lp[0]).nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=torch.tensor([2])) == [0, 1]
    assert kept(top_p=torch.tensor([0.5])) == [0, 1]  # the token that crosses 0.5 stays
    assert kept(top_p=torch.tensor([0.01])) == [0]
    assert kept(min_p=torch.tensor([0.6])) == [0, 1]
    assert kept(top_k=torch.tensor([3]), top_p=torch.tensor([0.8])) == [0, 1, 2]
