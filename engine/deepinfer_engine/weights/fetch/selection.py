"""Which files of a checkpoint a set of groups, or one expert-parallel rank, needs. Decided before anything is fetched.

A file is needed when the index puts a tensor into it that belongs to a wanted group and to the rank. Files that are
no shards (config, tokenizer, reference code) are small and always needed.

Expert e of a block with E experts belongs to rank floor(e / (E / R)) = floor(e * R / E); R need not divide E.
Everything that is no routed expert belongs to every rank. Example: E = 16, R = 4, rank 1 owns experts 4, 5, 6, 7;
with R = 5, rank 1 owns 4, 5, 6 (e * 5 // 16 = 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from deepinfer_engine.config.model_v4 import AnyConfig
from deepinfer_engine.config.strict_json import printable
from deepinfer_engine.errors import ArtefactError, CheckpointError, UsageError
from deepinfer_engine.weights.plan import MAX_TENSORS, tensor_families
from deepinfer_engine.weights.read_plan import owned_experts
from deepinfer_engine.weights.tensor_spec import Group

GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Selection:
    """What is wanted: ``groups`` (None = all) and optionally the share of ``rank`` of ``ep`` ranks."""

    groups: tuple[Group, ...] | None = None
    ep: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            for group in self.groups:
                if group not in GROUPS:
                    raise UsageError(f"there is no group {group!r}", hint=f"groups are {', '.join(GROUPS)}")
            if not self.groups:
                raise UsageError("no group is named", hint=f"groups are {', '.join(GROUPS)}")
        if (self.ep is None) != (self.rank is None):
            raise UsageError("an expert-parallel share needs both --ep and --rank", hint="as in --ep 8 --rank 3")
        if self.ep is not None and self.rank is not None:
            if self.ep < 1:
                raise UsageError(f"--ep {self.ep}: expected at least one rank")
            if not 0 <= self.rank < self.ep:
                raise UsageError(f"--rank {self.rank}: expected 0 to {self.ep - 1}, ranks of --ep {self.ep}")

    @property
    def everything(self) -> bool:
        return self.groups is None and self.ep is None

    def describe(self) -> str:
        parts = [f"groups {','.join(self.groups)}"] if self.groups is not None else []
        if self.ep is not None:
            parts.append(f"rank {self.rank} of {self.ep}")
        return ", ".join(parts) or "everything"

    def to_json(self) -> dict[str, Any]:
        return {"groups": list(self.groups) if self.groups is not None else None, "ep": self.ep, "rank": self.rank}

    @classmethod
    def from_json(cls, raw: Any) -> Selection:
        """The inverse of ``to_json``; raises KeyError, TypeError or ValueError."""
        groups, ep, rank = raw["groups"], raw["ep"], raw["rank"]
        if any(n is not None and type(n) is not int for n in (ep, rank)):
            raise TypeError("selection: ep and rank must be integers or null")
        try:
            return cls(tuple(groups) if groups is not None else None, ep, rank)
        except UsageError as exc:
            raise ValueError(f"selection: {exc.message}") from None


@dataclass(frozen=True)
class Share:
    """What the selection needs of one shard: its groups, and the payload bytes of the needed tensors."""

    groups: tuple[str, ...]
    needed_bytes: int


def shard_shares(
    config: AnyConfig, weight_map: Mapping[str, str], selection: Selection, where: str
) -> dict[str, Share]:
    """For every shard that the index names, what ``selection`` needs of it (0 bytes: the file is not needed).

    Raises ``CheckpointError`` when the index lacks a needed tensor or names one that the config does not imply.
    """
    need: Counter[str] = Counter()
    groups: dict[str, set[str]] = {file: set() for file in weight_map.values()}
    planned: set[str] = set()
    present: set[str] = set()
    missing: list[tuple[str, str]] = []
    for name, group, nbytes, mine in _tensors(config, selection):
        planned.add(name)
        wanted = mine and (selection.groups is None or group in selection.groups)
        file = weight_map.get(name)
        if file is not None:
            present.add(group)
            groups[file].add(group)
            if wanted:
                need[file] += nbytes
        elif wanted:
            missing.append((name, group))
    problems = [f"unexpected tensor {printable(n)} in {printable(f)}" for n, f in weight_map.items()
                if n not in planned]  # fmt: skip
    # a group that is wholly absent and was not asked for by name is a checkpoint without it
    required = set(selection.groups) if selection.groups is not None else {"backbone", *present}
    problems += [f"missing tensor {name} ({group})" for name, group in missing if group in required]
    if problems:
        raise CheckpointError(where, problems, hint="this index does not belong to this config")
    return {file: Share(tuple(g for g in GROUPS if g in groups[file]), need[file]) for file in groups}


def _tensors(config: AnyConfig, selection: Selection) -> Iterator[tuple[str, str, int, bool]]:
    """Name, group, bytes and whether the selected rank holds it, for every tensor of the plan."""
    families = tensor_families(config)
    total = sum(f.tensors for f in families)
    if total > MAX_TENSORS:
        raise ArtefactError(f"the config implies {total} tensors, more than {MAX_TENSORS} is no model of this family")
    for family in families:
        specs = [(spec.name.split("{e}"), spec.group, spec.nbytes) for spec in family.specs]
        mine = range(family.count)
        if selection.ep is not None and selection.rank is not None:
            mine = owned_experts(family.count, selection.ep, selection.rank)
        for e in range(family.count):
            own = e in mine
            for parts, group, nbytes in specs:
                routed = len(parts) > 1
                yield str(e).join(parts), group, nbytes, own or not routed
