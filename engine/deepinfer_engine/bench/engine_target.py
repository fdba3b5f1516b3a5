"""Our engine in this process as a target: the loop calls ``step``, tokens are stamped when the step hands them over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.bench.metrics import Value
from deepinfer_engine.bench.prompts import with_tokens
from deepinfer_engine.bench.result import host_hardware, now_utc, source_commit
from deepinfer_engine.bench.run import Chunk, Ended, TargetFacts
from deepinfer_engine.bench.workload import PlannedRequest, Workload
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.profile import LoadedProfile, load_profile
from deepinfer_engine.config.schema import Profile, leaves
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.launch import Launch, prepare
from deepinfer_engine.types import Completion, Request, SamplingParams


class EngineTarget:
    """An open engine. Made by ``open`` for one profile; several runs may follow one another on it."""

    def __init__(self, engine: Engine, loaded: LoadedProfile, launch: Launch):
        self.engine = engine
        self.loaded = loaded
        self.launch = launch
        self._ids = usable_ids(engine)
        self._times = _Marks(engine)
        self._streamed: dict[int, int] = {}
        #: single forwards wrote over cached blocks: nothing may be found in this cache any more
        self.overwritten = False

    @classmethod
    def open(
        cls,
        profile: str | Path,
        sets: Sequence[str] = (),
        *,
        model: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        announce: Callable[[Launch], None] | None = None,
    ) -> EngineTarget:
        """Load a profile and a model, fitted to this machine; ``announce`` is told what differs before loading."""
        loaded = load_profile(profile, sets)
        launch = prepare(loaded.profile, model)
        if announce is not None:
            announce(launch)
        engine = Engine.open(launch.profile, launch.checkpoint.directory, device=launch.device, progress=progress)
        return cls(engine, loaded, launch)

    def facts(self) -> TargetFacts:
        profile, launch = self.engine.profile, self.launch
        gpus = launch.requested.hardware.gpus
        reason = f"profile {launch.requested.name} names no GPU"
        if launch.replaced:
            gpus, reason = 0, f"profile {launch.requested.name} is emulated here, its GPUs are absent"
        identity = {
            "kind": "engine",
            "device": launch.device,
            "embedded": launch.embedded,
            "emulated_keys": sorted(r.key for r in launch.replaced),
            "inactive_keys": sorted(i.key for i in launch.inactive),
            "numerics": profile.numerics.mode,
            "config_digest": launch.checkpoint.config.digest,
            "weights_digest": launch.checkpoint.digest,
            "model": launch.checkpoint.directory.name,
        }
        return TargetFacts(
            identity=identity,
            profile_name=launch.requested.name,
            profile_digest=self.loaded.digest,
            profile=leaves(profile),
            hardware=host_hardware(launch.device),
            gpus=gpus or None,
            gpus_reason=reason,
            persistent_cache=profile.cache.prefix and profile.cache.store.backend != "none",
        )

    def plan(self, workload: Workload) -> Workload:
        return with_tokens(workload, self.launch.checkpoint.directory, self.launch.checkpoint.config)

    def check(self, workload: Workload) -> None:
        if self.overwritten and self.engine.profile.cache.prefix:
            raise UsageError("single forwards have written over this engine's cache", hint="open a fresh one")
        check_context(workload, self.engine.profile, self.engine.config)

    def prompt(self, workload: Workload, request: PlannedRequest, salt: int) -> tuple[int, ...]:
        """The tokens of a request."""
        return workload.token_ids(request, self._ids, salt=salt)

    def prepare(self, workload: Workload, request: PlannedRequest, salt: int) -> Request:
        ids, most = self.prompt(workload, request, salt), request.output_tokens
        if request.text is not None:
            own = request.text.sampling
            seed = workload.seed if own.seed is None else own.seed
            sampling = replace(own, max_tokens=most, seed=seed)
            return Request(str(request.index), ids, sampling, grammar=request.grammar)
        how = workload.sampling
        sampling = SamplingParams(how.temperature, max_tokens=most, ignore_eos=how.ignore_eos, seed=workload.seed)
        return Request(str(request.index), ids, sampling)

    def start(self, index: int, prepared: Request) -> float:
        at = time.perf_counter()
        self.engine.submit(prepared)
        return at

    def poll(self, timeout_s: float) -> Sequence[Chunk | Ended]:
        if not self.engine.busy:
            time.sleep(timeout_s)
            return ()
        events = self.engine.step()
        return self._translated(events, time.perf_counter())

    def abort(self) -> Sequence[Chunk | Ended]:
        out: list[Chunk | Ended] = []
        for request_id in self.engine.in_flight():
            ended = self.engine.abort(request_id)
            out += self._translated(ended, time.perf_counter())
        return out

    def _translated(self, events: Sequence[Any], now: float) -> list[Chunk | Ended]:
        """Engine events as the run's; the tokens of one request in one step are one chunk.

        The token that ends an answer is no event of its own; it comes with the completion and counts to its step.
        """
        counts: dict[int, int] = {}
        for event in events:
            index = int(event.request_id)
            if not isinstance(event, Completion):
                counts[index] = counts.get(index, 0) + 1
                self._streamed[index] = self._streamed.get(index, 0) + 1
                continue
            silent = event.usage.generated - self._streamed.pop(index, 0)
            if silent > 0 and event.finish_reason == "stop":
                counts[index] = counts.get(index, 0) + silent
        chunks: list[Chunk | Ended] = [Chunk(index, now, n) for index, n in counts.items()]
        return chunks + [_ended(e, now) for e in events if isinstance(e, Completion)]

    def begin(self) -> None:
        self._times = _Marks(self.engine)
        self.engine.restart_balance()

    def counters(self) -> tuple[dict[str, Value], dict[str, str]]:
        return self._times.since()

    def close(self) -> None:
        self.engine.close()


def check_context(workload: Workload, profile: Profile, config: ModelConfig) -> None:
    """Refuse (CapacityError) a workload whose longest request exceeds the context."""
    context = min(profile.sched.max_context_tokens, config.max_position_embeddings)
    if workload.longest() > context:
        raise CapacityError(
            f"workload {workload.name}: its longest request needs {workload.longest()} tokens, the context holds "
            f"{context}",
            hint="raise sched.max_context_tokens, or lower the lengths of the load",
        )


class _Marks:
    """Steps and host times of the engine since a moment."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps = engine.steps
        self._preemptions = engine.scheduler.preemptions
        self._drafts = deepcopy(engine.drafts)

    def since(self) -> tuple[dict[str, Value], dict[str, str]]:
        engine = self._engine
        steps = engine.steps - self._steps
        out: dict[str, Value] = {"steps": steps, "preemptions": engine.scheduler.preemptions - self._preemptions}
        for name in ("schedule", "build", "post", "run"):
            kept = list(getattr(engine.times, f"{name}_ms"))[-steps:] if steps else []
            out[f"step_{name}_mean_ms"] = float(np.mean(kept)) if kept else None
        balance = engine.balance(now=True)
        why = "one rank: there is nothing to balance" if balance is None else "no token was routed to an expert"
        for name in ("moe_lb", "moe_lb_step"):
            out[name] = None if balance is None else getattr(balance, name)
        self._add_drafts(out)
        idle = {key: "no step ran" if key.startswith("step_") else why for key, value in out.items() if value is None}
        return out, idle

    def _add_drafts(self, out: dict[str, Value]) -> None:
        """What verification did since: rows, drafts and tokens of a row, accepted share by place in the row."""
        before, now = self._drafts, self._engine.drafts
        rows = now.rows - before.rows
        out["verify_rows"] = rows
        if not rows:
            return
        out["verify_length_mean"] = (now.drafted - before.drafted) / rows
        out["tokens_per_verify_row"] = (now.tokens - before.tokens) / rows  # the token that is always drawn included
        verified, accepted = now.verified_at - before.verified_at, now.accepted_at - before.accepted_at
        for place in sorted(verified):
            out[f"acceptance_place_{place + 1}"] = accepted[place] / verified[place]


def usable_ids(engine: Engine) -> np.ndarray:
    """Vocabulary entries a random prompt may contain, int64: no special token, no image token."""
    config = engine.config
    kept_out = engine.tokenizer.added_ids | {config.eos_token_id, config.bos_token_id, config.image_token_id}
    size = min(config.vocab_size, engine.tokenizer.vocab_size)
    return np.array([i for i in range(size) if i not in kept_out], dtype=np.int64)


def measured_on(target: EngineTarget) -> dict[str, Any]:
    """On what a measurement beside the workloads ran: profile, target, hardware, commit and time."""
    facts = target.facts()
    return {
        "kind": "measured",
        "profile": facts.profile_name,
        "profile_digest": facts.profile_digest,
        "resolved": facts.profile,
        "target": facts.identity,
        "hardware": host_hardware(target.launch.device),
        "commit": source_commit(),
        "measured": now_utc(),
    }


def _ended(done: Completion, now: float) -> Ended:
    status = "failed" if done.error else "cancelled" if done.finish_reason == "abort" else "completed"
    return Ended(
        index=int(done.request_id),
        at_s=now,
        status=status,
        input_tokens=done.usage.prompt,
        output_tokens=done.usage.generated,
        cached_tokens=done.usage.cached,
        replayed_tokens=done.usage.replayed,
        drafted_tokens=done.usage.drafted,
        accepted_tokens=done.usage.accepted,
        preemptions=done.usage.preemptions,
        queued_s=done.timing.queued_s,
        finish_reason=done.finish_reason,
        error_group=done.error,
        error=done.error_detail or done.error,
    )
