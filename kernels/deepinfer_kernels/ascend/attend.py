"""TileLang programs of sparse latent attention and of its index for Ascend 950: a query with its heads after the other.

The cube multiplies 64 keys at a time, the two vector cores beside it take half of the heads each: all logits of a query
stay in their memory, so that one softmax over all keys needs no rescaling. Keys are BF16 rows found by place.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

from typing import Any

import tilelang.ascend.language as T

from deepinfer_kernels.ascend.cube import CORES

#: keys of a tile
KEYS = 64
_BF16, _F32 = "bfloat16", "float32"


def attend(*, N: int, D: int, K: int) -> Any:
    """OUT [T, N, D] = softmax(Q · KVᵀ · scale, sink) · KV over the rows at ``PLACES`` [T, K], −1 hidden.

    N is a multiple of 32, D of 16, K of 64.
    """
    n, rows, tiles, half = T.dynamic("T"), T.dynamic("R"), K // KEYS, N // 2

    @T.prim_func
    def attend(
        Q: T.Tensor((n, N, D), _BF16), KV: T.Tensor((rows, D), _BF16), PLACES: T.Tensor((n, K), "int32"),
        SINK: T.Tensor((N,), _F32), OUT: T.Tensor((n, N, D), _BF16), scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            q = T.alloc_l1((N, D), _BF16)
            k = T.alloc_l1((KEYS, D), _BF16)
            v = T.alloc_l1((D, KEYS), _BF16)
            p = T.alloc_l1((N, KEYS), _BF16)
            s = T.alloc_l0c((N, KEYS), _F32)
            o = T.alloc_l0c((N, D), _F32)
            scores = T.alloc_shared((half, KEYS), _F32)
            logits = T.alloc_shared((half, K), _F32)
            weights = T.alloc_shared((half, KEYS), _BF16)
            kept = T.alloc_shared((KEYS, D // 2), _BF16)
            turned = T.alloc_shared((D // 2, KEYS), _BF16)
            places = T.alloc_shared((K,), "int32")
            sink = T.alloc_shared((half,), _F32)
            top = T.alloc_shared((half,), _F32)
            total = T.alloc_shared((half,), _F32)
            T.dual_copy(SINK, sink)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(Q[row, 0:N, 0:D], q)
                T.copy(PLACES[row, 0:K], places)
                for t in T.serial(tiles):
                    for i in T.serial(KEYS):
                        T.copy(KV[T.max(PLACES[row, t * KEYS + i], 0), 0:D], k[i, 0:D])
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    T.dual_copy(s, scores)
                    with T.SimtVF(threads=128):
                        for h, i in T.Parallel(half, KEYS):
                            logits[h, t * KEYS + i] = T.if_then_else(
                                places[t * KEYS + i] >= 0, scores[h, i] * scale, -3.0e38
                            )
                with T.SimtVF(threads=half):
                    for h in T.Parallel(half):
                        best = T.alloc_var(_F32)
                        mass = T.alloc_var(_F32)
                        best = sink[h]
                        for i in T.serial(K):
                            best = T.max(best, logits[h, i])
                        mass = T.exp(sink[h] - best)
                        for i in T.serial(K):
                            mass = mass + T.exp(logits[h, i] - best)
                        top[h] = best
                        total[h] = mass
                for t in T.serial(tiles):
                    for i in T.serial(KEYS):
                        slot = T.max(PLACES[row, t * KEYS + i], 0)
                        T.dual_copy(KV[slot : slot + 1, 0:D], kept[i : i + 1, :])
                    with T.SimtVF(threads=128):
                        # the cube wants the keys along the inner dimension of both operands
                        for d, i in T.Parallel(D // 2, KEYS):
                            turned[d, i] = kept[i, d]
                    with T.SimtVF(threads=128):
                        for h, i in T.Parallel(half, KEYS):
                            weights[h, i] = T.cast(T.exp(logits[h, t * KEYS + i] - top[h]) / total[h], _BF16)
                    T.dual_copy(turned, v)
                    T.dual_copy(weights, p)
                    T.gemm(p, v, o, transpose_B=True, clear_accum=(t == 0))
                T.copy(o, OUT[row, 0:N, 0:D])

    return attend


def index_scores(*, HEADS: int, D: int) -> Any:
    """OUT [T, N] = Σ_h W_h · relu(Q_h · KV_j) of T queries over the N entries of one sequence.

    HEADS and D are multiples of 16. The caller hides what a query may not see.
    """
    n, rows = T.dynamic("T"), T.dynamic("N")
    half = KEYS // 2

    @T.prim_func
    def index_scores(
        Q: T.Tensor((n, HEADS, D), _BF16), W: T.Tensor((n, HEADS), _F32), KV: T.Tensor((rows, D), _BF16),
        OUT: T.Tensor((n, rows), _F32),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            q = T.alloc_l1((HEADS, D), _BF16)
            k = T.alloc_l1((KEYS, D), _BF16)
            s = T.alloc_l0c((HEADS, KEYS), _F32)
            scores = T.alloc_shared((HEADS, half), _F32)
            w = T.alloc_shared((HEADS,), _F32)
            out = T.alloc_shared((1, half), _F32)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(Q[row, 0:HEADS, 0:D], q)
                T.copy(W[row, 0:HEADS], w)
                for t in T.serial(T.ceildiv(rows, KEYS)):
                    T.copy(KV[t * KEYS : (t + 1) * KEYS, 0:D], k)
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    T.dual_copy(s, scores)
                    with T.SimtVF(threads=half):
                        for i in T.Parallel(half):
                            total = T.alloc_var(_F32)
                            total = 0.0
                            for h in T.serial(HEADS):
                                total = total + w[h] * T.max(scores[h, i], 0.0)
                            out[0, i] = total
                    T.dual_copy(out, OUT[row : row + 1, t * KEYS : (t + 1) * KEYS])

    return index_scores
