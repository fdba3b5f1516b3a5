"""The journal of a batch: cut off at any byte, it continues with nothing lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.offline.journal import Journal

HEADER = {"input_sha256": "ab", "seed": 1}


def filled(out: Path, lines: list[int]) -> bytes:
    with Journal(out, HEADER, resume=False) as journal:
        for line in lines:
            journal.append(line, f'{{"n": {line}}}')
        return journal.path.read_bytes()


@given(st.data())
def test_killed_at_any_byte_nothing_is_lost_or_doubled(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    out = tmp_path_factory.mktemp("journal") / "out.jsonl"
    lines = [3, 1, 12, 2, 7]
    whole = filled(out, lines)
    part = out.with_name("out.jsonl.part")
    at = data.draw(st.integers(0, len(whole)))
    part.write_bytes(whole[:at])
    with Journal(out, HEADER, resume=True) as journal:
        complete = max(0, whole[:at].count(b"\n") - 1)
        assert journal.done == set(lines[:complete])
        for line in lines[complete:]:
            journal.append(line, f'{{"n": {line}}}')
        journal.finish(ordered=True)
    assert out.read_text() == "".join(f'{{"n": {line}}}\n' for line in sorted(lines))
    assert not part.exists()


def test_unordered_keeps_the_order_of_finishing(tmp_path: Path):
    out = tmp_path / "o.jsonl"
    with Journal(out, HEADER, resume=False) as journal:
        for line in (2, 1):
            journal.append(line, f'{{"n": {line}}}')
        journal.finish(ordered=False)
    assert out.read_text() == '{"n": 2}\n{"n": 1}\n'


def test_another_run_is_refused_by_what_differs(tmp_path: Path):
    filled(tmp_path / "o", [1])
    with pytest.raises(ArtefactError, match="other seed"):
        Journal(tmp_path / "o", {**HEADER, "seed": 2}, resume=True)


def test_unfinished_run_is_not_overwritten(tmp_path: Path):
    filled(tmp_path / "o", [1])
    with pytest.raises(UsageError, match="holds an unfinished run"):
        Journal(tmp_path / "o", HEADER, resume=False)
    with pytest.raises(UsageError, match="nothing to resume"):
        Journal(tmp_path / "other", HEADER, resume=True)


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    with (
        Journal(tmp_path / "o", HEADER, resume=False),
        pytest.raises(UsageError, match="in use by another run"),
    ):
        Journal(tmp_path / "o", HEADER, resume=True)


def test_damage_is_found(tmp_path: Path):
    filled(tmp_path / "o", [1, 2])
    part = tmp_path / "o.part"
    for bad in ("1\t{}\n", "x\t{}\n", "4 {}\n", "5\tnull\n"):
        text = part.read_text()
        part.write_text(text + bad)
        with pytest.raises(ArtefactError, match="line 4 is damaged"):
            Journal(tmp_path / "o", HEADER, resume=True)
        part.write_text(text)
