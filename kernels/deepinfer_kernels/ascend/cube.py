"""TileLang programs of matrix products for Ascend 950: tiles of both operands in L1, sums in L0C, f32.

The last tile of rows may be short. Rows of an expert begin on the height of a tile, which is what keeps them apart.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

from typing import Any

import tilelang.ascend.language as T

#: cube cores of an Ascend 950
CORES = 28
#: rows of a tile; K of a step
ROWS, STEP = 128, 128
_BF16, _F32 = "bfloat16", "float32"


def linear(*, OUT: int, IN: int, WIDE: bool = False) -> Any:
    """Y [T, OUT] = X [T, IN] · Wᵀ of bf16 operands, rounded to bf16 unless ``WIDE``."""
    rows = T.dynamic("T")
    wide = 256 if OUT % 256 == 0 else 128 if OUT % 128 == 0 else 64 if OUT % 64 == 0 else 16
    step = STEP if IN % STEP == 0 else 32 if IN % 32 == 0 else 16
    across = OUT // wide

    @T.prim_func
    def linear(
        X: T.Tensor((rows, IN), _BF16), W: T.Tensor((OUT, IN), _BF16),
        Y: T.Tensor((rows, OUT), _F32 if WIDE else _BF16),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            a = T.alloc_l1((ROWS, step), _BF16)
            b = T.alloc_l1((wide, step), _BF16)
            c = T.alloc_l0c((ROWS, wide), _F32)
            for tile in T.Persistent([T.ceildiv(rows, ROWS) * across], CORES, core, group_size=1):
                m = tile // across * ROWS
                n = tile % across * wide
                for k in T.Pipelined(IN // step, num_stages=2):
                    T.copy(X[m : m + ROWS, k * step : (k + 1) * step], a)
                    T.copy(W[n : n + wide, k * step : (k + 1) * step], b)
                    T.gemm(a, b, c, transpose_B=True, clear_accum=(k == 0))
                T.copy(c, Y[m : m + ROWS, n : n + wide])

    return linear


def linear_mx(*, OUT: int, IN: int) -> Any:
    """Y [T, OUT] = X · Wᵀ of E4M3 operands with one E8M0 scale per 32 of K each."""
    rows = T.dynamic("T")
    wide = 256 if OUT % 256 == 0 else 128 if OUT % 128 == 0 else 64
    across = OUT // wide

    @T.prim_func
    def linear_mx(
        X: T.Tensor((rows, IN), "float8_e4m3fn"), XS: T.Tensor((rows, IN // 32), "float8_e8m0fnu"),
        W: T.Tensor((OUT, IN), "float8_e4m3fn"), WS: T.Tensor((OUT, IN // 32), "float8_e8m0fnu"),
        Y: T.Tensor((rows, OUT), _BF16),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            a = T.alloc_l1((ROWS, STEP), "float8_e4m3fn")
            b = T.alloc_l1((wide, STEP), "float8_e4m3fn")
            sa = T.alloc_l1((ROWS, STEP // 32), "float8_e8m0fnu")
            sb = T.alloc_l1((wide, STEP // 32), "float8_e8m0fnu")
            c = T.alloc_l0c((ROWS, wide), _F32)
            for tile in T.Persistent([T.ceildiv(rows, ROWS) * across], CORES, core, group_size=1):
                m = tile // across * ROWS
                n = tile % across * wide
                for k in T.Pipelined(IN // STEP, num_stages=2):
                    T.copy(X[m : m + ROWS, k * STEP : (k + 1) * STEP], a)
                    T.copy(W[n : n + wide, k * STEP : (k + 1) * STEP], b)
                    T.copy(XS[m : m + ROWS, k * STEP // 32 : (k + 1) * STEP // 32], sa)
                    T.copy(WS[n : n + wide, k * STEP // 32 : (k + 1) * STEP // 32], sb)
                    T.gemm_blockscaled(a, b, c, sa, sb, transpose_B=True, clear_accum=(k == 0))
                T.copy(c, Y[m : m + ROWS, n : n + wide])

    return linear_mx


def grouped(*, S: int, OUT: int, IN: int) -> Any:
    """Y [M, OUT] = X [M, IN] · W[slot]ᵀ in bf16; ``SLOTS`` says whose rows a tile has, below 0 it has none."""
    rows, tiles = T.dynamic("M"), T.dynamic("TILES")
    wide = 256 if OUT % 256 == 0 else 128 if OUT % 128 == 0 else 64 if OUT % 64 == 0 else 16
    step = STEP if IN % STEP == 0 else 32 if IN % 32 == 0 else 16
    across = OUT // wide

    @T.prim_func
    def grouped(
        X: T.Tensor((rows, IN), _BF16), W: T.Tensor((S, OUT, IN), _BF16), SLOTS: T.Tensor((tiles,), "int32"),
        Y: T.Tensor((rows, OUT), _BF16),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            a = T.alloc_l1((ROWS, step), _BF16)
            b = T.alloc_l1((wide, step), _BF16)
            c = T.alloc_l0c((ROWS, wide), _F32)
            for tile in T.Persistent([tiles * across], CORES, core, group_size=1):
                m = tile // across * ROWS
                n = tile % across * wide
                slot = SLOTS[tile // across]
                if slot >= 0:
                    for k in T.Pipelined(IN // step, num_stages=2):
                        T.copy(X[m : m + ROWS, k * step : (k + 1) * step], a)
                        T.copy(W[slot, n : n + wide, k * step : (k + 1) * step], b)
                        T.gemm(a, b, c, transpose_B=True, clear_accum=(k == 0))
                    T.copy(c, Y[m : m + ROWS, n : n + wide])

    return grouped
