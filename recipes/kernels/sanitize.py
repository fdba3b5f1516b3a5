"""The smallest cases of every GPU operation under compute-sanitizer: wrong addresses, races, reads of nothing.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.sanitize`` runs the cases of every backend that is installed
under memcheck, racecheck and initcheck and prints one line for each; whole reports go to ``--out``. Before that each
tool has to find its fault in a kernel made for it, since a filter or a driver that hides everything would look clean,
and the cases run once without a tool, which compiles their kernels. Exit code 0: clean; 6: something was found or a
case failed; 3: there is no compute-sanitizer or no case, or a tool is blind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recipes.kernels.bounded import bounded

TOOLS = ("memcheck", "racecheck", "initcheck")
_ROWS = "agrees_with_the_reference and "
#: what is run → (package it needs, its cases, which of them)
CASES = {
    "triton": (
        "triton",
        "tests/kernels/triton_cases.py",
        f"({_ROWS}-2]) or rows_are_stored or cannot_read_as_they_lie or packed_weights "
        "or (uneven_slots and (counts0 or counts2 or counts3)) or (matrix_written_out and 257)",
    ),
    "triton-step": (
        "triton",
        "tests/kernels/triton_step_cases.py",
        "not refused and not 70-64-1000 and not same_bits and not 5000 and not 9000 and not 20000",
    ),
    "triton-draw": (
        "triton",
        "tests/kernels/triton_draw_cases.py",
        "not refused and not 129280 and not 5003 and not 40001",
    ),
    "triton-reject": ("triton", "tests/kernels/triton_reject_cases.py", "not refused and not 129280 and not rounding"),
    "tilelang": ("tilelang", "tests/kernels/tilelang_cases.py", _ROWS + "-2]"),
    "tilelang-gemm": (
        "tilelang",
        "tests/kernels/tilelang_gemm_cases.py",
        "(experts_agree and counts0) or (scores_agree and -2])",
    ),
    "vendor": ("torch", "tests/kernels/vendor_cases.py", _ROWS + "-7]"),
}
#: reads what nobody wrote and what another warp is writing, and writes behind the end
FAULTY = r"""
extern "C" __global__ void faulty(float* x, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[n + threadIdx.x] = s[(threadIdx.x + 32) % 64];
}
"""
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")


def pytest_configure() -> None:
    """As a plugin of the cases: leave memory as it was allocated, for initcheck to follow."""
    import torch.utils.deterministic

    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def run_faulty() -> None:
    """Launch a kernel that every tool has to complain about."""
    import torch

    kernel = torch.cuda._compile_kernel(FAULTY, "faulty")
    kernel((1, 1, 1), (64, 1, 1), [torch.empty(64, device="cuda"), 64])
    torch.cuda.synchronize()


def sanitised(tool: str, command: list[str], report: Path, seconds: float) -> tuple[int | None, int | None]:
    """(complaints of the tool, exit code of the command) under it; None where it came to no summary or no end."""
    # an allocation of its own for every tensor, or what lies behind the end belongs to another one
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    full = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", sys.executable, "-m", *command]
    code = bounded(full, report, seconds, env)
    if code is None:
        return None, None
    found = SUMMARY.findall(report.read_text(errors="replace"))
    return (int(found[-1]) if found else None), code


def kernels(report: Path) -> str:
    """The kernels that a report complains about."""
    return ", ".join(sorted(set(re.findall(r"=+ +(?:at|in) (?:void )?([\w:]+)", report.read_text(errors="replace")))))


def cases_of(name: str, plugin: bool = False) -> list[str]:
    """The module and arguments that run a row of ``CASES``."""
    _, cases, which = CASES[name]
    plugins = ["-p", "recipes.kernels.sanitize"] if plugin else []
    return ["pytest", "-q", "-p", "no:cacheprovider", *plugins, cases, "-k", which, "--timeout=0"]


def ended(report: Path) -> str:
    """How many cases passed, failed, were skipped, in pytest's words."""
    ran = re.findall(r"\d+ (?:passed|failed|skipped|deselected)[^\n]*", report.read_text(errors="replace"))
    return ran[-1] if ran else "no case ended"


def without_a_tool(name: str, out: Path, seconds: float) -> tuple[str, int | None]:
    """(what pytest said, exit code) of a row's cases alone; their kernels are compiled after this."""
    report = out / f"plain-{name}.log"
    code = bounded([sys.executable, "-m", *cases_of(name)], report, seconds)
    return ("no end" if code is None else ended(report)), code


def with_a_tool(tool: str, name: str, out: Path, seconds: float) -> tuple[str, bool]:
    """(one line of result, clean) of a row's cases under a tool."""
    report, began = out / f"{tool}-{name}.log", time.monotonic()
    found, code = sanitised(tool, cases_of(name, tool == "initcheck"), report, seconds)
    last = ended(report)
    good = found == 0 and code == 0 and "passed" in last
    what = "no end" if code is None else f"{found} found {kernels(report)}".strip()
    took = time.monotonic() - began
    return f"{name} {tool}: {'clean' if good else what}, {last}, {took:.0f} s", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--out", type=Path, default=Path("sanitize"), help="folder of the reports")
    parser.add_argument("--seconds", type=float, default=300, help="longest time of one tool over one row of cases")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--faulty", action="store_true", help="run only the faulty kernel, for a tool to find")
    args = parser.parse_args()
    if args.faulty:
        run_faulty()
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: it comes with the CUDA toolkit", file=sys.stderr)
        return 3
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KERNEL_CASES_CACHE", str(args.out.resolve() / "kernels"))
    pool = ThreadPoolExecutor(args.jobs)

    def faults(tool: str) -> int | None:
        report = args.out / f"{tool}-faulty.log"
        return sanitised(tool, ["recipes.kernels.sanitize", "--faulty"], report, args.seconds)[0]

    seeing = dict(zip(args.tools, pool.map(faults, args.tools), strict=True))
    for tool, found in seeing.items():
        if not found:
            print(f"{tool}: did not find the fault made for it, see {args.out / tool}-faulty.log", file=sys.stderr)
    if not all(seeing.values()):
        return 3
    clean, names = True, []
    plain = pool.map(lambda name: without_a_tool(name, args.out, args.seconds), args.cases)
    for name, (said, code) in zip(args.cases, plain, strict=True):
        if code in (0, 5) and "passed" not in said and "failed" not in said:  # skipped or not there
            print(f"{name}: nothing ran ({said}; is {CASES[name][0]} installed?)")
        elif code != 0:
            print(f"{name} without a tool: {said}, see {args.out}/plain-{name}.log")
            clean = False
        else:
            names.append(name)
    jobs = [pool.submit(with_a_tool, tool, name, args.out, args.seconds) for name in names for tool in args.tools]
    for job in jobs:
        line, good = job.result()
        clean &= good
        print(line, flush=True)
    if clean and not jobs:
        print("no row of cases ran: nothing is known", file=sys.stderr)
        return 3
    return 0 if clean else 6


if __name__ == "__main__":
    sys.exit(main())
