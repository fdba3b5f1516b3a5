"""Decode steps of the embedded model on a GPU with Triton and with plain torch, interleaved in one process.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.steps --rows 1 64 --out FILE.jsonl`` alternates windows of steps
torch, triton, triton, torch and prints medians, the ratio, and how many greedy tokens of both are the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from deepinfer_engine.engine import Engine
from deepinfer_engine.types import Request, SamplingParams
from deepinfer_kernels.triton import launch

STEPS = 8  # of a window


def decoding(backend: str, rows: int, sets: list[str]) -> Engine:
    """An engine in the middle of decoding ``rows`` answers, at positions from 128 on (a full window)."""
    engine = Engine.open("h200x1-nano", sets=[f"kernels.backend={backend}", *sets])
    for i in range(rows):
        prompt = tuple(5 + (i * 7 + j * 13) % 1500 for j in range(128))
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=400, ignore_eos=True)))
    while engine.scheduler.waiting or engine.steps < 6:
        engine.step()
    return engine


def window(engine: Engine) -> float:
    """Wall milliseconds per step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS * 1e3


def compare(rows: int, quads: int, sets: list[str]) -> dict[str, object]:
    """Milliseconds per step of both, and the median ratio of ``quads`` quadruples of windows."""
    times: dict[str, list[float]] = {"torch": [], "triton": []}
    with decoding("reference", rows, sets) as plain, decoding("triton", rows, sets) as mine:
        ratios, before = [], len(launch.compiled)
        for _ in range(quads):
            a, b, c, d = window(plain), window(mine), window(mine), window(plain)
            times["torch"] += [a, d]
            times["triton"] += [b, c]
            ratios.append((a + d) / (b + c))
    result = {"rows": rows, **{f"{k}_ms": round(median(v), 2) for k, v in times.items()}}
    result |= {"compiled_at_start": before, "compiled_in_windows": len(launch.compiled) - before}
    return result | {"ratio": round(median(ratios), 3), "device": torch.cuda.get_device_name(0)}


def same_tokens(sets: list[str], prompts: int = 16, tokens: int = 32) -> dict[str, int]:
    """How many greedy tokens agree before the first that differs, summed over prompts."""
    answers = []
    for backend in ("reference", "triton"):
        with Engine.open("h200x1-nano", sets=[f"kernels.backend={backend}", *sets]) as engine:
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            work = [Request(str(i), tuple(5 + (i * 31 + j * 17) % 1500 for j in range(200)), sampling)
                    for i in range(prompts)]  # fmt: skip
            answers.append([c.token_ids for c in engine.generate(work)])
    agree = sum(
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(*answers, strict=True)
    )
    return {"prompts": prompts, "tokens": prompts * tokens, "agree_before_first_difference": agree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--quads", type=int, default=4)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [compare(rows, args.quads, args.sets) for rows in args.rows] + [same_tokens(args.sets)]
    for result in results:
        print(json.dumps(result), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(r) + "\n" for r in results))


if __name__ == "__main__":
    main()
