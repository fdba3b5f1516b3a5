"""Routing to data-parallel ranks against a direct transcription of the rule, and its balance over 64 ranks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.sched.router import Head, RankLoad, route

heads = st.lists(st.builds(Head, st.integers(1, 2000), st.integers(1, 16)), max_size=12)
ranks = st.lists(
    st.builds(RankLoad, st.integers(0, 4), st.integers(0, 4000), st.integers(0, 3), st.integers(0, 20)),
    min_size=1,
    max_size=6,
)


def oracle(waiting: list[Head], loads: list[RankLoad]) -> list[int]:
    """The rule read aloud, with a scan over all ranks for every head."""
    now = [list(load) for load in loads]  # seqs, tokens, free slots, free blocks
    slots, blocks = sum(r[2] for r in now), sum(r[3] for r in now)
    total = sum(r[1] for r in now)
    for h in waiting:
        slots, blocks = slots - 1, blocks - h.blocks
        if slots < 0 or blocks < 0:
            break
        total += h.length
    ceiling = 1.05 * total / len(now)
    out = []
    for h in waiting:
        fit = [i for i, r in enumerate(now) if r[2] > 0 and r[3] >= h.blocks + (r[0] + 1 if r[0] else 0)]
        below = [i for i in fit if now[i][1] + h.length <= ceiling]
        if below:
            best = min(below, key=lambda i: (now[i][0], now[i][1], i))
        elif fit:
            best = min(fit, key=lambda i: (now[i][1], i))
        else:
            break
        out.append(best)
        now[best][0] += 1
        now[best][1] += h.length
        now[best][2] -= 1
        now[best][3] -= h.blocks
    return out


@given(heads, ranks)
def test_route_is_the_rule(waiting: list[Head], loads: list[RankLoad]):
    assert route(waiting, loads) == oracle(waiting, loads)


def test_worked_example():
    empty = [RankLoad(0, 0, 8, 64)] * 2
    assert route([Head(900, 8), Head(100, 1), Head(100, 1), Head(100, 1)], empty) == [0, 1, 1, 1]


def test_sixty_four_ranks_fill_evenly():
    rng = random.Random(5)
    waiting = [Head(rng.choice((80, 300, 1200, 4000)) + rng.randrange(50), 2) for _ in range(64 * 12)]
    chosen = route(waiting, [RankLoad(0, 0, 32, 1024)] * 64)
    assert len(chosen) == len(waiting)
    tokens = [0] * 64
    for rank, head in zip(chosen, waiting, strict=True):
        tokens[rank] += head.length
    mean = sum(tokens) / 64
    assert max(tokens) <= 1.15 * mean
    assert min(tokens) >= 0.80 * mean


def test_one_at_a_time_is_even_too():
    loads = [RankLoad(0, 0, 32, 1024)] * 64
    for _ in range(64 * 3):
        (rank,) = route([Head(500, 4)], loads)
        r = loads[rank]
        loads = [
            *loads[:rank],
            RankLoad(r.seqs + 1, r.tokens + 500, r.free_slots - 1, r.free_blocks - 4),
            *loads[rank + 1 :],
        ]
    assert {r.seqs for r in loads} == {3}
