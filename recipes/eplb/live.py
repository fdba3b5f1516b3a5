"""Expert balance of nano's real routing without, with static and with live placement, and what live placement costs.

    python -m recipes.eplb.live [--profiles decode-ep8,decode-ep64] [--rows 16] [--steps 96] [--out FILE.jsonl]

One run per profile with live rebalancing. Its traffic shifts: sums, then JSON records, then look-ups in lists, then
continued words; requests enter as rows become free, and the mix changes every ``--steps`` steps. Routing does not
depend on where experts live, so the counts of that one run are also judged under the two placements that it does not
use: *off* is the built-in one, *static* is planned from the first window and kept. All three are judged on the steps
after the first window, by the even split of an expert over its replicas; ``floor`` is what counting noise alone would
leave of a perfect plan. ``--out`` appends one JSON line per profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.resources import data_dir
from deepinfer_engine.engine import Engine
from deepinfer_engine.eplb.planner import build_plan
from deepinfer_engine.eplb.policy import Topology
from deepinfer_engine.eplb.record import BalanceMeter, CountChunk
from deepinfer_engine.eplb.score import noise_floor
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.launch import prepare
from deepinfer_engine.tokens.protocol import ChatCodec
from deepinfer_engine.types import Completion, Request, SamplingParams

PHASES = ("sums", "json", "look-ups", "words")
#: characters of a question: longer look-ups would make all others wait for their prompts
LONGEST = 400


def prompts(engine: Engine, phase: str, seed: int) -> Iterator[tuple[int, ...]]:
    """Endless prompt ids of one kind of traffic."""
    rng = random.Random(seed)
    codec = ChatCodec(engine.checkpoint.directory, engine.config)
    if phase == "words":
        words = (data_dir("recipes") / "nano" / "words.txt").read_text(encoding="utf-8").split()
        while True:
            text = " ".join(rng.choices(words, k=24))
            yield (engine.config.bos_token_id, *engine.tokenizer.encode_text(text))
    name = {"sums": "nano-arith", "json": "nano-json", "look-ups": "nano-retrieval"}[phase]
    lines = (data_dir("recipes") / "evals" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["question"] for line in lines]
    asked = [text for text in asked if len(text) < LONGEST]
    while True:
        for text in rng.sample(asked, len(asked)):
            yield codec.render([{"role": "user", "content": text}], thinking=True).token_ids


def run(engine: Engine, rows: int, steps: int) -> tuple[list[int], dict[int, np.ndarray]]:
    """Run all phases; the first step of each phase, and the slots of every epoch."""
    watch, mesh = engine.runner.watch, engine.runner.mesh
    assert watch is not None
    slots = {0: mesh.placement.slots_LRS}
    flying, count, starts = 0, 0, []
    for turn, phase in enumerate(PHASES):
        source = prompts(engine, phase, turn)
        starts.append(engine.steps)
        while engine.steps < (turn + 1) * steps:
            while flying < rows:
                ids = next(source)
                engine.submit(Request(f"{count}", ids, SamplingParams(max_tokens=96)))
                count, flying = count + 1, flying + 1
            flying -= sum(isinstance(event, Completion) for event in engine.step())
            slots[mesh.table.epoch] = mesh.placement.slots_LRS
    return starts, slots


def judged(chunks: list[CountChunk], slots: dict[int, np.ndarray], experts: int) -> Any:
    """Balance of chunks, each step under the slots of its epoch."""
    meter = BalanceMeter(slots[min(slots)], experts)
    for epoch in sorted(slots):
        meter.use(epoch, slots[epoch])
    for chunk in chunks:
        meter.add(chunk)
    return meter.balance()


def still(chunks: list[CountChunk]) -> list[CountChunk]:
    """The same steps, as if the slots had never changed."""
    return [CountChunk(c.counts_MLE, c.tokens_M, np.zeros_like(c.epoch_M)) for c in chunks]


def measure(name: str, rows: int, steps: int, window: int, period: int) -> dict[str, Any]:
    """One profile: balances by placement over all and by phase, and every rebalance."""
    ep = load_profile(name).profile.parallel
    sets = [
        f"eplb.window_steps={window}",
        f"eplb.period_steps={period}",
        f"sched.max_rows_per_rank={-(-rows // ep.dp)}",
        "sched.overlap=false",
        "spec.verify=off",
    ]
    launch = prepare(load_profile(name, sets).profile)
    with Engine.open(launch.profile, launch.checkpoint.directory, device=launch.device, record_experts=True) as engine:
        starts, slots = run(engine, rows, steps)
        engine.balance(now=True)
        watch = engine.runner.watch
        assert watch is not None
        record, experts, built_in = watch.record, engine.config.n_routed_experts, slots[0]
        first = record.window(window, window)
        counts = np.concatenate([c.counts_MLE for c in first]).astype(np.int64)
        stats = ExpertStats(counts, tuple(range(counts.shape[1])), ep=ep.ep)
        planned, _ = build_plan(stats, Topology(ep.ep, built_in.shape[2]))
        spans = {"all": (window, record.steps)}
        for k, phase in enumerate(PHASES):
            end = starts[k + 1] if k + 1 < len(starts) else record.steps
            spans[phase] = (max(starts[k], window), end)
        balances: dict[str, Any] = {}
        for span, (lo, hi) in spans.items():
            if hi <= lo:
                continue
            chunks = record.window(hi, hi - lo)
            results = {
                "off": judged(still(chunks), {0: built_in}, experts),
                "static": judged(still(chunks), {0: planned.slot_expert_LRS}, experts),
                "live": judged(chunks, slots, experts),
            }
            total = np.concatenate([c.counts_MLE for c in chunks]).astype(np.int64)
            floors = [noise_floor(total[:, k], planned.replicas_LE[k], ep.ep) for k in range(total.shape[1])]
            balances[span] = {k: round(b.moe_lb, 4) for k, b in results.items()} | {
                "floor": round(float(np.mean(floors)), 4),
                "steps": hi - lo,
                "tokens": results["live"].tokens,
            }
        rebalances = [dataclasses.asdict(entry) for entry in engine.rebalances]
        step_ms = float(np.median(engine.times.run_ms))
        weights = engine.checkpoint.digest
    return {
        "measurement": "live-eplb",
        "profile": name,
        "ranks": ep.ep,
        "slots_per_rank": int(built_in.shape[2]),
        "rows": rows,
        "window_steps": window,
        "period_steps": period,
        "weights_digest": weights,
        "commit": commit(),
        "step_ms": round(step_ms, 2),
        "moe_lb": balances,
        "rebalances": rebalances,
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def show(row: dict[str, Any]) -> str:
    """The numbers of one profile as tables."""
    out = [f"{row['profile']}: {row['ranks']} ranks x {row['slots_per_rank']} slots, {row['rows']} rows"]
    out.append(f"{'steps':>10}{'off':>9}{'static':>9}{'live':>9}{'floor':>9}{'tokens':>9}")
    for span, b in row["moe_lb"].items():
        out.append(f"{span:>10}{b['off']:>9.3f}{b['static']:>9.3f}{b['live']:>9.3f}{b['floor']:>9.3f}{b['tokens']:>9d}")
    for r in row["rebalances"]:
        if r["outcome"] != "moved":
            out.append(f"  step {r['step']}: {r['outcome']}: {r['reason']}")
            continue
        out.append(
            f"  step {r['step']}: {'back, ' if r['back'] else ''}{r['experts']} experts, {r['bytes'] / 1e6:.2f} MB, "
            f"at most {r['max_rank_bytes'] / 1e3:.0f} kB to a rank, {r['move_steps']} steps, {r['move_ms']:.1f} ms "
            f"({row['step_ms']:.0f} ms a step), planned in {r['plan_ms']:.0f} ms; "
            f"predicted {_lb(r['predicted_before'])} -> {_lb(r['predicted_after'])}, "
            f"observed {_lb(r['observed_before'])} -> {_lb(r['observed_after'])}"
        )
    return "\n".join(out)


def _lb(value: float | None) -> str:
    """A balance; – where the run ended before there was one."""
    return "–" if value is None else f"{value:.3f}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", default="decode-ep8,decode-ep64")
    parser.add_argument("--rows", type=int, default=16, help="requests in flight")
    parser.add_argument("--steps", type=int, default=96, help="steps of each kind of traffic")
    parser.add_argument("--window", type=int, default=32, help="steps a plan is made from")
    parser.add_argument("--period", type=int, default=32, help="steps between two plans")
    parser.add_argument("--out", type=Path, help="append one JSON line per profile")
    given = parser.parse_args(arguments)
    for name in given.profiles.split(","):
        row = measure(name, given.rows, given.steps, given.window, given.period)
        print(show(row), flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
