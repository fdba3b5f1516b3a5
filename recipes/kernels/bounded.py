"""A command that ends in time, with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def bounded(command: Sequence[str], report: Path, seconds: float, env: Mapping[str, str] | None = None) -> int | None:
    """Exit code of a command whose output goes to ``report``; None where it ran longer and was killed.

    It leads a process group of its own, which is killed with it: compilers and workers do not outlive it.
    """
    with report.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
