"""Running a profile on a machine it was not written for.

With the embedded weights a profile whose hardware is absent is emulated: its mesh (ep, dp, redundant experts), its
windows and its policies stay, so that the same decisions are taken; hardware, capacities and kernel choices are
replaced, and every replaced key is listed. With a user's own weights nothing is emulated away silently: either they
fit the memory there is, or ``require_fit`` refuses with need, have and the knob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.rules import BLOCK_TOKENS, ModelFacts, backend_runs_on
from deepinfer_engine.config.schema import Platform, Profile, leaves
from deepinfer_engine.errors import CapacityError

_GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The machine a run starts on. ``hbm_gib`` is the usable memory of one accelerator; 0 without one."""

    platform: Platform
    gpus: int
    hbm_gib: float
    ram_gib: float
    cores: int

    @property
    def device_gib(self) -> float:
        """Memory that holds weights and KV in one process: one accelerator's, or the host's."""
        return self.ram_gib if self.platform == "cpu" else self.hbm_gib


@dataclass(frozen=True)
class Replaced:
    """One key whose value the machine could not honour."""

    key: str
    requested: Any
    used: Any
    reason: str


def hardware_is_present(profile: Profile, machine: Machine) -> bool:
    """Whether the machine has what the profile's hardware section names; a cpu profile runs anywhere."""
    want = profile.hardware
    if want.platform == "cpu":
        return True
    return (
        machine.platform == want.platform
        and machine.gpus >= min(want.gpus, want.gpus_per_node)
        and machine.hbm_gib >= want.hbm_gib
    )


def emulate(profile: Profile, machine: Machine, facts: ModelFacts) -> tuple[Profile, list[Replaced]]:
    """The profile as this machine can run it, and every key that differs from the request, in schema order.

    The caches of all virtual ranks together get a quarter of the memory weights leave free, half for the rows'
    windows and half for block KV; the host tiers get an eighth of it. CapacityError when not even one row of one
    block per rank fits.
    """
    if hardware_is_present(profile, machine):
        return profile, []
    plan = _Plan(profile)
    device = "no accelerator" if machine.platform == "cpu" else f"{machine.gpus} x {machine.platform}"
    has = f"this machine has {device}"
    plan.set("hardware.platform", machine.platform, has)
    plan.set("hardware.gpus", machine.gpus, has)
    plan.set("hardware.gpus_per_node", machine.gpus, has)
    plan.set("hardware.hbm_gib", machine.hbm_gib, has)
    _replace_capacities(plan, profile, machine, facts)
    _replace_kernels(plan, profile, machine)
    for key in ("driver_min", "cuda_min", "nccl_min", "cann_min"):
        plan.set(f"requires.{key}", None, "its hardware is emulated")
    plan.set("network.interface", None, "all ranks share one process")
    return plan.finish()


def require_fit(profile: Profile, machine: Machine, need_bytes: int, *, what: str = "weights") -> None:
    """Refuse (CapacityError, exit 3) when ``need_bytes`` exceed the memory the run may use on this machine."""
    have = int(machine.device_gib * _GIB)
    if need_bytes <= have:
        return
    memory = "host memory" if machine.platform == "cpu" else f"memory of one {machine.platform} device"
    ranks = f", {profile.ranks} ranks in one process" if profile.ranks > 1 else ""
    raise CapacityError(
        f"{what} do not fit: need {need_bytes / _GIB:.1f} GiB, have {have / _GIB:.1f} GiB ({memory}{ranks})",
        hint="use a machine with that memory, or lower sched.max_rows_per_rank and cache.hbm_tokens_per_rank; "
        "without --model the embedded weights are used and the profile is emulated",
    )


class _Plan:
    """Collects replacements; a key that keeps its value is not one."""

    def __init__(self, profile: Profile):
        self._profile = profile
        self._asked = leaves(profile)
        self._changed: dict[str, Replaced] = {}

    def set(self, key: str, used: Any, reason: str) -> None:
        asked = self._asked[key]
        if used != asked:
            self._changed[key] = Replaced(key, asked, used, reason)

    def drop_override(self, op: str, reason: str) -> None:
        key = f"kernels.overrides.{op}"
        self._changed[key] = Replaced(key, self._asked[key], "auto", reason)

    def finish(self) -> tuple[Profile, list[Replaced]]:
        profile = self._profile
        for change in self._changed.values():
            profile = _with(profile, change.key.split("."), change.used)
        order = list(self._asked)
        return profile, sorted(self._changed.values(), key=lambda r: order.index(r.key))


def _with(section: Any, path: list[str], value: Any) -> Any:
    """A copy of a frozen section with one value replaced; relations are not checked again, ranks are virtual here."""
    if isinstance(section, dict):
        return section | {path[0]: value}
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _with(getattr(section, path[0]), path[1:], value)})


def _replace_capacities(plan: _Plan, profile: Profile, machine: Machine, facts: ModelFacts) -> None:
    ranks, sched, cache = profile.ranks, profile.sched, profile.cache
    budget = (int(machine.device_gib * _GIB) - facts.weights_bytes) // 4
    context = min(sched.max_context_tokens, facts.max_position_embeddings)
    plan.set("sched.max_context_tokens", context, f"the embedded model has {facts.max_position_embeddings} positions")

    rows = min(sched.max_rows_per_rank, max(budget, 0) // 2 // (ranks * facts.row_bytes))
    blocks = max(budget, 0) // 2 // (ranks * facts.kv_bytes_per_token * BLOCK_TOKENS)
    if rows < 1 or blocks < 1:
        need = facts.weights_bytes + 8 * ranks * max(facts.row_bytes, facts.kv_bytes_per_token * BLOCK_TOKENS)
        raise CapacityError(
            f"{ranks} virtual ranks do not fit: need {need / _GIB:.2f} GiB, "
            f"this machine has {machine.device_gib:.2f} GiB",
            hint="lower parallel.ep and parallel.dp",
        )
    share = f"{ranks} ranks share {budget / _GIB:.1f} GiB for caches"
    plan.set("sched.max_rows_per_rank", rows, share)
    asked = cache.hbm_tokens_per_rank or rows * (-(-context // BLOCK_TOKENS) * BLOCK_TOKENS)
    tokens = min(asked, blocks * BLOCK_TOKENS)
    if tokens < asked:
        plan.set("cache.hbm_tokens_per_rank", tokens, share)
    if tokens < context:
        plan.set("sched.max_context_tokens", tokens, share)

    host = int(machine.ram_gib * _GIB) // 8 / ranks / _GIB
    reason = f"{ranks} ranks share {machine.ram_gib / 8:.1f} GiB of host tiers"
    wants = cache.host_gib_per_rank + cache.swa_pool_gib_per_rank
    if wants > host:
        plan.set("cache.host_gib_per_rank", round(cache.host_gib_per_rank * host / wants, 3), reason)
        plan.set("cache.swa_pool_gib_per_rank", round(cache.swa_pool_gib_per_rank * host / wants, 3), reason)
    if machine.platform == "cpu" and cache.engram_placement == "device":
        plan.set("cache.engram_placement", "host", "there is no device memory")


def _replace_kernels(plan: _Plan, profile: Profile, machine: Machine) -> None:
    reason = f"that backend does not run on {machine.platform}"
    if not backend_runs_on(profile.kernels.backend, machine.platform):
        plan.set("kernels.backend", "auto", reason)
    for op, backend in profile.kernels.overrides.items():
        if not backend_runs_on(backend, machine.platform):
            plan.drop_override(op, reason)
