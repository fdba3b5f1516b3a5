"""How long the scheduler decides: planning a step, admission and post-processing, beside a model that really runs.

    PYTHONPATH=.:engine:kernels python -m recipes.host.decisions --rows 64 256 --out rows.jsonl

All rows decode, and requests end and arrive throughout: answers have random lengths, a queue refills the rows. Caches
are as cold as the forward pass between two decisions leaves them. ``schedule_us``: every call of ``schedule``, those
that admit included; ``schedule_cpu_us`` the same in processor time, to which other processes add nothing; ``decide_us``
the calls that admit nobody, ``admit_us`` those that do. ``submit_us`` is one request entering the queue, ``build_us``
the step's tensors, ``post_us`` its results: commit, text, stops, completions.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from deepinfer_engine.runtime.threads import set_thread_defaults

THREADS = set_thread_defaults(rows=32)  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepinfer_engine.engine import Engine  # noqa: E402
from deepinfer_engine.types import Request, SamplingParams  # noqa: E402
from recipes.host.pairs import ORDINARY_IDS  # noqa: E402

PROMPT_TOKENS = (16, 64)
ANSWER_TOKENS = (32, 160)
SEED = 9


def quantiles(values_ms: Sequence[float]) -> dict[str, float] | None:
    """Microseconds at 50 and 99 % and the largest; None without values."""
    if not values_ms:
        return None
    us = np.asarray(values_ms) * 1e3
    return {"p50": round(float(np.percentile(us, 50)), 1), "p99": round(float(np.percentile(us, 99)), 1)} | {
        "max": round(float(us.max()), 1)
    }


def measure(profile: str, sets: Sequence[str], rows: int, steps: int) -> dict[str, Any]:
    """Times of ``steps`` steps with all rows running and some of them changing."""
    rng = Random(SEED)
    room = [f"sched.max_rows_per_rank={rows}", f"cache.hbm_tokens_per_rank={max(65536, 512 * rows)}"]
    with Engine.open(profile, sets=[*room, *sets]) as engine:
        submit_ms: list[float] = []
        sent = 0

        def refill() -> None:
            nonlocal sent
            while len(engine.scheduler.waiting) < 8:
                prompt = tuple(rng.randrange(*ORDINARY_IDS) for _ in range(rng.randint(*PROMPT_TOKENS)))
                request = Request(
                    str(sent), prompt, SamplingParams(max_tokens=rng.randint(*ANSWER_TOKENS), ignore_eos=True)
                )
                sent += 1
                began = time.perf_counter()
                engine.submit(request)
                submit_ms.append((time.perf_counter() - began) * 1e3)

        while len(engine.scheduler.running) < rows:
            refill()
            engine.step()
        for _ in range(8):
            refill()
            engine.step()
        submit_ms.clear()
        times = engine.times
        for kept in (times.schedule_ms, times.build_ms, times.post_ms, times.run_ms):
            kept.clear()
        admitted: list[int] = []
        cpu_ms: list[float] = []
        plain = engine.scheduler.schedule

        def counted() -> Any:
            began = time.thread_time()
            plan = plain()
            cpu_ms.append((time.thread_time() - began) * 1e3)
            admitted.append(len(plan.admitted))
            return plan

        engine.scheduler.schedule = counted
        for _ in range(steps):
            refill()
            engine.step()
        engine.scheduler.schedule = plain
        schedule = list(times.schedule_ms)
        return {
            "kind": "decisions",
            "profile": profile,
            "set": list(sets),
            "device": engine.runner.device,
            "torch": torch.__version__,
            "rows": rows,
            "steps": steps,
            "admitted": sum(admitted) + rows,
            "schedule_us": quantiles(schedule),
            "schedule_cpu_us": quantiles(cpu_ms),
            "decide_us": quantiles([ms for ms, new in zip(schedule, admitted, strict=True) if not new]),
            "admit_us": quantiles([ms for ms, new in zip(schedule, admitted, strict=True) if new]),
            "submit_us": quantiles(submit_ms),
            "build_us": quantiles(list(times.build_ms)),
            "post_us": quantiles(list(times.post_ms)),
            "step_ms": round(float(np.median(times.run_ms)), 2),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", default="cpu-nano")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args(arguments)
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists")
    lines = []
    for rows in args.rows:
        lines.append(measure(args.profile, args.set, rows, args.steps))
        print(json.dumps(lines[-1], allow_nan=False), flush=True)
    if args.out is not None:
        part = args.out.with_name(args.out.name + ".part")
        part.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        os.replace(part, args.out)


if __name__ == "__main__":
    main()
