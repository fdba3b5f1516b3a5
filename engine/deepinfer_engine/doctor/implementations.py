"""Which implementation computes each operation here, why a preferred one does not, and where compiled ones are kept."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile
    from deepinfer_kernels.shapes import Shapes

#: The command that compiles what is missing; a reason without it is a damaged library's.
_BUILD = "deepinfer build-kernels --target cpu"
#: Compiled kernels of all shapes of one profile stay below this.
_CACHE_BYTES = 2 * 2**30


def check_implementations(profile: Profile | None, platform: str, model: Path | None = None) -> Sequence[Finding]:
    """Resolve every operation as a run of a profile would here, and list choices and passed-over candidates.

    ``model``: the weights to be served, None: the embedded model.
    """
    from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, resolve, why_not

    mode = profile.numerics.mode if profile is not None else "fast"
    forced = dict(profile.kernels.overrides) if profile is not None else {}
    backend = profile.kernels.backend if profile is not None else "auto"
    invariant = profile.numerics.batch_invariant if profile is not None else False
    cache, shapes = _named_cache(profile), _shapes(profile, model)
    command = _gpu_command(profile, platform, model)
    given = {"batch_invariant": invariant, "cache": cache, "shapes": shapes}
    try:
        chosen = resolve(mode, platform, forced, backend=backend, **given).chosen
    except KernelError as exc:
        fix = "use the platform the kernels are for, or drop the override of that operation"
        if command is not None and "not built" in str(exc):
            fix = command
        return [failed("operations", str(exc), fix)]
    by_backend: dict[str, list[str]] = defaultdict(list)
    for op, implementation in chosen.items():
        by_backend[implementation.backend].append(op)
    counts = ", ".join(f"{len(ops)} {backend}" for backend, ops in sorted(by_backend.items()))
    lines = [f"{backend}: {', '.join(ops)}" for backend, ops in sorted(by_backend.items())]
    passed_over: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # forms of an operation share a reason
    elsewhere: dict[str, set[str]] = defaultdict(set)
    for op, implementation in chosen.items():
        for candidate in IMPLEMENTATIONS[op]:
            if candidate is implementation:
                break
            if platform not in candidate.platforms:
                if candidate.backend not in _backends(op, platform):  # else it is further down the list
                    elsewhere[candidate.backend].add(op)
                continue
            reason = why_not(candidate, mode, platform, **given)
            if reason is not None:
                passed_over[candidate.backend, reason][op] = None
    lines += [f"not {backend} ({reason}): {', '.join(ops)}" for (backend, reason), ops in passed_over.items()]
    if elsewhere:
        lines.append(f"not for {platform}: {', '.join(f'{name} ({len(ops)})' for name, ops in elsewhere.items())}")
    before: dict[tuple[str, str], list[str]] = defaultdict(list)
    for op, implementation in chosen.items():
        rows = IMPLEMENTATIONS[op]
        for other in rows[rows.index(implementation) + 1 :]:
            rivals = {implementation.backend, other.backend} == {"triton", "tilelang"}
            if rivals and why_not(other, mode, platform, **given) is None:
                before[implementation.backend, other.backend].append(op)
    lines += [
        f"{first} before {second}, unless kernels.overrides says otherwise: {', '.join(dict.fromkeys(ops))}"
        for (first, second), ops in before.items()
    ]
    found = f"{len(chosen)} on {platform} in {mode} numerics: {counts}"
    if command is not None and any("not built" in reason for _, reason in passed_over):
        return [warned("operations", f"{found}; kernels that are not built are passed over", command, lines)]
    return [passed("operations", found, lines)]


def _shapes(profile: Profile | None, model: Path | None) -> Shapes | None:
    """The sizes that a profile serves, None without a profile."""
    if profile is None:
        return None
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import EMBEDDED, find_model

    return kernel_shapes(find_model(EMBEDDED if model is None else str(model)).config, profile)


def _gpu_command(profile: Profile | None, platform: str, model: Path | None) -> str | None:
    """What builds the kernels of a GPU, None for other platforms."""
    if platform not in ("sm90", "sm100"):
        return None
    if profile is None or profile.hardware.platform != platform:
        return f"deepinfer build-kernels --target {platform}"
    from deepinfer_engine.build_command import build_command

    return build_command(profile, model)


def _backends(op: str, platform: str) -> set[str]:
    """Those that have an implementation of an operation for a platform."""
    from deepinfer_kernels.registry import IMPLEMENTATIONS

    return {i.backend for i in IMPLEMENTATIONS[op] if platform in i.platforms}


def check_ascend(profile: Profile | None, platform: str) -> Sequence[Finding]:
    """What is known of the operations on Ascend 950, where the machine or the profile is one."""
    from deepinfer_kernels.ascend import families

    if "ascend950" not in (platform, profile.hardware.platform if profile is not None else None):
        return []
    have, without = families.OPERATIONS, families.without_form()
    lines = [f"{families.LABEL}: {', '.join(have)}", f"{families.NO_FORM}: {', '.join(without)}"]
    found = f"{len(have)} operations have AscendC sources, {len(without)} have none; no step runs on an NPU"
    fix = "deepinfer build-kernels --target ascend950 writes the sources; steps run on sm90, sm100 and cpu"
    return [warned("Ascend kernels", found, fix, lines)]


def check_step_loop(profile: Profile | None, platform: str) -> Sequence[Finding]:
    """Whether the next step is planned while one runs, as the profile asks and this machine can."""
    if profile is None:
        return []
    if not profile.sched.overlap:
        return [passed("step loop", "plain: a step is finished before the next is planned (sched.overlap: false)")]
    if platform == "cpu":
        plain = "plain in one process: nothing can run beside a step on a CPU; the tokens are the same"
        return [passed("step loop", plain, ["several processes (run --nproc) plan ahead, as sched.overlap asks"])]
    return [passed("step loop", "pipelined: the next step is planned while one runs, at most two in flight")]


def check_compiled(profile: Profile | None, platform: str) -> Sequence[Finding]:
    """Which libraries of compiled CPU operations are built for this machine; nothing where they do not run."""
    from deepinfer_kernels.cpu.families import FAMILIES

    if platform != "cpu":
        return []
    reasons = {name: family.binary.missing(_named_cache(profile)) for name, family in FAMILIES.items()}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    count = sum(len(FAMILIES[name].operations) for name in absent)
    if not absent:
        total = sum(len(family.operations) for family in FAMILIES.values())
        return [passed("compiled kernels", f"{total} operations in {len(FAMILIES)} libraries, used in fast numerics")]
    lines = [f"{name}: {reason}" for name, reason in absent.items() if _BUILD not in reason]
    found = f"{count} operations run their torch form, several times slower in decoding"
    return [warned("compiled kernels", found, _BUILD, lines)]


def _named_cache(profile: Profile | None) -> Path | None:
    """The kernel cache a profile names, None for the user's."""
    return profile.kernels.folder if profile is not None else None


def cache_folder(system: System, profile: Profile | None) -> Path:
    """The folder of compiled kernels: the profile's, or ``deepinfer/kernels`` in the user's cache folder."""
    named = _named_cache(profile)
    if named is not None:
        return named
    home = system.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "deepinfer" / "kernels"


def check_cache(system: System, profile: Profile | None) -> Sequence[Finding]:
    """Whether compiled kernels can be kept: the nearest existing folder is writable and has room."""
    folder = cache_folder(system, profile)
    fix = "set kernels.cache_dir to a writable folder on a local disk"
    place = next(p for p in (folder, *folder.parents) if p.exists())
    if not place.is_dir():
        return [failed("kernel cache", f"{place} is not a folder", fix)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [failed("kernel cache", f"{place} is not writable, {folder} cannot be kept", fix)]
    usage = system.disk(folder)
    if usage is not None and usage.free < _CACHE_BYTES:
        return [warned("kernel cache", f"{folder}: {usage.free / 2**30:.1f} GiB free", "free 2 GiB there, or " + fix)]
    entries = sum(1 for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
    return [passed("kernel cache", f"{folder}: {entries} files" if entries else f"{folder}: empty")]
