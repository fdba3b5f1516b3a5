"""What a setting costs per step: two settings of one profile, measured in alternating windows of decode steps.

    PYTHONPATH=.:engine:kernels python -m recipes.host.pairs --base sched.overlap=false --other sched.overlap=true
    PYTHONPATH=.:engine:kernels python -m recipes.host.pairs --profile h200x1-nano --rows 64 \\
        --base numerics.batch_invariant=false --other numerics.batch_invariant=true

Two engines live in one process and run the same requests. A window is ``--steps`` calls of ``step`` on one engine;
windows follow each other in the order A B B A, so that a drift of the machine meets both. Both engines are in the
same state at every pair of windows. The ratio is other / base of a pair, in wall time and in processor time of the
process (all threads); its interval is that of the mean logarithm (95 %, Student). Tokens are compared too.

``--wave`` adds whole requests: mixed prompts and answers that end by themselves, from submission to the last token.
There a step planned ahead may hold rows whose request has just ended. ``--thread``: the other engine launches its
steps on a thread, which on one CPU is what overlap would be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from typing import Any

from deepinfer_engine.runtime.threads import set_thread_defaults

THREADS = set_thread_defaults(rows=32)  # before torch is imported

import torch  # noqa: E402

from deepinfer_engine.engine import Engine  # noqa: E402
from deepinfer_engine.runtime.lane import ThreadLane  # noqa: E402
from deepinfer_engine.types import Completion, Request, SamplingParams, TokenEvent  # noqa: E402

PROMPT_TOKENS = (16, 192)
ORDINARY_IDS = (300, 1500)  # byte-pair tokens of nano's vocabulary, no control token among them
SEED = 5
#: two-sided 97.5 % points of Student's distribution, by degrees of freedom; beyond the last, the normal one
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11)


@dataclass(frozen=True)
class Window:
    """Wall and processor milliseconds of a window, and what it generated."""

    wall_ms: float
    cpu_ms: float
    tokens: tuple[tuple[str, int], ...]


def prompts(rows: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts of mixed lengths."""
    rng = Random(seed)
    return [tuple(rng.randrange(*ORDINARY_IDS) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(rows)]


def fill(engine: Engine, rows: int, tokens: int) -> None:
    """Submit ``rows`` requests and run until each of them decodes."""
    for i, prompt in enumerate(prompts(rows, SEED)):
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    while engine.scheduler.waiting or any(
        len(s.token_ids) < s.num_prompt + 2 for s in engine.scheduler.running.values()
    ):
        engine.step()


def timed(engine: Engine, work: Callable[[], list[Any]]) -> Window:
    """Run ``work`` to its end, the device's included."""
    began, used = time.perf_counter(), time.process_time()
    events = work()
    if engine.runner.device.startswith("cuda"):
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    ids = tuple((e.request_id, e.token_id) for e in events if isinstance(e, TokenEvent))
    return Window(wall * 1e3, cpu * 1e3, ids)


def steps(engine: Engine, count: int) -> Window:
    """``count`` steps."""
    return timed(engine, lambda: [event for _ in range(count) for event in engine.step()])


def wave(engine: Engine, rows: int, seed: int) -> Window:
    """``4 * rows`` sums of two numbers, answered until nano ends them, ``rows`` of them at a time."""
    from deepinfer_engine.tokens.protocol import ChatCodec  # its library is not needed for windows of steps

    codec, rng = ChatCodec(engine.checkpoint.directory, engine.config), Random(seed)
    for i in range(4 * rows):
        text = f"{rng.randrange(1000)}+{rng.randrange(1000)}?"
        ids = codec.render([{"role": "user", "content": text}]).token_ids
        engine.submit(Request(f"{seed}-{i}", ids, SamplingParams(max_tokens=64)))
    return timed(engine, lambda: list(engine.stream()))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(mean ratio, low, high) over paired windows, from the mean of the logarithms."""
    logs = [math.log(r) for r in ratios]
    middle = mean(logs)
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    student = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else 1.96
    half = student * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare(engines: tuple[Engine, Engine], run: Callable[[Engine, int], Window], pairs: int) -> dict[str, Any]:
    """Paired windows of both engines, the order turning with every pair; ``run(engine, number of the pair)``."""
    found: tuple[list[Window], list[Window]] = ([], [])
    for n in range(pairs):
        for side in (0, 1) if n % 2 == 0 else (1, 0):
            found[side].append(run(engines[side], n))
    out: dict[str, Any] = {"pairs": pairs}
    for name in ("wall", "cpu"):
        base, other = ([getattr(w, f"{name}_ms") for w in side] for side in found)
        ratio, low, high = interval([b / a for a, b in zip(base, other, strict=True)])
        out |= {
            f"base_{name}_ms": round(median(base), 3),
            f"other_{name}_ms": round(median(other), 3),
            f"{name}_ratio": round(ratio, 4),
            f"{name}_ratio_low": round(low, 4),
            f"{name}_ratio_high": round(high, 4),
        }
    base, other = (_by_request(side) for side in found)
    # a pipeline is one step behind: it has shown fewer tokens, and those must be the same
    same = all(a[: len(b)] == b[: len(a)] for a, b in ((base[k], other.get(k, [])) for k in base))
    return out | {"same_tokens": same}


def _by_request(windows: Sequence[Window]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for window in windows:
        for request_id, token in window.tokens:
            out.setdefault(request_id, []).append(token)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", default="cpu-nano")
    parser.add_argument("--base", action="append", default=[], metavar="KEY=VALUE", required=True)
    parser.add_argument("--other", action="append", default=[], metavar="KEY=VALUE", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=20, help="steps of a window")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--thread", action="store_true", help="the other engine launches on a thread")
    parser.add_argument("--wave", action="store_true", help="whole requests too")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args(arguments)
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists")
    lines: list[dict[str, Any]] = []
    for rows in args.rows:
        room = f"cache.hbm_tokens_per_rank={max(65536, 1024 * rows)}"
        common = [f"sched.max_rows_per_rank={rows}", room, *args.set]
        with (
            Engine.open(args.profile, sets=[*common, *args.base]) as a,
            Engine.open(args.profile, sets=[*common, *args.other], lane=ThreadLane() if args.thread else None) as b,
        ):
            total = args.steps * (args.pairs + 2)
            about = {
                "profile": args.profile,
                "base": args.base,
                "other": args.other,
                "set": args.set,
                "overlap": [a.overlap, b.overlap],
                "rows": rows,
                "device": a.runner.device,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "cores": os.cpu_count(),
            }
            for engine in (a, b):
                fill(engine, rows, total + 8)
                steps(engine, args.steps)  # warm
            found = compare((a, b), lambda engine, _: steps(engine, args.steps), args.pairs)
            lines.append({"kind": "steps", **about, "steps": args.steps, **found})
            _show(lines[-1])
            for engine in (a, b):
                for request_id in engine.in_flight():
                    engine.abort(request_id)
                _drain(engine)
            if args.wave:
                for engine in (a, b):
                    wave(engine, rows, 10_000)
                found = compare((a, b), lambda engine, n, rows=rows: wave(engine, rows, n), args.pairs)
                lines.append({"kind": "requests", **about, **found})
                _show(lines[-1])
    if args.out is not None:
        part = args.out.with_name(args.out.name + ".part")
        part.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        os.replace(part, args.out)


def _drain(engine: Engine) -> list[Completion]:
    return [e for e in engine.stream() if isinstance(e, Completion)]


def _show(line: dict[str, Any]) -> None:
    print(json.dumps(line, allow_nan=False), flush=True)
    if not line["same_tokens"]:
        print("note: the two settings drew different tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
