"""What a build finds, makes, waits for, removes and refuses in the kernel cache."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.kernel_cache import Job
from deepinfer_kernels.processes import BuildError


def raising(exc: Exception) -> bytes:
    raise exc


def job(folder: Path, stem: str = "norm-0123", **given) -> Job:
    return Job("norm", folder, stem, "so", **{"make": partial(bytes, b"library"), **given})


def build(*jobs: Job, **given) -> list[kernel_cache.Built]:
    return kernel_cache.build(jobs, side_by_side=map, **given)


def test_a_file_is_made_once_and_named_by_what_it_is_made_of_and_its_bytes(tmp_path):
    wanted = job(tmp_path / "cpu")
    assert kernel_cache.plan([wanted])[0].status == "missing" and not (tmp_path / "cpu").exists()
    [made] = build(wanted)
    assert made.status == "built" and made.path == tmp_path / "cpu" / f"norm-0123-{kernel_cache.digest(b'library')}.so"
    [again] = build(job(tmp_path / "cpu", make=partial(raising, RuntimeError())))
    assert (again.status, again.path) == ("cached", made.path) == (kernel_cache.plan([wanted])[0].status, made.path)
    assert sorted(p.name for p in made.path.parent.iterdir()) == [".lock", made.path.name]


def test_two_jobs_of_one_file_are_one(tmp_path):
    calls: list[int] = []

    def make() -> bytes:
        calls.append(1)
        return b"library"

    made = build(job(tmp_path, make=make), job(tmp_path, make=make))
    assert [b.status for b in made] == ["built", "built"] and len(calls) == 1


@pytest.mark.parametrize("content", [b"", b"libra", b"another"])
def test_a_damaged_file_is_made_again_and_that_is_said(tmp_path, content):
    wanted = job(tmp_path)
    [made] = build(wanted)
    assert made.path is not None and made.detail is None
    made.path.write_bytes(content)
    assert kernel_cache.find(tmp_path, "norm-0123", "so") is None
    assert kernel_cache.plan([wanted])[0].status == "missing"
    [again] = build(job(tmp_path, make=partial(bytes, b"made otherwise")))
    assert again.status == "built" and "damaged" in (again.detail or "")
    assert [p.name for p in tmp_path.glob("*.so")] == [again.path.name if again.path else ""], "the damaged one is gone"


def test_a_file_that_is_not_served_is_made_again(tmp_path):
    [made] = build(job(tmp_path))
    served = job(tmp_path, served=lambda path: path != made.path)
    assert kernel_cache.plan([served])[0].status == "missing" and build(served)[0].status == "built"


def test_a_job_that_fails_fails_alone_with_the_line_that_says_why(tmp_path):
    said = "x.cpp: In function f:\n  x.cpp:1:2: error: no such thing\nx.cpp:9:9: error: another"
    bad = job(tmp_path, "bad-1", make=partial(raising, RuntimeError(said)))
    worse = job(tmp_path, "bad-2", make=partial(raising, KeyError()))
    made = build(bad, job(tmp_path), worse)
    assert [b.status for b in made] == ["failed", "built", "failed"]
    assert made[0].detail == "x.cpp:1:2: error: no such thing" and made[2].detail == "KeyError"


def test_what_a_killed_build_left_is_removed_by_the_next_one_and_nothing_else(tmp_path):
    for name in (".norm-0123-00000000.so.part", ".x1y2.part/made.so", ".x1y2.part/deep/er"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("half")
    kept = ("mine.part", ".hidden", "norm-ffff-00000000.so")
    for name in kept:
        (tmp_path / name).write_text("not a build's")
    kernel_cache.plan([job(tmp_path)])
    assert (tmp_path / ".x1y2.part").exists(), "only under the lock: a build may be writing it"
    [made] = build(job(tmp_path))
    assert made.path is not None
    assert {p.name for p in tmp_path.iterdir()} == {".lock", made.path.name, *kept}


def test_another_build_is_waited_for_which_is_said_and_what_it_made_is_not_made_again(tmp_path):
    wanted, said = job(tmp_path), []
    other = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)

    def note(text: str) -> None:
        said.append(text)
        assert kernel_cache.plan([wanted])[0].status == "missing"
        (tmp_path / f"norm-0123-{kernel_cache.digest(b'other')}.so").write_bytes(b"other")
        os.close(other)

    [made] = build(wanted, note=note)
    assert made.status == "cached" and made.path is not None and made.path.read_bytes() == b"other"
    assert said == [f"waiting for another build, which holds {tmp_path / '.lock'}"]


def test_a_cache_that_has_everything_need_not_be_writable(tmp_path, monkeypatch):
    build(job(tmp_path))
    (tmp_path / ".lock").unlink()
    assert build(job(tmp_path))[0].status == "cached" and not (tmp_path / ".lock").exists()
    monkeypatch.setattr(kernel_cache.os, "access", lambda path, mode: False)
    with pytest.raises(BuildError, match="cannot be written: Permission denied") as raised:
        build(job(tmp_path, "norm-4567"))
    assert "kernels.cache_dir" in raised.value.hint


def test_a_folder_that_cannot_come_to_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"the kernel cache .*file/cpu cannot be written: Not a directory"):
        build(job(tmp_path / "file" / "cpu"))


@pytest.mark.parametrize(
    "exc",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("collect2: error: ld returned 1\n/usr/bin/ld: final link failed: No space left on device"),
        RuntimeError("g++: internal compiler error: File size limit exceeded signal terminated program cc1plus"),
    ],
)  # fmt: skip
def test_a_full_disk_is_none_of_the_sources_faults(tmp_path, exc):
    with pytest.raises(BuildError, match=r"No space left|File size limit") as raised:
        build(job(tmp_path, make=partial(raising, exc)))
    assert str(tmp_path) in str(raised.value) and "make room" in raised.value.hint


def test_a_file_that_does_not_fit_leaves_nothing_that_could_be_taken_for_it(tmp_path):
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from deepinfer_kernels import kernel_cache, processes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "job = kernel_cache.Job('norm', Path(sys.argv[1]), 'norm-0123', 'so', lambda: bytes(5000))\n"
        "try:\n"
        "    kernel_cache.build([job], side_by_side=map)\n"
        "except processes.BuildError as exc:\n"
        "    print(exc)\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == f"the kernel cache {tmp_path} cannot be written: File too large\n"
    assert not list(tmp_path.glob("*.so"))
    assert build(job(tmp_path))[0].status == "built" and not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("In file included from x.h:1\nx.cpp:1:1: error: no such thing\nnote", "x.cpp:1:1: error: no such thing"),
        ("Compilation error:\nx.cu(12): error: too few arguments", "x.cu(12): error: too few arguments"),
        ("ptxas fatal   : Unresolved extern function 'f'", "ptxas fatal   : Unresolved extern function 'f'"),
        ("a linker\nhas errors", "has errors"),
        ("\n killed\n", "killed"),
        ("", None),
    ],
)
def test_the_reason_of_a_failure_is_the_first_line_that_says_an_error(said, reason):
    assert kernel_cache.reason(said) == reason
