"""``ExpertPlan``: where every expert's replicas live, frozen, checked, with the moves that lead to it and a stamped
JSON file.

A plan is legal when every layer gives each logical expert 1 to 16 replicas and every live rank fills all of its slots.
A dead rank holds -1 in all of its slots, in every layer. Two replicas of an expert on one rank are legal
(``colocations`` lists them); the planner makes them only where they cannot be avoided.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.eplb.placement import MAX_REPLICAS, colocated
from deepinfer_engine.errors import ArtefactError, NotReadyError

FORMAT = "deepinfer.expert_plan"
VERSION = 1

#: A plan file of 100 layers x 10,000 slots is 6 MB; anything past this is not one.
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Digests:
    """What a plan was made from; an empty string means unknown."""

    config: str = ""
    weights: str = ""
    stats: str = ""


@dataclass(frozen=True)
class Move:
    """One expert a rank must receive. ``src_rank`` is -1 when no live rank holds it: it comes from the checkpoint."""

    layer: int
    expert: int
    src_rank: int
    src_slot: int
    dst_rank: int
    dst_slot: int


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """Slots of every layer: ``slot_expert_LRS`` int64 [L, R, S], read-only.

    ``moe_lb_L`` is the predicted balance per layer on the planning window, None for a layer without tokens. ``epoch``
    counts the plans of one deployment. Raises ArtefactError when the slots are not a legal plan for ``experts``.
    """

    epoch: int
    experts: int
    slot_expert_LRS: np.ndarray
    layer_ids: tuple[int, ...]
    algorithm: str
    moe_lb_L: tuple[float | None, ...]
    digests: Digests = Digests()
    tool_version: str = ""

    def __post_init__(self) -> None:
        slots = np.ascontiguousarray(self.slot_expert_LRS, np.int64)
        slots.flags.writeable = False
        object.__setattr__(self, "slot_expert_LRS", slots)
        problem = plan_problem(slots, self.experts)
        if problem is None and not len(self.layer_ids) == len(self.moe_lb_L) == slots.shape[0]:
            problem = (
                f"{slots.shape[0]} layers of slots, {len(self.layer_ids)} layer ids, {len(self.moe_lb_L)} balances"
            )
        if problem is not None:
            raise ArtefactError(f"not a legal plan: {problem}")

    @property
    def layers(self) -> int:
        return self.slot_expert_LRS.shape[0]

    @property
    def ranks(self) -> int:
        return self.slot_expert_LRS.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.slot_expert_LRS.shape[2]

    @cached_property
    def dead_ranks(self) -> tuple[int, ...]:
        return tuple(np.nonzero((self.slot_expert_LRS[0] < 0).all(axis=1))[0].tolist())

    @cached_property
    def replicas_LE(self) -> np.ndarray:
        """Copies of every expert, int64 [L, E]."""
        return np.stack(
            [
                np.bincount(row[row >= 0], minlength=self.experts)
                for row in self.slot_expert_LRS.reshape(self.layers, -1)
            ]
        )

    @property
    def moe_lb(self) -> float | None:
        """Predicted balance: mean over the layers that have one."""
        known = [v for v in self.moe_lb_L if v is not None]
        return math.fsum(known) / len(known) if known else None

    def colocations(self) -> tuple[tuple[int, int, int], ...]:
        """(layer, rank, slot) of every replica that shares its rank with another replica of the same expert."""
        return tuple((k, r, s) for k in range(self.layers) for r, s in colocated(self.slot_expert_LRS[k]))

    def moves(self, old: ExpertPlan) -> tuple[Move, ...]:
        """What every rank must receive to go from ``old`` to this plan, layer by layer.

        An expert the rank already holds in any slot is not received. Receivers of an expert are dealt to its old live
        holders in rank order, so that no holder sends everything. Raises ArtefactError when the plans are not of the
        same model.
        """
        if (old.layers, old.experts) != (self.layers, self.experts):
            raise ArtefactError(
                f"the old plan is {old.layers} layers x {old.experts} experts, "
                f"the new one {self.layers} x {self.experts}"
            )
        out: list[Move] = []
        for layer in range(self.layers):
            out.extend(
                _layer_moves(layer, self.slot_expert_LRS[layer], old.slot_expert_LRS[layer], set(self.dead_ranks))
            )
        return tuple(out)

    def same_slots(self, old: ExpertPlan) -> bool:
        return self.slot_expert_LRS.shape == old.slot_expert_LRS.shape and bool(
            (self.slot_expert_LRS == old.slot_expert_LRS).all()
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan file as plain values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "epoch": self.epoch,
            "algorithm": self.algorithm,
            "tool_version": self.tool_version,
            "config_digest": self.digests.config,
            "weights_digest": self.digests.weights,
            "stats_digest": self.digests.stats,
            "experts": self.experts,
            "ranks": self.ranks,
            "slots_per_rank": self.slots_per_rank,
            "layer_ids": list(self.layer_ids),
            "moe_lb": list(self.moe_lb_L),
            "slot_expert": self.slot_expert_LRS.tolist(),
        }

    def digest(self) -> str:
        """SHA-256 of the slots and what they belong to: equal for equal plans."""
        head = f"{self.experts} {self.slot_expert_LRS.shape} {self.layer_ids} {self.digests.config}"
        return hashlib.sha256(head.encode() + self.slot_expert_LRS.astype("<i4").tobytes()).hexdigest()


def plan_problem(slots_LRS: np.ndarray, experts: int) -> str | None:
    """What is wrong with [L, R, S] slots for ``experts``, or None."""
    if slots_LRS.ndim != 3 or 0 in slots_LRS.shape:
        return f"slots have shape {list(slots_LRS.shape)}, expected [layers, ranks, slots], none zero"
    if experts < 1:
        return f"experts is {experts}, expected 1 or more"
    bad = np.argwhere((slots_LRS < -1) | (slots_LRS >= experts))
    if len(bad):
        k, r, s = bad[0].tolist()
        return f"layer {k}, rank {r}, slot {s} holds expert {slots_LRS[k, r, s]}, expected 0..{experts - 1}"
    empty = slots_LRS < 0
    dead_R = empty[0].all(axis=1)
    if (empty != dead_R[None, :, None]).any():
        k, r, s = np.argwhere(empty != dead_R[None, :, None])[0].tolist()
        return f"layer {k}, rank {r}, slot {s}: -1 is legal only in all slots of a dead rank, in every layer"
    for k, row in enumerate(slots_LRS.reshape(slots_LRS.shape[0], -1)):
        copies = np.bincount(row[row >= 0], minlength=experts)
        if not copies.all():
            return f"layer {k}: expert {int((copies == 0).argmax())} has no slot"
        if copies.max() > MAX_REPLICAS:
            return (
                f"layer {k}: expert {int(copies.argmax())} has {copies.max()} replicas, "
                f"at most {MAX_REPLICAS} are supported"
            )
    return None


def _layer_moves(layer: int, new_RS: np.ndarray, old_RS: np.ndarray, dead: set[int]) -> list[Move]:
    holders: dict[int, list[tuple[int, int]]] = {}
    for r, row in enumerate(old_RS.tolist()):
        if r not in dead:
            for s, e in enumerate(row):
                if e >= 0:
                    holders.setdefault(e, []).append((r, s))
    served: dict[int, int] = {}
    out = []
    for r, row in enumerate(new_RS.tolist()):
        have = set(old_RS[r].tolist()) if r < len(old_RS) else set()
        for s, e in enumerate(row):
            if e < 0 or e in have:
                continue
            have.add(e)  # a second replica on the same rank is a local copy
            sources = holders.get(e, [])
            turn = served.get(e, 0)
            served[e] = turn + 1
            src = sources[turn % len(sources)] if sources else (-1, -1)
            out.append(Move(layer, e, *src, r, s))
    return out


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name beside ``path``, then rename."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as e:
        raise NotReadyError(f"cannot write {path}: {e.strerror}") from e
    finally:
        part.unlink(missing_ok=True)


def plan_text(plan: ExpertPlan) -> str:
    """The plan file: strict JSON, one layer of slots a line."""
    values = plan.to_dict()
    slots = values.pop("slot_expert")
    head = json.dumps(values, allow_nan=False, indent=1)
    rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in slots)
    return f'{head[:-2]},\n "slot_expert": [\n  {rows}\n ]\n}}\n'


def write_plan(plan: ExpertPlan, path: Path) -> None:
    write_text(path, plan_text(plan))


def strict_json(text: str, where: str) -> Any:
    """Parse JSON without NaN, infinities or repeated keys; ArtefactError says where it went wrong."""

    def refuse(name: str) -> Any:
        raise ArtefactError(f"{where}: {name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            names = [k for k, _ in items]
            raise ArtefactError(f"{where}: key {next(k for k in names if names.count(k) > 1)!r} appears twice")
        return out

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)
    except json.JSONDecodeError as e:
        raise ArtefactError(f"{where}: not JSON, line {e.lineno} column {e.colno}: {e.msg}") from e
    except RecursionError as e:
        raise ArtefactError(f"{where}: JSON nested too deeply") from e


def read_json(path: Path) -> Any:
    """A JSON file of at most ``MAX_FILE_BYTES``; ArtefactError otherwise."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ArtefactError(f"{path}: {size} bytes, JSON files may have {MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ArtefactError(f"{path}: not UTF-8 text at byte {e.start}") from e
    return strict_json(text, str(path))


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "version": int,
    "epoch": int,
    "algorithm": str,
    "tool_version": str,
    "config_digest": str,
    "weights_digest": str,
    "stats_digest": str,
    "experts": int,
    "ranks": int,
    "slots_per_rank": int,
    "layer_ids": list,
    "moe_lb": list,
    "slot_expert": list,
}


def slots_array(rows: Sequence[Any], where: str, ndim: int = 3) -> np.ndarray:
    """Nested lists of integers as int64; ArtefactError for ragged lists, floats, booleans or other depths."""
    try:
        out = np.array(rows)
    except ValueError as e:
        raise ArtefactError(f"{where}: rows of different lengths") from e
    if out.dtype.kind not in "iu" or out.ndim != ndim:
        raise ArtefactError(f"{where}: {out.ndim} levels of {out.dtype.name}, expected {ndim} levels of integers")
    return out.astype(np.int64)


def plan_from_dict(values: Any, where: str) -> ExpertPlan:
    """The plan of a parsed file; ArtefactError names the field and what was expected."""
    if not isinstance(values, dict):
        raise ArtefactError(f"{where}: a {type(values).__name__}, expected an object")
    if values.get("format") != FORMAT:
        raise ArtefactError(f"{where}: format is {values.get('format')!r}, expected {FORMAT!r}")
    if values.get("version") != VERSION:
        raise ArtefactError(f"{where}: version is {values.get('version')!r}, this tool reads {VERSION}")
    for key, kind in _FIELDS.items():
        if key not in values:
            raise ArtefactError(f"{where}: {key} is missing")
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise ArtefactError(f"{where}: {key} is a {type(values[key]).__name__}, expected {kind}")
    unknown = sorted(set(values) - set(_FIELDS))
    if unknown:
        raise ArtefactError(f"{where}: unknown field {unknown[0]!r}")
    slots = slots_array(values["slot_expert"], f"{where}: slot_expert")
    stated = (values["ranks"], values["slots_per_rank"])
    if slots.shape[1:] != stated:
        raise ArtefactError(
            f"{where}: slot_expert is {list(slots.shape[1:])} per layer, ranks x slots_per_rank says {list(stated)}"
        )
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values["layer_ids"]):
        raise ArtefactError(f"{where}: layer_ids must be integers")
    for k, v in enumerate(values["moe_lb"]):
        if v is not None and (isinstance(v, bool) or not isinstance(v, (int, float)) or not v >= 1.0 - 1e-9):
            raise ArtefactError(f"{where}: moe_lb[{k}] is {v!r}, expected null or 1.0 or more")
    try:
        return ExpertPlan(
            epoch=values["epoch"],
            experts=values["experts"],
            slot_expert_LRS=slots,
            layer_ids=tuple(values["layer_ids"]),
            algorithm=values["algorithm"],
            moe_lb_L=tuple(values["moe_lb"]),
            tool_version=values["tool_version"],
            digests=Digests(values["config_digest"], values["weights_digest"], values["stats_digest"]),
        )
    except ArtefactError as e:
        raise ArtefactError(f"{where}: {e.message}") from e


def read_plan(path: Path) -> ExpertPlan:
    """The plan file at ``path``; ArtefactError when it is anything else."""
    return plan_from_dict(read_json(path), str(path))
