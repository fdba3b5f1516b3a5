"""What replays and prefix hits save: prefills under each ``replay.decoder`` and the start after a hit.

The engines of all modes are open together, so that the modes take turns: a drift of the machine meets all of
them. A cell is the time from handing over a prompt to its first token, the scheduler included. Two ratios are
predicted: by rows × layers, which is what the plan counts, and by FLOPs, which knows that layers differ and that index
scans grow with the context.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deepinfer_engine.bench.engine_target import EngineTarget, measured_on, usable_ids
from deepinfer_engine.bench.run import Interrupts
from deepinfer_engine.cache.replay import DecoderReplay, ReplayShape, ReplaySpan, plan_prefill
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.cost.work import prompt_flops
from deepinfer_engine.errors import CapacityError, CheckFailed, Interrupted, UsageError
from deepinfer_engine.types import Request, SamplingParams

#: share of the second prompt that the first one left in the cache
SHARED = 0.96
_MODES: tuple[DecoderReplay, ...] = ("off", "exact", "bounded")
_REUSE = ("cache.prefix=true", "replay.decoder=bounded", "replay.encoder=bounded")
Case = Literal["off", "exact", "bounded", "hit"]
_CASES: tuple[Case, ...] = (*_MODES, "hit")


@dataclass(frozen=True)
class ReplayCell:
    """One prompt length and case. ``ratio`` and both predicted ones are against ``against``: off, and for a hit the
    bounded prefill of the whole prompt. Times in ms, medians and extremes of the rounds; ``cpu_ms`` is process time.
    ``reached``: the measured saving as a share of what rows × layers predict.
    """

    tokens: int
    case: Case
    cached: int
    replayed: int
    row_layers: int
    gflop: float
    median_ms: float
    min_ms: float
    max_ms: float
    cpu_ms: float
    against: str
    ratio: float
    predicted_rows: float
    predicted_flops: float
    reached: float


@dataclass(frozen=True)
class MeasuredReplay:
    """Cells in order of lengths, then cases; ``meta`` says on what.

    ``clock``: the time that ratios are of. On CPU it is the process's own, so that other work on the machine does not
    count; on a device it is the wall's.
    """

    cells: tuple[ReplayCell, ...]
    rounds: int
    clock: Literal["cpu_ms", "median_ms"]
    meta: dict[str, Any]


@dataclass
class _Times:
    wall: list[float]
    cpu: list[float]
    cached: int = 0
    replayed: int = 0

    def middle(self, clock: str) -> float:
        return statistics.median(self.cpu if clock == "cpu_ms" else self.wall)


def measure_replay(
    open_target: Callable[[tuple[str, ...]], EngineTarget],
    lengths: Sequence[int],
    *,
    rounds: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MeasuredReplay:
    """Measure prompts of ``lengths`` tokens. ``open_target`` opens an engine with further profile overrides.

    Raises ``CapacityError`` for a length beyond the context, ``CheckFailed`` when a prefix was not found again,
    ``Interrupted`` on Ctrl-C.
    """
    found: dict[tuple[int, Case], _Times] = {}
    done, total = 0, len(lengths) * (rounds + 1) * (len(_MODES) + 1)
    with ExitStack() as close, Interrupts() as stop:
        targets = {}
        for mode in _MODES:
            targets[mode] = open_target((f"replay.decoder={mode}",))
            close.callback(targets[mode].close)
        reuse = open_target(_REUSE)
        close.callback(reuse.close)
        config = reuse.engine.config
        shape = {mode: ReplayShape.of(config, decoder=mode) for mode in _MODES}
        _check_lengths(lengths, reuse, shape["bounded"])
        ids, rng = usable_ids(reuse.engine), np.random.default_rng(0)
        for length in lengths:
            shared = _shared(length, shape["bounded"])
            for turn in range(rounds + 1):  # the first one warms up
                prompt = rng.choice(ids, length).tolist()
                tail = rng.choice(ids, length - shared).tolist()
                runs: list[tuple[Case, EngineTarget, list[int]]] = [(m, targets[m], prompt) for m in _MODES]
                _run(reuse, prompt)  # leaves its blocks
                runs.append(("hit", reuse, [*prompt[:shared], *tail]))
                for case, target, tokens in runs if turn % 2 == 0 else reversed(runs):
                    if stop.is_set():
                        raise Interrupted("interrupted; a comparison with holes is not kept")
                    wall, cpu, usage = _run(target, tokens)
                    if case == "hit" and usage.cached != shared:
                        raise CheckFailed(f"{usage.cached} of {shared} tokens were found again at {length} tokens")
                    if turn:
                        times = found.setdefault((length, case), _Times([], []))
                        times.wall.append(wall * 1e3)
                        times.cpu.append(cpu * 1e3)
                        times.cached, times.replayed = usage.cached, usage.replayed
                    done += 1
                    progress(done, total)
        meta = measured_on(targets["off"])
        clock = "cpu_ms" if reuse.launch.device == "cpu" else "median_ms"
    cells = []
    for length in lengths:
        for case in _CASES:
            times = found[length, case]
            base: DecoderReplay = "bounded" if case == "hit" else "off"
            if case == "hit":
                after = ReplayShape.of(config, decoder="bounded", encoder="bounded")
                at = frozenset() if times.replayed else frozenset({times.cached})
                plan = plan_prefill(after, length, hit=times.cached, windows_at=at)
            else:
                plan = plan_prefill(shape[case], length)
            whole = plan_prefill(shape[base], length)
            cells.append(_cell(config, length, case, times, plan, found[length, base], whole, clock))
    return MeasuredReplay(tuple(cells), rounds, clock, meta)


def _cell(
    config: ModelConfig,
    length: int,
    case: Case,
    times: _Times,
    plan: ReplaySpan,
    other: _Times,
    whole: ReplaySpan,
    clock: str,
) -> ReplayCell:
    flops = prompt_flops(config, length, start=plan.start, pivot=plan.pivot)
    ratio, predicted = times.middle(clock) / other.middle(clock), plan.row_layers / whole.row_layers
    return ReplayCell(
        tokens=length,
        case=case,
        cached=times.cached,
        replayed=times.replayed,
        row_layers=plan.row_layers,
        gflop=flops / 1e9,
        median_ms=times.middle("median_ms"),
        min_ms=min(times.wall),
        max_ms=max(times.wall),
        cpu_ms=times.middle("cpu_ms"),
        against=whole.shape.decoder,
        ratio=ratio,
        predicted_rows=predicted,
        predicted_flops=flops / prompt_flops(config, length, start=whole.start, pivot=whole.pivot),
        reached=predicted / ratio,
    )


def _shared(length: int, shape: ReplayShape) -> int:
    """Tokens of the shared beginning: whole blocks, and no more than a hit may take."""
    cap = plan_prefill(shape, length).cap
    return min(cap, int(length * SHARED) // BLOCK_TOKENS * BLOCK_TOKENS)


def _check_lengths(lengths: Sequence[int], target: EngineTarget, shape: ReplayShape) -> None:
    context = min(target.engine.profile.sched.max_context_tokens, target.engine.config.max_position_embeddings)
    for length in lengths:
        least = 2 * BLOCK_TOKENS + shape.final_rows
        if length < least:
            raise UsageError(
                f"a prompt of {length} tokens, expected {least} to {context - 1}: a hit needs two blocks and the "
                "final rows"
            )
        if length >= context:
            raise CapacityError(
                f"a prompt of {length} tokens, expected {least} to {context - 1}: an answer needs one token of the "
                f"context of {context}",
                hint="raise sched.max_context_tokens, or choose other lengths",
            )


def _run(target: EngineTarget, prompt: Sequence[int]) -> tuple[float, float, Any]:
    """(wall seconds, process seconds, usage) of one prompt and its first token on an idle engine."""
    request = Request("replay", tuple(prompt), SamplingParams(max_tokens=1, ignore_eos=True))
    wall, cpu = time.perf_counter(), time.process_time()
    (done,) = target.engine.generate([request])
    if done.error:
        raise CheckFailed(f"a prompt of {len(prompt)} tokens ended with {done.error}")
    return time.perf_counter() - wall, time.process_time() - cpu, done.usage
