"""The smallest cases of every GPU operation under compute-sanitizer: wrong addresses, races, reads of nothing.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.sanitize`` runs the cases of every backend that is installed
under memcheck, racecheck and initcheck and prints one line for each; whole reports go to ``--out``. Before that each
tool has to find its fault in a kernel made for it: a filter or a driver that hides everything would look clean. Exit
code 0: clean; 6: something was found or a case failed; 3: there is no compute-sanitizer or no case, or a tool is blind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
#: backend → (package it needs, its cases, which of them)
CASES = {
    "triton": ("triton", "tests/kernels/triton_cases.py", "agrees_with_the_reference and -2]"),
    "tilelang": ("tilelang", "tests/kernels/tilelang_cases.py", "agrees_with_the_reference and -2]"),
    "vendor": ("torch", "tests/kernels/vendor_cases.py", "agrees_with_the_reference and -7]"),
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
    with report.open("w") as file:
        try:
            code = subprocess.run(full, stdout=file, stderr=subprocess.STDOUT, env=env, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return None, None
    found = SUMMARY.findall(report.read_text(errors="replace"))
    return (int(found[-1]) if found else None), code.returncode


def kernels(report: Path) -> str:
    """The kernels that a report complains about."""
    return ", ".join(sorted(set(re.findall(r"=+ +(?:at|in) (?:void )?([\w:]+)", report.read_text(errors="replace")))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--backends", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--out", type=Path, default=Path("sanitize"), help="folder of the reports")
    parser.add_argument("--seconds", type=float, default=300, help="longest time of one tool over one backend")
    parser.add_argument("--faulty", action="store_true", help="run only the faulty kernel, for a tool to find")
    args = parser.parse_args()
    if args.faulty:
        run_faulty()
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: it comes with the CUDA toolkit", file=sys.stderr)
        return 3
    args.out.mkdir(parents=True, exist_ok=True)
    blind = False
    for tool in args.tools:
        report = args.out / f"{tool}-faulty.log"
        found, _ = sanitised(tool, ["recipes.kernels.sanitize", "--faulty"], report, args.seconds)
        if not found:
            print(f"{tool}: did not find the fault made for it, see {report}", file=sys.stderr)
            blind = True
    if blind:
        return 3
    clean, any_ran = True, False
    for backend in args.backends:
        package, cases, which = CASES[backend]
        for tool in args.tools:
            report, began = args.out / f"{tool}-{backend}.log", time.monotonic()
            plugin = ["-p", "recipes.kernels.sanitize"] if tool == "initcheck" else []
            command = ["pytest", "-q", "-p", "no:cacheprovider", *plugin, cases, "-k", which, "--timeout=0"]
            found, code = sanitised(tool, command, report, args.seconds)
            took = f"{time.monotonic() - began:.0f} s"
            ran = re.findall(r"\d+ (?:passed|failed|skipped|deselected)[^\n]*", report.read_text(errors="replace"))
            last = ran[-1] if ran else "no case ended"
            if found == 0 and ran and "passed" not in last and "failed" not in last:  # skipped or not there
                print(f"{backend} {tool}: nothing ran ({last}; is {package} installed?)")
                continue
            any_ran = True
            good = found == 0 and code == 0 and "passed" in last
            clean &= good
            what = "no end" if code is None else f"{found} found {kernels(report)}".strip()
            print(f"{backend} {tool}: {'clean' if good else what}, {last}, {took}")
    if not any_ran:
        print("no backend's cases ran: nothing is known", file=sys.stderr)
        return 3
    return 0 if clean else 6


if __name__ == "__main__":
    sys.exit(main())
