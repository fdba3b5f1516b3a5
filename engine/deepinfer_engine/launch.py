"""From a requested profile and a model to something this machine can run: as asked, emulated, or refused.

With the embedded weights a profile whose hardware is absent is emulated and every replaced key is reported. With a
user's own weights it runs if they fit what is here, otherwise it is refused with need and have.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.emulate import Machine, Replaced, emulate, hardware_is_present, require_fit
from deepinfer_engine.config.inactive import Inactive, inactive_features
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.resources import model_dir as embedded_dir
from deepinfer_engine.config.rules import ModelFacts, check_against_model
from deepinfer_engine.config.schema import Platform, Profile
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.reform import Reformed, read_healthy, reform
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.starting import starting_placement
from deepinfer_engine.errors import NotReadyError, ProfileError, UsageError
from deepinfer_engine.runtime.host import resolve_ops
from deepinfer_engine.weights.checkpoint import Checkpoint, no_draft_weights
from deepinfer_kernels.device import probe_cuda

#: the model that ships with the package
EMBEDDED = "nano"
_GIB = 2**30


@dataclass(frozen=True)
class Launch:
    """What will run: profile after emulation, checkpoint, torch device, and what differs from the request."""

    requested: Profile
    profile: Profile
    checkpoint: Checkpoint
    embedded: bool
    device: str
    replaced: tuple[Replaced, ...]
    inactive: tuple[Inactive, ...]
    processes: int = 1
    reformed: Reformed | None = None

    @property
    def placement(self) -> Placement | None:
        """Where experts live, if ranks were lost; else where the profile says."""
        return None if self.reformed is None else Placement.of(self.reformed.slots_LRS)


def this_machine() -> Machine:
    """The accelerator (if any), memory and cores of this host."""
    devices = probe_cuda()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    cores = os.cpu_count() or 1
    if devices and devices[0].platform in ("sm90", "sm100"):
        first = devices[0]
        return Machine(cast(Platform, first.platform), len(devices), first.memory_bytes / _GIB, ram, cores)
    return Machine("cpu", 0, 0.0, ram, cores)


def model_facts(config: ModelConfig, weights_bytes: int, *, records: bool) -> ModelFacts:
    """Sizes that rules and emulation need of a model."""
    layout = KVLayout.of(config, records=records)
    return ModelFacts(
        n_routed_experts=config.n_routed_experts,
        max_position_embeddings=config.max_position_embeddings,
        window=config.sliding_window,
        draft_tokens=config.dspark_block_size if config.num_nextn_predict_layers else 0,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=-(-layout.block_bytes // 128),
        row_bytes=layout.slot_bytes,
    )


def check_model(profile: Profile, config: ModelConfig) -> None:
    """Refuse (ProfileError) what this model cannot honour of the profile."""
    problems = check_against_model(
        profile,
        config.n_routed_experts,
        max_position_embeddings=config.max_position_embeddings,
        window=config.sliding_window,
        draft_tokens=config.dspark_block_size if config.num_nextn_predict_layers else 0,
    )
    if problems:
        raise ProfileError("\n".join(problems))


def check_device(profile: Profile, device: str) -> None:
    """Refuse (ProfileError) a torch device of another kind than the profile's platform."""
    kind = "cuda" if profile.hardware.platform in ("sm90", "sm100") else profile.hardware.platform
    if device.split(":")[0] != kind:
        raise ProfileError(
            f"device {device} is asked for, the profile is for {profile.hardware.platform}",
            hint="leave the device out, or change hardware.platform",
        )


def resident_bytes(checkpoint: Checkpoint, profile: Profile, processes: int = 1) -> int:
    """Memory of one process's prepared weights and caches: dense in the dtype of the numerics.

    Compiled operations of the CPU keep experts packed. Expert slots beyond the logical experts count; tables gathered
    from the file do not. Each of several processes has its share of the slots and the caches, and everything else.
    """
    config = checkpoint.config
    element = 2 if profile.numerics.mode == "fast" else 4
    packed = profile.hardware.platform == "cpu" and resolve_ops(profile).chosen["moe_experts"].backend == "cpu"
    slots = profile.ranks * profile.slots_per_rank(config.n_routed_experts) // processes
    total = 0
    drafts = profile.spec.verify != "off"
    groups = ("backbone", "engram", "draft") if drafts else ("backbone", "engram")
    for name, spec in checkpoint.plan.items():
        if spec.group not in groups or not checkpoint.has(name) or spec.kind.endswith("8_scale"):
            continue
        if spec.kind == "fp8":
            total += math.prod(spec.shape) * element
        elif spec.kind == "fp4":
            copies = (1, 1) if spec.group == "draft" else (slots, config.n_routed_experts)
            weights = math.prod(spec.shape) * 17 // 16 if packed else 2 * math.prod(spec.shape) * element
            total += weights * copies[0] // copies[1]
        elif spec.kind == "fp4_scale" or (spec.kind.startswith("table") and profile.cache.engram_placement == "mmap"):
            continue
        else:
            total += spec.nbytes
    layout = KVLayout.of(config, records=profile.numerics.mode != "float", draft=drafts)
    rows = profile.sched.max_rows_per_rank
    tokens = profile.cache.hbm_tokens_per_rank or rows * profile.sched.max_context_tokens
    hosted = -(-profile.parallel.dp // processes)
    return total + hosted * (rows * layout.slot_bytes + layout.blocks_for(tokens) * layout.block_bytes)


def _drafting(
    used: Profile, replaced: list[Replaced], checkpoint: Checkpoint, *, embedded: bool, processes: int
) -> tuple[Profile, list[Replaced]]:
    """The profile without speculation where it cannot be had, and why; a user's model without drafts is refused."""
    if used.spec.verify == "off":
        return used, replaced
    if processes > 1:
        reason = "drafts are verified in one process only"
    elif "draft" in checkpoint.groups_present:
        return used, replaced
    elif embedded:
        reason = "the embedded model has no draft weights"
    else:
        raise no_draft_weights(checkpoint.directory)
    off = used.model_copy(update={"spec": used.spec.model_copy(update={"verify": "off"})})
    return off, [*replaced, Replaced("spec.verify", used.spec.verify, "off", reason)]


def prepare(
    profile: Profile,
    model: str | Path | None = None,
    *,
    processes: int = 1,
    here: int | None = None,
    healthy: str | None = None,
) -> Launch:
    """Open the checkpoint (``model``, or the embedded one) and fit the profile to this machine.

    ``processes`` share the mesh, ``here`` of them (None: all) on this host. ``healthy``: ranks that are left, as
    ``read_healthy`` takes it; the profile is re-formed over them first. Raises ``CheckpointError`` (4),
    ``ProfileError`` (2) where profile and model disagree, ``UsageError`` (2) where ranks do not divide over processes,
    ``CapacityError`` (3).
    """
    embedded = model is None
    checkpoint = Checkpoint.open(embedded_dir(EMBEDDED) if model is None else model)
    config, machine = checkpoint.config, this_machine()
    weights_bytes = sum(s.nbytes for name, s in checkpoint.plan.items() if checkpoint.has(name))
    facts = model_facts(config, weights_bytes, records=profile.numerics.mode != "float")
    reformed = None
    if healthy is not None:
        alive = read_healthy(healthy, profile.ranks)
        check_model(profile, config)
        slots_LRS = starting_placement(checkpoint, profile).slots_LRS
        reformed = reform(profile, slots_LRS, config.n_routed_experts, alive)
        profile = reformed.profile
        if (left := len(alive)) % processes:
            fits = max(n for n in range(1, processes) if left % n == 0)
            raise UsageError(
                f"--healthy {healthy}: {left} of {reformed.had} ranks are left, "
                f"which do not divide over {processes} processes",
                hint=f"--nproc {fits}",
            )
    Share(profile.parallel.ep, profile.parallel.dp, 0, processes)  # refuses processes that do not divide the ranks
    used, replaced = profile, []
    if not embedded and processes == 1:
        require_fit(profile, machine, weights_bytes)
    if embedded or not hardware_is_present(profile, machine):
        used, replaced = emulate(profile, machine, facts)
    used, replaced = _drafting(used, replaced, checkpoint, embedded=embedded, processes=processes)
    check_model(used, config)
    device = "cpu"
    if used.hardware.platform in ("sm90", "sm100"):
        device = "cuda"
    elif used.hardware.platform != "cpu":
        raise NotReadyError(
            f"no backend for platform {used.hardware.platform} is built", hint="use a cpu or sm90 profile"
        )
    if not embedded:
        raw = weights_bytes if device == "cpu" else 0  # what was read stays on the host until it is prepared
        shared = (processes if here is None else here) if device == "cpu" else 1  # a device belongs to one process
        need = raw + shared * resident_bytes(checkpoint, used, processes)
        require_fit(used, machine, need, what="weights and caches")
    return Launch(
        requested=profile,
        profile=used,
        checkpoint=checkpoint,
        embedded=embedded,
        device=device,
        replaced=tuple(replaced),
        inactive=tuple(inactive_features(used)),
        processes=processes,
        reformed=reformed,
    )
