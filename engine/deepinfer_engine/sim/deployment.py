"""``plan_deployment``: what a profile means for one model: mesh, memory per rank, what fits, how fast it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.rules import check_against_model
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.cost.account import Workload
from deepinfer_engine.cost.figure import Figure
from deepinfer_engine.cost.memory import (
    GIB,
    Deployment,
    MemoryPlan,
    max_chunk,
    max_context,
    max_kv_tokens,
    max_rows,
    max_rows_beside_kv,
    plan_memory,
)
from deepinfer_engine.errors import CapacityError, ProfileError, UsageError
from deepinfer_engine.sim.models import PlannedModel
from deepinfer_engine.sim.prediction import predict

#: Contexts of the fit table beside the profile's own: a chat, the edges of the length classes, the model's limit.
_CONTEXTS = (8192, 16_384, 65_536, 262_144, 1_048_576)
#: Beyond this many rows a step is long enough to hide its launches.
_CAPTURED_ROWS = 256
_WORD_BYTES = {"fast": 2, "reference": 4, "float": 4}


@dataclass(frozen=True)
class Slo:
    """Limits of latency in milliseconds; None where none is set."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class Mesh:
    """Ranks and expert slots of one instance."""

    ranks: int
    hosts: int
    experts: int
    slots_per_rank: int

    @property
    def replicas(self) -> int:
        """Slots beyond one per expert."""
        return self.ranks * self.slots_per_rank - self.experts


@dataclass(frozen=True)
class Fit:
    """``rows`` rows of ``context`` tokens each fit on a rank; the field named by ``asked`` was found."""

    asked: str
    rows: int
    context: int


@dataclass(frozen=True)
class DeploymentPlan:
    """The answer of ``plan``. ``have_bytes`` is None where the memory of a rank is not known."""

    profile: Profile
    model: PlannedModel
    mesh: Mesh
    deployment: Deployment
    memory: MemoryPlan
    have_bytes: int | None
    fits: tuple[Fit, ...]
    kv_tokens: int | None
    predictions: tuple[Figure, ...]
    notes: tuple[str, ...]

    @property
    def free_bytes(self) -> int | None:
        return None if self.have_bytes is None else self.have_bytes - self.memory.device_bytes

    def require_fit(self) -> None:
        """Raise ``CapacityError`` with need, have and the largest knob when a rank's memory is too small."""
        if self.have_bytes is None or self.memory.device_bytes <= self.have_bytes:
            return
        who = "the process" if self.profile.hardware.platform == "cpu" else "a rank"
        raise CapacityError(
            f"{who} needs {self.memory.device_bytes / GIB:.1f} GiB, it has {self.have_bytes / GIB:.1f} GiB",
            hint=_knob(self),
        )


def deployment_of(profile: Profile, config: ModelConfig) -> Deployment:
    """What of a profile decides bytes.

    On a CPU all ranks share one process, so they are one rank here, and weights are dense as in the torch reference,
    whether or not kernels are built; accelerators keep the stored formats under ``fast``.
    """
    p, on_cpu = profile, profile.hardware.platform == "cpu"
    shared = p.parallel.dp if on_cpu else 1
    context = min(p.sched.max_context_tokens, config.max_position_embeddings)
    rows = p.sched.max_rows_per_rank
    dense = on_cpu or p.numerics.mode != "fast"
    captured = 0 if on_cpu or p.role == "prefill" else len(_captured_sizes(rows))
    slots = p.slots_per_rank(config.n_routed_experts)
    return Deployment(
        ranks=1 if on_cpu else p.ranks,
        slots_per_rank=slots * p.ranks if on_cpu else slots,
        ranks_per_host=1 if on_cpu else min(p.hardware.gpus_per_node, p.ranks),
        rows=rows * shared,
        kv_tokens=(p.cache.hbm_tokens_per_rank or rows * context) * shared,
        context=context,
        chunk=p.sched.prefill_chunk_tokens * shared,
        drafts=0 if p.spec.verify == "off" else p.spec.draft_tokens,
        engram="device" if on_cpu and p.cache.engram_placement == "host" else p.cache.engram_placement,
        weight_bytes=_WORD_BYTES[p.numerics.mode] if dense else 0,
        records=p.numerics.mode != "float",
        replicas=2 if p.cache.swa_pool_gib_per_rank else 0,  # one may be written while the other is read
        graphs=captured,
        fused=not on_cpu,
        runtime=not on_cpu,
        host_kv_bytes=int(p.cache.host_gib_per_rank * GIB),
        pool_bytes=int(p.cache.swa_pool_gib_per_rank * GIB),
    )


def _captured_sizes(rows: int) -> list[int]:
    """Batch sizes of captured decode steps: powers of two to 8, then every eighth; larger ones are not captured."""
    top = min(rows, _CAPTURED_ROWS)
    return sorted({n for n in (1, 2, 4, 8) if n <= top} | set(range(16, top + 1, 8)) | {top})


def plan_deployment(
    profile: Profile, model: PlannedModel, *, workload: Workload, slo: Slo, hbm_gib: float | None = None
) -> DeploymentPlan:
    """Plan one instance. ``hbm_gib`` gives a CPU's memory, which a profile does not carry.

    Raises ``ProfileError`` when the model cannot honour the profile; a plan that does not fit is returned, so that it
    can be shown before ``require_fit`` refuses it.
    """
    config = model.config
    bad = check_against_model(
        profile,
        config.n_routed_experts,
        window=config.sliding_window,
        draft_tokens=config.dspark_block_size if config.num_nextn_predict_layers else 0,
    )
    if bad:
        raise ProfileError("\n".join(f"{profile.name}: {text}" for text in bad))
    d = deployment_of(profile, config)
    memory = plan_memory(config, d)
    gib = hbm_gib if profile.hardware.platform == "cpu" else profile.hardware.hbm_gib
    have = None if gib is None else int(gib * GIB)
    hosts = 1 if profile.hardware.platform == "cpu" else profile.hardware.gpus // profile.hardware.gpus_per_node
    room = max_rows_beside_kv(config, d, have) if have is not None else None
    figures, reasons = predict(profile, model, workload, tpot_ms=slo.tpot_ms, max_rows=room)
    return DeploymentPlan(
        profile=profile,
        model=model,
        mesh=Mesh(profile.ranks, hosts, config.n_routed_experts, profile.slots_per_rank(config.n_routed_experts)),
        deployment=d,
        memory=memory,
        have_bytes=have,
        fits=tuple(_fits(config, d, have)) if have is not None else (),
        kv_tokens=max_kv_tokens(config, d, have) if have is not None else None,
        predictions=figures,
        notes=tuple(_notes(profile, config, d, have)) + reasons,
    )


def _fits(config: ModelConfig, d: Deployment, have: int) -> Sequence[Fit]:
    contexts = sorted({c for c in _CONTEXTS if c <= config.max_position_embeddings} | {d.context})
    found = [Fit("rows", max_rows(config, d, have, context), context) for context in contexts]
    return [*found, Fit("context", d.rows, max_context(config, d, have, d.rows))]


def _notes(profile: Profile, config: ModelConfig, d: Deployment, have: int | None) -> Sequence[str]:
    notes = []
    if d.weight_bytes:
        text = f"weights are held dense, {d.weight_bytes} bytes an element"
        if profile.hardware.platform == "cpu" and profile.numerics.mode == "fast":
            packed = plan_memory(config, replace(d, packed_experts=True)).device_bytes
            text += f"; compiled operations keep routed experts as stored: {packed / GIB:.2f} GiB in all"
        notes.append(text)
    else:
        wide = plan_memory(config, replace(d, weight_bytes=_WORD_BYTES[profile.numerics.mode])).device_bytes
        text = f"{wide / GIB:.1f} GiB per rank in all"
        if have is not None and wide > have:
            text += f", which does not fit {have / GIB:.1f}"
        notes.append(
            f"weights stay in their stored formats; where operations run the torch reference, they are dense: {text}"
        )
    if profile.cache.hbm_tokens_per_rank and d.kv_tokens < d.rows * d.context:
        notes.append(
            f"block KV holds {d.kv_tokens / d.rows:,.0f} tokens for each of {d.rows} rows; "
            f"rows of {d.context:,} tokens share it"
        )
    if have is None:
        notes.append("what fits is not answered: a cpu profile has no memory size, give --hbm GIB")
    return notes


def _knob(plan: DeploymentPlan) -> str:
    """One next step for a plan that does not fit: the first knob that alone makes it fit, with its value."""
    config, d, have = plan.model.config, plan.deployment, plan.have_bytes or 0
    if d.weight_bytes and plan.profile.numerics.mode != "fast":
        return "set numerics.mode to fast; other modes hold every weight in 4 bytes"
    if d.engram == "device" and plan_memory(config, replace(d, engram="host")).device_bytes <= have:
        return "set cache.engram_placement to host"
    if plan.kv_tokens:
        return f"lower cache.hbm_tokens_per_rank to {plan.kv_tokens}"
    if chunk := max_chunk(config, d, have):
        return f"lower sched.prefill_chunk_tokens to {chunk}"
    if rows := max_rows_beside_kv(config, d, have):
        return f"lower sched.max_rows_per_rank to {rows}"
    experts = plan.memory.of("routed experts") > plan.memory.of("dense weights")
    if experts:
        return "use more ranks (parallel.ep), each holds fewer experts"
    return "use a device with more memory; every rank holds the dense weights"


# -------------------------------------------------------------------- healthy


def reform(profile: Profile, ranks: int) -> list[str]:
    """The ``key=value`` settings that re-form an instance over ``ranks`` healthy GPUs.

    Every width is legal, uneven ones too: the widest is taken. Hosts are counted by what they can fill evenly. Raises
    ``UsageError`` for a width that is no degradation of the profile's.
    """
    had = profile.ranks
    if profile.hardware.platform == "cpu":
        raise UsageError("--healthy re-forms an instance over accelerators; the profile is for cpu")
    if not 1 <= ranks <= had:
        raise UsageError(f"--healthy {ranks}: the instance has {had} ranks, expected 1 to {had}")
    sets = [
        f"hardware.gpus={ranks}",
        f"hardware.gpus_per_node={math.gcd(ranks, profile.hardware.gpus_per_node)}",
        f"parallel.ep={ranks}",
        f"parallel.dp={ranks}",
    ]
    if ranks == 1:  # nothing to balance on one rank
        sets += ["parallel.redundant_experts_per_rank=0", "eplb.period_steps=0"]
    return sets
