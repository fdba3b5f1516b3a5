"""Times of TileLang's programs beside Triton's kernels, in the cases of ``bench`` that both have.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.programs --cache DIR --out FILE.json`` compiles the programs
into a kernel cache, then times as ``bench`` does; "share" is the bound over the time of TileLang's.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.tilelang import attention, build, experts, families, index, launch
from recipes.kernels import bench

#: module of ``bench`` → the same operations of TileLang
MODULES = {"attention": attention, "moe": experts, "index": index}
CASES: dict[str, Callable[[], bench.Case]] = {
    f"experts EP{ranks} T{T}": partial(bench._experts, T, ranks)
    for T in (bench.DECODE, bench.PREFILL)
    for ranks in (8, 64)
} | {
    "scores B64 C1": partial(bench._scores, 64, 1, 16384),
    "scores B1 C1024": partial(bench._scores, 1, 1024, 16384),
    "scores B1 C1": partial(bench._scores, 1, 1, 16384),
    "attend decode T64": partial(bench._attend, bench.DECODE, False),
    "attend prefill T2048": partial(bench._attend, bench.PREFILL, True),
    "attend decode T4": partial(bench._attend, 4, False),
}


@contextmanager
def programs() -> Iterator[None]:
    """The cases call TileLang while this holds; what it lacks stays Triton's."""
    before = {name: getattr(bench, name) for name in MODULES}
    for name, module in MODULES.items():
        names = {n: getattr(module, n, getattr(before[name], n)) for n in dir(before[name])}
        setattr(bench, name, SimpleNamespace(**names))
    try:
        yield
    finally:
        for name, module in before.items():
            setattr(bench, name, module)


def compile_all(cases: list[bench.Case], cache: Path) -> None:
    """Build what the cases launch. Raises ``RuntimeError`` with the first program that does not compile."""
    found: list[tuple[str, launch.Call]] = []
    platform = families.platform()
    with programs(), launch.recording(lambda call: found.append(("case", call)), platform):
        for case in cases:
            case.ours()()
            _tidy()
    for built in kernel_cache.build(build.jobs(build.kernels(found), platform, cache)):
        if built.path is None:
            raise RuntimeError(f"{built.name}: {built.detail}")


def _tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="kernel cache, for the programs")
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    args = parser.parse_args()
    torch.manual_seed(0)
    cases = [case for name, make in CASES.items() if args.only in name for case in [make()]]
    compile_all(cases, args.cache)
    copy, product = bench.ceilings()
    rows: list[dict[str, Any]] = [{"name": "copy", "gb_s": copy / 1e9}, {"name": "bf16", "tflop_s": product / 1e12}]
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    for case in cases:
        bound = max(case.bytes / copy, case.flops / product) * 1e6
        row: dict[str, Any] = {"name": case.name, "bytes": case.bytes, "flops": case.flops, "bound_us": bound}
        row["triton_us"] = bench._safely(lambda case=case: bench.timed(case.ours, case.bytes))
        _tidy()
        with programs(), families.from_folder(args.cache / families.platform()):
            row["us"] = bench._safely(lambda case=case: bench.timed(case.ours, case.bytes))
        _tidy()
        rows.append(row)
        share = bound / row["us"] if isinstance(row["us"], float) else 0.0
        print(
            f"{case.name:40s} tilelang {row['us']}, triton {row['triton_us']} us, {share:.0%} of {bound:.1f}",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
