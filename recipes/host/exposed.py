"""Host time of a step that a device does not hide: planning, building, post-processing, against the device's own clock.

    PYTHONPATH=.:engine:kernels python -m recipes.host.exposed --profile h200x1-nano --rows 64 --out rows.jsonl

Device events stand before and after all work of a step's forward pass and of its drawing. *Exposed* is the time
between the end of one and the start of the next on the device's clock: there the device had nothing to do because the
host was planning, building or post-processing. Where the host keeps ahead these gaps are the few microseconds between
two events. *Launching* is the host time inside forward and drawing, *host* the rest of a step without the waiting for
the device. If launching takes as long as the step, the device idles inside the forward pass too: that is a matter of
kernels, is not counted here, and ``kernel_ms`` (profiled on a few steps after the measurement) tells it.

Measured with the pipeline and with the plain loop; both draw the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepinfer_engine.engine import Engine
from deepinfer_engine.runtime.lane import Lane
from recipes.host.pairs import fill


@dataclass
class Marks:
    """What was launched: device events before and after, and host seconds before and after."""

    events: list[tuple[Any, Any]] = field(default_factory=list)
    host_s: list[tuple[float, float]] = field(default_factory=list)


class MarkedLane:
    """A lane that marks the launches of another one."""

    def __init__(self, inner: Lane):
        self.inner = inner
        self.beside = inner.beside
        self.marks = Marks()

    def launch(self, work: Callable[[], None]) -> Future[None]:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        before.record()
        done = self.inner.launch(work)
        after.record()
        self.marks.events.append((before, after))
        self.marks.host_s.append((began, time.perf_counter()))
        return done

    def close(self) -> None:
        self.inner.close()


class MarkedWait:
    """Counts the seconds in which ``collect`` waits for the device."""

    def __init__(self, engine: Engine):
        self.seconds = 0.0
        self._collect = engine.runner.collect
        engine.runner.collect = self.collect  # pyright: ignore[reportAttributeAccessIssue]

    def collect(self, flight: Any) -> Any:
        began = time.perf_counter()
        if flight.ready is not None:
            flight.ready.synchronize()
        self.seconds += time.perf_counter() - began
        return self._collect(flight)


def measure(profile: str, sets: Sequence[str], rows: int, steps: int, kernels: bool) -> dict[str, Any]:
    """Exposed, host and launching time per step over ``steps`` decode steps of ``rows`` rows."""
    with Engine.open(profile, sets=sets) as engine:
        if not engine.runner.device.startswith("cuda"):
            raise SystemExit(
                "error: the device's clock is a CUDA one, and this profile runs on " + engine.runner.device
            )
        fill(engine, rows, steps + 64)
        for _ in range(16):
            engine.step()
        lane = MarkedLane(engine.runner.lane)
        engine.runner.lane = lane
        wait = MarkedWait(engine)
        kept = len(engine.times.post_ms)
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        total_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        marks, waited_ms = lane.marks, wait.seconds * 1e3
        engine.runner.lane = lane.inner
        busy = _kernel_ms(engine) if kernels else None
        times = engine.times
        parts = {
            name: round(median(list(values)[kept : kept + steps]), 3)
            for name, values in (
                ("schedule_ms", times.schedule_ms),
                ("build_ms", times.build_ms),
                ("post_ms", times.post_ms),
            )
        }
        device = torch.cuda.get_device_name()
    gaps = [a[1].elapsed_time(b[0]) for a, b in zip(marks.events, marks.events[1:], strict=False)]
    inside = sum(a.elapsed_time(b) for a, b in marks.events)
    launching_ms = sum(b - a for a, b in marks.host_s) * 1e3
    exposed_ms = sum(gaps)
    host_ms = total_ms - launching_ms - waited_ms
    return {
        "kind": "exposed",
        "profile": profile,
        "set": list(sets),
        "rows": rows,
        "steps": steps,
        "device": device,
        "torch": torch.__version__,
        "step_ms": round(total_ms / steps, 3),
        "device_ms": round(inside / steps, 3),
        "kernel_ms": busy,
        "launching_ms": round(launching_ms / steps, 3),
        "waited_ms": round(waited_ms / steps, 3),
        "host_ms": round(host_ms / steps, 3),
        "exposed_ms": round(exposed_ms / steps, 3),
        "exposed_share": round(exposed_ms / (exposed_ms + inside), 4),
        "host_hidden_share": round(max(0.0, 1 - exposed_ms / host_ms), 3),
        **parts,
    }


def _kernel_ms(engine: Engine, steps: int = 5) -> float:
    """Milliseconds per step in which a kernel or copy runs, by the profiler; one stream, so they do not overlap."""
    from torch.profiler import ProfilerActivity, profile

    engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    return round(sum(e.self_device_time_total for e in found.key_averages()) / steps / 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", default="h200x1-nano")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kernels", action="store_true", help="profile the time in which kernels run")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args(arguments)
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists")
    lines = []
    for rows in args.rows:
        for overlap in ("true", "false"):
            sets = [*args.set, f"sched.overlap={overlap}"]
            lines.append(measure(args.profile, sets, rows, args.steps, args.kernels))
            print(json.dumps(lines[-1], allow_nan=False), flush=True)
    if args.out is not None:
        part = args.out.with_name(args.out.name + ".part")
        part.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        os.replace(part, args.out)


if __name__ == "__main__":
    main()
