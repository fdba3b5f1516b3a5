"""``BenchResult``: what a run gave, with what it was run on. Every writer reads this and nothing else."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine import __version__
from deepinfer_engine.bench.metrics import RequestRow, Value, failures
from deepinfer_engine.bench.workload import Workload


@dataclass(frozen=True)
class Meta:
    """What a measurement carries. ``profile``: resolved values by dotted key ({} for an endpoint that names none).

    ``target``: what answered, as its identity states it. ``salt``: what kept prompts apart from earlier runs.
    """

    kind: Literal["measured", "simulated"]
    workload: str
    workload_digest: str
    seed: int
    salt: int
    target: dict[str, Any]
    profile_name: str | None
    profile_digest: str | None
    profile: Mapping[str, Any]
    hardware: Mapping[str, Any]
    commit: str | None
    started: str
    tool_version: str = __version__
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """What a target says about itself: the result's meta, and the GPU count its profile states."""

    identity: dict[str, Any]
    profile_name: str | None
    profile_digest: str | None
    profile: dict[str, Any]
    hardware: dict[str, Any]
    gpus: int | None
    gpus_reason: str
    persistent_cache: bool


@dataclass(frozen=True)
class BenchResult:
    """``summary``: flat values, units in their names; ``undefined``: key → reason of every None among them.

    ``status`` is interrupted when the run was stopped: what had ended is in it, the rest counts as cancelled or unsent.
    """

    summary: dict[str, Value]
    requests: list[RequestRow]
    meta: Meta
    undefined: dict[str, str] = field(default_factory=dict)
    status: Literal["complete", "interrupted"] = "complete"

    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by kind."""
        return failures(self.requests)

    def to_row(self) -> dict[str, Value]:
        """One flat row for tables: what it was, on what, the recipe's choices, every value of the summary."""
        meta = self.meta
        arrivals = meta.recipe.get("arrivals", {})
        return {
            "kind": meta.kind,
            "status": self.status,
            "workload": meta.workload,
            "workload_digest": meta.workload_digest,
            "target": str(meta.target.get("kind", "")),
            "profile": meta.profile_name,
            "profile_digest": meta.profile_digest,
            "commit": meta.commit,
            "hardware": str(meta.hardware.get("name", "")),
            "seed": meta.seed,
            "started": meta.started,
            "tool_version": meta.tool_version,
            "concurrency": arrivals.get("concurrency"),
            "rate_per_s": arrivals.get("rate_per_s"),
            "cache": meta.recipe.get("cache"),
            **self.summary,
        }


def meta_of(workload: Workload, facts: TargetFacts, *, salt: int, started: str) -> Meta:
    """The meta of a measurement made here."""
    return Meta(
        kind="measured",
        workload=workload.name,
        workload_digest=workload.digest,
        seed=workload.seed,
        salt=salt,
        target=dict(facts.identity),
        profile_name=facts.profile_name,
        profile_digest=facts.profile_digest,
        profile=facts.profile,
        hardware=facts.hardware,
        commit=source_commit(),
        started=started,
        recipe=workload.recipe,
    )


def now_utc() -> str:
    """The time of a measurement, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@cache
def source_commit() -> str | None:
    """Commit of the source tree this package runs from, with ``+`` when files differ; None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def host_hardware(device: str = "cpu") -> dict[str, Any]:
    """The accelerator or processor that runs a measurement: a name, counts, versions that matter for speed."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if device.startswith("cuda"):
        out |= {"name": torch.cuda.get_device_name(0), "devices": torch.cuda.device_count(), "cuda": torch.version.cuda}
    else:
        out |= {"name": out["cpu"], "devices": 0}
    return out


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
