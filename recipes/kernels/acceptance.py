"""Everything that only a GPU can show of the kernels, in one run: cases, golden vectors, sanitizer, times.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.acceptance --out DIR`` compiles for the device first, then runs
what is timed, one after the other, then what is compared, side by side. Every part is a process group with a time of
its own; one that fails, or does not end, leaves the others alone. A table and ``DIR/acceptance.json`` say what became
of each, ``DIR/<part>.log`` what it printed. Exit code 0: every part passed; 6: one did not; 3: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from recipes.kernels.bounded import bounded

#: what is done in which order; parts of "time" have the device for themselves
Stage = Literal["compile", "time", "compare"]
STAGES: tuple[Stage, ...] = ("compile", "time", "compare")


@dataclass(frozen=True)
class Part:
    """A module with its arguments, and the seconds it may take; ``{out}`` stands for the folder of results."""

    name: str
    stage: Stage
    seconds: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a part; ``code`` None: it did not end in its time. ``last``: the last line it printed."""

    name: str
    stage: str
    code: int | None
    seconds: float
    last: str


def _part(name: str, stage: Stage, seconds: int, command: str) -> Part:
    return Part(name, stage, seconds, tuple(command.split()))


def _cases(name: str, *files: str) -> Part:
    paths = " ".join(f"tests/kernels/{file}.py" for file in files)
    return _part(f"cases-{name}", "compare", 400, f"pytest -q -p no:cacheprovider --timeout=0 {paths}")


_NANO = "--set kernels.cache_dir={out}/kernels"
PARTS = (
    *(_part(f"warm-bench-{i}", "compile", 150, f"recipes.kernels.bench --warm {i}/6") for i in range(6)),
    *(_part(f"warm-step-{i}", "compile", 150, f"recipes.kernels.step_ops --warm {i}/3") for i in range(3)),
    _part("build-nano", "compile", 200, f"deepinfer_cli build-kernels --target sm90 --profile h200x1-nano {_NANO}"),
    _part("programs", "time", 260, "recipes.kernels.programs --cache {out}/kernels --out {out}/tilelang.json"),
    _part("bench", "time", 200, "recipes.kernels.bench --out {out}/triton.json"),
    _part("step-ops", "time", 120, "recipes.kernels.step_ops --ours --out {out}/step-ops.jsonl"),
    _part("steps", "time", 150, f"recipes.kernels.steps --rows 1 64 --out {{out}}/steps.jsonl {_NANO}"),
    _part("exposed", "time", 90, f"recipes.host.exposed --profile h200x1-nano --rows 64 --steps 40 --kernels {_NANO}"),
    _cases("triton", "triton_cases"),
    _cases("steps", "triton_step_cases", "triton_draw_cases"),
    _cases("tilelang", "tilelang_cases", "tilelang_gemm_cases"),
    _part("golden", "compare", 300, "pytest -q -p no:cacheprovider -m gpu --timeout=0 tests/engine"),
    _part("sanitize", "compare", 420, "recipes.kernels.sanitize --out {out}/sanitize --jobs 8"),
)


def run(part: Part, out: Path) -> Outcome:
    """Run a part to its end or to the end of its time."""
    log, began = out / f"{part.name}.log", time.monotonic()
    command = [sys.executable, "-m", *(word.format(out=out) for word in part.command)]
    code = bounded(command, log, part.seconds, os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"})
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(part.name, part.stage, code, round(time.monotonic() - began, 1), lines[-1][:110] if lines else "")


def run_all(parts: list[Part], out: Path) -> list[Outcome]:
    """Stage by stage; every outcome is printed and kept as soon as it is there."""
    found: list[Outcome] = []
    for stage in STAGES:
        mine = [part for part in parts if part.stage == stage]
        with ThreadPoolExecutor(1 if stage == "time" else max(1, len(mine))) as pool:
            for outcome in pool.map(lambda part: run(part, out), mine):
                found.append(outcome)
                said = "no end" if outcome.code is None else f"exit {outcome.code}"
                print(f"{outcome.name:16s} {said:8s} {outcome.seconds:6.1f} s  {outcome.last}", flush=True)
                (out / "acceptance.json").write_text(json.dumps([asdict(o) for o in found], indent=1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results, logs and compiled kernels")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose names begin so")
    parser.add_argument("--skip", nargs="+", metavar="WORD", default=(), help="but not those")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    args = parser.parse_args()
    parts = [p for p in PARTS if args.only is None or p.name.startswith(tuple(args.only))]
    parts = [p for p in parts if not p.name.startswith(tuple(args.skip))]
    if args.list or not parts:
        for part in PARTS:
            print(f"{part.name:16s} {part.stage:8s} {part.seconds:4d} s  {' '.join(part.command)}")
        return 0 if args.list else 2
    if not torch.cuda.is_available():
        print("no CUDA device: these parts show nothing without one; see deepinfer doctor", file=sys.stderr)
        return 3
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KERNEL_CASES_CACHE", str(out / "kernels"))
    found = run_all(parts, out)
    bad = [o.name for o in found if o.code != 0]
    print(f"{len(found) - len(bad)} of {len(found)} parts passed" + (f", not {', '.join(bad)}" if bad else ""))
    return 6 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
