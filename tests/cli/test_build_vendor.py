"""``deepinfer build-kernels --vendor``: needs and commands, a build from a source tree, what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_cli import main as cli
from deepinfer_kernels.vendor import build, libraries


def run(args, capsys):
    code = cli.main(["build-kernels", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose compilers and torch can be chosen; the kernel cache is the test's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)

    def tool(name: str, says: str, code: int = 0) -> None:
        path = tools / name
        path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
        path.chmod(0o755)

    def with_tools(gxx="13.2.0", nvcc="13.1", git="2.39", cuda="13.0"):
        for name, says in (("g++", gxx), ("nvcc", f"Cuda compilation tools, release {nvcc}, V{nvcc}.1"), ("git", git)):
            tool(name, says)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return ["--set", f"kernels.cache_dir={tmp_path / 'kernels'}", "--format", "json"]

    with_tools.tool = tool  # type: ignore[attr-defined]
    return with_tools


def tree(folder: Path, setup: str = "from setuptools import setup\nsetup(name='deepgemm', packages=['deep_gemm'])\n"):
    """A source tree that looks like DeepGEMM's and installs in a second."""
    for inner in ("deep_gemm", "third-party/cutlass/include", "third-party/fmt/include"):
        (folder / inner).mkdir(parents=True)
    (folder / "deep_gemm" / "__init__.py").write_text("bf16_gemm_nt = print\n")
    (folder / "setup.py").write_text(setup)
    return folder


def test_dry_run_lists_needs_and_pinned_commands_and_writes_nothing(machine, capsys, tmp_path):
    code, out, _ = run(["--vendor", "deep_gemm", "--dry-run", *machine()], capsys)
    document = json.loads(out)
    assert code == 0 and document["schema"] == "deepinfer/build-vendor/1" and not (tmp_path / "kernels").exists()
    assert document["commit"] == libraries.LIBRARIES["deep_gemm"].commit and len(document["commit"]) == 40
    needs = {r["what"]: r["status"] for r in document["rows"] if r["part"] == "need"}
    assert needs["nvcc 12.9 or newer"] == needs["g++ 11 or newer"] == needs["torch built for CUDA"] == "ok"
    commands = {r["part"]: r["what"] for r in document["rows"] if r["status"] == "planned"}
    assert list(commands) == ["clone", "check out", "submodules", "build"]
    assert (
        "https://github.com/deepseek-ai/DeepGEMM" in commands["clone"] and document["commit"] in commands["check out"]
    )
    assert commands["build"].startswith("DG_FORCE_BUILD=1 ") and "--no-build-isolation" in commands["build"]


@pytest.mark.parametrize("name", list(libraries.LIBRARIES))
def test_no_command_takes_a_placeholder_from_an_index(machine, capsys, name):
    _, out, _ = run(["--vendor", name, "--dry-run", *machine()], capsys)
    words = [w for r in json.loads(out)["rows"] if r["part"] != "need" for w in r["what"].split()]
    assert not set(words) & set(libraries.PLACEHOLDERS) and words


def test_the_platform_selects_what_is_built(machine, capsys):
    arguments = machine()
    for target, variable in (("sm90", "FLASH_MLA_DISABLE_SM100=1"), ("sm100", "FLASH_MLA_DISABLE_SM90=1")):
        _, out, _ = run(["--vendor", "flash_mla", "--target", target, "--dry-run", *arguments], capsys)
        assert json.loads(out)["rows"][-2 if target == "sm100" else -1]["what"].startswith(variable)
        assert ("528 and 288 byte records" in out) == (target == "sm100")


@pytest.mark.parametrize(
    ("tools", "need", "found"),
    [
        ({"nvcc": "12.8"}, "nvcc 12.9 or newer", "nvcc 12.8"),
        ({"gxx": "10.2.1"}, "g++ 11 or newer", "g++ 10.2.1"),
        ({"cuda": None}, "torch built for CUDA", "torch "),
    ],
)
def test_what_is_lacking_is_said_with_what_is_there(machine, capsys, tools, need, found):
    code, out, err = run(["--vendor", "deep_gemm", *machine(**tools)], capsys)
    row = next(r for r in json.loads(out)["rows"] if r["what"] == need)
    assert code == 3 and row["status"] == "missing" and found in row["found"] and row["next"]
    assert f"deep_gemm cannot be built here: it needs {need}, this is" in err


def test_a_tool_that_is_absent_has_nothing_found(machine, capsys, tmp_path):
    arguments = machine()
    (tmp_path / "bin" / "nvcc").unlink()
    code, out, _ = run(["--vendor", "deep_gemm", *arguments], capsys)
    row = next(r for r in json.loads(out)["rows"] if r["what"].startswith("nvcc"))
    assert code == 3 and row["found"] is None
    assert row["next"].startswith(
        "there is no nvcc in PATH, nor in the package nvidia-cuda-nvcc: pip install 'nvidia-cuda"
    )


def test_the_nvcc_of_a_package_is_taken_and_told_to_the_build(machine, capsys, tmp_path, monkeypatch):
    arguments = machine()
    home = tmp_path / "site" / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    (tmp_path / "bin" / "nvcc").rename(home / "bin" / "nvcc")
    monkeypatch.setattr(
        build.cuda_tools.find,
        "__defaults__",
        (*build.cuda_tools.find.__defaults__[:2], lambda package, name: str(home / "bin" / name)),
    )
    code, out, _ = run(["--vendor", "deep_gemm", "--dry-run", *arguments], capsys)
    rows = json.loads(out)["rows"]
    assert code == 0 and "ok" in {r["status"] for r in rows if r["what"].startswith("nvcc")}
    assert f"CUDA_HOME={home} " in rows[-1]["what"]


@pytest.mark.parametrize("name", list(libraries.LIBRARIES))
def test_whatever_is_missing_names_what_installs_it(machine, capsys, tmp_path, monkeypatch, name):
    arguments = machine(cuda=None)
    for tool in ("g++", "nvcc", "git"):
        (tmp_path / "bin" / tool).unlink()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build.sys, "version", "3.11.2 x")
    _, out, _ = run(["--vendor", name, *arguments], capsys)
    missing = [r for r in json.loads(out)["rows"] if r["status"] == "missing"]
    assert len(missing) >= 3
    for row in missing:
        assert re.search(r"pip install |apt install |ensurepip|git clone|--source", row["next"]), row


def test_a_library_without_a_known_commit_needs_a_tree(machine, capsys):
    code, out, _ = run(["--vendor", "deep_ep", *machine()], capsys)
    row = next(r for r in json.loads(out)["rows"] if r["what"] == "a source tree with EPBuffer")
    assert code == 3 and "--source" in row["next"]


def test_a_source_tree_is_built_into_the_cache_once_and_found_by_the_adapters(machine, capsys, tmp_path, monkeypatch):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools to build a package")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "kernels" / "vendor" / "deep_gemm" / ".site-killed.part").mkdir(parents=True)
    arguments = ["--vendor", "deep-gemm", "--source", str(tree(tmp_path / "tree")), *machine()]
    code, out, err = run(arguments, capsys)
    document = json.loads(out)
    assert code == 0, err
    assert [r["status"] for r in document["rows"] if r["part"] == "build"] == ["done"]
    site = tmp_path / "kernels" / "vendor" / "deep_gemm" / "site"
    assert not (site.parent / ".site-killed.part").exists()
    assert document["folder"] == str(site) and (site / "deep_gemm" / "__init__.py").is_file()
    assert [p.name for p in site.parent.iterdir() if p.name not in (".lock", "site")] == []
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert libraries.missing("deep_gemm", ("bf16_gemm_nt",), tmp_path / "kernels") is None
    monkeypatch.delitem(sys.modules, "deep_gemm")
    again = json.loads(run(arguments, capsys)[1])
    assert [r["status"] for r in again["rows"] if r["part"] == "build"] == ["cached"]


def test_a_build_of_another_tree_platform_or_torch_is_not_taken_for_this_one(machine, capsys, tmp_path, monkeypatch):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools to build a package")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = tree(tmp_path / "tree")
    arguments = ["--vendor", "deep_gemm", "--source", str(source), *machine()]

    def status(more: list[str]) -> str:
        code, out, err = run([*arguments, *more], capsys)
        assert code == 0, err
        return json.loads(out)["rows"][-1]["status"]

    assert [status([]), status(["--dry-run"])] == ["done", "cached"]
    (source / "deep_gemm" / "__init__.py").write_text("bf16_gemm_nt = repr\n")
    assert status([]) == "done"
    site = tmp_path / "kernels" / "vendor" / "deep_gemm" / "site"
    assert "repr" in (site / "deep_gemm" / "__init__.py").read_text()
    assert sorted(p.name for p in site.parent.iterdir()) == [".lock", "site"]
    with monkeypatch.context() as patch:
        patch.setattr(build.importlib.metadata, "version", lambda name: "99.0")
        assert status(["--dry-run"]) == "planned"
    named = {
        platform: build.plan("flash_mla", tmp_path, platform=platform).made_of for platform in ("sm90", "sm100", None)
    }
    assert len(set(named.values())) == 3


def test_a_clone_without_the_pinned_state_is_fetched_again(machine, capsys, tmp_path):
    arguments = machine()
    (tmp_path / "kernels" / "vendor" / "deep_gemm" / "source" / ".git").mkdir(parents=True)
    _, out, _ = run(["--vendor", "deep_gemm", "--dry-run", *arguments], capsys)
    assert next(r["part"] for r in json.loads(out)["rows"] if r["part"] != "need") == "fetch"
    machine.tool("git", "commit")
    _, out, _ = run(["--vendor", "deep_gemm", "--dry-run", *arguments], capsys)
    assert next(r["part"] for r in json.loads(out)["rows"] if r["part"] != "need") == "check out"


def test_a_failing_build_leaves_nothing_and_ends_with_the_reason(machine, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = tree(tmp_path / "tree", "raise SystemExit('error: no kernel image for this machine')\n")
    code, out, err = run(["--vendor", "deep_gemm", "--source", str(source), *machine()], capsys)
    assert (
        code == 4
        and "deep_gemm was not built: error: no kernel image for this machine" in err
        and "run it by hand: DG_FORCE_BUILD=1" in err
    )
    assert [r["status"] for r in json.loads(out)["rows"] if r["part"] == "build"] == ["failed"]
    assert sorted(p.name for p in (tmp_path / "kernels" / "vendor" / "deep_gemm").iterdir()) == [".lock", "build.log"]


def test_a_repository_that_cannot_be_fetched_is_an_environment_that_is_not_ready(machine, capsys):
    arguments = machine()
    machine.tool("git", "fatal: unable to access the repository", code=128)
    code, _, err = run(["--vendor", "deep_gemm", *arguments], capsys)
    assert code == 3 and "deep_gemm was not fetched: fatal: unable to access" in err and "--source" in err


def test_trees_that_are_not_the_library_are_refused(machine, capsys, tmp_path):
    arguments = machine()
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = run(["--vendor", "flash_mla", "--source", str(empty), *arguments], capsys)
    assert code == 4 and "is no source tree of flash_mla: it has no setup.py" in err
    source = tree(tmp_path / "tree")
    (source / "third-party" / "cutlass" / "include").rmdir()
    code, _, err = run(["--vendor", "deep_gemm", "--source", str(source), *arguments], capsys)
    assert code == 4 and "submodule update --init --recursive" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vendor", "deepgem"], "no library named 'deepgem'"),
        (["--vendor", "deep_gemm", "--target", "cpu"], "built for sm90 and sm100"),
        (["--vendor", "deep_gemm", "--source", "absent"], "no such folder"),
        (["--vendor", "deep_gemm", "--ops", "linear"], "built as a whole"),
        (["--target", "cpu", "--source", "."], "none is named"),
        ([], "neither --target nor --vendor is given"),
    ],
)
def test_wrong_command_lines_are_refused(capsys, arguments, said):
    code, out, err = run(arguments, capsys)
    assert code == 2 and out == "" and said in err


def test_table_form_gives_commands_one_may_copy(machine, capsys):
    code, out, _ = run(["--vendor", "deep_gemm", "--dry-run", *machine()[:2]], capsys)
    assert code == 0 and "\nclone: planned\n  git clone https://github.com/deepseek-ai/DeepGEMM " in out
    assert out.startswith("need")


def test_each_library_says_what_proves_its_tree():
    assert set(build._TREES) == set(libraries.LIBRARIES) == set(build._NEEDS)
