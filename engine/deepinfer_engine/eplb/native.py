"""Build, load and call the compiled inner loops (``loops.cpp``, plain C++ through ctypes).

The library is built by ``deepinfer build-kernels``, or on first use, into the kernel cache. ``load`` raises
NotReadyError with the reason; falling back is the caller's decision.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.eplb import moments, placement
from deepinfer_engine.eplb.loops import NumpyWindow, Window
from deepinfer_engine.eplb.moments import LayerMoments
from deepinfer_engine.eplb.search import SearchRules, sharpness
from deepinfer_engine.errors import NotReadyError
from deepinfer_kernels import cpp, processes
from deepinfer_kernels.kernel_cache import default_cache

#: No reassociation and no contraction: the compiled loops must return the bits of the numpy ones. They make no
#: infinity, no NaN and nothing that depends on the sign of a zero: minima and maxima may be single instructions.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-std=c++17",
    "-shared",
    "-fPIC",
)

SOURCE = cpp.Source("eplb", Path(__file__).with_name("loops.cpp"), FLAGS)

#: Columns are padded to a cache line.
COLUMN_STEPS = 16

_I64 = ctypes.c_int64
_PTR = ctypes.c_void_p
_F64 = ctypes.c_double


def load(cache: Path | None = None, compiler: str | None = None) -> NativeLoops:
    """The compiled loops, built by ``compiler`` ($CXX, else g++) if no compiler has built them in the kernel cache yet.

    Raises NotReadyError with the reason.
    """
    cache = cache or default_cache()
    path = SOURCE.intact(cache) or _built(cache, compiler)
    try:
        return NativeLoops(ctypes.CDLL(str(path)))
    except OSError as e:
        raise NotReadyError(f"cannot load {path}: {e}", hint="delete it, or plan with --loop numpy") from e


def _built(cache: Path, compiler: str | None) -> Path:
    try:
        found = cpp.Compiler.find(compiler)
        (made,) = cpp.build([SOURCE], found, cache)
    except processes.BuildError as e:
        raise NotReadyError(
            str(e), hint="install g++, give --cache-dir a writable folder, or plan with --loop numpy"
        ) from e
    if made.path is None:
        raise NotReadyError(
            f"{found.path} could not build {SOURCE.path.name}: {made.detail}", hint="plan with --loop numpy"
        )
    return made.path


def _at(a: np.ndarray) -> int:
    return a.ctypes.data


def _bound(lib: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Any:
    call = getattr(lib, name)
    call.argtypes, call.restype = arguments, result
    return call


def _taken(spare: np.ndarray | None, shape: tuple[int, ...], kind: type) -> np.ndarray:
    """An array of ``shape`` in the memory of ``spare`` where that has this shape, else a new one: fresh pages cost more
    than what is computed in them."""
    return spare if spare is not None and spare.shape == shape else np.empty(shape, kind)


class NativeWindow:
    """One layer's counts as int32 columns [E, M of ``ld``], steps without tokens left out.

    The covariance that ``moments`` returns is the window's memory too.
    """

    def __init__(self, loops: NativeLoops, columns_EM: np.ndarray, tokens_M: np.ndarray, spare: Window | None):
        self.loops, self.columns_EM, self.tokens_M = loops, columns_EM, tokens_M
        self.tokens = float(tokens_M.sum())
        size = (columns_EM.shape[0],) * 2
        self.cov_EE = _taken(spare.cov_EE if isinstance(spare, NativeWindow) else None, size, np.float64)

    def moments(self, ahead: bool = True) -> LayerMoments:
        (experts, ld), steps = self.columns_EM.shape, len(self.tokens_M)
        blocks = moments.block_count(steps)
        at_B = np.array(moments.block_starts(steps, max(blocks, 1)), np.int64)
        block_BE = np.empty((len(at_B) - 1, experts), np.int64)
        self.loops.block_sums(_at(self.columns_EM), ld, experts, _at(at_B), len(block_BE), _at(block_BE))
        total_E, block_BE = block_BE.sum(axis=0), block_BE[:blocks]
        mean_E, recent = moments.expected(total_E, block_BE, ahead)
        tokens = int(total_E.sum())
        per_step = float(tokens) / steps
        if steps < moments.MIN_STEPS:
            return LayerMoments(total_E, mean_E, moments.noise_only(mean_E, per_step), steps, per_step)
        cov_EE = self.cov_EE
        self.loops.covariance(
            _at(self.columns_EM), steps, experts, ld, _at(self.tokens_M), _at(block_BE), blocks, tokens, _at(mean_E),
            _at(cov_EE),
        )  # fmt: skip
        return LayerMoments(total_E, mean_E, cov_EE, steps, per_step, recent)

    def peak_sum(self, slot_RS: np.ndarray, copies_E: np.ndarray) -> int:
        slot_RS = np.ascontiguousarray(slot_RS, np.int64)
        copies_E = np.ascontiguousarray(copies_E, np.int64)
        (experts, ld), steps, most = self.columns_EM.shape, len(self.tokens_M), int(self.tokens_M.max(initial=0))
        return self.loops.peaks(
            _at(self.columns_EM), steps, experts, ld, most, _at(slot_RS), _at(copies_E), *slot_RS.shape
        )


class NativeLoops:
    """``Loops`` through the compiled library; thread-safe (no state, and ctypes releases the interpreter lock)."""

    name = "compiled"

    def __init__(self, lib: ctypes.CDLL):
        self._columns = _bound(lib, "dl_columns", _I64, _PTR, _I64, _I64, _I64, _I64, _PTR, _PTR)
        self.block_sums = _bound(lib, "dl_block_sums", None, _PTR, _I64, _I64, _PTR, _I64, _PTR)
        self.covariance = _bound(lib, "dl_covariance", None, _PTR, _I64, _I64, _I64, _PTR, _PTR, _I64, _I64, _PTR, _PTR)
        self.peaks = _bound(lib, "dl_peak_sum", _I64, _PTR, _I64, _I64, _I64, _I64, _PTR, _PTR, _I64, _I64)
        self._counts = _bound(lib, "dl_replica_counts", None, _PTR, _I64, _I64, _I64, _PTR)
        self._place = _bound(lib, "dl_longest_first", _I64, _PTR, _PTR, _PTR, _I64, _I64, _I64, _PTR)
        self._search = _bound(
            lib, "dl_swap_search", _I64, _PTR, _I64, _I64, _I64, _PTR, _PTR, _PTR, _F64, _F64, _F64, _I64, _PTR
        )

    def window(self, counts_ME: np.ndarray, spare: Window | None = None) -> Window:
        counts_ME, stride = _rows(counts_ME)
        steps, experts = counts_ME.shape
        ld = -(-steps // COLUMN_STEPS) * COLUMN_STEPS
        mine = spare.columns_EM if isinstance(spare, NativeWindow) else None
        columns_EM, tokens_M = _taken(mine, (experts, ld), np.int32), np.empty(steps, np.int64)
        if not self._columns(_at(counts_ME), steps, experts, stride, ld, _at(columns_EM), _at(tokens_M)):
            return NumpyWindow(counts_ME)  # counts beyond int32: the same bits, slower
        if not tokens_M.all():
            return self.window(np.ascontiguousarray(counts_ME[tokens_M > 0]), spare)
        return NativeWindow(self, columns_EM, tokens_M, spare)

    def replica_counts(self, weight_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
        cap = placement.replica_cap(len(weight_E), ranks, slots)
        weight_E = np.ascontiguousarray(weight_E, np.int64)
        copies_E = np.empty(len(weight_E), np.int64)
        self._counts(_at(weight_E), len(weight_E), slots - len(weight_E), cap, _at(copies_E))
        return copies_E

    def longest_first(self, weight_E: np.ndarray, copies_E: np.ndarray, ranks: int) -> np.ndarray:
        load_E = placement.replica_load(weight_E, copies_E)
        order_E = np.ascontiguousarray(np.argsort(-load_E, kind="stable"), np.int64)
        copies_E = np.ascontiguousarray(copies_E, np.int64)
        slot_RS = np.empty((ranks, int(copies_E.sum()) // ranks), np.int64)
        shared = self._place(_at(load_E), _at(order_E), _at(copies_E), len(load_E), *slot_RS.shape, _at(slot_RS))
        return placement.separated(slot_RS, load_E, copies_E) if shared else slot_RS

    def swap_search(
        self,
        slot_RS: np.ndarray,
        mean_E: np.ndarray,
        cov_EE: np.ndarray,
        copies_E: np.ndarray,
        rules: SearchRules,
        held_RE: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]:
        slot_RS = np.array(slot_RS, np.int64, order="C")
        mean_E, cov_EE = np.ascontiguousarray(mean_E), np.ascontiguousarray(cov_EE)
        copies_E = np.ascontiguousarray(copies_E, np.int64)
        fresh_RE = None if held_RE is None else np.ascontiguousarray(~held_RE).view(np.uint8)
        swaps = self._search(
            _at(slot_RS), *slot_RS.shape, len(mean_E), _at(mean_E), _at(cov_EE), _at(copies_E),
            sharpness(slot_RS.shape[0]), rules.tol, rules.price, -1 if rules.cap is None else rules.cap,
            None if fresh_RE is None else _at(fresh_RE),
        )  # fmt: skip
        return slot_RS, int(swaps)


def _rows(counts_ME: np.ndarray) -> tuple[np.ndarray, int]:
    """int64 counts with contiguous rows, and the distance between rows in elements; copies only when it must."""
    if counts_ME.dtype != np.int64 or counts_ME.strides[1] != 8 or counts_ME.strides[0] % 8 or counts_ME.strides[0] < 0:
        counts_ME = np.ascontiguousarray(counts_ME, np.int64)
    return counts_ME, counts_ME.strides[0] // 8
