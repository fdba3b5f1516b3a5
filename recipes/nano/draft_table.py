"""No drafts, all drafts and a planned budget on one engine, in windows that alternate, for several numbers of rows.

    python -m recipes.nano.draft_table --checkpoint DIR --prompts FILE --out FILE [--rows 1,8,16,32] [--windows 20]

A window is ``--steps`` steps over full rows (a request that ends is replaced). Windows run in the order none, fixed,
adaptive, adaptive, fixed, none and so on, so that a drift of the machine hits all alike; the first steps of a window,
in which drafts of another way are still under way, do not count. Time is processor time on a CPU (all threads of this
process) and wall time on a device. A ratio's interval is that of the mean log ratio of neighbouring windows (95 %,
Student). FILE gets one JSON line per number of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.spec.planner import BudgetPlanner, Choice
from deepinfer_engine.types import Completion, Request, SamplingParams
from recipes.nano.draft import read_prompts

WAYS = ("none", "fixed", "adaptive")
#: steps at the start of a window that do not count
SETTLE = 3
#: 97.5 % points of Student's distribution by degrees of freedom; beyond them that of 30
_STUDENT = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 30: 2.042}


@dataclass
class Always:
    """A planner that always takes one way; it passes what it sees on to the real one, which has to keep learning."""

    way: str
    planner: BudgetPlanner

    def observe(self, survival_BJ: np.ndarray) -> None:
        self.planner.observe(survival_BJ)

    def outcome(self, hoped: float, accepted: int) -> None:
        self.planner.outcome(hoped, accepted)

    def plan(self, rows: int) -> Choice:
        drafts = self.planner.curve.draft_tokens
        return Choice("off", 0, 0.0) if self.way == "none" else Choice("fixed", rows * drafts, 0.0)


@dataclass
class Tally:
    """What the windows of one way did."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    drafts: int = 0
    accepted: int = 0

    @property
    def speed(self) -> list[float]:
        return [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]


def requests(prompts: list[list[int]], new: int, temperature: float, *, ignore_eos: bool = False) -> Iterator[Request]:
    """Endless requests over the prompts; sampled ones have a seed of their own."""
    number = 0
    while True:
        ids = prompts[number % len(prompts)]
        seed = None if temperature == 0 else number
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=new, ignore_eos=ignore_eos)
        yield Request(f"q{number}", tuple(ids), sampling)
        number += 1


def window(engine: Engine, source: Iterator[Request], rows: int, steps: int, clock: Callable[[], float]) -> tuple:
    """(tokens, seconds, rows run, drafts verified, accepted) of one window."""
    seen = engine.drafts
    tokens = verified = accepted = count = 0
    began, before = 0.0, (0, 0)
    for step in range(-SETTLE, steps):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < rows:
            engine.submit(next(source))
        if step == 0:
            began, before = clock(), (seen.drafted, seen.accepted)
        events = engine.step()
        if step >= 0:
            tokens += sum(not isinstance(e, Completion) for e in events)
            count += rows
    seconds = clock() - began
    verified, accepted = seen.drafted - before[0], seen.accepted - before[1]
    return tokens, seconds, count, verified, accepted


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(ratio, low, high): mean of logs with its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    free = len(logs) - 1
    points = [t for n, t in _STUDENT.items() if n <= free] or [_STUDENT[4]]
    half = points[-1] * statistics.stdev(logs) / math.sqrt(len(logs)) if free else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def measure(engine: Engine, prompts: list[list[int]], rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """All windows of one number of rows."""
    planner = engine.scheduler.planner
    assert isinstance(planner, BudgetPlanner)
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    source = requests(prompts, args.new, args.temperature, ignore_eos=args.ignore_eos)
    tallies = {way: Tally() for way in WAYS}
    planned = 0
    for turn in range(args.windows):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            engine.scheduler.planner = planner if way == "adaptive" else cast(BudgetPlanner, Always(way, planner))
            tokens, seconds, count, verified, accepted = window(engine, source, rows, args.steps, clock)
            if turn == 0:
                continue  # the first round warms up
            tally = tallies[way]
            tally.tokens.append(tokens)
            tally.seconds.append(seconds)
            tally.rows += count
            tally.drafts += verified
            tally.accepted += accepted
            planned += way == "adaptive" and planner.way != "fixed"
    engine.scheduler.planner = planner
    for request_id in list(engine._live):  # the next number of rows starts empty
        engine.abort(request_id)
    for _ in engine.stream():
        pass
    out: dict[str, Any] = {"rows": rows, "windows": args.windows - 1, "steps": args.steps, "way_at_end": planner.way}
    for way, tally in tallies.items():
        out[way] = {
            "verify_length": round(tally.drafts / tally.rows, 3),
            "tokens_per_step": round(sum(tally.tokens) / tally.rows, 3),
            "tok_s": round(sum(tally.tokens) / sum(tally.seconds), 1),
        }
    for way, base in (("fixed", "none"), ("adaptive", "none"), ("adaptive", "fixed")):
        pairs = zip(tallies[way].speed, tallies[base].speed, strict=True)
        out[f"{way}/{base}"] = [round(v, 4) for v in interval([a / b for a, b in pairs])]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="compare none, fixed and adaptive verification of nano's drafts")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="1,8,16,32")
    parser.add_argument("--windows", type=int, default=21)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the answer, into text nano never saw")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = [int(r) for r in args.rows.split(",")]
    prompts = read_prompts(args.prompts)
    sets = [f"sched.max_rows_per_rank={max(rows)}", "sched.max_context_tokens=1024", "cache.prefix=false",
            f"cache.hbm_tokens_per_rank={max(rows) * 1024}", "spec.verify=adaptive", "sched.overlap=true"]  # fmt: skip
    profile = load_profile("h200x1-nano" if args.device == "cuda" else "cpu-nano", sets).profile
    with Engine.open(profile, args.checkpoint, device=args.device) as engine:
        for count in rows:
            line = json.dumps(measure(engine, prompts, count, args))
            print(line, file=sys.stderr, flush=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
