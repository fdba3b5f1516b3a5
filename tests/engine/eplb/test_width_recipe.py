"""The recipe that times steps by expert-parallel size: same work for every size, ratios within a round."""

from __future__ import annotations

import pytest

from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Completion
from recipes.eplb import width


def done(engine: Engine) -> list[Completion]:
    return [event for event in engine.stream() if isinstance(event, Completion)]


def test_every_size_decodes_the_same_requests():
    spent = width.measure(["1", "8", "4+1"], rows=3, rounds=2, steps=2)
    assert list(spent) == ["1", "8", "4+1"]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in spent.values())
    with width.opened("1", 3, 5) as one, width.opened("4+1", 3, 5) as four:
        assert four.profile.parallel.ep == 4 and four.runner.mesh.placement.slots_per_rank == 17
        answers = [sorted((c.request_id, c.token_ids) for c in done(engine)) for engine in (one, four)]
    assert answers[0] == answers[1] and len(answers[0]) == 3


def test_ratios_compare_sizes_within_a_round():
    # the machine is three times as slow in the second and third round
    got = width.summary({"1": [1.0, 3.0, 3.0, 1.0], "8": [1.1, 3.3, 3.3, 1.1]})
    assert got["1"] == {"step_ms": 2.0, "ratio": 1.0, "ratio_p25": 1.0, "ratio_p75": 1.0}
    assert got["8"]["ratio"] == pytest.approx(1.1) and got["8"]["step_ms"] == pytest.approx(2.2)


def test_a_size_over_the_limit_is_exit_6(monkeypatch, capsys):
    monkeypatch.setattr(width, "measure", lambda *args: {"1": [1.0, 1.0], "64": [1.3, 1.3]})
    assert width.main(["--limit", "1.25"]) == 6
    assert width.main(["--limit", "1.35"]) == 0
    assert "64      1.30   1.300" in capsys.readouterr().out
