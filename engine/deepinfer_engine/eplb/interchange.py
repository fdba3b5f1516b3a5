"""Read token counts in the forms other engines write them, as ``ExpertStats``.

* ``npz``: ours, or any ``.npz`` with ``counts`` (and ``physical_to_logical`` [L, P] when they are per physical slot)
* ``npy``: one array, counts [M, L, E] or totals [L, E]
* ``sglang``: ``.pt`` or ``.json`` of the expert-distribution recorder: ``logical_count`` [M, L, E] or [L, E]; or
  ``records`` per forward pass and rank, physical, with ``last_physical_to_logical_map``; or a folder of such per-rank
  ``.pt`` files
* ``deepseek``: ``.pt`` with one tensor, totals [L, E]
* ``trtllm``: folder with ``meta_info.json`` and ``rank<i>.safetensors``, keys ``<iteration>_<layer>`` holding [E],
  summed over ranks

Counts per physical slot are folded to experts with the map in the file or the plan they were recorded under. ``.pt``
files are read with weights-only loading. What a form cannot tell (step order, idle rows) is returned as notes for the
report.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.eplb.plan import ExpertPlan, read_json
from deepinfer_engine.eplb.stats import (
    MAX_ARRAY_BYTES,
    PHYSICAL,
    ExpertStats,
    counts_from,
    read_npy,
    read_npz,
    stats_from,
)
from deepinfer_engine.errors import ArtefactError, UsageError

KINDS = ("auto", "npz", "npy", "sglang", "deepseek", "trtllm")

#: The recorder keeps a ring: after it wraps, rows are not in time order.
_RING = "steps come from a ring buffer: their order is unknown, so no window is held out"
_LAST_MAP = "counts were folded with the last slot map of the file; wrong if a re-balance happened while recording"
_TOTALS = "totals only, no steps: planned on means and counting noise, not on covariance"


def guess_kind(path: Path) -> str:
    """The form of ``path`` by its name; UsageError when that does not tell."""
    if path.is_dir():
        return "trtllm" if (path / "meta_info.json").exists() else "sglang"
    by_suffix = {".npz": "npz", ".npy": "npy", ".json": "sglang", ".pt": "sglang", ".pth": "sglang"}
    kind = by_suffix.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{path}: cannot tell what a {path.suffix or 'nameless'} file is",
            hint=f"give --input {'|'.join(KINDS[1:])}",
        )
    return kind


def read_statistics(
    path: Path, kind: str = "auto", recorded_under: ExpertPlan | None = None
) -> tuple[ExpertStats, tuple[str, ...]]:
    """Statistics and notes from a file or folder of any supported kind.

    ``recorded_under`` is the plan whose physical slots the counts are over; with it, the last axis must be its slots.
    Raises ArtefactError for damaged content and UsageError for a kind or path that cannot be right.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if kind == "auto":
        kind = guess_kind(path)
    if kind not in KINDS:
        raise UsageError(f"input kind {kind!r}, expected one of {', '.join(KINDS)}")
    readers = {"npz": _npz, "npy": _npy, "sglang": _sglang, "deepseek": _deepseek, "trtllm": _trtllm}
    stats, notes = readers[kind](path, recorded_under)
    return stats, (*notes, _TOTALS) if stats.steps == 1 else notes


# ---------------------------------------------------------------------- ours and plain arrays


def _npz(path: Path, under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    arrays = read_npz(path)
    slot_map = arrays.pop(PHYSICAL, None)
    if slot_map is not None and under is not None:
        raise UsageError(f"{path} carries its own {PHYSICAL}", hint="drop --recorded-under")
    if slot_map is not None or under is not None:
        counts = counts_from(arrays.get("counts", np.zeros(0)), f"{path}: counts", ("step", "layer", "slot"))
        arrays["counts"] = folded(counts, _slot_map(slot_map, under, path), f"{path}: counts", _experts(under))
    return stats_from(arrays, str(path)), ()


def _npy(path: Path, under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    return _plain(read_npy(path), under, path), ()


def _plain(raw: np.ndarray, under: ExpertPlan | None, path: Path, ordered: bool = True) -> ExpertStats:
    """Statistics from one bare array; per slot when a plan is given."""
    if under is None:
        counts = counts_from(raw, f"{path}: counts")
        return ExpertStats(counts, tuple(range(counts.shape[1])), ordered=ordered)
    counts = counts_from(raw, f"{path}: counts", ("step", "layer", "slot"))
    counts = folded(counts, _slot_map(None, under, path), f"{path}: counts", under.experts)
    return ExpertStats(
        counts,
        under.layer_ids,
        ordered=ordered,
        ep=under.ranks,
        config_digest=under.digests.config,
        weights_digest=under.digests.weights,
    )


def _experts(under: ExpertPlan | None) -> int | None:
    return None if under is None else under.experts


def _slot_map(raw: np.ndarray | None, under: ExpertPlan | None, path: Path) -> np.ndarray:
    if raw is None:
        assert under is not None
        return under.slot_expert_LRS.reshape(under.layers, -1)
    if raw.ndim != 2 or raw.dtype.kind not in "iu":
        raise ArtefactError(f"{path}: {PHYSICAL} is {raw.dtype} {list(raw.shape)}, expected integers [layers, slots]")
    return raw.astype(np.int64)


def folded(counts_MLP: np.ndarray, map_LP: np.ndarray, where: str, experts: int | None = None) -> np.ndarray:
    """Counts per slot [M, L, P] as counts per expert [M, L, E] under a slot map [L, P] (-1 = empty slot).

    Raises ArtefactError when shapes differ, an empty slot has tokens, or an expert has no slot.
    """
    if counts_MLP.shape[1:] != map_LP.shape:
        raise ArtefactError(
            f"{where}: {list(counts_MLP.shape[1:])} layers x slots, "
            f"the plan they were recorded under has {list(map_LP.shape)}"
        )
    experts = int(map_LP.max()) + 1 if experts is None else experts
    if experts < 1 or map_LP.min() < -1 or map_LP.max() >= experts:
        raise ArtefactError(
            f"{where}: slot map holds experts {map_LP.min()}..{map_LP.max()}, expected -1..{experts - 1}"
        )
    out = np.zeros((*counts_MLP.shape[:2], experts), np.int64)
    for k, row in enumerate(map_LP):
        stray = counts_MLP[:, k, row < 0].any(axis=0)
        if stray.any():
            slot = int(np.nonzero(row < 0)[0][stray.argmax()])
            raise ArtefactError(f"{where}: layer {k}, slot {slot} is empty in the plan but has tokens")
        if len(np.unique(row[row >= 0])) != experts:
            raise ArtefactError(f"{where}: layer {k}: some of the {experts} experts have no slot")
        for p in np.nonzero(row >= 0)[0]:
            out[:, k, row[p]] += counts_MLP[:, k, p]
    return out


# ---------------------------------------------------------------------- torch files


#: What torch's loader raises on damaged streams.
_TORCH_ERRORS = (
    RuntimeError, ValueError, EOFError, KeyError, IndexError, AttributeError, TypeError, OverflowError, ImportError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip


def load_pt(path: Path) -> Any:
    """A ``torch.save`` file through weights-only loading: tensors and plain containers, nothing that runs code."""
    import torch  # the only form that needs it; planning does not

    try:
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as z:
                size = max(size, sum(i.file_size for i in z.infolist()))
        if size > MAX_ARRAY_BYTES:
            raise ArtefactError(
                f"{path}: {size} bytes, at most {MAX_ARRAY_BYTES} are read", hint="record a shorter window"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickle protocols; what cannot be read is an error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror or e}") from e
    except pickle.UnpicklingError as e:
        raise ArtefactError(
            f"{path}: holds Python objects (a pickle), which are never loaded", hint="save tensors only"
        ) from e
    except _TORCH_ERRORS as e:
        raise ArtefactError(
            f"{path}: damaged or not a torch file: {(str(e) or type(e).__name__).splitlines()[0]}"
        ) from e


def array_of(value: Any, where: str) -> np.ndarray:
    """A tensor, array or nested list as numpy; the size a view claims is checked before it is copied."""
    if isinstance(value, list):
        try:
            return np.array(value)
        except ValueError as e:
            raise ArtefactError(f"{where}: rows of different lengths") from e
    if hasattr(value, "numel") and hasattr(value, "detach"):
        if value.numel() * 8 > MAX_ARRAY_BYTES:
            raise ArtefactError(f"{where}: {value.numel()} values, at most {MAX_ARRAY_BYTES // 8} are read")
        value = value.detach()
        return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    raise ArtefactError(f"{where}: a {type(value).__name__}, expected a tensor or nested lists")


def _loaded(path: Path) -> Any:
    return read_json(path) if path.suffix.lower() == ".json" else load_pt(path)


def _deepseek(path: Path, under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    value = _loaded(path)
    if isinstance(value, dict):
        raise ArtefactError(f"{path}: a dictionary, expected one tensor [layers, experts]", hint="give --input sglang")
    return _plain(array_of(value, f"{path}: counts"), under, path), ()


def _sglang(path: Path, under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    if path.is_dir():
        return _rank_files(sorted(path.glob("*.pt")), under)
    value = _loaded(path)
    if not isinstance(value, dict):
        return _plain(array_of(value, f"{path}: counts"), under, path), ()
    if "logical_count" in value:
        if under is not None:
            raise UsageError(f"{path} counts logical experts", hint="drop --recorded-under")
        raw = array_of(value["logical_count"], f"{path}: logical_count")
        counts = counts_from(raw, f"{path}: logical_count")
        stats = ExpertStats(counts, tuple(range(counts.shape[1])), ordered=counts.shape[0] == 1)
        return stats, (_RING,) if counts.shape[0] > 1 else ()
    if "records" in value:
        return _sglang_passes(value, under, path)
    raise ArtefactError(f"{path}: keys {sorted(map(str, value))[:6]}, expected logical_count or records")


def _sglang_passes(value: dict[str, Any], under: ExpertPlan | None, path: Path) -> tuple[ExpertStats, tuple[str, ...]]:
    """Per-pass records: physical counts, summed over ranks by forward pass, in the order of the passes."""
    records = value["records"]
    if not isinstance(records, list) or not records:
        raise ArtefactError(f"{path}: records is empty or not a list")
    passes: dict[int, np.ndarray] = {}
    for k, record in enumerate(records):
        if not isinstance(record, dict) or not {"forward_pass_id", "global_physical_count"} <= set(record):
            raise ArtefactError(f"{path}: record {k} has no forward_pass_id and global_physical_count")
        if not isinstance(record["forward_pass_id"], int):
            raise ArtefactError(f"{path}: record {k}: forward_pass_id is not an integer")
        where = f"{path}: record {k}"
        got = counts_from(array_of(record["global_physical_count"], where), where, ("step", "layer", "slot"))[0]
        before = passes.get(record["forward_pass_id"])
        if before is not None and before.shape != got.shape:
            raise ArtefactError(f"{where}: counts are {list(got.shape)}, another rank's are {list(before.shape)}")
        passes[record["forward_pass_id"]] = got if before is None else before + got
    shapes = {c.shape for c in passes.values()}
    if len(shapes) > 1:
        raise ArtefactError(f"{path}: passes of different shapes {sorted(map(list, shapes))}")
    counts = np.stack([passes[k] for k in sorted(passes)])
    raw = value.get("last_physical_to_logical_map")
    if raw is None and under is None:
        raise ArtefactError(f"{path}: no last_physical_to_logical_map", hint="give --recorded-under PLAN")
    slot_map = None if under is not None else array_of(raw, f"{path}: last_physical_to_logical_map")
    counts = folded(counts, _slot_map(slot_map, under, path), f"{path}: records", _experts(under))
    stats = ExpertStats(counts, tuple(range(counts.shape[1])) if under is None else under.layer_ids)
    return stats, () if under is not None else (_LAST_MAP,)


def _rank_files(paths: Sequence[Path], under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    """The per-pass files of all ranks as one: records are concatenated, slot maps must agree."""
    if not paths:
        raise UsageError("the folder has no .pt files", hint="give the folder with one recorder file per rank")
    merged: dict[str, Any] = {"records": []}
    for path in paths:
        value = _loaded(path)
        if not isinstance(value, dict) or "records" not in value:
            raise ArtefactError(f"{path}: no records; only per-pass files can be merged")
        merged["records"] += value["records"]
        one = value.get("last_physical_to_logical_map")
        if one is not None:
            now = array_of(one, f"{path}: map")
            if "last_physical_to_logical_map" in merged and not np.array_equal(
                now, array_of(merged["last_physical_to_logical_map"], "map")
            ):
                raise ArtefactError(f"{path}: its slot map differs from the other ranks'")
            merged["last_physical_to_logical_map"] = one
    return _sglang_passes(merged, under, paths[0])


# ---------------------------------------------------------------------- TensorRT-LLM


def _trtllm(path: Path, under: ExpertPlan | None) -> tuple[ExpertStats, tuple[str, ...]]:
    """A statistics folder: logical counts per iteration and model layer, one file per rank."""
    if under is not None:
        raise UsageError(f"{path} counts logical experts", hint="drop --recorded-under")
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", hint="give the folder with meta_info.json and rank*.safetensors")
    meta = read_json(path / "meta_info.json")
    experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if not isinstance(experts, int) or isinstance(experts, bool) or experts < 1:
        raise ArtefactError(f"{path / 'meta_info.json'}: num_experts is {experts!r}, expected a positive integer")
    top_k = meta.get("num_experts_per_token")
    files = sorted(p for p in path.glob("rank*.safetensors") if re.fullmatch(r"rank\d+", p.stem))
    if not files:
        raise ArtefactError(f"{path}: no rank<i>.safetensors")
    cells: dict[tuple[int, int], np.ndarray] = {}
    for file in files:
        for key, raw in _safetensors(file).items():
            name = re.fullmatch(r"(\d+)_(\d+)", key)
            if name is None:
                raise ArtefactError(f"{file}: key {key!r}, expected <iteration>_<layer>")
            if raw.shape != (experts,):
                raise ArtefactError(f"{file}: {key} has shape {list(raw.shape)}, expected [{experts}]")
            got = counts_from(raw[None, None], f"{file}: {key}")[0, 0]
            at = int(name[1]), int(name[2])
            cells[at] = cells[at] + got if at in cells else got
    steps, layers = sorted({m for m, _ in cells}), sorted({k for _, k in cells})
    counts = np.zeros((len(steps), len(layers), experts), np.int64)
    for i, m in enumerate(steps):
        for j, k in enumerate(layers):
            if (m, k) not in cells:
                raise ArtefactError(f"{path}: iteration {m} has no layer {k}")
            counts[i, j] = cells[m, k]
    return ExpertStats(counts, tuple(layers), top_k=top_k if isinstance(top_k, int) else None), ()


_SAFE_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "F64": "<f8", "F32": "<f4"}


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file: header checked against the file size first."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_ARRAY_BYTES else b""
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror}") from e
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or 8 + length > len(data):
        raise ArtefactError(f"{path}: damaged or larger than {MAX_ARRAY_BYTES} bytes")
    try:
        head = json.loads(data[8 : 8 + length])
        body = memoryview(data)[8 + length :]
        out = {}
        for name, entry in head.items():
            if name == "__metadata__":
                continue
            lo, hi = entry["data_offsets"]
            dtype = np.dtype(_SAFE_TYPES[entry["dtype"]])
            if not 0 <= lo <= hi <= len(body) or hi - lo != int(np.prod(entry["shape"], dtype=object)) * dtype.itemsize:
                raise ValueError(f"{name} does not fit")
            out[name] = np.frombuffer(body[lo:hi], dtype).reshape(entry["shape"])
        return out
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ArtefactError(f"{path}: damaged header: {e}") from e
