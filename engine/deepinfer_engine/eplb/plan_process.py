"""``PlanProcess``: the planner in a process of its own, driven by a thread, so that steps go on while it plans.

Planning is seconds of arithmetic that holds the interpreter lock where it is not compiled; a thread of the engine would
share that lock with the steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_engine.eplb.report import Economics
from deepinfer_engine.errors import ArtefactError, NotReadyError


@dataclass(frozen=True, eq=False)
class PlanJob:
    """One window to plan from: counts int32 [M, L, E], tokens int64 [M], and the slots int32 [L, R, S] that run."""

    counts_MLE: np.ndarray
    tokens_M: np.ndarray
    slot_LRS: np.ndarray
    epoch: int
    top_k: int
    config_digest: str
    weights_digest: str
    economics: Economics
    move_price: float


@dataclass(frozen=True, eq=False)
class PlanAnswer:
    """Slots to run int64 [L, R, S], ``use`` or ``keep``, the reason in a sentence, moe_lb before and after (predicted
    on steps the plan has not seen where there are enough), gain per layer, seconds, and which inner loop ran."""

    slot_LRS: np.ndarray
    action: str
    sentence: str
    before: float | None
    after: float | None
    gain_L: tuple[float, ...]
    plan_s: float
    loop: str


class PlanProcess:
    """Plans jobs one at a time. ``plan`` blocks its thread; ``stop`` from another thread makes it fail at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def plan(self, job: PlanJob) -> PlanAnswer:
        """Raises NotReadyError when the process cannot start or ends, ArtefactError when the job cannot be planned."""
        process = self._running()
        arrays = [
            np.ascontiguousarray(job.counts_MLE, "<i4"),
            np.ascontiguousarray(job.tokens_M, "<i8"),
            np.ascontiguousarray(job.slot_LRS, "<i4"),
        ]
        head = {
            "arrays": [[list(a.shape), a.dtype.str] for a in arrays],
            "epoch": job.epoch,
            "top_k": job.top_k,
            "config_digest": job.config_digest,
            "weights_digest": job.weights_digest,
            "economics": {
                "expert_bytes": job.economics.expert_bytes,
                "link_gb_s": job.economics.link_gb_s,
                "moe_ms": job.economics.moe_ms,
                "horizon_steps": job.economics.horizon_steps,
            },
            "move_price": job.move_price,
        }
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(head).encode() + b"\n")
            for a in arrays:
                process.stdin.write(a.data.cast("B"))
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.release()
            raise NotReadyError("the planning process ended unexpectedly")
        return _answer(json.loads(line))

    def stop(self) -> None:
        """End the process, whatever it is doing, and start no other."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def release(self) -> None:
        """End the process and close its pipes; for the thread that plans, or when none does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent yet has no reader
                pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise NotReadyError("the planner was stopped")
            if self._process is None:
                env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
                env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # other cores belong to the steps
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "deepinfer_engine.eplb.plan_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=env,
                )
            return self._process


def _answer(reply: dict[str, Any]) -> PlanAnswer:
    if "error" in reply:
        raise ArtefactError(reply["error"])
    return PlanAnswer(
        np.array(reply["slots"], np.int64),
        reply["action"],
        reply["sentence"],
        reply["before"],
        reply["after"],
        tuple(reply["gain"]),
        reply["plan_s"],
        reply["loop"],
    )
