"""Write a checkpoint in the official on-disk format from float tensors.

``write_checkpoint`` quantises per storage kind of the plan: FP8 tiles, MXFP4 experts (packed nibbles as I8), per-row
Engram tables; raw E8M0 bytes for the scales. One shard per official grouping key, 5-digit names, an index with
``total_size``. Everything is written into a temporary sibling directory, which is renamed when it is complete.

The safetensors library cannot store uint8 data under dtype F8_E8M0, so headers are serialised here.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer_engine.config.model_v4 import AnyConfig, parse_any_config
from deepinfer_engine.errors import ArtefactError, CheckpointError
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.tensor_spec import ITEM_BYTES, Group, TensorSpec
from deepinfer_engine.weights.validate import INDEX_FILE
from deepinfer_kernels.reference.quantise import quantise_fp8_tiles, quantise_mxfp4, quantise_q8

Source = Mapping[str, Tensor] | Callable[[TensorSpec], Tensor]

_PLAIN_DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


class Payload(NamedTuple):
    """One tensor ready to be written: raw little-endian bytes of ``dtype``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def write_checkpoint(
    directory: str | Path,
    raw_config: dict[str, Any],
    source: Source,
    *,
    extra_files: Mapping[str, bytes | Path] | None = None,
    groups: Iterable[Group] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write ``raw_config`` and the weights from ``source`` as an official-format checkpoint.

    ``source`` gives, per stored tensor that is not a scale, values of ``spec.value_shape``: floats for weights,
    integers for I64. As a mapping it must hold exactly those names; as a function it is called once per tensor, so
    one shard is in memory at a time. ``groups`` (default: every group of the config) selects what is written and
    must contain the backbone. ``extra_files`` are copied beside the weights. ``max_shard_bytes`` splits a shard
    whose payload is larger.

    ``directory`` must not exist or be empty. Raises ``CheckpointError`` with every missing, unexpected, mis-shaped
    or non-finite source (nothing is left behind).
    """
    directory = Path(directory)
    config = parse_any_config(raw_config)
    plan = _selected(tensor_plan(config), groups)
    problems = _check_names(plan, source) if isinstance(source, Mapping) else []
    extra = dict(extra_files or {})
    problems += _check_extra(extra)
    if problems:
        raise CheckpointError(str(directory), problems)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ArtefactError(f"{directory}: exists and is not empty", hint="choose a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    temporary.mkdir()
    try:
        weight_map, total = _write_shards(temporary, plan, config, source, max_shard_bytes)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        # one name in one long line each would be a third of a small checkpoint's headers: no spaces
        _write_bytes(temporary / INDEX_FILE, json.dumps(index, separators=(",", ":")).encode() + b"\n")
        _write_bytes(temporary / "config.json", _json_bytes(raw_config))
        for name, content in extra.items():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_bytes(target, content if isinstance(content, bytes) else content.read_bytes())
        os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_shard(path: Path, tensors: Iterable[Payload]) -> int:
    """Write one safetensors file and return its payload bytes.

    Wider elements come first so that every tensor is aligned; the order is kept otherwise.
    """
    ordered = sorted(tensors, key=lambda t: -ITEM_BYTES[t.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in ordered:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in ordered:
            file.write(t.data)
        file.flush()
        os.fsync(file.fileno())
    return at


def quantise(spec: TensorSpec, value: Tensor, *, block: int = 32) -> tuple[Tensor, Tensor | None]:
    """(stored tensor, E8M0 scale bytes or None) of float ``value`` for the storage kind of ``spec``."""
    value = value.detach().cpu()
    if spec.kind == "fp8":
        return quantise_fp8_tiles(value.float(), block)
    if spec.kind == "fp4":
        packed, scale = quantise_mxfp4(value.float())
        return packed.view(torch.int8), scale
    if spec.kind == "table":
        return quantise_q8(value.float())
    return value.to(_PLAIN_DTYPE[spec.dtype]), None


# ------------------------------------------------------------------------- parts


def _selected(plan: dict[str, TensorSpec], groups: Iterable[Group] | None) -> dict[str, TensorSpec]:
    if groups is None:
        return plan
    wanted = set(groups)
    have = {spec.group for spec in plan.values()}
    if "backbone" not in wanted or wanted - have:
        raise ArtefactError(
            f"groups {sorted(wanted)} cannot be written: this config has {sorted(have)}, "
            "and the backbone is not optional"
        )
    return {name: spec for name, spec in plan.items() if spec.group in wanted}


def _check_names(plan: dict[str, TensorSpec], source: Mapping[str, Tensor]) -> list[str]:
    problems = []
    wanted = {name: spec for name, spec in plan.items() if not spec.is_scale}
    for name, spec in wanted.items():
        if name not in source:
            problems.append(f"missing source {name} {list(spec.value_shape)}")
        elif tuple(source[name].shape) != spec.value_shape:
            problems.append(_shape_problem(spec, source[name]))
    problems += [f"unexpected source {name}" for name in source if name not in wanted]
    return problems


def _shape_problem(spec: TensorSpec, value: Tensor) -> str:
    return f"source {spec.name}: expected {list(spec.value_shape)}, found {list(value.shape)}"


def _check_extra(extra: Mapping[str, bytes | Path]) -> list[str]:
    problems = []
    for name in extra:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name:
            problems.append(f"extra file {name!r} does not stay inside the checkpoint directory")
        elif name in ("config.json", INDEX_FILE) or name.endswith(".safetensors"):
            problems.append(f"extra file {name!r} collides with a file of the checkpoint itself")
    return problems


def _write_shards(
    directory: Path, plan: dict[str, TensorSpec], config: AnyConfig, source: Source, limit: int | None
) -> tuple[dict[str, str], int]:
    parts = _shard_parts(plan, limit)
    weight_map: dict[str, str] = {}
    total = 0
    problems: list[str] = []
    for number, specs in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        payloads: list[Payload] = []
        for spec in specs:
            payloads += _payloads(spec, plan, source, config.weight_block, problems)
        if problems:
            continue  # nothing will be kept, but every later source is still looked at
        total += write_shard(directory / file, payloads)
        weight_map |= {p.name: file for p in payloads}
    if problems:
        raise CheckpointError("write_checkpoint", problems)
    return weight_map, total


def _shard_parts(plan: dict[str, TensorSpec], limit: int | None) -> list[list[TensorSpec]]:
    """Value tensors per file: the plan's grouping keys, split where ``limit`` bytes would be passed."""
    parts: list[list[TensorSpec]] = []
    key, size = "", 0
    for spec in plan.values():
        if spec.is_scale:
            continue
        nbytes = spec.nbytes + (plan[_scale_name(spec)].nbytes if spec.kind != "plain" else 0)
        if limit is not None and nbytes > limit:
            raise ArtefactError(f"tensor {spec.name} alone has {nbytes} bytes, max_shard_bytes is {limit}")
        if spec.shard != key or (limit is not None and size + nbytes > limit):
            parts.append([])
            key, size = spec.shard, 0
        parts[-1].append(spec)
        size += nbytes
    return parts


def _scale_name(spec: TensorSpec) -> str:
    return f"{spec.name.removesuffix('.weight')}.scale"


def _payloads(
    spec: TensorSpec, plan: dict[str, TensorSpec], source: Source, block: int, problems: list[str]
) -> list[Payload]:
    value = source[spec.name] if isinstance(source, Mapping) else source(spec)
    if tuple(value.shape) != spec.value_shape:
        problems.append(_shape_problem(spec, value))
        return []
    if (spec.dtype == "I64") == value.is_floating_point():
        problems.append(f"source {spec.name}: {value.dtype} cannot become {spec.dtype}")
        return []
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        problems.append(f"source {spec.name}: holds NaN or infinity")
        return []
    stored, scale = quantise(spec, value, block=block)
    out = [Payload(spec.name, spec.dtype, spec.shape, tensor_bytes(stored))]
    if scale is not None:
        name = _scale_name(spec)
        out.append(Payload(name, plan[name].dtype, plan[name].shape, tensor_bytes(scale)))
    assert all(len(p.data) == plan[p.name].nbytes for p in out), spec.name
    return out


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a CPU tensor, not copied when it is contiguous."""
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
