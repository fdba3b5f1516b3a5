"""Which bytes a rank reads and where they go: only its own experts, sorted and coalesced. No torch here.

Statement. A *piece* is one contiguous byte range of a shard (a whole tensor, or the row range of a sharded Engram
table) with its place in a destination. Destinations are fused parameters: the experts of a layer stacked by slot with
w1 and w3 concatenated (``experts.w13``), ``wq_a`` + ``wkv``, the shared expert's w1 + w3, the compressor's
``wkv`` + ``wgate``; scales are fused alike. Pieces are sorted by (file, offset) and merged into *spans* while the gap
is below 1 MiB; a gap that holds bytes of another rank's experts is never bridged. A tensor wanted twice (an expert in
two slots of a rank) is read once and copied.

Ownership without a slot table is the identity placement: expert e of E belongs to rank ⌊e · R / E⌋ of R.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.errors import UsageError
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.tensor_spec import ITEM_BYTES, Group, TensorSpec

#: Reading a gap of this size costs less than a second request on any disk or network file system.
COALESCE_GAP = 1024 * 1024

EngramMode = Literal["mmap", "shard", "whole"]

#: (first, second, fused): rows of ``second`` follow those of ``first``. Module names inside a layer, matched whole.
_FUSED = (
    ("attn.wq_a", "attn.wkv", "attn.wq_a_wkv"),
    ("attn.compressor.wkv", "attn.compressor.wgate", "attn.compressor.wkv_wgate"),
    ("attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate", "attn.indexer.compressor.wkv_wgate"),
    ("ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w13"),
)


class Destination(NamedTuple):
    """A parameter to be filled: raw bytes of ``dtype`` [``shape``]. ``row0`` is the first row of a sharded table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row0: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """``nbytes`` of ``tensor`` at ``offset`` of ``file``, to be put at byte ``at`` of ``destination``."""

    tensor: str
    file: str
    offset: int
    nbytes: int
    destination: str
    at: int


class Span(NamedTuple):
    """One contiguous read; the bytes between its pieces are read and dropped."""

    file: str
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ReadPlan:
    """Everything one rank reads. ``copies`` are (piece already read, piece to fill from it)."""

    rank: int
    ep: int
    destinations: dict[str, Destination]
    spans: tuple[Span, ...]
    copies: tuple[tuple[Piece, Piece], ...]
    empty: tuple[tuple[str, int, int], ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*(p for s in self.spans for p in s.pieces), *(new for _, new in self.copies))

    @property
    def useful_bytes(self) -> int:
        return sum(p.nbytes for s in self.spans for p in s.pieces)

    @property
    def read_bytes(self) -> int:
        return sum(s.nbytes for s in self.spans)


def owned_experts(experts: int, ep: int, rank: int) -> range:
    """Experts of ``rank`` in the identity placement: expert e belongs to rank ⌊e · R / E⌋; shares differ by one."""
    return range(-(-rank * experts // ep), -(-(rank + 1) * experts // ep))


def engram_rows(config: ModelConfig, layer: int, ep: int, rank: int) -> range:
    """Rows of ``layer``'s table that ``rank`` owns when tables are sharded by whole hash heads."""
    primes = config.engram_primes[config.engram_layer_ids.index(layer)]
    first, last = len(primes) * rank // ep, len(primes) * (rank + 1) // ep
    return range(sum(primes[:first]), sum(primes[:last]))


def plan_read(
    checkpoint: Checkpoint,
    *,
    ep: int = 1,
    rank: int = 0,
    slots: Sequence[Sequence[int]] | None = None,
    groups: Iterable[Group] = ("backbone", "engram"),
    engram: EngramMode = "mmap",
    fuse: bool = True,
) -> ReadPlan:
    """The read list of one rank.

    ``slots`` [L][S]: logical expert per physical slot of this rank and backbone layer, -1 for an empty slot; None is
    the identity placement. Draft experts always use the identity placement. ``engram``: "mmap" reads no table (gather
    from the file), "shard" reads the rank's hash heads, "whole" everything. Raises ``UsageError`` for a rank, slot
    table or group that does not fit the checkpoint.
    """
    builder = _Builder(checkpoint, ep, rank, slots, engram, fuse)
    wanted = set(groups)
    have = {s.group for s in checkpoint.plan.values()}
    if missing := sorted((wanted & have) - set(checkpoint.groups_present)):
        raise UsageError(f"{checkpoint.directory}: holds no {', '.join(missing)} weights")
    for spec in checkpoint.plan.values():
        if spec.group in wanted:
            builder.add(spec)
    return builder.finish()


class _Builder:
    def __init__(self, checkpoint: Checkpoint, ep: int, rank: int, slots: Sequence[Sequence[int]] | None,
                 engram: EngramMode, fuse: bool):  # fmt: skip
        config = checkpoint.any_config
        if ep < 1 or not 0 <= rank < ep:
            raise UsageError(f"rank {rank} of ep {ep} does not exist")
        self.checkpoint, self.ep, self.rank, self.engram, self.fuse = checkpoint, ep, rank, engram, fuse
        self.destinations: dict[str, Destination] = {}
        self.pieces: list[Piece] = []
        self.empty: list[tuple[str, int, int]] = []
        self.foreign: dict[str, list[tuple[int, int]]] = {}
        self.slots = _slot_table(config.num_hidden_layers, config.n_routed_experts, slots)
        self.places: dict[str, dict[int, list[int]]] = {}
        self.widths: dict[str, int] = {}

    # -------------------------------------------------------------- one tensor

    def add(self, spec: TensorSpec) -> None:
        if ".ffn.experts." in spec.name:
            self._expert(spec)
        elif spec.kind in ("table", "table_scale"):
            self._table(spec)
        else:
            self._plain(spec)

    def _expert(self, spec: TensorSpec) -> None:
        prefix, rest = spec.name.split(".experts.")
        number, matrix, leaf = rest.split(".")
        places = self._places(prefix.removesuffix(".ffn"))
        mine = places.get(int(number), ())
        stored = self.checkpoint.stored(spec.name)
        if not mine:
            self.foreign.setdefault(self.checkpoint.file_of(spec.name).name, []).append((stored.begin, stored.end))
        fused, half = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}[matrix] if self.fuse else (matrix, 0)
        name = f"{prefix}.experts.{fused}.{leaf}"
        copies = 2 if fused == "w13" else 1
        if name not in self.destinations:
            slots = self.widths[prefix.removesuffix(".ffn")]
            shape = (slots, copies * spec.shape[0], *spec.shape[1:])
            self.destinations[name] = Destination(name, spec.dtype, shape)
            used = {slot for placed in places.values() for slot in placed}
            size = copies * spec.nbytes
            self.empty += [(name, slot * size, size) for slot in range(slots) if slot not in used]
        for slot in mine:
            self._piece(spec, name, (slot * copies + half) * spec.nbytes)

    def _places(self, place: str) -> dict[int, list[int]]:
        """Logical expert -> local slots, of one layer or draft stage."""
        if place not in self.places:
            config = self.checkpoint.any_config
            kind, number = place.split(".")
            if kind == "layers" and self.slots is not None:
                row = list(self.slots[int(number)])
            else:
                experts = config.n_routed_experts
                if kind == "mtp" and isinstance(config, ModelConfig):
                    experts = config.dspark_n_routed_experts
                row = list(owned_experts(experts, self.ep, self.rank))
                row += [-1] * (-(-experts // self.ep) - len(row))
            table: dict[int, list[int]] = {}
            for slot, expert in enumerate(row):
                if expert >= 0:
                    table.setdefault(expert, []).append(slot)
            self.places[place], self.widths[place] = table, len(row)
        return self.places[place]

    def _table(self, spec: TensorSpec) -> None:
        if self.engram == "mmap":
            return
        config = self.checkpoint.config
        rows = range(spec.shape[0])
        if self.engram == "shard":
            rows = engram_rows(config, int(spec.name.split(".")[1]), self.ep, self.rank)
        width = spec.shape[1] * ITEM_BYTES[spec.dtype]
        self.destinations[spec.name] = Destination(spec.name, spec.dtype, (len(rows), spec.shape[1]), rows.start)
        self._piece(spec, spec.name, 0, skip=rows.start * width, nbytes=len(rows) * width)

    def _plain(self, spec: TensorSpec) -> None:
        parts = spec.name.split(".", 2)
        if self.fuse and parts[0] in ("layers", "mtp") and len(parts) == 3:
            module, _, leaf = parts[2].rpartition(".")
            for first, second, fused in _FUSED:
                if module in (first, second):
                    base = f"{parts[0]}.{parts[1]}."
                    names = (f"{base}{first}.{leaf}", f"{base}{second}.{leaf}")
                    if self._may_fuse(base, first, second):
                        self._half(spec, names, f"{base}{fused}.{leaf}")
                        return
        self.destinations[spec.name] = Destination(spec.name, spec.dtype, spec.shape)
        self._piece(spec, spec.name, 0)

    def _may_fuse(self, base: str, first: str, second: str) -> bool:
        """Both exist, and the first one's rows fill whole FP8 tiles, so that the scale grids concatenate."""
        plan = self.checkpoint.plan
        a, b = plan.get(f"{base}{first}.weight"), plan.get(f"{base}{second}.weight")
        if a is None or b is None or a.dtype != b.dtype:
            return False
        return a.kind != "fp8" or a.shape[0] % self.checkpoint.any_config.weight_block == 0

    def _half(self, spec: TensorSpec, names: tuple[str, str], fused: str) -> None:
        first, second = (self.checkpoint.plan[n] for n in names)
        if fused not in self.destinations:
            shape = (first.shape[0] + second.shape[0], *first.shape[1:])
            self.destinations[fused] = Destination(fused, spec.dtype, shape)
        self._piece(spec, fused, 0 if spec.name == names[0] else first.nbytes)

    def _piece(self, spec: TensorSpec, destination: str, at: int, *, skip: int = 0, nbytes: int | None = None) -> None:
        length = spec.nbytes if nbytes is None else nbytes
        if length:
            file, begin = self.checkpoint.file_of(spec.name).name, self.checkpoint.stored(spec.name).begin
            self.pieces.append(Piece(spec.name, file, begin + skip, length, destination, at))

    # ------------------------------------------------------------------ result

    def finish(self) -> ReadPlan:
        foreign = {file: sorted(ranges) for file, ranges in self.foreign.items()}
        spans: list[Span] = []
        copies: list[tuple[Piece, Piece]] = []
        run: list[Piece] = []
        for piece in sorted(self.pieces, key=lambda p: (p.file, p.offset, p.destination, p.at)):
            if run and run[-1].file == piece.file and run[-1].offset == piece.offset:
                copies.append((run[-1], piece))
                continue
            if run and not _joins(run[-1], piece, foreign.get(piece.file, [])):
                spans.append(_span(run))
                run = []
            run.append(piece)
        if run:
            spans.append(_span(run))
        plan = ReadPlan(self.rank, self.ep, self.destinations, tuple(spans), tuple(copies), tuple(self.empty))
        _assert_tiled(plan)
        return plan


def _slot_table(layers: int, experts: int, slots: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    if slots is None:
        return None
    table = [[int(e) for e in row] for row in slots]
    if len(table) != layers:
        raise UsageError(f"the slot table has {len(table)} layers, the model has {layers}")
    for layer, row in enumerate(table):
        if bad := [e for e in row if not -1 <= e < experts]:
            raise UsageError(f"the slot table names expert {bad[0]} in layer {layer}, the model has 0..{experts - 1}")
    return table


def _joins(last: Piece, piece: Piece, foreign: list[tuple[int, int]]) -> bool:
    gap_begin, gap_end = last.offset + last.nbytes, piece.offset
    if last.file != piece.file or gap_end - gap_begin >= COALESCE_GAP:
        return False
    i = bisect.bisect_left(foreign, (gap_begin, 0))
    return not (i < len(foreign) and foreign[i][0] < gap_end)


def _span(run: list[Piece]) -> Span:
    return Span(run[0].file, run[0].offset, run[-1].offset + run[-1].nbytes - run[0].offset, tuple(run))


def _assert_tiled(plan: ReadPlan) -> None:
    """Pieces and empty slots must cover every destination exactly once."""
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in plan.destinations}
    for piece in plan.pieces:
        parts[piece.destination].append((piece.at, piece.nbytes))
    for name, at, nbytes in plan.empty:
        parts[name].append((at, nbytes))
    for name, ranges in parts.items():
        at = 0
        for begin, nbytes in sorted(ranges):
            assert begin == at, f"{name}: bytes {at}..{begin} have no source or two"
            at += nbytes
        assert at == plan.destinations[name].nbytes, f"{name}: {at} of {plan.destinations[name].nbytes} bytes planned"
