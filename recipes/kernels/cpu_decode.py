"""Decode steps of the embedded model in this process, with torch and with compiled CPU operations, and their floor.

One JSON line per number of rows on stdout; ``recipes.kernels.cpu_steps`` starts it once per number of threads. Windows
of steps alternate torch, compiled, compiled, torch, so that a neighbour's load meets both; the ratio is the median over
such quadruples. The floor is the time to copy as many bytes as a step has to touch, at the best rate of copies before
and after these windows: dense weights, the experts that were chosen, KV records and looked-up rows of tables, all as
they are stored. A last cache that holds them all could be faster than its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from deepinfer_engine.runtime.threads import set_thread_defaults

THREADS = set_thread_defaults(rows=1)  # before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from deepinfer_engine.bench.result import host_hardware, now_utc, source_commit  # noqa: E402
from deepinfer_engine.engine import Engine  # noqa: E402
from deepinfer_engine.types import Request, SamplingParams  # noqa: E402
from deepinfer_kernels.reference.moe import ExpertBank  # noqa: E402
from deepinfer_kernels.registry import IMPLEMENTATIONS  # noqa: E402

PROFILE = "cpu-nano"
STEPS = 8  # of a window
PROMPT = 128  # tokens: the window is full from the first step on
#: larger than any cache
_COPY_BYTES = 256 << 20
#: weights of which a step of text reads some rows or nothing
_NOT_DENSE = {"bank", "embed", "bias_vl"}


def decoding(cache: Path | None, rows: int, tokens: int) -> Engine:
    """An engine in the middle of decoding ``rows`` answers of ``tokens`` tokens with the kernels of a cache."""
    sets = [f"sched.max_rows_per_rank={rows}", *([f"kernels.cache_dir={cache}"] if cache else [])]
    engine = Engine.open(PROFILE, sets=sets)
    for i in range(rows):
        prompt = tuple(5 + (i * 7 + j * 13) % 1500 for j in range(PROMPT))
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    while engine.scheduler.waiting or any(len(s.token_ids) < PROMPT + 2 for s in engine.scheduler.running.values()):
        engine.step()
    return engine


def not_built(engine: Engine) -> list[str]:
    """Operations that are compiled for CPUs and run otherwise here."""
    chosen = engine.runner.ops.chosen
    has = {name for name, rows in IMPLEMENTATIONS.items() if any(i.backend == "cpu" for i in rows)}
    return sorted(name for name in has if chosen[name].backend != "cpu")


# ----------------------------------------------------------------- the floor


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in records of records, but those of ``_NOT_DENSE``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in _NOT_DENSE:
                yield from _tensors(getattr(value, field.name))


def _rows(store: Tensor | None, at: Tensor) -> int:
    """Bytes of the distinct rows ``at`` of a store."""
    return 0 if store is None else at.unique().numel() * store.nbytes // len(store)


def _experts(rows: Tensor, counts: Tensor, bank: ExpertBank, *_: Any) -> int:
    held = sum(t.nbytes for t in _tensors(bank))
    return int(counts.count_nonzero()) * held // len(counts)


def _attended(q: Tensor, local: Tensor, window: Tensor, ring: Any, slots: Any, entries: Any, *_: Any) -> int:
    return _rows(ring, -2 - window[window <= -2]) + (0 if slots is None else _at(entries, slots))


def _at(store: Tensor, slots: Tensor, *_: Any) -> int:
    return _rows(store, slots[slots >= 0])


#: operation → (what it touches, bytes of that, given its arguments); of nested ones the outermost counts
_TOUCHES: dict[str, tuple[str, Callable[..., int]]] = {
    "moe_experts": ("experts", _experts),
    "attend_cached": ("records", _attended),
    "load_rows": ("records", _at),
    "store_rows": ("records", _at),
    "store_pairs": ("records", _at),
    "store_entries": ("records", lambda x, w, eps, cos, sin, store, slots, kind: _at(store, slots)),
    "pool_cached": ("records", lambda v, g, ring, second, partner, slot, kept: _rows(ring, slot[kept])),
    "embed_streams": ("records", lambda ids, table, streams: _rows(table, ids)),
    "engram_lookup": ("records", lambda weight, scale, ids: _rows(weight, ids) + _rows(scale, ids)),
}


@contextmanager
def touching(ops: Any) -> Iterator[Counter[str]]:
    """Bytes of stored experts and records that calls of ``ops`` touch in the meantime."""
    found: Counter[str] = Counter()
    inside = [False]

    def counted(kind: str, nbytes: Callable[..., int], call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return call(*args, **kwargs)
            found[kind] += nbytes(*args, **kwargs)
            inside[0] = True
            try:
                return call(*args, **kwargs)
            finally:
                inside[0] = False

        return wrapped

    kept = {name: getattr(ops, name) for name in _TOUCHES}
    for name, (kind, nbytes) in _TOUCHES.items():
        setattr(ops, name, counted(kind, nbytes, kept[name]))
    try:
        yield found
    finally:
        for name, call in kept.items():
            setattr(ops, name, call)


def touched(engine: Engine, steps: int = STEPS) -> dict[str, int]:
    """Bytes that a step touches, the mean of the next ones: dense weights, chosen experts, records."""
    with touching(engine.runner.ops) as found:
        for _ in range(steps):
            engine.step()
    dense = sum(t.nbytes for t in _tensors(engine.runner.model.weights))
    return {"dense": dense} | {kind: round(found[kind] / steps) for kind in ("experts", "records")}


def copy_gb_s() -> float:
    """GB read and written per second by a copy in memory, the best of four."""
    source, target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * _COPY_BYTES / min(times) / 1e9


# ------------------------------------------------------------------- windows


def window(engine: Engine) -> float:
    """Milliseconds per step."""
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - began) / STEPS * 1e3


def compare(rows: int, quads: int, cache: Path | None) -> dict[str, Any]:
    """One line: both speeds, their ratio, and what a compiled step touches. Raises ``NotBuilt``."""
    tokens = (2 * quads + 3) * STEPS + 8
    times: tuple[list[float], list[float]] = ([], [])
    ratios, rates = [], [copy_gb_s()]
    with (
        tempfile.TemporaryDirectory() as nothing,
        decoding(Path(nothing), rows, tokens) as plain,
        decoding(cache, rows, tokens) as compiled,
    ):
        if missing := not_built(compiled):
            raise NotBuilt(missing)
        window(plain), window(compiled)
        nbytes = touched(compiled)
        touched(plain)  # both at the same positions
        for _ in range(quads):
            a, b, c, d = window(plain), window(compiled), window(compiled), window(plain)
            times[0].extend((a, d))
            times[1].extend((b, c))
            ratios.append((a + d) / (b + c))
        rates.append(copy_gb_s())
    torch_ms, ms = map(median, times)
    floor_ms = sum(nbytes.values()) / max(rates) / 1e6
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "rows": rows,
        "threads": torch.get_num_threads(),
        "torch_tok_s": round(rows / torch_ms * 1e3, 1),
        "compiled_tok_s": round(rows / ms * 1e3, 1),
        "ratio": round(median(ratios), 2),
        "ratio_quartiles": [round(low, 2), round(high, 2)],
        "torch_ms": round(torch_ms, 3),
        "compiled_ms": round(ms, 3),
        **{f"{kind}_bytes": n for kind, n in nbytes.items()},
        "copy_gb_s": round(max(rates), 2),
        "floor_ms": round(floor_ms, 4),
        "times_floor": round(ms / floor_ms, 1),
    }


class NotBuilt(Exception):
    """Operations would run in torch on both sides; ``args[0]`` lists them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--quads", type=int, default=8, help="quadruples of windows")
    parser.add_argument("--cache", type=Path, help="kernel cache (default: the user's)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    for rows in args.rows:
        about = {"kind": "measured", "profile": PROFILE, "steps": STEPS, "quads": args.quads, "commit": source_commit()}
        about |= {"hardware": host_hardware(), "load": round(os.getloadavg()[0], 2), "measured": now_utc()}
        try:
            found = compare(rows, args.quads, args.cache)
        except NotBuilt as exc:
            print(f"error: not compiled for this CPU: {', '.join(exc.args[0])}", file=sys.stderr)
            print("\nhint: deepinfer build-kernels --target cpu, or name the cache with --cache", file=sys.stderr)
            sys.exit(3)
        print(json.dumps(found | about, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
