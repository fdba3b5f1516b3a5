"""``deepinfer doctor``: forms of the result, exit codes, and what goes to which stream."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_engine.doctor import diagnose as module
from deepinfer_engine.doctor.finding import Check, failed, passed, warned


def run(args, capsys):
    code = cli.main(["doctor", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def given(monkeypatch):
    """Replace the checks by given findings; what the command asked for is kept."""
    asked = {}

    def use(*findings):
        def checks(profile, model, system):
            asked.update(profile=profile, model=model)
            return [Check("storage", "x", lambda: findings)]

        monkeypatch.setattr(module, "checks", checks)
        return asked

    return use


TEXTS = Path(__file__).parent / "texts"


def test_help_is_the_kept_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(["--help"], capsys)
    assert code == 0 and out == (TEXTS / "help_doctor.txt").read_text(encoding="utf-8")


GOOD = passed("disk", "900 GiB free")
SLOW = warned("nvcc", "absent", "install the CUDA toolkit")
BAD = failed("NCCL", "2.29.1; 2.32.3 is needed", "pip install nvidia-nccl-cu13", ["mapped from /usr/lib/libnccl.so.2"])


def test_all_passed_is_exit_0(given, capsys):
    given(GOOD, SLOW)
    code, out, err = run([], capsys)
    assert (code, err) == (0, "")
    assert out == (
        "storage\n"
        "  pass  disk  900 GiB free\n"
        "  warn  nvcc  absent\n"
        "              fix: install the CUDA toolkit\n"
        "1 passed, 1 warned, 0 failed\n"
    )


def test_a_failure_is_exit_3_with_its_fix_and_the_report_is_complete(given, capsys):
    given(GOOD, BAD, SLOW)
    code, out, err = run([], capsys)
    assert code == 3
    assert "              mapped from /usr/lib/libnccl.so.2\n" in out and out.endswith("1 passed, 1 warned, 1 failed\n")
    assert err == "error: 1 check failed: NCCL\n\nhint: pip install nvidia-nccl-cu13\n"


def test_json_is_one_document_with_counts_and_details(given, capsys):
    given(GOOD, BAD)
    code, out, _ = run(["--format", "json"], capsys)
    document = json.loads(out)
    assert code == 3
    assert document["schema"] == "deepinfer/doctor/1"
    assert (document["pass"], document["warn"], document["fail"]) == (1, 0, 1)
    assert document["checks"][1] == {
        "group": "storage", "check": "NCCL", "result": "fail", "found": "2.29.1; 2.32.3 is needed",
        "fix": "pip install nvidia-nccl-cu13", "details": ["mapped from /usr/lib/libnccl.so.2"],
    }  # fmt: skip


def test_rows_as_csv_and_jsonl(given, capsys):
    given(GOOD, SLOW)
    _, out, _ = run(["--format", "csv"], capsys)
    assert [r["result"] for r in csv.DictReader(io.StringIO(out))] == ["pass", "warn"]
    _, out, _ = run(["--format", "jsonl"], capsys)
    assert [json.loads(line)["check"] for line in out.splitlines()] == ["disk", "nvcc"]


def test_report_goes_to_a_file(given, capsys, tmp_path):
    given(GOOD)
    code, out, _ = run(["--out", str(tmp_path / "report.txt")], capsys)
    assert (code, out) == (0, "")
    assert (tmp_path / "report.txt").read_text().startswith("storage\n")


def test_profile_and_model_reach_the_checks(given, capsys, tmp_path):
    asked = given(GOOD)
    args = ["-p", "h200x8", "--set", "hardware.hbm_gib=100.0", "--model", str(tmp_path)]
    assert run(args, capsys)[0] == 0
    assert asked["profile"].hardware.hbm_gib == 100.0 and asked["model"] == tmp_path


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--set", "cache.prefix=true"], "--set changes a profile, and none is given"),
        (["--format", "text"], "doctor has no --format text"),
        (["--profile", "h200x9"], "no shipped profile is called 'h200x9'"),
    ],
)
def test_usage_errors_are_exit_2(args, part, capsys):
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "") and part in err


def test_profile_for_absent_hardware_is_exit_3_on_a_machine_without_it(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(["--profile", "decode-ep64"], capsys)
    assert code == 3
    assert "the profile is for sm100, this machine has cpu" in out
    assert err.startswith("error: ") and "profile hardware" in err
