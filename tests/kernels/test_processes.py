"""Compilers and processes that compile end with the build that started them, and so does what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_kernels import processes
from deepinfer_kernels.processes import BuildError, Programs, spawned

#: a program that starts another one, which writes its number; it ends only when it is told to
PARENT = "sh -c 'echo $$ > child.part; mv child.part child; exec sleep 600' & wait"


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold while a slow machine may take for it."""
    for _ in range(600):
        if holds():
            return True
        time.sleep(0.05)
    return False


def gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(folder: Path) -> int:
    """The number of the process that ``PARENT`` has started."""
    assert eventually((folder / "child").exists)
    return int((folder / "child").read_text())


def test_what_a_program_prints_is_in_english_and_with_its_status(folder, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with Programs() as programs:
        assert programs.run(["sh", "-c", "echo $LC_ALL $X; echo e >&2; exit 3"], 60, {"X": "y"}) == (3, "C y\ne\n")
    assert processes.answer("sh", "-c", "echo 1.2") == "1.2\n"
    assert processes.answer("sh", "-c", "echo 1.2; exit 1") is None and processes.answer("no-such-program") is None


def test_a_program_that_runs_out_of_time_ends_with_what_it_started(folder):
    with Programs() as programs, pytest.raises(TimeoutError, match="not finished in 1 s"):
        programs.run(["sh", "-c", PARENT], 1)
    assert eventually(lambda: gone(started(folder)))


def test_one_that_does_not_listen_is_killed(folder, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    with Programs() as programs, pytest.raises(TimeoutError):
        programs.run(["sh", "-c", f"trap '' TERM; {PARENT}"], 1)
    assert eventually(lambda: gone(started(folder)))


def test_programs_of_other_threads_end_with_the_block_and_none_is_started_after_it(folder):
    seen: list[int] = []
    with Programs() as programs:
        thread = threading.Thread(target=lambda: seen.append(programs.run(["sh", "-c", PARENT], 600)[0]))
        thread.start()
        child = started(folder)
    thread.join()
    assert seen[0] < 0 and eventually(lambda: gone(child))
    with pytest.raises(RuntimeError, match="the build is over"):
        programs.run(["true"], 1)


def test_other_processes_make_items_in_order_and_what_one_raises_is_raised():
    assert spawned(abs, [-1, -2, 3]) == [1, 2, 3]
    with pytest.raises(ValueError):
        spawned(int, ["1", "x"])


def test_a_process_that_is_killed_is_no_bug():
    with pytest.raises(BuildError, match="a process that compiles was killed, or crashed") as raised:
        spawned(os._exit, [9])
    assert raised.value.hint


@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGKILL, False)]
)
def test_processes_end_with_the_one_that_started_them(number, to_group):
    """As of an interrupt from a terminal, which every process of the group gets, or of a kill, which none can see."""
    code = "import time; from deepinfer_kernels.processes import spawned; spawned(time.sleep, [600.0, 600.0])"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    main = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, start_new_session=True)
    wanted = 1 + min(2, processes.cores())  # the resource tracker is one
    assert eventually(lambda: len(children(main.pid)) == wanted)
    workers = children(main.pid)
    os.killpg(main.pid, number) if to_group else os.kill(main.pid, number)
    _, said = main.communicate()
    assert main.returncode in (-number, 1) and eventually(lambda: all(map(gone, workers)))
    assert said.count(b"Traceback") == (number == signal.SIGINT), said  # its own


def test_being_told_to_end_is_an_interrupt_unless_somebody_handles_it(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), processes.terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with processes.terminable():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]
