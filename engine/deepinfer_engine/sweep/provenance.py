"""The machine that rows come from: only rows of one machine, one build and one thread count are one curve."""

from __future__ import annotations

import os
import platform
from typing import Any

from deepinfer_engine import __version__
from deepinfer_engine.bench.result import host_hardware


def machine() -> dict[str, Any]:
    """Processor, threads, memory, accelerators, versions. Imports torch: thread defaults are to be set before."""
    from deepinfer_kernels.device import probe_cuda

    devices = probe_cuda()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        **host_hardware("cuda" if devices else "cpu"),
        "ram_gib": round(ram, 1),
        "python": platform.python_version(),
        "tool_version": __version__,
    }
