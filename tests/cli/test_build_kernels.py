"""``deepinfer build-kernels``: what is built, what is found again, what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_engine.eplb import native
from deepinfer_kernels import cpp
from deepinfer_kernels.cpu.binary import source
from deepinfer_kernels.cpu.families import FAMILIES
from deepinfer_kernels.triton import families as triton

TEXTS = Path(__file__).parent / "texts"


def run(args, capsys):
    code = cli.main(["build-kernels", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def cache(tmp_path: Path) -> list[str]:
    return ["--set", f"kernels.cache_dir={tmp_path / 'kernels'}"]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for the C++ compiler: a script whose version and success can be chosen."""

    def make(version: str = "1.0", then: str = 'for last; do :; done; echo built > "$out"') -> None:
        script = tmp_path / "c++"
        lines = ["#!/bin/sh", f'[ "$1" = --version ] && echo "cc {version}" && exit 0']
        lines += ['while [ "$1" != -o ]; do shift; done; out=$2', then]
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    make()
    return make


def needs_triton() -> None:
    if (reason := triton.unusable()) is not None:
        pytest.skip(f"needs another triton: {reason}")


def test_help_is_the_kept_one(capsys, monkeypatch):
    """``COLUMNS=100 python -m deepinfer_cli build-kernels --help`` writes it anew."""
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(["--help"], capsys)
    assert code == 0 and out == (TEXTS / "help_build_kernels.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_gpu_kernels_are_built_without_a_gpu_and_found_again(capsys, cache, tmp_path, target):
    needs_triton()
    arguments = ["--target", target, "--ops", "rms_norm,mhc_collapse", "--format", "json", *cache]
    dry = json.loads(run([*arguments, "--dry-run"], capsys)[1])
    assert {r["status"] for r in dry["rows"]} == {"missing"} and not (tmp_path / "kernels").exists()
    code, out, _ = run(arguments, capsys)
    document = json.loads(out)
    assert code == 0 and document["compiler"].startswith("triton 3.")
    # nano norms rows of 160, of 64 (query latent and head) and of 32
    assert [r["op"] for r in document["rows"]] == ["rms_norm"] * 3 + ["mhc_collapse"]
    assert {r["status"] for r in document["rows"]} == {"built"} and len(document["rows"]) == len(dry["rows"])
    for row in document["rows"]:
        assert Path(row["file"]).read_bytes()[:4] == b"\x7fELF" and f"/{target}/" in row["file"]
    assert not [p for p in (tmp_path / "kernels" / target).iterdir() if p.suffix == ".part"]
    again = json.loads(run(arguments, capsys)[1])["rows"]
    assert [(r["status"], r["file"]) for r in again] == [("cached", r["file"]) for r in document["rows"]]
    Path(again[0]["file"]).write_bytes(b"damaged")
    assert [r["status"] for r in json.loads(run(arguments, capsys)[1])["rows"]] == ["built"] + ["cached"] * 3


def test_every_gpu_kernel_of_the_release_is_known_without_compiling(capsys, cache):
    needs_triton()
    arguments = ["--target", "sm100", "--model", "deepseek-v4.1-flash", "--dry-run", "--format", "json", *cache]
    code, out, _ = run([*arguments, "--profile", "decode-ep64"], capsys)
    from deepinfer_kernels.triton.families import FAMILIES

    made_of_bytes = {"prepare_weight"}  # keeps what the checkpoint has
    assert code == 0
    assert {r["op"] for r in json.loads(out)["rows"]} == {n for f in FAMILIES.values() for n in f} - made_of_bytes


def test_gpu_kernels_need_triton(capsys, cache, monkeypatch):
    from deepinfer_kernels.triton import families

    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: None)
    code, _, err = run(["--target", "sm90", *cache], capsys)
    assert code == 3 and "kernels for sm90 are compiled by triton, and triton is not installed" in err
    assert "pip install 'deepinfer-cli[cuda]'" in err


def test_a_library_is_built_once_and_serves_every_operation_of_its_family(capsys, cache, tmp_path):
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("no C++ compiler on the path")
    arguments = ["--target", "cpu", "--ops", "rms_norm, rope", "--format", "json", *cache]
    code, out, _ = run(arguments, capsys)
    document = json.loads(out)
    assert code == 0 and document["schema"] == "deepinfer/build-kernels/1" and document["target"] == "cpu"
    rows = document["rows"]
    assert [(r["op"], r["status"]) for r in rows] == [("rms_norm", "built"), ("rope", "built")]
    assert rows[0]["file"] == rows[1]["file"] and rows[0]["seconds"] > 0
    files = sorted(p.name for p in (tmp_path / "kernels" / "cpu").iterdir())
    assert files == [".lock", Path(rows[0]["file"]).name], "nothing temporary is left"
    assert FAMILIES["norm"].binary.missing(tmp_path / "kernels") is None
    again = json.loads(run(arguments, capsys)[1])["rows"]
    assert [r["status"] for r in again] == ["cached", "cached"]


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(capsys, cache, compiler, tmp_path):
    code, out, _ = run(["--target", "cpu", "--dry-run", "--format", "csv", *cache], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and {r["status"] for r in rows} == {"missing"}
    operations = [name for family in FAMILIES.values() for name in family.operations]
    assert [r["op"] for r in rows] == [*operations, "eplb_plan"]
    assert not (tmp_path / "kernels").exists()


def test_the_loops_of_the_planner_are_built_too(capsys, cache, tmp_path, monkeypatch):
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("no C++ compiler on the path")
    (row,) = json.loads(run(["--target", "cpu", "--ops", "eplb_plan", "--format", "json", *cache], capsys)[1])["rows"]
    assert (row["op"], row["status"]) == ("eplb_plan", "built")
    monkeypatch.setenv("CXX", "no-such-compiler")  # what is built needs no compiler any more
    assert native.load(tmp_path / "kernels").name == "compiled"


def test_another_compiler_and_a_damaged_library_are_built_anew(capsys, cache, compiler, tmp_path):
    arguments = ["--target", "cpu", "--ops", "rope", "--format", "jsonl", *cache]

    def status() -> tuple[str, Path]:
        row = json.loads(run(arguments, capsys)[1])
        return row["status"], Path(row["file"])

    first, path = status()
    assert (first, status()[0]) == ("built", "cached")
    path.write_text("b")
    assert status()[0] == "built" and path.read_text() == "built\n"
    compiler("2.0")
    second, other = status()
    assert second == "built" and other != path


def test_a_failing_compiler_is_exit_4_with_its_message(capsys, cache, compiler, tmp_path):
    compiler(then="echo 'x.cpp:1:1: error: no such thing' >&2; exit 1")
    code, out, err = run(["--target", "cpu", "--ops", "rope", *cache], capsys)
    assert code == 4 and "failed" in out
    assert "1 of 1 kernels were not built, first of rope: x.cpp:1:1: error: no such thing" in err
    assert [p.name for p in (tmp_path / "kernels" / "cpu").iterdir()] == [".lock"]


def test_what_stands_in_the_way_is_exit_3(capsys, cache, compiler, tmp_path, monkeypatch):
    (tmp_path / "kernels").write_text("a file")
    code, _, err = run(["--target", "cpu", *cache], capsys)
    assert code == 3 and "cannot be written" in err and "kernels.cache_dir" in err and "g++" not in err
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, _, err = run(["--target", "cpu", *cache], capsys)
    assert code == 3 and "no C++ compiler: no-such-compiler is not on the path" in err and "apt install g++" in err


def test_misspelt_operations_and_forms_are_usage_errors(capsys, cache):
    code, _, err = run(["--target", "cpu", "--ops", "rms_nrom", *cache], capsys)
    assert code == 2 and "no compiled operation named 'rms_nrom'" in err and "rms_norm" in err
    assert run(["--target", "cpu", "--format", "text", *cache], capsys)[0] == 2
    assert run(["--target", "tpu", *cache], capsys)[0] == 2


def test_concurrent_builds_wait_for_each_other(compiler, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    found = cpp.Compiler.find()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(cpp.build, [source("norm")], found, tmp_path) for _ in range(2)]
        assert sorted(r.result()[0].status for r in runs) == ["built", "cached"]


def test_a_model_is_refused_where_kernels_are_for_any_shapes(capsys: pytest.CaptureFixture[str]):
    for other in (["--target", "cpu"], ["--vendor", "deep_gemm"]):
        assert cli.main(["build-kernels", "--model", "nano", "--dry-run", *other]) == 2
        assert f"--model with {' '.join(other)}" in capsys.readouterr().err
