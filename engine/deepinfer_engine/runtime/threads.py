"""Thread defaults, to be set before torch is imported. No torch here.

Two busy OpenMP teams on two cores can slow each other a hundredfold by spinning, so a machine that is already busy
gets one thread. An explicit OMP_NUM_THREADS wins.
"""

from __future__ import annotations

import os


def set_thread_defaults(rows: int) -> int:
    """Fill in OMP_NUM_THREADS and the spin count where unset; returns the thread count that holds.

    One row per step gains nothing from a second thread: its matrices are too small.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        busy = os.getloadavg()[0] > 0.5
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = "1" if rows <= 1 or busy else str(min(2, cores))
    # 1000 spins: waits end quickly when the core is ours, and give way when it is not
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    value = os.environ["OMP_NUM_THREADS"].split(",")[0]
    return int(value) if value.isdigit() and int(value) > 0 else 1
