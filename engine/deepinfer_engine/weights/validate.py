"""Three-way check of a checkpoint: index, shard headers and the tensors that the config implies. No torch here.

Reads headers only, so it runs on every load. Every defect is one sentence that names tensor and file.

A group that was not asked for may be wholly absent (its shards need not exist); partly absent is an error, and so
is any tensor that the config does not imply.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.config.strict_json import printable, read_json_object
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.weights.header import ShardHeader, StoredTensor, scan_header
from deepinfer_engine.weights.tensor_spec import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: Duplicates larger than this are reported without comparing their bytes.
_COMPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Inventory:
    """What is on disk: headers by file name, and per tensor the file that the index (or the only file) names.

    ``indexed`` is None for a single-file checkpoint without an index.
    """

    headers: dict[str, ShardHeader]
    indexed: dict[str, str] | None
    missing_files: frozenset[str]
    warnings: tuple[str, ...]


def scan_directory(directory: Path, problems: list[str]) -> Inventory:
    """Read the index and every header it names; defects are appended to ``problems``.

    Raises ``ArtefactError`` when there is nothing to check at all.
    """
    if not directory.is_dir():
        raise ArtefactError(f"{directory}: not a directory", hint="give a directory that holds config.json")
    present = sorted(entry.name for entry in os.scandir(directory))
    warnings: list[str] = []
    if INDEX_FILE in present:
        index = read_json_object(directory / INDEX_FILE)
        indexed = _weight_map(index, problems)
        files = sorted(set(indexed.values()))
    elif SINGLE_FILE in present:
        index, indexed, files = None, None, [SINGLE_FILE]
    else:
        hint = "the weights are in a directory with model.safetensors.index.json or model.safetensors"
        raise ArtefactError(f"{directory}: no {INDEX_FILE} and no {SINGLE_FILE}", hint=hint)
    missing = _missing_files(files, present)
    headers: dict[str, ShardHeader] = {}
    for name in files:
        if name not in missing:
            header = scan_header(directory / name, problems)
            if header is not None:
                headers[name] = header
    for name in present:
        if name.endswith(".safetensors") and name not in files:
            warnings.append(f"{printable(name)} is not named by the index and was not read")
    if index is not None and not missing:
        warnings += _total_size(index, headers)
    return Inventory(headers, indexed, frozenset(missing), tuple(warnings))


def check_plan(
    plan: dict[str, TensorSpec],
    inventory: Inventory,
    wanted: Iterable[str],
    problems: list[str],
    *,
    block: int,
) -> dict[str, str]:
    """Compare plan, index and headers; returns the file of every usable tensor.

    ``wanted`` are the groups that must be complete. ``block`` is the FP8 tile side, for messages.
    """
    found = _locate(inventory, problems)
    wanted = set(wanted) | {"backbone"}
    per_group: dict[str, list[int]] = {}
    for name, spec in plan.items():
        counts = per_group.setdefault(spec.group, [0, 0])
        counts[0] += name in found
        counts[1] += 1
    absent = {g for g, (have, _) in per_group.items() if have == 0 and g not in wanted}
    for group, (have, total) in per_group.items():
        if group not in wanted and 0 < have < total:
            problems.append(f"{group} weights are partly absent: {have} of {total} tensors present")
        elif group in wanted and have == 0 and group != "backbone":
            problems.append(f"{group} weights are absent: 0 of {total} tensors present")
            absent.add(group)
    _report_missing_files(plan, inventory, absent, problems)
    usable: dict[str, str] = {}
    for name, spec in plan.items():
        file = found.get(name)
        if file is None:
            if spec.group not in absent and _readable(name, inventory):
                problems.append(_missing(name, spec, found))
            continue
        stored = inventory.headers[file].tensors[name]
        reason = _mismatch(spec, stored, block)
        if reason:
            problems.append(f"{reason} in {printable(file)}")
        else:
            usable[name] = file
    _report_unexpected(plan, found, inventory, problems)
    return usable


# ---------------------------------------------------------------------- index


def _weight_map(index: dict[str, Any], problems: list[str]) -> dict[str, str]:
    raw = index.get("weight_map")
    if not isinstance(raw, dict) or not raw:
        raise ArtefactError(f"{INDEX_FILE}: weight_map is missing, empty or not an object")
    good: dict[str, str] = {}
    good_files: set[str] = set()
    bad_files: set[str] = set()
    for name, file in raw.items():
        if isinstance(file, str) and (file in good_files or _plain_name(file)):
            good[name] = file
            good_files.add(file)
        elif repr(file) not in bad_files:
            bad_files.add(repr(file))
            problems.append(
                f"{INDEX_FILE}: tensor {printable(name)} maps to {printable(repr(file))}, expected the plain name of a "
                ".safetensors file in the same directory"
            )
    by_lower: dict[str, str] = {}
    for file in sorted(set(good.values())):
        other = by_lower.setdefault(file.lower(), file)
        if other != file:
            problems.append(f"{INDEX_FILE}: files {printable(other)} and {printable(file)} differ only in case")
    return good


def _plain_name(file: str) -> bool:
    return (
        file.endswith(".safetensors")
        and 0 < len(file.encode("utf-8", "replace")) <= 255
        and file.isprintable()
        and not any(c in file for c in '/\\:*?"<>|')
        and not file.startswith(".")
    )


def _missing_files(files: list[str], present: list[str]) -> dict[str, str]:
    """Missing file -> the file on disk that differs only in case, or ''."""
    there = set(present)
    lower = {name.lower(): name for name in present}
    return {f: lower.get(f.lower(), "") for f in files if f not in there}


def _total_size(index: dict[str, Any], headers: dict[str, ShardHeader]) -> list[str]:
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    payload = sum(h.file_bytes - h.payload_begin for h in headers.values())
    if type(claimed) is int and claimed == payload:
        return []
    return [f"{INDEX_FILE}: total_size is {printable(repr(claimed))}, the shards hold {payload} payload bytes"]


# -------------------------------------------------------------------- tensors


def _locate(inventory: Inventory, problems: list[str]) -> dict[str, str]:
    """File of every tensor that index and headers agree on; disagreements and duplicates are reported."""
    found: dict[str, str] = {}
    twice: dict[str, list[str]] = {}
    for file, header in inventory.headers.items():
        for name in header.tensors:
            if name in found:
                twice.setdefault(name, [found[name]]).append(file)
            else:
                found[name] = file
    problems += [_duplicate(name, files, inventory) for name, files in twice.items()]
    if inventory.indexed is None:
        return found
    for name, file in found.items():
        says = inventory.indexed.get(name)
        if says == file:
            continue
        if says is None:
            problems.append(f"tensor {printable(name)}: found in {printable(file)}, the index does not name it")
        elif says in twice.get(name, ()):
            found[name] = says
        else:
            problems.append(f"tensor {printable(name)}: index says {printable(says)}, found in {printable(file)}")
    for name, says in inventory.indexed.items():
        if name not in found and says in inventory.headers:
            problems.append(f"tensor {printable(name)}: index says {printable(says)}, which does not hold it")
    return found


def _duplicate(name: str, files: list[str], inventory: Inventory) -> str:
    first, second = (inventory.headers[f] for f in files[:2])
    a, b = first.tensors[name], second.tensors[name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        how = "with different dtype or shape"
    elif a.end - a.begin > _COMPARE_BYTES:
        how = "too large to compare"
    else:
        same = _bytes_of(first.path, a) == _bytes_of(second.path, b)
        how = "with equal bytes" if same else "with different bytes"
    return f"tensor {printable(name)}: stored {len(files)} times, in {' and '.join(map(printable, files))}, {how}"


def _bytes_of(path: Path, stored: StoredTensor) -> bytes:
    with path.open("rb") as file:
        file.seek(stored.begin)
        return file.read(stored.end - stored.begin)


def _report_missing_files(
    plan: dict[str, TensorSpec], inventory: Inventory, absent: set[str], problems: list[str]
) -> None:
    """A missing shard is an error unless everything the index puts there belongs to wholly absent groups."""
    names: dict[str, list[str]] = {f: [] for f in inventory.missing_files}
    for name, file in (inventory.indexed or {}).items():
        if file in names:
            names[file].append(name)
    for file in sorted(names):
        needed = [n for n in names[file] if n not in plan or plan[n].group not in absent]
        if needed:
            problems.append(f"shard {printable(file)} missing (the index puts {len(names[file])} tensors there)")


def _readable(name: str, inventory: Inventory) -> bool:
    """Whether the shard where ``name`` should be could be read; otherwise the shard itself is the problem."""
    if inventory.indexed is None:
        return bool(inventory.headers)
    file = inventory.indexed.get(name)
    return file is None or file in inventory.headers


def _missing(name: str, spec: TensorSpec, found: dict[str, str]) -> str:
    text = f"missing tensor {name} ({spec.dtype}{list(spec.shape)} expected)"
    partner = _partner(spec)
    if partner in found:
        text += f"; scale/weight pair incomplete, {partner} is there"
    return text


def _partner(spec: TensorSpec) -> str:
    if spec.is_scale:
        return f"{spec.name.removesuffix('.scale')}.weight"
    return f"{spec.name.removesuffix('.weight')}.scale" if spec.kind != "plain" else ""


def _mismatch(spec: TensorSpec, stored: StoredTensor, block: int) -> str | None:
    if stored.dtype == spec.dtype and stored.shape == spec.shape:
        return None
    if spec.kind == "fp8_scale" and stored.dtype == spec.dtype:
        return (
            f"tensor {spec.name}: grid {list(stored.shape)}, expected {list(spec.shape)} "
            f"(one scale per {block} x {block} block)"
        )
    return f"tensor {spec.name}: expected {spec.dtype}{list(spec.shape)}, found {stored.dtype}{list(stored.shape)}"


def _report_unexpected(
    plan: dict[str, TensorSpec], found: dict[str, str], inventory: Inventory, problems: list[str]
) -> None:
    lower = {name.lower(): name for name in plan} if any(n not in plan for n in found) else {}
    for name, file in found.items():
        if name not in plan:
            twin = lower.get(name.lower())
            also = f", it differs only in case from {twin}" if twin else ""
            problems.append(f"unexpected tensor {printable(name)} in {printable(file)}{also}")
    for name, file in (inventory.indexed or {}).items():
        if name not in plan and name not in found and file in inventory.missing_files:
            problems.append(f"unexpected tensor {printable(name)} in the index, mapped to {printable(file)}")
