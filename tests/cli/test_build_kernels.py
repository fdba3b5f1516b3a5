"""``deepinfer build-kernels``: what is built, what is found again, what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_engine.eplb import native
from deepinfer_kernels import cpp
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


def test_no_two_rows_of_gpu_kernels_look_alike(capsys, cache):
    needs_triton()
    arguments = ["--target", "sm90", "--model", "deepseek-v4.1-flash", "--dry-run", *cache, "--profile", "decode-ep64"]
    rows = json.loads(run([*arguments, "--format", "json"], capsys)[1])["rows"]
    listed = list(csv.DictReader(io.StringIO(run([*arguments, "--format", "csv"], capsys)[1])))
    shown = run([*arguments, "--format", "table"], capsys)[1].splitlines()[1:]
    made = [i for i, row in enumerate(rows) if row["status"] != "skipped"]
    assert len(rows) == len(listed) == len(shown) and len(made) > 200
    assert len({shown[i] for i in made}) == len({str(listed[i]) for i in made}) == len(made)
    product = next(i for i in made if rows[i]["kernel"] == "linear.linear")
    sizes = rows[product]["sizes"]
    assert {"N", "K", "BN", "BT", "BK", "num_warps"} <= set(sizes) and sizes["X"] == "*bf16"
    assert listed[product]["sizes"] == ", ".join(f"{name}={value}" for name, value in sizes.items())
    assert f"N={sizes['N']}, K={sizes['K']}, " in shown[product] and "X=" not in shown[product], "all take bf16"


@pytest.mark.parametrize("normalise", [True, False])
def test_the_gates_of_a_config_are_built_whether_it_normalises_choices_or_not(capsys, cache, tmp_path, normalise):
    needs_triton()
    from deepinfer_engine.config.resources import model_dir

    config = json.loads((model_dir("nano") / "config.json").read_text())
    assert config["text_config"]["norm_topk_prob"] is True
    config["text_config"]["norm_topk_prob"] = normalise
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config))
    arguments = ["--target", "sm90", "--ops", "gate_topk", "--model", str(model), "--dry-run", "--format", "jsonl"]
    code, out, _ = run([*arguments, *cache], capsys)
    sizes = [json.loads(row)["sizes"] for row in out.splitlines()]
    assert code == 0 and {s["NORMALISE"] for s in sizes if "NORMALISE" in s} == {normalise}


def test_a_gpu_kernel_that_fails_is_named_with_the_line_of_its_compiler(capfd, cache, tmp_path, monkeypatch):
    needs_triton()
    version = "Cuda compilation tools, release 12.9, V12.9.86"
    line = "ptxas x.ptx, line 7; error   : Arguments mismatch for instruction"
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit 0\necho "{line}" >&2\nexit 255\n')
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    code = cli.main(["build-kernels", "--target", "sm90", "--ops", "rms_norm", "--format", "jsonl", *cache])
    out, err = capfd.readouterr()
    rows = [json.loads(row) for row in out.splitlines()]
    assert code == 4 and {row["reason"] for row in rows} == {line}
    assert f"3 of 3 kernels were not built, first of rms_norm, norm.rms_norm (H={rows[0]['sizes']['H']}" in err
    assert f"): {line}\n" in err


def test_a_gpu_kernel_that_triton_refuses_has_its_message_and_the_line_that_it_is_about(tmp_path):
    needs_triton()
    from deepinfer_kernels.triton.build import Kernel, compile_one

    arguments = {"X": "*bf16", "W": "*bf16", "Y": "*bf16", "rows": "i32", "eps": "fp32"}
    constants = {"H": 3, "ROWS": 1, "BLOCK": 3}
    signature = (*arguments.items(), *dict.fromkeys(constants, "constexpr").items())
    numbered = tuple(enumerate(constants.values(), len(arguments)))
    kernel = Kernel("rms_norm", "deepinfer_kernels.triton.norm", "_rms_norm", signature, numbered, (), ())
    with pytest.raises(RuntimeError, match=r"^col = tl\.arange\(0, BLOCK\).*: error: .*power of 2"):
        compile_one(kernel, "sm90", tmp_path)


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
    assert "1 of 1 kernels were not built, first of rope, norm: x.cpp:1:1: error: no such thing" in err
    assert [p.name for p in (tmp_path / "kernels" / "cpu").iterdir()] == [".lock"]


def test_what_stands_in_the_way_is_exit_3(capsys, cache, compiler, tmp_path, monkeypatch):
    (tmp_path / "kernels").write_text("a file")
    code, _, err = run(["--target", "cpu", *cache], capsys)
    assert code == 3 and "cannot be written" in err and "kernels.cache_dir" in err and "g++" not in err
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, _, err = run(["--target", "cpu", *cache], capsys)
    assert code == 3 and "no C++ compiler: no-such-compiler is not on the path" in err and "apt install g++" in err


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["--ops", "rms_nrom"], "no operation named 'rms_nrom'", "did you mean rms_norm?"),
        (["--ops", "qqqq"], "no operation named 'qqqq'", "there are: attend"),
        (["--ops", "count_choices"], "count_choices is not compiled for cpu", "there are: attend"),
        (["--ops", ""], "--ops has an empty name", "there are: attend"),
        (["--ops", "rope,"], "--ops has an empty name", "there are: attend"),
        (["--target", "sm90"], "--target is given more than once: cpu, sm90", "build one at a time"),
        (["--format", "text"], "build-kernels has no --format text", "table, json, jsonl, csv"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_with_the_next_step(capsys, cache, arguments, said, hint):
    code, _, err = run(["--target", "cpu", *arguments, *cache], capsys)
    assert code == 2 and said in err and f"hint: {hint}" in err.replace("use one of ", "")
    assert run(["--target", "tpu", *cache], capsys)[0] == 2


def test_operations_may_be_named_in_several_options(capsys, cache, compiler):
    arguments = ["--target", "cpu", "--dry-run", "--format", "jsonl", *cache]
    rows = run([*arguments, "--ops", "rope", "--ops", "rms_norm, rope"], capsys)[1].splitlines()
    assert [json.loads(row)["op"] for row in rows] == ["rms_norm", "rope"]


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("deepseek-v41-flash", "did you mean deepseek-v4.1-flash?"),
        ("nope.json", "name nano, deepseek-v4.1-flash, a folder or"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_those_that_are(capsys, cache, model, hint):
    needs_triton()
    code, _, err = run(["--target", "sm90", "--model", model, "--dry-run", *cache], capsys)
    assert code == 4 and f"{model}: no such file" in err and hint in err


def test_a_cache_in_the_home_folder_is_there_and_not_in_a_folder_called_tilde(capsys, compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    arguments = ["--target", "cpu", "--ops", "rope", "--format", "jsonl", "--set"]
    for named, folder in (("~/kernels", tmp_path / "home" / "kernels"), ("kernels", tmp_path / "kernels")):
        code, out, _ = run([*arguments, f"kernels.cache_dir={named}"], capsys)
        assert code == 0 and Path(json.loads(out)["file"]).parent == folder / "cpu"


@contextmanager
def building(tmp_path: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, as in a terminal, which has printed and ended when the block is left."""
    command = [sys.executable, "-m", "deepinfer_cli", "build-kernels", "--set", f"kernels.cache_dir={tmp_path}/kernels"]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    process = subprocess.Popen(
        [*command, *args, "--format", "jsonl"], env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what a slow machine may take a while for."""
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


def gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


#: a compiler that starts another process, notes its number in the file "child" and waits for it
STUCK = 'echo half > "$out"; sleep 600 & echo $! > {0}/child.new; mv {0}/child.new {0}/child; wait'


def test_two_commands_that_build_the_same_at_once_compile_it_once(compiler, tmp_path):
    compiler(then=f'echo once >> {tmp_path}/log; until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo built > "$out"')
    wanted = ("--target", "cpu", "--ops", "rope")
    with building(tmp_path, *wanted) as one:
        eventually((tmp_path / "log").exists)
        with building(tmp_path, *wanted) as other:
            assert other.stderr is not None and "waiting for another build" in other.stderr.readline()
            (tmp_path / "go").touch()
            rows = [json.loads(process.communicate()[0]) for process in (one, other)]
    assert [r["status"] for r in rows] == ["built", "cached"] and rows[0]["file"] == rows[1]["file"]
    assert (tmp_path / "log").read_text() == "once\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(compiler, tmp_path, number):
    compiler(then=STUCK.format(tmp_path))
    with building(tmp_path, "--target", "cpu") as process:
        eventually((tmp_path / "child").exists)
        os.killpg(process.pid, number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    eventually(lambda: gone(int((tmp_path / "child").read_text())))
    assert [p.name for p in (tmp_path / "kernels" / "cpu").iterdir()] == [".lock"]


def test_nothing_that_a_killed_build_leaves_is_in_the_way_of_the_next(capsys, cache, compiler, tmp_path):
    compiler(then=STUCK.format(tmp_path))
    with building(tmp_path, "--target", "cpu", "--ops", "rope") as process:
        eventually((tmp_path / "child").exists)
        process.kill()
        process.communicate()
    assert any(p.suffix == ".part" for p in (tmp_path / "kernels" / "cpu").iterdir())
    compiler()
    code, out, _ = run(["--target", "cpu", "--ops", "rope", "--format", "jsonl", *cache], capsys)
    made = json.loads(out)
    assert (code, made["status"]) == (0, "built") and Path(made["file"]).read_text() == "built\n"
    assert {p.name for p in Path(made["file"]).parent.iterdir()} == {".lock", Path(made["file"]).name}
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_an_interrupted_build_of_gpu_kernels_ends_its_processes(tmp_path):
    needs_triton()
    with building(tmp_path, "--target", "sm90") as process:
        folder = tmp_path / "kernels" / "sm90"
        eventually(lambda: any(folder.glob("*.cubin")))
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()  # which ends when nobody holds the pipes any more
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize("change", ["source", "header", "flags", "compiler"])
def test_whatever_a_library_is_made_of_makes_another_one(compiler, tmp_path, change):
    def made(version: str, source: str, header: str, *flags: str) -> cpp.Built:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "x.cpp").write_text(source)
        (folder / "x.h").write_text(header)
        compiler(version)
        wanted = cpp.Source("x", folder / "x.cpp", flags, (folder / "x.h",))
        [found] = cpp.build([wanted], cpp.Compiler.find(), tmp_path / "kernels")
        return found

    before = {"version": "1.0", "source": "int f;", "header": "int g;", "flags": "-O2"}
    after = before | {"version" if change == "compiler" else change: "2"}
    first, other, again = (made(*parts.values()) for parts in (before, after, before))
    assert [b.status for b in (first, other, again)] == ["built", "built", "cached"]
    assert first.path == again.path != other.path


def test_a_model_is_refused_where_kernels_are_for_any_shapes(capsys: pytest.CaptureFixture[str]):
    for other in (["--target", "cpu"], ["--vendor", "deep_gemm"]):
        assert cli.main(["build-kernels", "--model", "nano", "--dry-run", *other]) == 2
        assert f"--model with {' '.join(other)}" in capsys.readouterr().err
