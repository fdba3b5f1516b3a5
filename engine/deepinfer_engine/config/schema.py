"""``Profile``: what an operator decides about a deployment, frozen and strictly typed.

Every key has a default except ``schema_version`` and ``name``, and a description that ``profile show`` prints. Units
stand in the names; "per rank" means one expert-parallel rank. Relations between keys are in ``rules``, keys whose
feature is not built yet in ``inactive``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Platform = Literal["cpu", "sm90", "sm100", "ascend950"]
Role = Literal["prefill", "decode", "both"]
Backend = Literal["auto", "reference", "cpu", "triton", "tilelang", "deep_gemm", "flash_mla", "tile_kernels", "ascend"]

#: Largest integer every JSON reader keeps exactly.
_MAX_INT = 2**53 - 1
#: Widest mesh: eight times the widest published deployment.
_MAX_RANKS = 1024

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
OpName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+){0,3}$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Gib = Annotated[float, Field(ge=0, le=1_048_576)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
Temperature = Annotated[float, Field(gt=0, le=100)]


class Section(BaseModel):
    """Strict, frozen, no extra keys: the settings shared by every part of a profile."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Hardware(Section):
    platform: Platform = Field(default="cpu", description="accelerator architecture of every rank")
    gpus: int = Field(default=0, ge=0, le=_MAX_RANKS, description="accelerators of one instance; 0 on cpu")
    gpus_per_node: int = Field(default=0, ge=0, le=_MAX_RANKS, description="accelerators in one host; 0 on cpu")
    hbm_gib: Gib = Field(default=0.0, description="usable memory of one accelerator, GiB; 0 on cpu")


class Parallel(Section):
    ep: int = Field(default=1, ge=1, le=_MAX_RANKS, description="expert-parallel ranks")
    dp: int = Field(default=1, ge=1, le=_MAX_RANKS, description="attention data-parallel ranks; divides ep")
    redundant_experts_per_rank: int = Field(
        default=0, ge=0, le=64, description="expert slots per rank beyond ceil(experts / ep), filled with replicas"
    )
    transport: Literal["torch", "deepep"] = Field(
        default="torch", description="what carries tokens between processes: torch.distributed (gloo, NCCL) or DeepEP"
    )


class Numerics(Section):
    mode: Literal["reference", "float", "fast"] = Field(
        default="fast",
        description="reference: every rounding of the model definition; float: no rounding; fast: per op",
    )
    batch_invariant: bool = Field(
        default=False, description="a row's logits do not depend on the other rows of its batch"
    )


class Sched(Section):
    max_rows_per_rank: int = Field(default=32, ge=1, le=65_536, description="sequences one rank runs at a time")
    prefill_chunk_tokens: int = Field(
        default=4096, ge=1, le=1_048_576, description="most prompt tokens one rank computes in a step"
    )
    max_context_tokens: int = Field(default=8192, ge=1, le=1_048_576, description="longest prompt plus answer admitted")
    step_budget_ms: float = Field(
        default=0.0,
        ge=0,
        le=600_000,
        description="time a step may take; prompt chunks shrink to fit; 0: token budget only",
    )
    overlap: bool = Field(
        default=False, description="schedule the next step and post-process the last one during a forward"
    )


class Ttl(Section):
    agent: Seconds = Field(
        default=259_200, description="seconds that blocks of agent traffic are kept after their last use"
    )
    chat: Seconds = Field(
        default=604_800, description="seconds that blocks of chat traffic are kept after their last use"
    )


class Store(Section):
    backend: Literal["none", "segment", "posix"] = Field(
        default="none",
        description="persistent block tier: segment log on a local disk, or one file per block on a mount",
    )
    path: Text | None = Field(default=None, description="folder of the store")
    capacity_gib: Gib = Field(
        default=0.0, description="size at which old blocks are dropped, GiB; 0: what the disk has"
    )
    ttl_s: Ttl = Field(default_factory=Ttl, description="lifetime by traffic class")
    fetch_deadline_ms: int = Field(
        default=2000,
        ge=1,
        le=600_000,
        description="time after which a fetch counts as a miss and the prompt is recomputed",
    )


class Cache(Section):
    hbm_tokens_per_rank: int = Field(
        default=0,
        ge=0,
        le=_MAX_INT,
        description="block KV held in device memory, tokens; 0: a full context for every row",
    )
    host_gib_per_rank: Gib = Field(default=0.0, description="block KV tier in host memory, GiB; 0: none")
    swa_pool_gib_per_rank: Gib = Field(
        default=0.0, description="host pool of window KV at 128-token pivots, GiB; 0: none"
    )
    swa_pool_ttl_s: Seconds = Field(default=180, description="lifetime of a window in the pool, seconds")
    prefix: bool = Field(default=False, description="reuse the blocks of prompts that share a prefix")
    strict_lineage: bool = Field(default=False, description="refuse to keep windows that a replay approximated")
    tenant: Annotated[str, Field(max_length=256)] = Field(
        default="", description="salt of the block digests; two tenants never share a block"
    )
    engram_placement: Literal["device", "host", "mmap"] = Field(
        default="host", description="n-gram tables: in device memory, in host memory, or read from the checkpoint file"
    )
    store: Store = Field(default_factory=Store, description="persistent tier")


class Replay(Section):
    decoder: Literal["off", "exact", "bounded"] = Field(
        default="off", description="prompt rows run through the decoder half: all, the receptive field, or one window"
    )
    encoder: Literal["off", "bounded"] = Field(
        default="off", description="on a prefix hit without its window KV: recompute the prompt, or replay one window"
    )


class Spec(Section):
    verify: Literal["off", "fixed", "adaptive"] = Field(
        default="off", description="speculative decoding: none, all drafts verified, or a budget by confidence"
    )
    mode: Literal["coupled", "rejection"] = Field(
        default="coupled", description="coupled: same output as without drafts; rejection: same distribution"
    )
    draft_tokens: int = Field(default=5, ge=1, le=16, description="positions drafted per step")
    confidence_temperatures: Annotated[tuple[Temperature, ...], Field(strict=False)] = Field(
        default=(), description="calibration per draft position; empty: the checkpoint's own"
    )
    curve_ttl_s: Seconds = Field(
        default=3600, description="age at which the measured step-time curve is measured again"
    )


class Eplb(Section):
    window_steps: int = Field(default=100, ge=1, le=1_000_000, description="steps of expert counts a plan is made from")
    period_steps: int = Field(
        default=0, ge=0, le=1_000_000_000, description="steps between two plans; 0: static placement"
    )
    max_bytes_per_step: int = Field(
        default=67_108_864, ge=1, le=_MAX_INT, description="expert bytes one rank may receive per step while moving"
    )
    plan_path: Text | None = Field(default=None, description="plan file of the placement to start from")
    replica_choice: Literal["hash", "least_load"] = Field(
        default="hash",
        description="replica a token takes: by its position and id alone, or where the load of the step is least",
    )


class Kernels(Section):
    backend: Backend = Field(default="auto", description="auto: the best built for the platform, op by op")
    overrides: dict[OpName, Backend] = Field(default_factory=dict, description="op name to backend, wins over backend")
    cache_dir: Text | None = Field(
        default=None, description="folder of compiled kernels; null: the user's cache folder"
    )

    @property
    def folder(self) -> Path | None:
        """``cache_dir`` from the root, ``~`` as in a shell; None: the user's."""
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser().absolute()


class Grammar(Section):
    workers: int = Field(default=2, ge=1, le=256, description="processes that compile grammars off the critical path")
    timeout_s: Seconds = Field(default=20, description="compile time after which that request fails")
    cache_mib: int = Field(default=1024, ge=1, le=1_048_576, description="size of the cache of compiled grammars, MiB")


class Deadlines(Section):
    load_s: Seconds = Field(default=3600, description="loading the weights")
    build_s: Seconds = Field(default=3600, description="compiling kernels")
    warmup_s: Seconds = Field(default=1800, description="first steps after loading")
    step_s: Seconds = Field(default=300, description="one step; a rank that takes longer counts as lost")


class Network(Section):
    interface: Text | None = Field(default=None, description="pattern of the interface ranks talk over, such as ib*")


class Requires(Section):
    driver_min: Version | None = Field(default=None, description="lowest accelerator driver version")
    cuda_min: Version | None = Field(default=None, description="lowest CUDA version")
    nccl_min: Version | None = Field(default=None, description="lowest NCCL version")
    cann_min: Version | None = Field(default=None, description="lowest CANN version")


class Profile(Section):
    """One deployment. ``load_profile`` builds it; ``ranks`` and ``slots_per_rank`` derive the mesh."""

    schema_version: Literal[1] = Field(description="version of this schema")
    name: Name = Field(description="name of the profile")
    description: Annotated[str, Field(max_length=200)] = Field(default="", description="one line for the list")
    extends: Text | None = Field(default=None, description="profile whose values this one starts from; one level")
    role: Role = Field(
        default="both", description="phase served; selects defaults of chunk, rebalancing and speculation"
    )
    hardware: Hardware = Field(default_factory=Hardware, description="what one instance runs on")
    parallel: Parallel = Field(default_factory=Parallel, description="ranks of one instance")
    numerics: Numerics = Field(default_factory=Numerics, description="how numbers are computed")
    sched: Sched = Field(default_factory=Sched, description="batching")
    cache: Cache = Field(default_factory=Cache, description="KV tiers")
    replay: Replay = Field(default_factory=Replay, description="bounded replay of window KV")
    spec: Spec = Field(default_factory=Spec, description="speculative decoding")
    eplb: Eplb = Field(default_factory=Eplb, description="rebalancing of experts")
    kernels: Kernels = Field(default_factory=Kernels, description="implementations of operations")
    grammar: Grammar = Field(default_factory=Grammar, description="structured output")
    deadlines: Deadlines = Field(default_factory=Deadlines, description="limits after which a phase has failed")
    network: Network = Field(default_factory=Network, description="between ranks")
    requires: Requires = Field(default_factory=Requires, description="versions doctor checks")

    @property
    def ranks(self) -> int:
        """Ranks of the mesh; one per expert-parallel rank, real or virtual."""
        return self.parallel.ep

    def slots_per_rank(self, n_routed_experts: int) -> int:
        """Physical expert slots S of one rank: ceil(E / R) + redundant."""
        return -(-n_routed_experts // self.parallel.ep) + self.parallel.redundant_experts_per_rank


#: Labels: they name a profile and change nothing it does, so its digest leaves them out.
LABELS = ("name", "description", "extends")


def leaves(profile: Profile) -> dict[str, Any]:
    """Every resolved value by dotted key, in schema order; an op override is a key of its own."""
    out: dict[str, Any] = {}
    _flatten(profile.model_dump(mode="json"), "", out)
    return out


def _flatten(tree: dict[str, Any], prefix: str, out: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            _flatten(value, f"{prefix}{key}.", out)
        else:
            out[prefix + key] = value


def known_keys(path: tuple[str, ...]) -> list[str] | None:
    """Keys of the section at ``path``; None when the schema has no such section (a mapping of free keys included)."""
    section: type[BaseModel] = Profile
    for key in path:
        info = section.model_fields.get(key)
        if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
            return None
        section = info.annotation
    return list(section.model_fields)


def describe_key(key: str) -> str:
    """Description of a dotted key (of its mapping, for an op override)."""
    section: type[BaseModel] = Profile
    text = ""
    for part in key.split("."):
        info = section.model_fields.get(part)
        if info is None:
            break
        text = info.description or ""
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            section = info.annotation
    return text
