"""The sanitizer's recipe says what it could not look at and reads reports as they are written."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.kernels import sanitize
from recipes.kernels.bounded import bounded

CLEAN = "3 passed in 1.00s\n========= ERROR SUMMARY: 0 errors\n"
#: what a tool says of a kernel that reads behind the end
FOUND = """3 passed in 1.00s
========= Invalid __global__ read of size 2 bytes
=========     at _rms_norm+0x1a0 in norm.py:27
=========     by thread (0,0,0) in block (3,0,0)
========= ERROR SUMMARY: 2 errors
"""
RACES = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for compute-sanitizer that prints one report for the faulty kernel and another for the cases."""

    def install(faulty: str, cases: str) -> None:
        for name, text in (("faulty", faulty), ("cases", cases)):
            (tmp_path / name).write_text(text)
        script = tmp_path / "compute-sanitizer"
        script.write_text(
            f'#!/bin/sh\ncase "$*" in *--faulty*) cat {tmp_path}/faulty;; *) cat {tmp_path}/cases;; esac\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def run(monkeypatch: pytest.MonkeyPatch, out: Path, plain: tuple[str, int] = ("3 passed in 1.00s", 0)) -> int:
    monkeypatch.setattr(sanitize, "without_a_tool", lambda *_: plain)
    monkeypatch.setattr(sys, "argv", ["sanitize", "--cases", "triton", "--tools", "memcheck", "--out", str(out)])
    return sanitize.main()


def test_without_the_tool_nothing_is_clean(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, tmp_path / "out") == 3
    assert "compute-sanitizer is not on the path" in capsys.readouterr().err


def test_a_tool_that_misses_the_fault_made_for_it_is_called_blind(tool, tmp_path, monkeypatch, capsys):
    tool(CLEAN, CLEAN)
    assert run(monkeypatch, tmp_path / "out") == 3
    assert "memcheck: did not find the fault made for it" in capsys.readouterr().err


def test_a_clean_report_is_clean(tool, tmp_path, monkeypatch, capsys):
    tool(FOUND, CLEAN)
    assert run(monkeypatch, tmp_path / "out") == 0
    assert "triton memcheck: clean, 3 passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "said"), [(FOUND, "2 found _rms_norm"), (RACES, "1 found"), ("killed", "None found")]
)
def test_what_was_found_or_never_ended_is_not_clean(tool, tmp_path, monkeypatch, capsys, report, said):
    tool(FOUND, report)
    assert run(monkeypatch, tmp_path / "out") == 6
    assert f"triton memcheck: {said}" in capsys.readouterr().out


def test_where_every_case_was_skipped_nothing_is_known(tool, tmp_path, monkeypatch, capsys):
    tool(FOUND, CLEAN)
    assert run(monkeypatch, tmp_path / "out", ("4 skipped in 1.00s", 0)) == 3
    streams = capsys.readouterr()
    assert "triton: nothing ran (4 skipped" in streams.out and "nothing is known" in streams.err


def test_cases_that_fail_without_a_tool_are_not_looked_at(tool, tmp_path, monkeypatch, capsys):
    tool(FOUND, CLEAN)
    assert run(monkeypatch, tmp_path / "out", ("1 failed, 3 passed in 1.00s", 1)) == 6
    assert "triton without a tool: 1 failed" in capsys.readouterr().out


def test_the_names_of_cases_select_some(pytestconfig):
    """Every row of cases names a file that is there, and words of test names that are in it."""
    for _, path, which in sanitize.CASES.values():
        text = (pytestconfig.rootpath / path).read_text()
        for word in re.findall(r"[a-z_]*[a-z]_[a-z_0-9]+", which):
            assert word in text, (path, word)


#: row of cases → parts of test names of which some have to be chosen, and of those that take too long under a tool
CHOSEN = {
    "triton": (
        (
            *(
                f"agrees_with_the_reference[{op}-2]"
                for op in ("linear", "moe_experts", "attend_cached", "index_scores")
            ),
            "test_rows_are_stored_where_they_belong",  # store_rows
            "test_weights_that_kernels_cannot_read_as_they_lie",  # prepare_weight, without tiles
            "test_packed_weights_are_what_any_operation_reads",  # prepare_weight, in tiles
            *(f"test_every_row_of_uneven_slots_is_computed[counts{i}]" for i in (0, 2, 3)),
            "test_many_tokens_take_the_matrix_written_out[257]",  # the dense route
        ),
        ("of_flash", "real_size", "counts1]", "[260]", "-40]"),
    ),
    "triton-step": (
        tuple(f"test_logits_agree_with_f32_products[{sizes}]" for sizes in ("1-300-160", "3-1-192", "17-129-200")),
        ("[70-64-1000]", "same_bits", "[5000]"),
    ),
}


@pytest.mark.parametrize("row", list(CHOSEN))
def test_what_only_a_device_runs_is_chosen_and_small(pytestconfig, row):
    needs, left_out = CHOSEN[row]
    pytest.importorskip(sanitize.CASES[row][0])
    command = [sys.executable, "-m", *sanitize.cases_of(row), "--collect-only", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        command, cwd=pytestconfig.rootpath, env=environment, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    chosen = [line for line in found if "::" in line]
    for part in needs:
        assert any(part in line for line in chosen), (part, found[-3:])
    assert not [line for line in chosen for part in left_out if part in line]


def test_a_command_that_does_not_end_is_killed_with_what_it_started(tmp_path):
    assert bounded(["sh", "-c", "sleep 60 & echo $!; wait"], tmp_path / "log", 0.5) is None
    child = Path("/proc") / (tmp_path / "log").read_text().strip() / "stat"
    with suppress(FileNotFoundError, ProcessLookupError):  # gone, or dead and not yet taken note of
        while child.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.05)
    assert bounded(["sh", "-c", "exit 7"], tmp_path / "log", 9) == 7
