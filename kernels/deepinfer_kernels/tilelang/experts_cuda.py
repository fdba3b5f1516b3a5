"""TileLang programs of grouped MXFP4 products: weights are the left operand, decoded in the registers it lies in.

A producer loads codes and rows by TMA; two warpgroups decode and multiply. Rows lie sorted by slot, blocks find their
tile from the counts.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false

from pathlib import Path
from typing import Any

import tilelang.language as T
from tilelang.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_quarter_bank_swizzled_layout,
)

SOURCE = Path(__file__).with_name("mxfp4.cuh").read_text()
PASSES: dict[str, dict[str, Any]] = {}


def _product(N, K, BT, BK, STAGES, ahead, alone, share, pair, GRAIN, gated):
    """Kernel: OUT [M, N] of rows X [M, K] sorted by slot and weights [S, N, K].

    ``gated``: two weights, whose products become routed activations; 64 outputs per tile then, otherwise 128.
    """
    M, S, R, Q = (T.dynamic(n) for n in ("M", "S", "R", "Q"))
    groups, steps, stride, width = BK // 32, K // BK, K // 32, 64 if gated else 128
    swizzled = make_half_bank_swizzled_layout if BK == 128 else make_quarter_bank_swizzled_layout
    tiles = -(-N // width) + (-(-N // width) % 2 if pair else 0)
    sums, apart, words = BT // 2, 64 if gated else 8, 128 * stride // 4
    loaders = 128 if alone else 32  # registers are moved between whole warpgroups
    mask, cluster = (3, 2) if pair else (None, None)
    panel, box = BT * 64 * 2, BT if GRAIN == BT else max(64, GRAIN)
    finish = f"mx_activate<{BT}>" if gated else f"mx_results<{BT}>"

    @T.macro
    def decode(a, c_s, s_s, k):
        T.call_extern(
            "handle", f"mx_decode<{groups}, {apart}>", T.access_ptr(a, "w"),
            T.access_ptr(c_s[k % STAGES, 0, 0], "r", 128 * BK // 2), T.access_ptr(s_s, "r"), stride, k,
        )  # fmt: skip

    @T.macro
    def multiply(a, x_s, acc, k, rows):
        desc = T.alloc_wgmma_desc()
        T.initialize_wgmma_descriptor(desc, x_s.access_ptr("r"), 1, 1, 64)
        T.increase_descriptor_offset(desc, (k % STAGES) * (BT * BK * 2))
        T.warpgroup_fence_operand(a, num_regs=BK // 4)
        T.warpgroup_fence_operand(acc, num_regs=sums)
        T.warpgroup_arrive()
        for ki in T.unroll(BK // 16):
            T.ptx_wgmma_rs(
                "float32", f"m64n{rows}k16", True, "bf16", "bf16", "fp32", a.data, ki * 8, desc.data,
                ((ki // 4) * panel + (ki % 4) * 32) >> 4, acc.data, 0, 1, 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def drain(a, acc):
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(acc, num_regs=sums)
        T.warpgroup_fence_operand(a, num_regs=BK // 4)

    @T.macro
    def release(empty, k):
        if T.get_thread_binding() % 32 == 0:
            if pair:
                T.mbarrier_arrive(empty[k % STAGES], 0)
                T.mbarrier_arrive(empty[k % STAGES], 1)
            else:
                T.mbarrier_arrive(empty[k % STAGES])

    @T.macro
    def step(a, b, acc, x_s, c_s, s_s, full, empty, k, rows):
        """Multiply step k, whose operand is ``a``; decode the next one into ``b`` meanwhile."""
        multiply(a, x_s, acc, k, rows)
        if k + 1 < steps:
            T.mbarrier_wait_parity(full[(k + 1) % STAGES], ((k + 1) // STAGES) & 1)
            decode(b, c_s, s_s, k + 1)
        drain(a, acc)
        release(empty, k)

    @T.macro
    def all_steps(rows, acc, a, b, x_s, c_s, s_s, full, empty):
        if ahead:
            T.mbarrier_wait_parity(full[0], 0)
            decode(a, c_s, s_s, 0)
            for kk in T.serial(steps // 2):
                step(a, b, acc, x_s, c_s, s_s, full, empty, 2 * kk, rows)
                step(b, a, acc, x_s, c_s, s_s, full, empty, 2 * kk + 1, rows)
            if steps % 2 == 1:
                step(a, b, acc, x_s, c_s, s_s, full, empty, steps - 1, rows)
        else:
            for k in T.serial(steps):
                T.mbarrier_wait_parity(full[k % STAGES], (k // STAGES) & 1)
                decode(a, c_s, s_s, k)
                multiply(a, x_s, acc, k, rows)
                drain(a, acc)
                release(empty, k)

    @T.macro
    def steps_of(rows, there, acc, a, b, x_s, c_s, s_s, full, empty):
        """All steps with the narrowest product that covers the rows of the tile."""
        if rows <= GRAIN:
            all_steps(rows, acc, a, b, x_s, c_s, s_s, full, empty)
        else:
            if there > rows - GRAIN:
                all_steps(rows, acc, a, b, x_s, c_s, s_s, full, empty)
            else:
                steps_of(rows - GRAIN, there, acc, a, b, x_s, c_s, s_s, full, empty)

    @T.macro
    def body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place):
        x_s = T.alloc_shared((STAGES, BT, BK), "bfloat16")
        c_s = T.alloc_shared((STAGES, 128, BK // 2), "uint8")
        s_s = T.alloc_shared((-(-words // 256) * 256,), "uint32")
        acc = T.alloc_local((sums,), "float32")
        a = T.alloc_local((BK // 2,), "bfloat16")
        b = T.alloc_local((BK // 2,), "bfloat16")
        found = T.alloc_local((3,), "int32")
        full = T.alloc_barrier([loaders] * STAGES)
        empty = T.alloc_cluster_barrier([16] * STAGES) if pair else T.alloc_barrier([8] * STAGES)
        scaled = T.alloc_barrier([loaders])
        T.annotate_layout({c_s: swizzled(c_s), x_s: make_full_bank_swizzled_layout(x_s)})
        tx = T.get_thread_binding()
        T.call_extern("handle", f"mx_find_tile<{BT}>", T.access_ptr(COUNTS, "r"), S, place, T.access_ptr(found, "w"))
        slot, first, end = found[0], found[1], found[2]
        n0 = bn * width
        row, at = slot * N + n0, (slot * N + n0) * stride // 4
        if found[0] < S:
            if tx >= 256:
                if alone:
                    T.dec_max_nreg(40)
                if gated:
                    T.tma_copy(S1[at : at + words // 2], s_s[0 : words // 2], barrier=scaled[0])
                    T.tma_copy(S3[at : at + words // 2], s_s[words // 2 : words], barrier=scaled[0])
                else:
                    T.tma_copy(S1[at : at + words], s_s[0:words], barrier=scaled[0])
                T.mbarrier_arrive(scaled[0])
                for k in T.serial(steps):
                    stage = k % STAGES
                    k0 = k * (BK // 2)
                    T.mbarrier_wait_parity(empty[stage], ((k // STAGES) & 1) ^ 1)
                    for i in T.unroll(BT // box):
                        if i == 0 or first + i * box < end:
                            T.tma_copy(
                                X[first + i * box : first + (i + 1) * box, k * BK : (k + 1) * BK],
                                x_s[stage, i * box : (i + 1) * box, :],
                                barrier=full[stage],
                                cluster_mask=mask,
                            )
                    if gated:
                        T.tma_copy(W1[row : row + 64, k0 : k0 + BK // 2], c_s[stage, 0:64, :], barrier=full[stage])
                        T.tma_copy(W3[row : row + 64, k0 : k0 + BK // 2], c_s[stage, 64:128, :], barrier=full[stage])
                    else:
                        T.tma_copy(W1[row : row + 128, k0 : k0 + BK // 2], c_s[stage, :, :], barrier=full[stage])
                    T.mbarrier_arrive(full[stage])
            else:
                if alone:
                    T.inc_max_nreg(232)
                for i in T.unroll(sums):
                    acc[i] = 0.0
                T.mbarrier_wait_parity(scaled[0], 0)
                steps_of(BT, end - first, acc, a, b, x_s, c_s, s_s, full, empty)
                if gated:
                    T.call_extern(
                        "handle", finish, T.access_ptr(acc, "r"), T.access_ptr(x_s[0, 0, 0], "rw", BT * BK),
                        T.access_ptr(WEIGHT, "r"), T.access_ptr(OUT, "w"), first, end, n0, N, limit,
                    )  # fmt: skip
                else:
                    T.call_extern(
                        "handle", finish, T.access_ptr(acc, "r"), T.access_ptr(x_s[0, 0, 0], "rw", BT * BK),
                        T.access_ptr(OUT, "w"), first, end, n0, N,
                    )  # fmt: skip
        if pair:
            T.cluster_sync()

    if gated:

        @T.prim_func
        def gate_up(
            X: T.Tensor((M, K), "bfloat16"),
            COUNTS: T.Tensor((S,), "int64"),
            W1: T.Tensor((R, K // 2), "uint8"),
            S1: T.Tensor((Q,), "uint32"),
            W3: T.Tensor((R, K // 2), "uint8"),
            S3: T.Tensor((Q,), "uint32"),
            WEIGHT: T.Tensor((M,), "float32"),
            OUT: T.Tensor((M, N), "bfloat16"),
            limit: T.float32,
            places: T.int32,
        ):
            with T.Kernel(tiles, places, threads=256 + loaders, cluster_dims=cluster) as (bn, place):
                T.import_source(SOURCE)
                if share > 1:
                    T.annotate_min_blocks_per_sm(share)
                body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place)

        return gate_up

    @T.prim_func
    def down(
        X: T.Tensor((M, K), "bfloat16"),
        COUNTS: T.Tensor((S,), "int64"),
        W2: T.Tensor((R, K // 2), "uint8"),
        S2: T.Tensor((Q,), "uint32"),
        OUT: T.Tensor((M, N), "bfloat16"),
        places: T.int32,
    ):
        with T.Kernel(tiles, places, threads=256 + loaders, cluster_dims=cluster) as (bn, place):
            T.import_source(SOURCE)
            if share > 1:
                T.annotate_min_blocks_per_sm(share)
            body(X, COUNTS, W2, S2, W2, S2, W2, OUT, 0.0, bn, place)

    return down


def _blackwell(N, K, BT, gated):
    """As ``_product`` on Blackwell: operands are decoded into shared memory, sums lie in the tensor cores' memory."""
    M, S, R, Q = (T.dynamic(n) for n in ("M", "S", "R", "Q"))
    steps, stride = K // 64, K // 32
    rows, STAGES = 256 if gated else 128, 3
    words = 128 * stride // 4

    @T.macro
    def body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place):
        x_s = T.alloc_shared((STAGES, BT, 64), "bfloat16")
        c_s = T.alloc_shared((STAGES, rows, 32), "uint8")
        w_s = T.alloc_shared((STAGES, rows, 64), "bfloat16")
        s_s = T.alloc_shared((rows // 128 * words,), "uint32")
        gate_t = T.alloc_tmem((128, BT), "float32")
        up_t = T.alloc_tmem((128, BT), "float32") if gated else gate_t
        gate = T.alloc_fragment((128, 32), "float32")
        up = T.alloc_fragment((128, 32), "float32")
        found = T.alloc_local((3,), "int32")
        scaled = T.alloc_barrier([32])
        loaded = T.alloc_barrier([32] * STAGES)
        decoded = T.alloc_barrier([128] * STAGES)
        consumed = T.alloc_barrier([1] * STAGES)
        summed = T.alloc_barrier([1])
        T.annotate_layout(
            {
                c_s: make_quarter_bank_swizzled_layout(c_s),
                w_s: make_full_bank_swizzled_layout(w_s),
                x_s: make_full_bank_swizzled_layout(x_s),
            }
        )
        tx = T.get_thread_binding()
        T.call_extern("handle", f"mx_find_tile<{BT}>", T.access_ptr(COUNTS, "r"), S, place, T.access_ptr(found, "w"))
        slot, first, end = found[0], found[1], found[2]
        n0 = bn * 128
        row, at = slot * N + n0, (slot * N + n0) * stride // 4
        if found[0] < S:
            if tx < 128:
                T.mbarrier_wait_parity(scaled[0], 0)
                for k in T.serial(steps):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(loaded[stage], (k // STAGES) & 1)
                    T.call_extern(
                        "handle", f"mx_spread<{rows}>", T.access_ptr(w_s[stage, 0, 0], "w", rows * 64),
                        T.access_ptr(c_s[stage, 0, 0], "r", rows * 32), T.access_ptr(s_s, "r"), stride, k,
                    )  # fmt: skip
                    T.fence_proxy_async()
                    T.mbarrier_arrive(decoded[stage])
                T.mbarrier_wait_parity(summed[0], 0)
                for part in T.unroll(BT // 32):
                    c0 = part * 32
                    T.copy(gate_t[:, c0 : c0 + 32], gate)
                    if gated:
                        T.copy(up_t[:, c0 : c0 + 32], up)
                    for i, j in T.Parallel(128, 32):
                        if first + c0 + j < end and n0 + i < N:
                            if gated:
                                OUT[first + c0 + j, n0 + i] = T.call_extern(
                                    "float32", "mx_swiglu", gate[i, j], up[i, j], limit, WEIGHT[first + c0 + j]
                                )
                            else:
                                OUT[first + c0 + j, n0 + i] = gate[i, j]
            elif tx < 160:
                T.tma_copy(S1[at : at + words], s_s[0:words], barrier=scaled[0])
                if gated:
                    T.tma_copy(S3[at : at + words], s_s[words : 2 * words], barrier=scaled[0])
                T.mbarrier_arrive(scaled[0])
                for k in T.serial(steps):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(consumed[stage], ((k // STAGES) & 1) ^ 1)
                    T.tma_copy(X[first : first + BT, k * 64 : (k + 1) * 64], x_s[stage, :, :], barrier=loaded[stage])
                    T.tma_copy(W1[row : row + 128, k * 32 : (k + 1) * 32], c_s[stage, 0:128, :], barrier=loaded[stage])
                    if gated:
                        T.tma_copy(
                            W3[row : row + 128, k * 32 : (k + 1) * 32], c_s[stage, 128:256, :], barrier=loaded[stage]
                        )
                    T.mbarrier_arrive(loaded[stage])
            else:
                for k in T.serial(steps):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(loaded[stage], (k // STAGES) & 1)
                    T.mbarrier_wait_parity(decoded[stage], (k // STAGES) & 1)
                    if gated:
                        T.tcgen05_gemm(
                            w_s[stage, 128:256, :],
                            x_s[stage, :, :],
                            up_t,
                            transpose_B=True,
                            clear_accum=k == 0,
                            mbar=None,
                        )
                    T.tcgen05_gemm(
                        w_s[stage, 0:128, :], x_s[stage, :, :], gate_t, transpose_B=True, clear_accum=k == 0,
                        mbar=consumed[stage],
                    )  # fmt: skip
                T.tcgen05_mma_arrive(summed)

    if gated:

        @T.prim_func
        def gate_up_blackwell(
            X: T.Tensor((M, K), "bfloat16"),
            COUNTS: T.Tensor((S,), "int64"),
            W1: T.Tensor((R, K // 2), "uint8"),
            S1: T.Tensor((Q,), "uint32"),
            W3: T.Tensor((R, K // 2), "uint8"),
            S3: T.Tensor((Q,), "uint32"),
            WEIGHT: T.Tensor((M,), "float32"),
            OUT: T.Tensor((M, N), "bfloat16"),
            limit: T.float32,
            places: T.int32,
        ):
            with T.Kernel(T.ceildiv(N, 128), places, threads=192) as (bn, place):
                T.import_source(SOURCE)
                body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place)

        return gate_up_blackwell

    @T.prim_func
    def down_blackwell(
        X: T.Tensor((M, K), "bfloat16"),
        COUNTS: T.Tensor((S,), "int64"),
        W2: T.Tensor((R, K // 2), "uint8"),
        S2: T.Tensor((Q,), "uint32"),
        OUT: T.Tensor((M, N), "bfloat16"),
        places: T.int32,
    ):
        with T.Kernel(T.ceildiv(N, 128), places, threads=192) as (bn, place):
            T.import_source(SOURCE)
            body(X, COUNTS, W2, S2, W2, S2, W2, OUT, 0.0, bn, place)

    return down_blackwell


def gate_up(**sizes: Any) -> Any:
    """Routed activations OUT [M, N] of rows X [M, K] sorted by slot, by gate and up weights [S, N, K]."""
    return _product(**sizes, gated=True)


def down(**sizes: Any) -> Any:
    """Outputs OUT [M, N] of activations X [M, K] sorted by slot, by weights [S, N, K]."""
    return _product(**sizes, gated=False)


def gate_up_blackwell(**sizes: Any) -> Any:
    """As ``gate_up``."""
    return _blackwell(**sizes, gated=True)


def down_blackwell(**sizes: Any) -> Any:
    """As ``down``."""
    return _blackwell(**sizes, gated=False)
