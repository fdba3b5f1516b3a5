"""What one stored tensor is, and families of equal tensors (one per expert). No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["fp8", "fp8_scale", "fp4", "fp4_scale", "table", "table_scale", "plain"]
Group = Literal["backbone", "draft", "engram", "vision"]

#: Bytes per element of every dtype that an official checkpoint stores.
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}

#: Channels that share one scale in MXFP4 experts and Engram rows.
SCALE_GROUP = 32


class TensorSpec(NamedTuple):
    """One tensor as it is stored: ``shape`` counts elements of ``dtype``, so a packed FP4 row has in/2 of them.

    ``group`` is the unit that may be left out of a load; ``shard`` is the grouping key of the official layout:
    one file per key.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    group: Group
    shard: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_scale(self) -> bool:
        return self.kind in ("fp8_scale", "fp4_scale", "table_scale")

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the numbers that are meant: [out, in] for a packed FP4 weight, otherwise ``shape``."""
        return (*self.shape[:-1], self.shape[-1] * 2) if self.kind == "fp4" else self.shape

    @property
    def parameters(self) -> int:
        """Model parameters held here; scales and integer tables count none."""
        return 0 if self.is_scale or self.dtype == "I64" else math.prod(self.value_shape)


@dataclass(frozen=True)
class Family:
    """``count`` equal sets of tensors of one component; ``{e}`` in a name stands for the number of the set.

    ``place`` is the layer number, ``mtp.<stage>`` or ``""``.
    """

    component: str
    place: str
    specs: tuple[TensorSpec, ...]
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.count * sum(s.nbytes for s in self.specs)

    @property
    def parameters(self) -> int:
        return self.count * sum(s.parameters for s in self.specs)

    @property
    def tensors(self) -> int:
        return self.count * len(self.specs)

    def expand(self) -> Iterator[TensorSpec]:
        """Every tensor of the family, set by set."""
        if self.count == 1 and "{e}" not in self.specs[0].name:
            yield from self.specs
            return
        parts = [(*s.name.split("{e}"), s) for s in self.specs]
        for e in range(self.count):
            for head, tail, s in parts:
                yield TensorSpec(f"{head}{e}{tail}", s.dtype, s.shape, s.kind, s.group, s.shard)


class FamilyBuilder:
    """Collects the tensors of one component of one place; storage kinds follow the quantisation in force.

    ``block`` is the side of an FP8 tile; ``quantised`` False stores every linear as BF16 without scales.
    """

    def __init__(self, component: str, place: str, prefix: str, group: Group, shard: str, *, block: int = 32,
                 quantised: bool = True):  # fmt: skip
        self.component, self.place, self.prefix, self.shard = component, place, prefix, shard
        self.group: Group = group
        self.block, self.quantised = block, quantised
        self.specs: list[TensorSpec] = []

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], kind: Kind) -> None:
        self.specs.append(TensorSpec(self.prefix + name, dtype, shape, kind, self.group, self.shard))

    def plain(self, name: str, *shape: int, dtype: str = "BF16") -> FamilyBuilder:
        self._add(name, dtype, shape, "plain")
        return self

    def fp8(self, name: str, out: int, width: int) -> FamilyBuilder:
        """A linear [out, width] in E4M3 with one E8M0 scale per tile."""
        if not self.quantised:
            return self.plain(f"{name}.weight", out, width)
        self._add(f"{name}.weight", "F8_E4M3", (out, width), "fp8")
        self._add(f"{name}.scale", "F8_E8M0", (-(-out // self.block), -(-width // self.block)), "fp8_scale")
        return self

    def fp4(self, name: str, out: int, width: int) -> FamilyBuilder:
        """A linear [out, width] in MXFP4: two E2M1 codes per I8, one E8M0 scale per 32 columns."""
        if not self.quantised:
            return self.plain(f"{name}.weight", out, width)
        self._add(f"{name}.weight", "I8", (out, width // 2), "fp4")
        self._add(f"{name}.scale", "F8_E8M0", (out, width // SCALE_GROUP), "fp4_scale")
        return self

    def table(self, name: str, rows: int, width: int) -> FamilyBuilder:
        """A lookup table [rows, width] in E4M3 with one E8M0 scale per 32 channels of a row."""
        self._add(f"{name}.weight", "F8_E4M3", (rows, width), "table")
        self._add(f"{name}.scale", "F8_E8M0", (rows, width // SCALE_GROUP), "table_scale")
        return self

    def build(self, count: int = 1) -> Family:
        return Family(self.component, self.place, tuple(self.specs), count)
