"""Which operations have a form for Ascend 950, of which programs, and what is known of them; imports no tilelang."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_kernels.ops import OPS
from deepinfer_kernels.tilelang import families as tilelang

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes

#: operation → "module.program" of each program that it is made of
OPERATIONS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("rows.rms_norm",),
    "rope": ("rows.rope",),
    "pack_rows": ("records.pack_rows",),
    "unpack_rows": ("records.load_rows",),
    "load_rows": ("records.load_rows",),
    "quantise_index_query": ("records.pack_rows", "records.load_rows"),
    "mhc_collapse": ("rows.mhc_collapse",),
    "mhc_expand": ("rows.mhc_expand",),
    "mhc_mixes": ("cube.linear", "rows.mhc_coefficients"),
    "gate_topk": ("cube.linear", "rows.gate_topk"),
    "moe_combine": ("rows.moe_combine",),
    "engram_hash": ("rows.engram_hash",),
    "engram_gate": ("rows.engram_gate",),
    "linear": ("cube.linear", "cube.linear_mx"),
    "linear_grouped": ("cube.grouped",),
    "shared_expert": ("cube.linear", "rows.swiglu"),
    "moe_experts": ("cube.grouped", "rows.swiglu"),
    "attend_cached": ("records.load_rows", "attend.attend"),
    "index_scores": ("attend.index_scores",),
}
#: what is known of every source: tests run it with an emulation of the intrinsics
LABEL = "compiles to AscendC source, right in an emulation on the CPU; binary and numerics unverified"
#: most window places of a query; the caller hides what a model has less
_WINDOW = 128
NO_FORM = "no Ascend form: reference through torch_npu, unverified"
BISHENG = "source the set_env.sh of CANN 9.2 or newer"


@dataclass(frozen=True)
class Program:
    """A program with its sizes, and the operations that are made of it."""

    ops: tuple[str, ...]
    name: str
    sizes: tuple[tuple[str, int | str | bool], ...]

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]

    def stem(self) -> str:
        """The part of a file name that says what is in it."""
        sizes = hashlib.sha256(repr(self.sizes).encode()).hexdigest()[:8]
        return f"{self.name}-{source_key()}-{sizes}"


@functools.cache
def source_key() -> str:
    """Digest of the programs and of the release that lowers them."""
    here = Path(__file__).parent
    parts = [f"tilelang {tilelang.RELEASE}".encode()]
    parts += [(here / f"{name}.py").read_bytes() for name in ("rows", "records", "cube", "attend")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def without_form() -> list[str]:
    """Operations that nothing here computes on this platform."""
    return [op for op in OPS if op not in OPERATIONS]


def bisheng() -> str | None:
    """CANN's compiler, of $BISHENG_HOME or on the path."""
    home = os.environ.get("BISHENG_HOME")
    found = shutil.which("bisheng", path=str(Path(home) / "bin")) if home else None
    return found or shutil.which("bisheng")


def missing(op: str, cache: Path | None = None) -> str:
    """Why an operation's Ascend form is not run: there is always a reason, no engine drives this device."""
    lacking = "" if bisheng() else f", bisheng is not on the path ({BISHENG})"
    return f"{LABEL}{lacking}; no step of this engine runs on an NPU"


def operation(op: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """An operation with the signature of its reference that says why it is not run."""

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{op} on ascend950: {missing(op)}")

    return call


def programs(shapes: Shapes) -> list[Program]:
    """Every program that a model's operations need, each once."""
    needed: dict[tuple[str, tuple], dict[str, None]] = {}
    for op, name, sizes in _wanted(shapes):
        needed.setdefault((name, tuple(sizes.items())), {})[op] = None
    return [Program(tuple(ops), name, sizes) for (name, sizes), ops in needed.items()]


def _wanted(s: Shapes) -> Iterator[tuple[str, str, dict[str, int | str | bool]]]:
    """(operation, program, its sizes), some programs more than once."""
    for width in s.rows:
        yield "rms_norm", "rows.rms_norm", {"H": width}
    for heads, width in ((s.N, s.D), (1, s.D), (s.index_heads, s.Di), (1, s.Di)):
        for inverse in (False, True):
            yield "rope", "rows.rope", {"N": heads, "D": width, "DR": s.Dr, "INVERSE": inverse}
    for kind, width in (("window", s.D), ("global", s.D), ("index", s.Di)):
        record: dict[str, int | str | bool] = {"D": width, "KIND": kind}
        yield "pack_rows", "records.pack_rows", record
        for op in ("unpack_rows", "load_rows", *(("attend_cached",) if kind != "index" else ())):
            yield op, "records.load_rows", record
        if kind == "index":
            yield "quantise_index_query", "records.pack_rows", record
            yield "quantise_index_query", "records.load_rows", record
    keys = -(-(_WINDOW + s.choice[0]) // 64) * 64
    yield "attend_cached", "attend.attend", {"N": -(-s.N // 32) * 32, "D": -(-s.D // 16) * 16, "K": keys}
    yield "index_scores", "attend.index_scores", {"HEADS": -(-s.index_heads // 16) * 16, "D": -(-s.Di // 16) * 16}
    yield "mhc_collapse", "rows.mhc_collapse", {"H": s.H, "C": s.C}
    yield "mhc_expand", "rows.mhc_expand", {"H": s.H, "C": s.C}
    parts = 3  # bf16 parts of an f32 matrix
    coefficients = s.C * (s.C + 2)
    yield "mhc_mixes", "cube.linear", {**_product(parts * coefficients, s.C * s.H), "WIDE": True}
    sizes: dict[str, int | str | bool] = {"H": s.H, "C": s.C, "PARTS": parts, "ITERS": s.sinkhorn}
    yield "mhc_mixes", "rows.mhc_coefficients", sizes
    if s.hash is not None:
        yield "engram_gate", "rows.engram_gate", {"H": s.H, "C": s.C}
        yield "engram_hash", "rows.engram_hash", {"LAGS": s.hash[0], "HEADS": s.hash[1]}
    for outs, inner, kind in s.products:
        yield "linear", "cube.linear", _product(outs, inner)
        if kind == "fp8" and outs % 64 == 0 and inner % 128 == 0:
            yield "linear", "cube.linear_mx", {"OUT": outs, "IN": inner}
    yield "linear_grouped", "cube.grouped", {"S": s.groups, **_product(s.group_out, s.N * s.D // s.groups)}
    for experts, choices, slots, width in s.routers:
        yield "gate_topk", "cube.linear", {**_product(experts, s.H), "WIDE": True}
        yield "gate_topk", "rows.gate_topk", {"E": experts, "K": choices, "NORMALISE": s.normalise}
        yield "moe_combine", "rows.moe_combine", {"H": s.H, "K": choices}
        yield "moe_experts", "cube.grouped", {"S": slots, **_product(width, s.H)}
        yield "moe_experts", "cube.grouped", {"S": slots, **_product(s.H, width)}
        for op in ("moe_experts", "shared_expert"):
            yield op, "rows.swiglu", {"WIDTH": width}
        yield "shared_expert", "cube.linear", _product(width, s.H)
        yield "shared_expert", "cube.linear", _product(s.H, width)


def _product(outs: int, inner: int) -> dict[str, int | str | bool]:
    """Sizes of a product on whole fractals of 16; the caller pads with zeros."""
    return {"OUT": -(-outs // 16) * 16, "IN": -(-inner // 16) * 16}
