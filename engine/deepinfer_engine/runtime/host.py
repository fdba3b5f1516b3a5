"""``host_runner``: what one process hosts of a deployment: its experts, the KV of its rows, the runner of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from deepinfer_engine.build_command import build_command
from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.replay import ReplayShape
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.config.schema import Backend, Profile
from deepinfer_engine.dist.mesh import Mesh
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.torch_mesh import TorchMesh
from deepinfer_engine.errors import NotReadyError, UsageError
from deepinfer_engine.model.kernel_shapes import kernel_shapes
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.lane import Lane
from deepinfer_engine.runtime.move_site import MoveSite
from deepinfer_engine.runtime.runner import Runner
from deepinfer_engine.runtime.speculate import Speculation
from deepinfer_engine.runtime.step_curve import temperatures_of
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.reader import ShardReport
from deepinfer_kernels.parts import INNER, PARTS
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, Ops, resolve


@dataclass(frozen=True)
class Capacity:
    """Rows and blocks of one attention rank."""

    rows: int
    blocks: int

    @classmethod
    def of(cls, profile: Profile) -> Capacity:
        sched = profile.sched
        # max_context_tokens is checked against the model's positions before
        tokens = profile.cache.hbm_tokens_per_rank or sched.max_rows_per_rank * sched.max_context_tokens
        return cls(sched.max_rows_per_rank, -(-tokens // BLOCK_TOKENS))


def host_runner(
    profile: Profile,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    lane: Lane,
    *,
    device: str,
    share: Share,
    placement: Placement | None = None,
    connect: Callable[[Placement], Mesh] | None = None,
    progress: Callable[[int, int], None] | None = None,
    make: Callable[..., Runner] = Runner,
) -> tuple[Runner, tuple[ShardReport, ...]]:
    """Load the share of this process and ``make`` its runner; and how fast each shard was read."""
    ops = resolve_ops(profile, checkpoint)
    check_moves(profile, ops)
    drafts = profile.spec.verify != "off"
    loaded = load_model(
        checkpoint,
        tokenizer,
        ops,
        profile,
        device=device,
        progress=progress,
        placement=placement,
        share=share,
        connect=connect,
        draft=drafts,
    )
    config, capacity, ranks = checkpoint.config, Capacity.of(profile), len(share.dp_ranks)
    kv = KVState(
        KVLayout.of(config, records=ops.numerics.records, draft=drafts),
        ops,
        slots=ranks * capacity.rows,
        blocks=ranks * capacity.blocks,
        device=device,
    )
    kept = replay_shape(profile, checkpoint).snapshot_layers
    runner = make(loaded.model, kv, ops, loaded.mesh, device, lane, kept=kept)
    if loaded.draft is not None:
        runner.speculation = Speculation(
            loaded.draft,
            tokens=profile.spec.draft_tokens,
            slots=ranks * capacity.rows,
            ngram=config.engram_max_ngram_size,
            vocab=config.vocab_size,
            mode=profile.spec.mode,
            device=device,
            temperatures=temperatures_of(profile, checkpoint),
        )
    if profile.ranks > 1 and profile.eplb.period_steps:
        runner.site = site = _move_site(runner)
        runner.commands["experts.prepare"] = lambda order: site.prepare(order).digest
        runner.commands["experts.run"] = site.run
    return runner, loaded.shards


def _move_site(runner: Runner) -> MoveSite:
    """What moves the experts of this process under live rebalancing."""
    mesh = runner.mesh
    banks = [layer.ffn.bank for layer in runner.model.weights.layers]
    return MoveSite(banks, mesh, runner.device, runner.ops, mesh if isinstance(mesh, TorchMesh) else None)


def replay_shape(profile: Profile, checkpoint: Checkpoint) -> ReplayShape:
    """How prompts are replayed under a profile."""
    return ReplayShape.of(checkpoint.config, decoder=profile.replay.decoder, encoder=profile.replay.encoder)


def check_moves(profile: Profile, ops: Ops) -> None:
    """Raise UsageError where experts are to move under a backend that would not see it: answers would be wrong."""
    experts = ops.chosen["moe_experts"]
    if profile.ranks > 1 and profile.eplb.period_steps and experts.copies:
        raise UsageError(
            f"{experts.backend} computes moe_experts with copies of the weights, and eplb.period_steps "
            f"{profile.eplb.period_steps} moves experts between slots",
            hint="set eplb.period_steps to 0, or leave moe_experts out of kernels.overrides",
        )


def resolve_ops(profile: Profile, checkpoint: Checkpoint | None = None) -> Ops:
    """The implementation of every operation, with a model only those that compile nothing while it is served.

    Raises NotReadyError or UsageError where a wish cannot be met.
    """
    _check_named(profile)
    try:
        ops = resolve(
            profile.numerics.mode,
            profile.hardware.platform,
            profile.kernels.overrides,
            backend=profile.kernels.backend,
            batch_invariant=profile.numerics.batch_invariant,
            cache=profile.kernels.folder,
            shapes=None if checkpoint is None else kernel_shapes(checkpoint.config, profile),
        )
    except KernelError as exc:
        if checkpoint is not None and "not built for the sizes" in str(exc):
            raise NotReadyError(str(exc), hint=build_command(profile, checkpoint.directory)) from None
        if profile.numerics.batch_invariant:
            raise NotReadyError(
                f"numerics.batch_invariant: {exc}", hint="numerics.mode float and fast have invariant operations"
            ) from None
        raise NotReadyError(str(exc), hint="deepinfer doctor shows what each operation needs") from None
    for op in INNER & profile.kernels.overrides.keys():
        callers = [whole for whole, parts in PARTS.items() if op in parts]
        if all(ops.chosen[whole].backend != "parts" for whole in callers):
            raise UsageError(
                f"kernels.overrides.{op} has no effect: only {' and '.join(callers)} would call it, named too",
                hint=f"leave out kernels.overrides.{op}, or kernels.overrides.{callers[0]}",
            )
    return ops


def _check_named(profile: Profile) -> None:
    """Raise UsageError where a backend is named for an operation that it never has on the platform."""
    platform, known = profile.hardware.platform, get_args(Backend)
    for op, backend in profile.kernels.overrides.items():
        here = [i.backend for i in IMPLEMENTATIONS[op] if platform in i.platforms and i.backend in known]
        if backend not in ("auto", *here):
            raise UsageError(
                f"kernels.overrides.{op} is {backend}, which has no {op} for {platform}",
                hint=f"use {', '.join(dict.fromkeys(('auto', *here)))}",
            )
