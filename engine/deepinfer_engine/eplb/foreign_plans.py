"""Plans in the forms other engines read and write.

All share one convention: rank r owns slots r·S … r·S + S − 1.

* ``sglang``: JSON ``{"physical_to_logical_map": [[…], …]}``, exactly one key, a row for every hidden layer, dense ones
  too
* ``trtllm``: YAML ``num_slots``, ``initial_global_assignments: {layer: […]}``, ``layer_updates_per_iter``; model layer
  numbers
* ``ascend``: JSON ``moe_layer_count``, ``layer_list`` of ``device_list`` of ``device_expert``; numbered over MoE layers
* ``npz``: ``physical_to_logical`` [L, P], ``logical_to_physical`` [L, E, X], ``copies`` [L, E]; -1 pads and marks the
  slots of dead ranks
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from deepinfer_engine.eplb.layout import identity
from deepinfer_engine.eplb.plan import (
    MAX_FILE_BYTES,
    Digests,
    ExpertPlan,
    plan_from_dict,
    read_json,
    slots_array,
    write_text,
)
from deepinfer_engine.eplb.stats import read_npz, write_npz
from deepinfer_engine.errors import ArtefactError, UsageError

EXPORTS = ("sglang", "trtllm", "ascend", "npz")


def export_plan(plan: ExpertPlan, kind: str, path: Path) -> tuple[str, ...]:
    """Write ``plan`` in a peer's form; returns what the reader of that file has to know.

    Raises UsageError for an unknown kind, and for plans with dead ranks in forms that cannot say so.
    """
    if kind not in EXPORTS:
        raise UsageError(f"export kind {kind!r}, expected one of {', '.join(EXPORTS)}")
    if plan.dead_ranks and kind != "npz":
        raise UsageError(
            f"{kind} files cannot say that ranks {list(plan.dead_ranks)} are dead",
            hint="export npz, or plan for the ranks that are left",
        )
    flat = plan.slot_expert_LRS.reshape(plan.layers, -1)
    if kind == "npz":
        write_npz(path, npz_arrays(plan))
        return ()
    if kind == "sglang":
        rows, filled = _every_layer(plan, flat)
        write_text(path, json.dumps({"physical_to_logical_map": rows}, separators=(",", ":")) + "\n")
        spare = flat.shape[1] - plan.experts
        return tuple(filter(None, (f"start with --ep-num-redundant-experts {spare} --ep-size {plan.ranks}", filled)))
    if kind == "trtllm":
        lines = [f"num_slots: {flat.shape[1]}", "initial_global_assignments:"]
        lines += [f"  {k}: {json.dumps(row.tolist())}" for k, row in zip(plan.layer_ids, flat, strict=True)]
        write_text(path, "\n".join([*lines, "layer_updates_per_iter: 0", ""]))
        return ("put the file under moe_config.load_balancer",)
    layers = [
        {
            "layer_id": k,
            "device_count": plan.ranks,
            "device_list": [{"device_id": r, "device_expert": row.tolist()} for r, row in enumerate(layer)],
        }
        for k, layer in enumerate(plan.slot_expert_LRS)
    ]
    write_text(path, json.dumps({"moe_layer_count": plan.layers, "layer_list": layers}) + "\n")
    return ()


def _every_layer(plan: ExpertPlan, flat_LP: np.ndarray) -> tuple[list[list[int]], str]:
    """Rows for hidden layers 0 … last; layers without experts of ours get the identity-like row."""
    by_layer = dict(zip(plan.layer_ids, flat_LP.tolist(), strict=True))
    filler = identity(plan.experts, plan.ranks, plan.slots_per_rank).reshape(-1).tolist()
    rows = [by_layer.get(k, filler) for k in range(max(plan.layer_ids) + 1)]
    missing = [k for k in range(len(rows)) if k not in by_layer]
    return rows, f"layers {missing} are not in the statistics: identity rows" if missing else ""


def npz_arrays(plan: ExpertPlan) -> dict[str, Any]:
    """Both directions of the map as arrays."""
    flat = plan.slot_expert_LRS.reshape(plan.layers, -1)
    copies = plan.replicas_LE
    back = np.full((plan.layers, plan.experts, int(copies.max())), -1, np.int32)
    for k, row in enumerate(flat):
        used = np.zeros(plan.experts, np.int64)
        for p, e in enumerate(row.tolist()):
            if e >= 0:
                back[k, e, used[e]] = p
                used[e] += 1
    return {
        "physical_to_logical": flat.astype(np.int32),
        "logical_to_physical": back,
        "copies": copies.astype(np.int32),
        "ranks": np.int64(plan.ranks),
        "slots_per_rank": np.int64(plan.slots_per_rank),
        "layer_ids": np.array(plan.layer_ids, np.int64),
        "meta": np.str_(json.dumps({k: v for k, v in plan.to_dict().items() if k != "slot_expert"}, allow_nan=False)),
    }


def read_any_plan(path: Path, ranks: int | None = None, experts: int | None = None) -> ExpertPlan:
    """A plan in our form or a peer's, told apart by content.

    ``ranks`` is needed for forms that only list slots (sglang, trtllm); ``experts`` defaults to the highest expert + 1.
    Raises ArtefactError for anything that is not a plan, UsageError when ``ranks`` is missing.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.suffix == ".npz":
        return _from_npz(path)
    if path.suffix in (".yaml", ".yml"):
        return _from_trtllm(path, ranks, experts)
    value = read_json(path)
    if isinstance(value, dict) and "physical_to_logical_map" in value:
        if len(value) != 1:
            raise ArtefactError(f"{path}: keys {sorted(value)}, expected only physical_to_logical_map")
        flat = slots_array(value["physical_to_logical_map"], f"{path}: physical_to_logical_map", 2)
        return _from_flat(flat, tuple(range(len(flat))), ranks, experts, path, "sglang")
    if isinstance(value, dict) and "layer_list" in value:
        return _from_ascend(value, experts, path)
    return plan_from_dict(value, str(path))


def _from_flat(
    flat_LP: np.ndarray, ids: tuple[int, ...], ranks: int | None, experts: int | None, path: Path, name: str
) -> ExpertPlan:
    if ranks is None:
        raise UsageError(f"{path} lists slots only", hint="give --ranks")
    if flat_LP.shape[1] % ranks:
        near = flat_LP.shape[1] // ranks * ranks or ranks
        raise ArtefactError(
            f"{path}: {flat_LP.shape[1]} slots do not divide over {ranks} ranks", hint=f"nearest: {near} slots"
        )
    slots = flat_LP.reshape(len(flat_LP), ranks, -1)
    return _plan(slots, ids, int(flat_LP.max()) + 1 if experts is None else experts, name, path)


def _plan(
    slots_LRS: np.ndarray, ids: tuple[int, ...], experts: int, name: str, path: Path, digests: Digests | None = None
) -> ExpertPlan:
    try:
        return ExpertPlan(0, experts, slots_LRS, ids, name, (None,) * len(ids), digests or Digests())
    except ArtefactError as e:
        raise ArtefactError(f"{path}: {e.message}") from e


def _from_npz(path: Path) -> ExpertPlan:
    arrays = read_npz(path, MAX_FILE_BYTES)
    for name in ("physical_to_logical", "ranks", "layer_ids", "copies"):
        if name not in arrays:
            raise ArtefactError(f"{path}: not a plan: array {name!r} is missing", hint="--export npz:PATH writes one")
    try:
        flat, ranks = arrays["physical_to_logical"], int(arrays["ranks"])
        ids = tuple(int(k) for k in arrays["layer_ids"])
        experts = int(arrays["copies"].shape[1])
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
        digests = Digests(*(str(meta.get(f"{k}_digest", "")) for k in ("config", "weights", "stats")))
        slots = flat.astype(np.int64).reshape(flat.shape[0], ranks, -1)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError) as e:
        raise ArtefactError(f"{path}: not a plan: {e}") from e
    return _plan(slots, ids, experts, "npz", path, digests)


def _from_trtllm(path: Path, ranks: int | None, experts: int | None) -> ExpertPlan:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ArtefactError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise ArtefactError(f"{path}: not YAML: {str(e).splitlines()[0]}") from e
    rows = value.get("initial_global_assignments") if isinstance(value, dict) else None
    if not isinstance(rows, dict) or not rows or not all(isinstance(k, int) for k in rows):
        raise ArtefactError(f"{path}: no initial_global_assignments with layer numbers")
    ids = tuple(sorted(rows))
    flat = slots_array([rows[k] for k in ids], f"{path}: initial_global_assignments", 2)
    if value.get("num_slots") != flat.shape[1]:
        raise ArtefactError(f"{path}: num_slots is {value.get('num_slots')}, the rows have {flat.shape[1]}")
    return _from_flat(flat, ids, ranks, experts, path, "trtllm")


def _from_ascend(value: dict[str, Any], experts: int | None, path: Path) -> ExpertPlan:
    try:
        layers = sorted(value["layer_list"], key=lambda layer: layer["layer_id"])
        rows = [
            [d["device_expert"] for d in sorted(layer["device_list"], key=lambda d: d["device_id"])] for layer in layers
        ]
        ids = tuple(layer["layer_id"] for layer in layers)
        stated = (value["moe_layer_count"], [layer["device_count"] for layer in layers])
    except (KeyError, TypeError) as e:
        raise ArtefactError(f"{path}: not an expert map: {e}") from e
    if stated != (len(rows), [len(row) for row in rows]):
        raise ArtefactError(f"{path}: moe_layer_count and device_count do not match the lists")
    slots = slots_array(rows, f"{path}: device_expert")
    return _plan(slots, ids, int(slots.max()) + 1 if experts is None else experts, "ascend", path)
