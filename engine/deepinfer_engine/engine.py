"""``Engine``: the façade that every operator job uses. submit / step / stream / abort / close."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.config.profile import Profile
from deepinfer_engine.errors import NotReadyError, UsageError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.runner import Runner
from deepinfer_engine.sched.scheduler import Limits, Scheduler
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import Completion, Request, Sequence, Timing, TokenEvent, Usage
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.reader import ShardReport
from deepinfer_kernels.registry import KernelError, Ops, resolve


class Engine:
    """One model under one profile in this process. Not thread-safe: one caller drives ``step``."""

    def __init__(
        self,
        profile: Profile,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        runner: Runner,
        scheduler: Scheduler,
        shards: tuple[ShardReport, ...],
    ):
        self.profile = profile
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.shards = shards
        self._started: dict[str, float] = {}
        self.steps = 0

    @classmethod
    def open(
        cls,
        model_dir: str | Path,
        profile: Profile,
        *,
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Validate and load a checkpoint for ``profile`` (already emulated where its hardware is absent).

        ``progress(done, total)`` counts loaded bytes. Raises ``CheckpointError`` (exit 4) or ``NotReadyError``.
        """
        checkpoint = Checkpoint.open(model_dir)
        tokenizer = Tokenizer.from_dir(model_dir)
        config = checkpoint.config
        ops = _resolve_ops(profile)
        loaded = load_model(checkpoint, tokenizer, ops, profile, device=device, progress=progress)
        limits = _limits(profile, config)
        kv = KVState(
            KVLayout.of(config, records=ops.numerics.records),
            ops,
            slots=limits.dp * limits.rows,
            blocks=limits.dp * limits.blocks,
            device=device,
        )
        runner = Runner(loaded.model, kv, ops, loaded.mesh, device)
        return cls(profile, checkpoint, tokenizer, runner, Scheduler(limits), loaded.shards)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses ids outside the vocabulary, image tokens and what can never fit."""
        config = self.config
        last = config.vocab_size - 1
        for position, token in enumerate(request.token_ids):
            if not 0 <= token <= last:
                raise UsageError(f"request {request.id!r}: token {token} at position {position} is not in 0..{last}")
        if config.image_token_id is not None and config.image_token_id in request.token_ids:
            raise UsageError(f"request {request.id!r}: image tokens need the vision tower, which this engine skips")
        seed = request.sampling.seed
        sequence = Sequence(
            request=request,
            token_ids=list(request.token_ids),
            num_prompt=len(request.token_ids),
            seed=secrets.randbits(64) if seed is None else seed,
        )
        self.scheduler.submit(sequence)
        self._started[request.id] = time.perf_counter()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def step(self) -> list[TokenEvent | Completion]:
        """Run one step; the tokens it drew and the requests it finished. Empty when idle."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return []
        running = dict(self.scheduler.running)
        out = self.runner.run(plan, running)
        now = time.perf_counter()
        self.steps += 1
        finished = self.scheduler.commit(plan, out.tokens)
        events: list[TokenEvent | Completion] = []
        for request_id, token in out.tokens.items():
            seq = running[request_id]
            if seq.first_token_s is None:
                seq.first_token_s = now - self._started[request_id]
            if seq.finish_reason != "error" and not (seq.finish_reason == "stop" and token == seq.token_ids[-1]):
                events.append(TokenEvent(request_id, token))
        events.extend(self._complete(seq, now) for seq in finished)
        return events

    def stream(self) -> Iterator[TokenEvent | Completion]:
        """Events of ``step`` until nothing is in flight."""
        while self.busy:
            yield from self.step()

    def abort(self, request_id: str) -> Completion | None:
        """End a request in any state; its completion carries what was generated. None when it is not in flight."""
        seq = self.scheduler.abort(request_id)
        return None if seq is None else self._complete(seq, time.perf_counter())

    def close(self) -> None:
        """Abort everything in flight."""
        for request_id in [*self.scheduler.running, *(s.request.id for s in self.scheduler.waiting)]:
            self.scheduler.abort(request_id)

    def _complete(self, seq: Sequence, now: float) -> Completion:
        assert seq.finish_reason is not None
        generated = seq.token_ids[seq.num_prompt :]
        kept = generated[:-1] if seq.finish_reason == "stop" else generated
        sampling = seq.request.sampling
        seeded = sampling.temperature == 0 or sampling.seed is not None
        return Completion(
            request_id=seq.request.id,
            token_ids=tuple(kept),
            finish_reason=seq.finish_reason,
            reproducible=seeded and self.profile.numerics.batch_invariant,
            usage=Usage(prompt=seq.num_prompt, generated=len(generated)),
            timing=Timing(seq.first_token_s, now - self._started.pop(seq.request.id)),
        )


def _resolve_ops(profile: Profile) -> Ops:
    backends = dict(profile.kernels.overrides)
    try:
        return resolve(profile.numerics.mode, profile.hardware.platform, backends)
    except KernelError as exc:
        raise NotReadyError(str(exc), hint="deepinfer doctor shows what each operation needs") from None
    except KeyError as exc:
        raise UsageError(f"kernels.overrides: {exc.args[0]}") from None


def _limits(profile: Profile, config: ModelConfig) -> Limits:
    sched = profile.sched
    context = min(sched.max_context_tokens, config.max_position_embeddings)
    tokens = profile.cache.hbm_tokens_per_rank or sched.max_rows_per_rank * context
    return Limits(
        dp=profile.parallel.dp,
        rows=sched.max_rows_per_rank,
        blocks=-(-tokens // BLOCK_TOKENS),
        chunk_tokens=sched.prefill_chunk_tokens,
        context_tokens=context,
        eos_token_id=config.eos_token_id,
    )


def synchronise(device: str) -> None:
    """Wait for the device, so that a host clock read afterwards is honest."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
