"""How a fetch looks while it runs, on stderr: live bars on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from deepinfer_cli import render
from deepinfer_engine.weights.fetch.progress import Activity, Progress

if TYPE_CHECKING:
    from rich.progress import TaskID

#: Seconds between two plain lines, and how many of them the shown speed is an average over.
_EVERY_S = 10.0
_WINDOW = 6

_DONE = {"fetch": "fetched", "check": "checked"}


class Shown(Progress, Protocol):
    """A progress that can be shown and taken away again."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def shown(*, quiet: bool) -> Iterator[Progress]:
    """The progress for this stderr: bars on a terminal, lines elsewhere or when the hub's bars are disabled."""
    from huggingface_hub import constants

    bars = sys.stderr.isatty() and not quiet and constants.HF_HUB_DISABLE_PROGRESS_BARS is not True
    progress: Shown = Bars() if bars else Lines(quiet=quiet)
    progress.start()
    try:
        yield progress
    finally:
        progress.stop()


class Lines:
    """Plain lines: notes as they come, and a summary every few seconds while something is expected."""

    def __init__(self, *, quiet: bool = False, every_s: float = _EVERY_S):
        self._quiet, self._every_s = quiet, every_s
        self._lock = threading.Lock()
        self._expected: dict[Activity, int] = {"fetch": 0, "check": 0}
        self._done: dict[Activity, int] = {"fetch": 0, "check": 0}
        self._active: dict[str, tuple[Activity, int, float]] = {}
        self._told: set[str] = set()
        self._past: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def start(self) -> None:
        self._past.append((time.monotonic(), 0))
        self._ticker.start()

    def stop(self) -> None:
        self._over.set()
        self._ticker.join()

    def expect(self, activity: Activity, nbytes: int) -> None:
        with self._lock:
            self._expected[activity] += nbytes

    def begin(self, activity: Activity, path: str, size: int, done: int) -> None:
        with self._lock:
            self._active[path] = (activity, size - done, time.monotonic())

    def advance(self, activity: Activity, path: str, nbytes: int) -> None:
        with self._lock:
            self._done[activity] += nbytes

    def end(self, activity: Activity, path: str) -> None:
        with self._lock:
            _, nbytes, since = self._active.pop(path)
            told = path in self._told
            self._told.add(path)
        if not told:  # the check of a file that was just fetched needs no line of its own
            self.note(f"{path}: {_DONE[activity]} {size_text(nbytes)} in {time.monotonic() - since:.1f} s")

    def note(self, text: str) -> None:
        render.note(text, quiet=self._quiet)

    def _tick(self) -> None:
        while not self._over.wait(self._every_s):
            self.note(self.summary(time.monotonic()))

    def summary(self, now_s: float) -> str:
        """One line about everything: how much, how fast, how long still, and on how many files."""
        with self._lock:
            fetched, wanted = self._done["fetch"], self._expected["fetch"]
            checked, to_check = self._done["check"], self._expected["check"]
            files = len(self._active)
            since_s, before = self._past[0] if self._past else (now_s, fetched)
            self._past.append((now_s, fetched))
        parts = []
        if wanted:
            speed = (fetched - before) / (now_s - since_s) if now_s > since_s else 0.0
            eta = duration_text((wanted - fetched) / speed) if speed else "unknown"
            parts.append(f"fetched {size_text(fetched)} of {size_text(wanted)} ({100 * fetched // wanted} %), "
                         f"{size_text(speed)}/s, ETA {eta}")  # fmt: skip
        if to_check:
            parts.append(f"checked {size_text(checked)} of {size_text(to_check)}")
        return "; ".join([*parts, f"{files} file{'' if files == 1 else 's'} open"])


class Bars:
    """Live bars: one per file in work, and the totals with speed and ETA below."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self._lock = threading.Lock()
        self._rich = RichProgress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), DownloadColumn(),
            TransferSpeedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=Console(stderr=True),
            transient=True, speed_estimate_period=60.0, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._totals: dict[Activity, TaskID] = {}
        self._expected: dict[Activity, int] = {}
        self._files: dict[tuple[Activity, str], TaskID] = {}

    def start(self) -> None:
        """Nothing yet: bars appear when there is something to wait for, below the table."""

    def stop(self) -> None:
        self._rich.stop()

    def expect(self, activity: Activity, nbytes: int) -> None:
        with self._lock:
            if not nbytes:
                return
            self._rich.start()
            total = self._expected[activity] = self._expected.get(activity, 0) + nbytes
            if activity not in self._totals:
                self._totals[activity] = self._rich.add_task(f"total {_DONE[activity]}", total=total)
            self._rich.update(self._totals[activity], total=total)

    def begin(self, activity: Activity, path: str, size: int, done: int) -> None:
        with self._lock:
            self._files[activity, path] = self._rich.add_task(f"{activity} {path}", total=size, completed=done)

    def advance(self, activity: Activity, path: str, nbytes: int) -> None:
        with self._lock:
            for task in (self._files.get((activity, path)), self._totals.get(activity)):
                if task is not None:
                    self._rich.advance(task, nbytes)

    def end(self, activity: Activity, path: str) -> None:
        with self._lock:
            self._rich.remove_task(self._files.pop((activity, path)))

    def note(self, text: str) -> None:
        self._rich.console.print(text, markup=False, highlight=False, soft_wrap=True)


def size_text(nbytes: float) -> str:
    """Bytes in decimal units, three significant digits: ``7.39 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            value = nbytes / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def duration_text(seconds: float) -> str:
    """``45 s``, ``12 min 05 s`` or ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
