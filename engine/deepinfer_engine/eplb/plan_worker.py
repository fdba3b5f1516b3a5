"""A process that plans while an engine runs: one job in, one line of JSON out. It may be killed at any time.

A job is a line of JSON (sizes, digests, economics) followed by the counts (int32 [M, L, E]), the tokens (int64 [M])
and the running slots (int32 [L, R, S]) as raw bytes. The answer holds the slots to run, which are the running ones when
moving does not pay, or ``error``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from deepinfer_engine.eplb import native
from deepinfer_engine.eplb.loops import Loops, NumpyLoops
from deepinfer_engine.eplb.plan import Digests, ExpertPlan
from deepinfer_engine.eplb.planner import Job, run_job
from deepinfer_engine.eplb.policy import PlanSettings
from deepinfer_engine.eplb.report import Economics
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.errors import DeepInferError, NotReadyError

#: below the steps of the engine, where both want the same core
_NICE = 10
#: newest part of the window that a plan is judged on and not made from, and the steps below which none is spared: what
#: a plan promises on its own window is far better than what it keeps
_HELD_OUT, _LEAST_STEPS = 0.2, 10


def main() -> None:
    """Serve jobs until stdin ends."""
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(_NICE)
    try:
        loops: Loops = native.load(None)
    except NotReadyError:
        loops = NumpyLoops()  # the same plan, slower; the answer says which
    while line := jobs.readline():
        head = json.loads(line)
        arrays = [_array(jobs, shape, kind) for shape, kind in head["arrays"]]
        began = time.perf_counter()
        try:
            reply = answer(head, *arrays, loops=loops)
        except DeepInferError as exc:
            reply = {"error": exc.message}
        reply |= {"loop": loops.name, "plan_s": time.perf_counter() - began}
        replies.write(json.dumps(reply, allow_nan=False).encode() + b"\n")
        replies.flush()


def _array(stream: BinaryIO, shape: list[int], kind: str) -> np.ndarray:
    dtype = np.dtype(kind)
    return np.frombuffer(stream.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def answer(
    head: dict[str, Any], counts: np.ndarray, tokens: np.ndarray, slots: np.ndarray, *, loops: Loops
) -> dict[str, Any]:
    """Plan one window: the slots to run, whether they are new, the sentence that says why, and the balances."""
    stats = ExpertStats(
        counts.astype(np.int64),
        tuple(range(counts.shape[1])),
        tokens.astype(np.int64),
        top_k=head["top_k"],
        ep=slots.shape[1],
        config_digest=head["config_digest"],
        weights_digest=head["weights_digest"],
    )
    digests = Digests(head["config_digest"], head["weights_digest"], "")
    old = ExpertPlan(
        head["epoch"], counts.shape[2], slots, stats.layer_ids, "running", (None,) * counts.shape[1], digests
    )
    economics = Economics(**head["economics"])
    settings = PlanSettings(move_price=head["move_price"])
    held = _HELD_OUT if stats.without_idle()[0].steps >= _LEAST_STEPS else 0.0
    outcome = run_job(Job(stats, old=old, settings=settings, economics=economics, holdout=held, ladder=False), loops)
    report = outcome.report
    after = report.windows.get("holdout", report.windows["train"])
    shown = [(row.before, row.holdout if row.holdout is not None else row.train) for row in report.layers]
    return {
        "slots": outcome.plan.slot_expert_LRS.tolist(),
        "action": report.verdict.action,
        "sentence": report.verdict.sentence,
        "before": report.windows["before"].moe_lb,
        "after": after.moe_lb,
        "gain": [0.0 if b is None or a is None else b - a for b, a in shown],
        "stats_digest": stats.digest,
    }


if __name__ == "__main__":
    main()
