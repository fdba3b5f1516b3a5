"""``ExpertStats``: how many tokens every expert got in every step, and the ``.npz`` file that carries it.

File (NumPy zip, no pickles): ``counts`` int64 [M steps, L layers, E experts]; ``tokens`` int64 [M]; ``layer_ids`` int64
[L]; ``layer_kinds`` text [L]; ``top_k`` and ``ep`` int64 scalars; ``config_digest``, ``weights_digest``,
``tool_version`` text scalars. Only ``counts`` is required of a file made by somebody else. Files are hostile until
proven otherwise: sizes are checked against the zip directory and every array header before a byte of data is read, and
object arrays are refused.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.eplb.placement import MAX_WEIGHT
from deepinfer_engine.errors import ArtefactError, NotReadyError

#: Most bytes of arrays read from one file: 1000 steps x 61 layers x 384 experts of int64 are 0.19 GB.
MAX_ARRAY_BYTES = 2 << 30

#: Most tokens of a layer in one file: loads of ranks are exact integers in units of 1/LCM token.
MAX_TOKENS = MAX_WEIGHT // 2

#: An array header is a short Python literal; numpy's own limit is 10,000 characters.
_MAX_HEADER = 10_000

_ARRAYS = (
    "counts",
    "tokens",
    "layer_ids",
    "layer_kinds",
    "top_k",
    "ep",
    "config_digest",
    "weights_digest",
    "tool_version",
)

#: Counts recorded per physical slot carry the map they were recorded under.
PHYSICAL = "physical_to_logical"


@dataclass(frozen=True, eq=False)
class ExpertStats:
    """Token counts int64 [M, L, E], read-only, and what is known about them (None or empty: not recorded).

    ``ordered`` says whether steps are in time order. Raises ArtefactError with the field and what was expected.
    """

    counts_MLE: np.ndarray
    layer_ids: tuple[int, ...]
    tokens_M: np.ndarray | None = None
    layer_kinds: tuple[str, ...] = ()
    top_k: int | None = None
    ep: int | None = None
    config_digest: str = ""
    weights_digest: str = ""
    tool_version: str = ""
    ordered: bool = True

    def __post_init__(self) -> None:
        counts = self.counts_MLE
        assert counts.dtype == np.int64 and counts.ndim == 3, "counts_from makes these"
        counts.flags.writeable = False
        steps, layers, _ = counts.shape
        if len(self.layer_ids) != layers:
            raise ArtefactError(f"layer_ids has {len(self.layer_ids)} entries, counts has {layers} layers")
        if len(set(self.layer_ids)) != layers or any(k < 0 for k in self.layer_ids):
            raise ArtefactError("layer_ids must be different and not negative")
        if self.layer_kinds and len(self.layer_kinds) != layers:
            raise ArtefactError(f"layer_kinds has {len(self.layer_kinds)} entries, counts has {layers} layers")
        for name, value in (("top_k", self.top_k), ("ep", self.ep)):
            if value is not None and not 1 <= value <= 65536:
                raise ArtefactError(f"{name} is {value}, expected 1..65536")
        if self.tokens_M is not None and self.tokens_M.shape != (steps,):
            raise ArtefactError(f"tokens has shape {list(self.tokens_M.shape)}, expected [{steps}]")

    @property
    def steps(self) -> int:
        return self.counts_MLE.shape[0]

    @property
    def layers(self) -> int:
        return self.counts_MLE.shape[1]

    @property
    def experts(self) -> int:
        return self.counts_MLE.shape[2]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the counts and what they belong to; independent of the file format they came in."""
        h = hashlib.sha256(
            f"{self.counts_MLE.shape} {self.layer_ids} {self.config_digest} {self.weights_digest}".encode()
        )
        for step in self.counts_MLE:
            h.update(np.ascontiguousarray(step).data)
        return h.hexdigest()

    def window(self, lo: int, hi: int) -> ExpertStats:
        """Steps lo … hi − 1."""
        return replace(
            self, counts_MLE=self.counts_MLE[lo:hi], tokens_M=None if self.tokens_M is None else self.tokens_M[lo:hi]
        )

    def without_idle(self) -> tuple[ExpertStats, int]:
        """The same without the steps in which no layer had a token, and how many those were."""
        busy = self.counts_MLE.any(axis=(1, 2))
        idle = int((~busy).sum())
        if not idle:
            return self, 0
        tokens = None if self.tokens_M is None else self.tokens_M[busy]
        return replace(self, counts_MLE=self.counts_MLE[busy], tokens_M=tokens), idle


def counts_from(raw: np.ndarray, where: str, axes: tuple[str, ...] = ("step", "layer", "expert")) -> np.ndarray:
    """Non-negative whole numbers as int64 [steps, layers, experts]; totals [layers, experts] become one step.

    Raises ArtefactError naming the field, the first offending cell and the nearest legal value.
    """
    if raw.ndim == 2:
        raw, axes = raw[None], ("step", *axes[-2:])
    if raw.ndim != 3:
        raise ArtefactError(
            f"{where} has {raw.ndim} dimensions {list(raw.shape)}, "
            "expected 3 [steps, layers, experts] or 2 [layers, experts]"
        )
    if 0 in raw.shape:
        raise ArtefactError(
            f"{where} is empty: {list(raw.shape)} [steps, layers, experts], expected at least 1 of each"
        )
    if raw.dtype.kind not in "iuf":
        raise ArtefactError(f"{where} holds {raw.dtype.name}, expected integers")

    def refuse(bad: np.ndarray, what: str, nearest: str) -> None:
        if bad.any():
            at = np.unravel_index(int(bad.argmax()), bad.shape)
            place = ", ".join(f"{name} {int(k)}" for name, k in zip(axes, at, strict=True))
            raise ArtefactError(
                f"{where} at {place} is {raw[at]}: {what}", hint=f"nearest legal value: {nearest.format(raw[at])}"
            )

    if raw.dtype.kind == "f":
        refuse(~np.isfinite(raw), "not a finite number", "0 (drop the step if it was not recorded)")
        refuse(raw < 0, "negative", "0")
        whole = np.rint(raw)
        bad = np.abs(raw - whole) > 1e-6
        if bad.any():
            refuse(bad, "not a whole number", f"{whole[np.unravel_index(int(bad.argmax()), bad.shape)]:.0f}")
        refuse(whole >= 2.0**62, "too large", str(2**62 - 1))
        raw = whole
    if raw.dtype.kind == "i":
        refuse(raw < 0, "negative", "0")
    if raw.dtype.itemsize == 8:
        refuse(raw >= 2**62, "too large", str(2**62 - 1))
    counts = np.array(raw, np.int64, order="C")
    if int(counts.max()) > MAX_TOKENS // counts.size:  # only then can a layer hold more
        total_L = counts.sum(axis=(0, 2), dtype=np.float64)
        if total_L.max() > MAX_TOKENS:
            k = int(total_L.argmax())
            raise ArtefactError(
                f"{where}: layer {k} has {total_L[k]:.4g} tokens in the window, at most {MAX_TOKENS:.4g} are exact",
                hint="record a shorter window",
            )
    return counts


def write_stats(stats: ExpertStats, path: Path) -> None:
    """Write the ``.npz``, compressed, under a temporary name that is then renamed."""
    arrays = {
        "counts": stats.counts_MLE,
        "tokens": _tokens(stats),
        "layer_ids": np.array(stats.layer_ids, np.int64),
        "layer_kinds": np.array(stats.layer_kinds or [""] * stats.layers, dtype=np.str_),
        "top_k": np.int64(stats.top_k or 0),
        "ep": np.int64(stats.ep or 0),
        "config_digest": np.str_(stats.config_digest),
        "weights_digest": np.str_(stats.weights_digest),
        "tool_version": np.str_(stats.tool_version),
    }
    write_npz(path, arrays)


def _tokens(stats: ExpertStats) -> np.ndarray:
    """Tokens of every step; where they were not recorded, the fewest that can have routed so many."""
    if stats.tokens_M is not None:
        return stats.tokens_M
    return -(-stats.counts_MLE.sum(axis=2).max(axis=1) // (stats.top_k or 1))


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as f:
            np.savez_compressed(f, allow_pickle=False, **arrays)
        os.replace(part, path)
    except OSError as e:
        raise NotReadyError(f"cannot write {path}: {e.strerror}") from e
    finally:
        part.unlink(missing_ok=True)


def read_npz(path: Path, limit: int = MAX_ARRAY_BYTES) -> dict[str, np.ndarray]:
    """Arrays of a NumPy zip. Nothing is allocated before all names, dtypes and sizes have been found legal and ≤
    ``limit``."""
    try:
        with zipfile.ZipFile(path) as z:
            infos = z.infolist()
            if len(infos) > 64:
                raise ArtefactError(f"{path}: {len(infos)} members, expected at most 64 arrays")
            heads: dict[str, tuple[zipfile.ZipInfo, tuple[int, ...], np.dtype, bool, int]] = {}
            total = 0
            for info in infos:
                name = info.filename.removesuffix(".npy")
                if name == info.filename or "/" in name or name in heads:
                    raise ArtefactError(f"{path}: member {info.filename!r}, expected one .npy array of each name")
                with z.open(info) as f:
                    shape, dtype, fortran, offset = _header(f, f"{path}: {name}")
                size = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
                if size + offset != info.file_size:
                    raise ArtefactError(
                        f"{path}: {name} says {size} bytes {list(shape)} {dtype}, "
                        f"the file holds {info.file_size - offset}"
                    )
                total += size
                if total > limit:
                    raise ArtefactError(
                        f"{path}: arrays of {total} bytes, at most {limit} are read", hint="record a shorter window"
                    )
                heads[name] = info, shape, dtype, fortran, offset
            return {name: _data(z, *head) for name, head in heads.items()}
    except (zipfile.BadZipFile, EOFError, RuntimeError) as e:
        raise ArtefactError(f"{path}: damaged or not a NumPy .npz file: {e}") from e
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror or e}") from e
    except zlib.error as e:
        raise ArtefactError(f"{path}: damaged data: {e}") from e


def read_npy(path: Path, limit: int = MAX_ARRAY_BYTES) -> np.ndarray:
    """One NumPy array file, its size checked against the header before anything is allocated."""
    try:
        with path.open("rb") as f:
            shape, dtype, fortran, offset = _header(f, str(path))
            size = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
            held = path.stat().st_size - offset
            if size != held:
                raise ArtefactError(f"{path}: says {size} bytes {list(shape)} {dtype}, the file holds {held}")
            if size > limit:
                raise ArtefactError(f"{path}: {size} bytes, at most {limit} are read", hint="record a shorter window")
            return _shaped(f.read(size), shape, dtype, fortran)
    except OSError as e:
        raise ArtefactError(f"cannot read {path}: {e.strerror or e}") from e


def _header(f: Any, where: str) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """(shape, dtype, Fortran order, offset of the data) of an array, read without trusting it."""
    magic = f.read(8)
    if len(magic) < 8 or magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ArtefactError(f"{where}: not a NumPy array")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(f.read(width), "little")
    if length > _MAX_HEADER:
        raise ArtefactError(f"{where}: an array header of {length} bytes")
    text = f.read(length)
    try:
        head = ast.literal_eval(text.decode("utf-8" if magic[6] == 3 else "latin1").strip())
        shape, fortran = tuple(head["shape"]), bool(head["fortran_order"])
        dtype = np.dtype(head["descr"])
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("a negative size")
    except (SyntaxError, ValueError, TypeError, KeyError, UnicodeDecodeError, RecursionError, MemoryError) as e:
        raise ArtefactError(f"{where}: damaged array header") from e
    if dtype.hasobject:
        raise ArtefactError(
            f"{where}: holds Python objects (a pickle), which are never loaded", hint="save plain integer arrays"
        )
    if dtype.kind not in "iufUSb":
        raise ArtefactError(f"{where}: holds {dtype}, expected integers or text")
    return shape, dtype, fortran, 8 + width + length


def _data(
    z: zipfile.ZipFile, info: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype, fortran: bool, offset: int
) -> np.ndarray:
    with z.open(info) as f:
        f.read(offset)
        return _shaped(f.read(), shape, dtype, fortran)


def _shaped(data: bytes, shape: tuple[int, ...], dtype: np.dtype, fortran: bool) -> np.ndarray:
    if len(data) != int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize:
        raise ArtefactError("an array ends too early")
    if dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def stats_from(arrays: dict[str, np.ndarray], where: str) -> ExpertStats:
    """Statistics from the arrays of a file (counts already per logical expert); ArtefactError names the field."""
    unknown = sorted(set(arrays) - set(_ARRAYS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _ARRAYS, 1)
        hint = f"did you mean {near[0]}?" if near else f"arrays of this file: {', '.join(_ARRAYS)}"
        raise ArtefactError(f"{where}: unknown array {unknown[0]!r}", hint=hint)
    if "counts" not in arrays:
        raise ArtefactError(f"{where}: array 'counts' is missing", hint="int64 [steps, layers, experts]")
    counts = counts_from(arrays["counts"], f"{where}: counts")
    steps, layers, _ = counts.shape

    def vector(name: str, length: int, kinds: str) -> np.ndarray | None:
        got = arrays.get(name)
        if got is None:
            return None
        if got.shape != (length,) or got.dtype.kind not in kinds:
            raise ArtefactError(f"{where}: {name} is {got.dtype} {list(got.shape)}, expected [{length}]")
        return got

    def scalar(name: str, kinds: str) -> Any:
        got = arrays.get(name)
        if got is None:
            return None
        if got.size != 1 or got.dtype.kind not in kinds:
            raise ArtefactError(f"{where}: {name} is {got.dtype} {list(got.shape)}, expected one value")
        return got.reshape(-1)[0].item()

    tokens, ids, kinds = (
        vector("tokens", steps, "iu"),
        vector("layer_ids", layers, "iu"),
        vector("layer_kinds", layers, "U"),
    )
    top_k, ep = scalar("top_k", "iu") or None, scalar("ep", "iu") or None
    if tokens is not None and (tokens < 0).any():
        raise ArtefactError(
            f"{where}: tokens of step {int((tokens < 0).argmax())} is {tokens.min()}, expected 0 or more"
        )
    if tokens is not None and top_k is not None:
        most = counts.sum(axis=2).max(axis=1)
        wrong = most > tokens.astype(np.int64) * top_k
        if wrong.any():
            m = int(wrong.argmax())
            raise ArtefactError(
                f"{where}: step {m} routed {most[m]} tokens, tokens x top_k allows {int(tokens[m]) * top_k}"
            )
    digests = scalar("config_digest", "U") or "", scalar("weights_digest", "U") or "", scalar("tool_version", "U") or ""
    try:
        return ExpertStats(
            counts, tuple(range(layers)) if ids is None else tuple(int(k) for k in ids),
            None if tokens is None else tokens.astype(np.int64), () if kinds is None else tuple(map(str, kinds)),
            top_k, ep, *digests,
        )  # fmt: skip
    except ArtefactError as e:
        raise ArtefactError(f"{where}: {e.message}", hint=e.hint) from e


def read_stats(path: Path, limit: int = MAX_ARRAY_BYTES) -> ExpertStats:
    """The statistics file at ``path``; ArtefactError when it is damaged, hostile or not one."""
    return stats_from(read_npz(path, limit), str(path))
