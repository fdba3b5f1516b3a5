"""Compilers and processes that compile: they end with the build that started them, whatever ends it.

Each is the first of a process group of its own, so that what it starts ends with it, and so that an interrupt from a
terminal reaches the build alone, which ends them in order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

#: programs that are told to end have this long to remove their temporary files; whoever interrupts waits for it
_GRACE_S = 1

#: signals that end a process which does not handle them, and here are as good as an interrupt
_ENDING = (signal.SIGTERM, signal.SIGHUP)

Item = TypeVar("Item")
Made = TypeVar("Made")


class BuildError(Exception):
    """No build can go on here: a compiler does not answer, or the kernel cache cannot be written; ``hint``: the next
    step."""

    def __init__(self, message: str, hint: str):
        super().__init__(message, hint)
        self.hint = hint

    def __str__(self) -> str:
        return self.args[0]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spawned(make: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """``make`` of every item, in other processes, as many at a time as there are cores.

    They are spawned, because a forked child would inherit torch's threads in whatever state they are. Raises what
    ``make`` raises, and ``BuildError`` where a process was killed.
    """
    workers: set[Any] = set()
    pool = ProcessPoolExecutor(max(1, min(cores(), len(items))), multiprocessing.get_context("spawn"), _lead)
    try:
        with _starting, _interrupts_later():
            others = set(multiprocessing.active_children())
            futures = [pool.submit(make, item) for item in items]
            workers = set(multiprocessing.active_children()) - others
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise BuildError(
            "a process that compiles was killed, or crashed", "free memory, or let it use fewer cores: taskset -c 0"
        ) from None
    finally:
        for worker in workers:
            _signal_group(worker.pid, signal.SIGKILL)
            worker.kill()  # one that has just started leads no group yet
        pool.shutdown(cancel_futures=True)


#: held while processes are started, so that one build does not take another's for its own
_starting = threading.Lock()


def _lead() -> None:
    """In a process that compiles: lead a group, which ends when the process that started it is gone."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """What interrupts waits until the end; a process that is started here has it blocked."""
    resource_tracker.ensure_running()  # its start would let them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def terminable() -> Iterator[None]:
    """While it holds, being told to end, or losing the terminal, is an interrupt, as far as nobody else handles it."""
    taken = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        taken = [s for s in _ENDING if signal.getsignal(s) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


class Programs:
    """Programs that run, started from any thread; whatever of them is left when the block ends is ended with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: set[subprocess.Popen[str]] | None = set()

    def run(self, argv: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
        """(exit status, what it printed, in English). Raises ``TimeoutError`` once it has ended a program that takes
        longer, and ``OSError`` where there is none."""
        with self._lock:
            if self._left is None:
                raise RuntimeError(f"{argv[0]} is not started: the build is over")
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", env=os.environ | {"LC_ALL": "C"} | dict(variables or {}), start_new_session=True,
            )  # fmt: skip
            self._left.add(process)
        with process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except BaseException as exc:
                _end(process)
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise TimeoutError(f"not finished in {seconds:.0f} s") from None
                raise
            finally:
                with self._lock:
                    if self._left is not None:
                        self._left.discard(process)
        return process.returncode, said

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            left, self._left = self._left, None
        _end(*left or ())


def answer(*argv: str) -> str | None:
    """What a program prints when asked for its version; None where it does not answer."""
    try:
        with Programs() as programs:
            status, said = programs.run(argv, 30)
    except OSError:  # a TimeoutError is one
        return None
    return said if status == 0 else None


def _end(*left: subprocess.Popen[str]) -> None:
    """End programs and whatever they started; politely first, so that temporary files and locks are removed."""
    for process in left:
        _signal_group(process.pid, signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    for process in left:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0, until - time.monotonic()))
    for process in left:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(leader: int | None, number: signal.Signals) -> None:
    if leader is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
