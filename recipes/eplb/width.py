"""Step time of nano against the number of virtual expert-parallel ranks, in one process.

    python -m recipes.eplb.width [--ep 1,2,4,8,16,64,128,64+1] [--rows 16] [--rounds 30] [--steps 6] [--out FILE.jsonl]

An engine per size is open at once, each with as many data-parallel as expert-parallel ranks and the same requests in
flight. In every round each engine in turn decodes ``--steps`` steps, in an order that is shuffled by round, so what
else the machine does meets all sizes alike. ``64+1`` is 64 ranks with one redundant expert each: as many slots as 128
ranks have, on which every expert of nano is there twice. Time is CPU time of the process, all its threads; a ratio
compares two sizes within a round. Exit 6 when the median ratio of a size to the first one is over ``--limit``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.launch import prepare
from deepinfer_engine.types import Request, SamplingParams

#: steps before the first round: prompts are read, buffers are allocated
WARM_STEPS = 8
PROMPT_TOKENS = 32


def opened(size: str, rows: int, tokens: int) -> Engine:
    """An engine of ``size`` (``EP`` or ``EP+REDUNDANT``) with ``rows`` requests of ``tokens`` tokens submitted."""
    ep, _, redundant = size.partition("+")
    sets = [
        f"parallel.ep={ep}",
        f"parallel.dp={ep}",
        f"parallel.redundant_experts_per_rank={redundant or 0}",
        f"sched.max_rows_per_rank={-(-rows // int(ep))}",
        "sched.overlap=false",
        "spec.verify=off",
    ]
    launch = prepare(load_profile("cpu-nano", sets).profile)
    engine = Engine.open(launch.profile, launch.checkpoint.directory, device="cpu")
    draw = random.Random(1)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for i in range(rows):
        ids = tuple(draw.randrange(300, 2000) for _ in range(PROMPT_TOKENS))
        engine.submit(Request(f"{i}", ids, sampling))
    return engine


def measure(sizes: list[str], rows: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU milliseconds per decode step by size, one number per round."""
    spent: dict[str, list[float]] = {ep: [] for ep in sizes}
    with contextlib.ExitStack() as stack:
        tokens = WARM_STEPS + (rounds + 1) * steps + PROMPT_TOKENS
        engines = {ep: stack.enter_context(opened(ep, rows, tokens)) for ep in sizes}
        for engine in engines.values():
            for _ in range(WARM_STEPS):
                engine.step()
        draw = random.Random(0)
        for _ in range(rounds):
            for ep in draw.sample(sizes, len(sizes)):
                began = time.process_time()
                for _ in range(steps):
                    engines[ep].step()
                spent[ep].append((time.process_time() - began) * 1000 / steps)
    return spent


def summary(spent: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per size: the median step in ms, the median ratio to the first size, and its middle half."""
    first = next(iter(spent.values()))
    out = {}
    for ep, step_ms in spent.items():
        ratios = [a / b for a, b in zip(step_ms, first, strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        out[ep] = {"step_ms": statistics.median(step_ms), "ratio": mid, "ratio_p25": low, "ratio_p75": high}
    return out


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", default="1,2,4,8,16,64,128,64+1", help="sizes; others are held to the first")
    parser.add_argument("--rows", type=int, default=16, help="requests in flight, over all ranks")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6, help="steps of an engine in a round")
    parser.add_argument("--limit", type=float, default=1.2, help="largest ratio to the first size")
    parser.add_argument("--out", type=Path, help="append one JSON line")
    given = parser.parse_args(arguments)
    sizes = given.ep.split(",")
    found = summary(measure(sizes, given.rows, given.rounds, given.steps))
    print(f"{'EP':>6}{'step ms':>10}{'ratio':>8}  middle half")
    for ep, row in found.items():
        print(f"{ep:>6}{row['step_ms']:>10.2f}{row['ratio']:>8.3f}  {row['ratio_p25']:.3f} to {row['ratio_p75']:.3f}")
    if given.out is not None:
        row: dict[str, Any] = {"measurement": "ep-width", "rows": given.rows, "rounds": given.rounds}
        row |= {"steps": given.steps, "commit": commit(), "sizes": found}
        with given.out.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")
    return 0 if all(row["ratio"] <= given.limit for row in found.values()) else 6


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
