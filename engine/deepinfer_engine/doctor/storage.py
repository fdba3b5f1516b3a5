"""Disk, memory, shared memory, and the weights: is there room, and is what is there what it says it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile

_GIB = 2**30
#: Published size of the V4.1-Flash release on the hub, all files.
_RELEASE_BYTES = 510_313_353_565
#: NCCL needs about 10 MiB per peer in one host, data loaders and rings of ranks more; Docker's default is 64 MiB.
_SHM_BYTES = _GIB
#: A mapped checkpoint of 88 files, sockets of 64 ranks and logs stay well below this.
_OPEN_FILES = 4096


def check_disk(system: System) -> Sequence[Finding]:
    """Room for the released checkpoint where a fetch would put it; too little only matters to who fetches it."""
    folder = Path.cwd()
    usage = system.disk(folder)
    if usage is None:
        return [warned("disk", f"{folder}: its file system cannot be read", "fetch with --dest FOLDER on a local disk")]
    found = f"{folder}: {usage.free / _GIB:,.0f} of {usage.total / _GIB:,.0f} GiB free"
    if usage.free < _RELEASE_BYTES:
        fix = f"the released weights need {_RELEASE_BYTES / _GIB:.0f} GiB: deepinfer fetch-weights --dest FOLDER"
        return [warned("disk", found, fix)]
    return [passed("disk", found)]


def check_memory(system: System, profile: Profile | None) -> Sequence[Finding]:
    """Host memory and limits: RAM, the control group's share, open files, locked pages."""
    text = system.read("/proc/meminfo") or ""
    sizes = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    if not total:
        return [warned("host memory", "/proc/meminfo cannot be read", "check host memory by hand")]
    limit = (system.read("/sys/fs/cgroup/memory.max") or "max").strip()
    found = f"{total / _GIB:.0f} GiB, {free / _GIB:.0f} GiB available"
    if limit.isdigit() and int(limit) < total:
        found += f", this container may use {int(limit) / _GIB:.0f} GiB"
        total = int(limit)
    need = 0.0
    if profile is not None:
        nodes = max(profile.hardware.gpus_per_node, 1)
        need = (profile.cache.host_gib_per_rank + profile.cache.swa_pool_gib_per_rank) * nodes
    findings = []
    if need * _GIB > total:
        fix = "lower cache.host_gib_per_rank and cache.swa_pool_gib_per_rank"
        findings.append(failed("host memory", f"{found}; the profile's host tiers need {need:g} GiB per host", fix))
    else:
        findings.append(passed("host memory", found))
    return [*findings, _open_files(system)]


def _open_files(system: System) -> Finding:
    match = re.search(r"^Max open files\s+(\d+|unlimited)", system.read("/proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return warned("open files", "the limit cannot be read", f"make sure it is {_OPEN_FILES} or more: ulimit -n")
    if match[1] != "unlimited" and int(match[1]) < _OPEN_FILES:
        return warned("open files", f"limit {match[1]}", f"ulimit -n {_OPEN_FILES}")
    return passed("open files", f"limit {match[1]}")


def check_shared_memory(system: System, profile: Profile | None) -> Sequence[Finding]:
    """Size of /dev/shm; several ranks in one host exchange through it."""
    place = system.path("/dev/shm")
    usage = system.disk(place) if place.is_dir() else None
    ranks = 1 if profile is None else min(profile.parallel.ep, max(profile.hardware.gpus_per_node, 1))
    if usage is None:
        return [warned("shared memory", "/dev/shm is absent", "mount it: docker run --shm-size 16g, or a tmpfs there")]
    found = f"/dev/shm: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _SHM_BYTES:
        fix = "docker run --shm-size 16g, or mount -o remount,size=16G /dev/shm"
        report = failed if ranks > 1 else warned
        return [report("shared memory", f"{found}, {ranks} ranks of a host need 1 GiB" if ranks > 1 else found, fix)]
    return [passed("shared memory", found)]


def check_weights(model: Path | None) -> Sequence[Finding]:
    """Config, index and every shard header of a model: the given one, or the embedded one."""
    from deepinfer_engine.config.resources import model_dir
    from deepinfer_engine.errors import ArtefactError, NotReadyError
    from deepinfer_engine.weights.checkpoint import Checkpoint

    name = "weights" if model is not None else "embedded model"
    try:
        folder = model if model is not None else model_dir("nano")
    except NotReadyError as exc:
        return [warned(name, exc.message, exc.hint or "give --model DIR")]
    try:
        checkpoint = Checkpoint.open(folder)
    except ArtefactError as exc:
        return [
            failed(name, exc.message.splitlines()[0], exc.hint or "fetch the files again", exc.message.splitlines()[1:])
        ]
    total = sum(h.file_bytes for h in checkpoint.headers.values())
    groups = ", ".join(sorted(checkpoint.groups_present))
    size = f"{total / _GIB:.1f} GiB" if total > _GIB else f"{total / 2**20:.1f} MiB"
    found = f"{len(checkpoint.headers)} files, {size}: {groups}"
    if total < _GIB:  # sampling the payloads of a large checkpoint takes minutes on a network mount
        found += f"; digest {checkpoint.digest[:12]}"
    if checkpoint.warnings:
        return [warned(name, found, "look at the listed files", checkpoint.warnings)]
    return [passed(name, found)]


def check_manifest(model: Path) -> Sequence[Finding]:
    """What a fetch remembers of the files in a folder: whether each is still as it was when its hash was checked."""
    from deepinfer_engine.weights.fetch.files import local_path
    from deepinfer_engine.weights.fetch.manifest import load_manifest

    manifest = load_manifest(model)
    if manifest is None:
        return [passed("weights manifest", "no fetch is remembered here; hashes are not checked")]
    changed, unchecked, good = [], [], 0
    for file in manifest.files:
        path, stamp = local_path(model, file.path), manifest.stamps.get(file.path)
        if not path.exists():
            continue  # not part of this selection; the header check knows what must be there
        if stamp is None:
            unchecked.append(file.path)
        elif stamp.holds(path) and stamp.matches(file.digest):
            good += 1
        else:
            changed.append(file.path)
    again = f"deepinfer fetch-weights {manifest.repo} --dest {model}"
    found = f"{manifest.repo} at {manifest.commit[:12]}: {good} files with checked hashes"
    if changed:
        text = f"{found}, {len(changed)} changed since they were checked"
        return [failed("weights manifest", text, f"{again} --verify --repair", changed)]
    if unchecked:
        text = f"{found}, {len(unchecked)} never checked"
        return [warned("weights manifest", text, f"{again} --verify", unchecked)]
    return [passed("weights manifest", found)]
