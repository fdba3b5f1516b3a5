"""TileLang programs of grouped MXFP4 products: weights are the left operand, decoded in the registers it lies in.

Weights lie in tiles of 64 rows and inputs (``in_tiles`` of the reference): 2,048 bytes of codes, as 2 x 256 words, and
32 words of scales. A producer loads them and rows by TMA; two warpgroups decode and multiply a tile's rows each. Rows
lie sorted by slot, blocks find their tile of them from the counts.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false

from math import gcd
from pathlib import Path
from typing import Any

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

SOURCE = Path(__file__).with_name("mxfp4.cuh").read_text()
PASSES: dict[str, dict[str, Any]] = {}


def _product(N, K, BT, TILES, STAGES, ahead, alone, share, GRAIN, gated):
    """OUT [M, N] of rows X [M, K] sorted by slot and weights [S, N, K], for Hopper.

    A block has ``BT`` rows and steps of ``TILES`` tiles, 1 or 2, ``STAGES`` of them in flight. ``ahead``: the next step
    is decoded while one is multiplied, into more registers. ``alone``: a block fills its multiprocessor and its loaders
    give their registers away; otherwise ``share`` blocks do. The last rows of a slot are multiplied in a multiple of
    ``GRAIN`` columns. ``gated``: two weights, one for each warpgroup, whose products become routed activations, 64 per
    block; otherwise one weight and 128 outputs.
    """
    M, S, R, Q = (T.dynamic(n) for n in ("M", "S", "R", "Q"))
    BK = 64 * TILES
    blocks, tiles, width = -(-N // 64), -(-K // 64), 64 if gated else 128
    steps = -(-tiles // TILES)
    sums = BT // 2
    loaders = 128 if alone else 32  # registers are moved between whole warpgroups
    panel, box = BT * 64 * 2, BT if GRAIN == BT else GRAIN if BT <= 64 else gcd(BT, 64)
    finish = f"mx_activate<{BT}>" if gated else f"mx_results<{BT}>"

    @T.macro
    def decode(a, at, k):
        T.call_extern("handle", f"mx_decode<{TILES}>", T.access_ptr(a, "w"), T.access_ptr(at, "r"), k % STAGES)

    @T.macro
    def multiply(a, desc, acc, k, rows):
        T.warpgroup_fence_operand(a, num_regs=BK // 4)
        T.warpgroup_fence_operand(acc, num_regs=sums)
        T.warpgroup_arrive()
        for ki in T.unroll(BK // 16):
            T.ptx_wgmma_rs(
                "float32", f"m64n{rows}k16", True, "bf16", "bf16", "fp32", a.data, ki * 8, desc.data,
                ((k % STAGES) * (BT * BK * 2) + (ki // 4) * panel + (ki % 4) * 32) >> 4, acc.data, 0, 1, 1, 1,
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
            T.mbarrier_arrive(empty[k % STAGES])

    @T.macro
    def one_step(rows, acc, a, desc, at, full, empty, k):
        T.mbarrier_wait_parity(full[k % STAGES], (k // STAGES) & 1)
        decode(a, at, k)
        multiply(a, desc, acc, k, rows)
        drain(a, acc)
        release(empty, k)

    @T.macro
    def step_ahead(a, b, acc, desc, at, full, empty, k, rows):
        """Multiply step k, whose operand is ``a``; decode the next one into ``b`` meanwhile."""
        multiply(a, desc, acc, k, rows)
        if k + 1 < steps:
            T.mbarrier_wait_parity(full[(k + 1) % STAGES], ((k + 1) // STAGES) & 1)
            decode(b, at, k + 1)
        drain(a, acc)
        release(empty, k)

    @T.macro
    def all_steps(rows, acc, a, b, desc, at, full, empty):
        if ahead:
            T.mbarrier_wait_parity(full[0], 0)
            decode(a, at, 0)
            for kk in T.serial(steps // 2):
                step_ahead(a, b, acc, desc, at, full, empty, 2 * kk, rows)
                step_ahead(b, a, acc, desc, at, full, empty, 2 * kk + 1, rows)
            if steps % 2 == 1:
                step_ahead(a, b, acc, desc, at, full, empty, steps - 1, rows)
        else:
            # a stage's addresses are constants where steps are unrolled by stages
            for r in T.serial(steps // STAGES):
                for s in T.unroll(STAGES):
                    one_step(rows, acc, a, desc, at, full, empty, r * STAGES + s)
            for s in T.unroll(steps % STAGES):
                one_step(rows, acc, a, desc, at, full, empty, steps // STAGES * STAGES + s)

    @T.macro
    def steps_of(rows, there, acc, a, b, desc, at, full, empty):
        """All steps with the narrowest product that covers the rows of the tile."""
        if rows <= GRAIN:
            all_steps(rows, acc, a, b, desc, at, full, empty)
        else:
            if there > rows - GRAIN:
                all_steps(rows, acc, a, b, desc, at, full, empty)
            else:
                steps_of(rows - GRAIN, there, acc, a, b, desc, at, full, empty)

    @T.macro
    def body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place):
        x_s = T.alloc_shared((STAGES, TILES, BT, 64), "bfloat16")
        c_s = T.alloc_shared((STAGES, 2, 2 * TILES, 256), "uint32")
        s_s = T.alloc_shared((STAGES, 2, TILES, 32), "uint32")
        acc = T.alloc_local((sums,), "float32")
        a = T.alloc_local((BK // 2,), "bfloat16")
        b = T.alloc_local((BK // 2,), "bfloat16")
        found = T.alloc_local((3,), "int32")
        at = T.alloc_local((2,), "int32")
        full = T.alloc_barrier([loaders] * STAGES)
        empty = T.alloc_barrier([8] * STAGES)
        T.annotate_layout({x_s: make_full_bank_swizzled_layout(x_s)})
        tx = T.get_thread_binding()
        T.call_extern("handle", f"mx_find_tile<{BT}>", T.access_ptr(COUNTS, "r"), S, place, T.access_ptr(found, "w"))
        slot, first, end = found[0], found[1], found[2]
        upper = (slot * blocks + (bn if gated else 2 * bn)) * tiles
        lower = upper if gated else upper + tiles
        if found[0] < S:
            if tx >= 256:
                if alone:
                    T.dec_max_nreg(40)
                for k in T.serial(steps):
                    stage = k % STAGES
                    w1, w3 = upper + k * TILES, lower + k * TILES
                    T.mbarrier_wait_parity(empty[stage], ((k // STAGES) & 1) ^ 1)
                    T.tma_copy(W1[2 * w1 : 2 * w1 + 2 * TILES, 0:256], c_s[stage, 0, :, :], barrier=full[stage])
                    T.tma_copy(W3[2 * w3 : 2 * w3 + 2 * TILES, 0:256], c_s[stage, 1, :, :], barrier=full[stage])
                    T.tma_copy(S1[w1 : w1 + TILES, 0:32], s_s[stage, 0, :, :], barrier=full[stage])
                    T.tma_copy(S3[w3 : w3 + TILES, 0:32], s_s[stage, 1, :, :], barrier=full[stage])
                    for i in T.unroll(BT // box):
                        if i == 0 or first + i * box < end:
                            for p in T.unroll(TILES):
                                k0 = k * BK + p * 64
                                T.tma_copy(
                                    X[first + i * box : first + (i + 1) * box, k0 : k0 + 64],
                                    x_s[stage, p, i * box : (i + 1) * box, :],
                                    barrier=full[stage],
                                )
                    T.mbarrier_arrive(full[stage])
            else:
                if alone:
                    T.inc_max_nreg(232)
                for i in T.unroll(sums):
                    acc[i] = 0.0
                T.call_extern(
                    "handle",
                    f"mx_places<{TILES}>",
                    T.access_ptr(at, "w"),
                    T.access_ptr(c_s, "r"),
                    T.access_ptr(s_s, "r"),
                )
                desc = T.alloc_wgmma_desc()
                T.initialize_wgmma_descriptor(desc, x_s.access_ptr("r"), 1, 1, 64)
                steps_of(BT, end - first, acc, a, b, desc, at, full, empty)
                if gated:
                    T.call_extern(
                        "handle", finish, T.access_ptr(acc, "r"), T.access_ptr(x_s[0, 0, 0, 0], "rw", BT * BK),
                        T.access_ptr(WEIGHT, "r"), T.access_ptr(OUT, "w"), first, end, bn * width, N, limit,
                    )  # fmt: skip
                else:
                    T.call_extern(
                        "handle", finish, T.access_ptr(acc, "r"), T.access_ptr(x_s[0, 0, 0, 0], "rw", BT * BK),
                        T.access_ptr(OUT, "w"), first, end, bn * width, N,
                    )  # fmt: skip

    return _program(body, N, K, (-(-N // width), 256 + loaders, share), gated, ("gate_up", "down"), (M, S, R, Q))


def _program(body, N, K, grid, gated, names, dynamic):
    """The program of one or two weights around a body; ``grid``: tiles of outputs, threads, blocks per processor."""
    tiles, threads, share = grid
    M, S, R, Q = dynamic
    if gated:

        @T.prim_func
        def gate_up(
            X: T.Tensor((M, K), "bfloat16"),
            COUNTS: T.Tensor((S,), "int64"),
            W1: T.Tensor((R, 256), "uint32"),
            S1: T.Tensor((Q, 32), "uint32"),
            W3: T.Tensor((R, 256), "uint32"),
            S3: T.Tensor((Q, 32), "uint32"),
            WEIGHT: T.Tensor((M,), "float32"),
            OUT: T.Tensor((M, N), "bfloat16"),
            limit: T.float32,
            places: T.int32,
        ):
            with T.Kernel(tiles, places, threads=threads) as (bn, place):
                T.import_source(SOURCE)
                if share > 1:
                    T.annotate_min_blocks_per_sm(share)
                body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place)

        return gate_up.with_attr("global_symbol", names[0])

    @T.prim_func
    def down(
        X: T.Tensor((M, K), "bfloat16"),
        COUNTS: T.Tensor((S,), "int64"),
        W2: T.Tensor((R, 256), "uint32"),
        S2: T.Tensor((Q, 32), "uint32"),
        OUT: T.Tensor((M, N), "bfloat16"),
        places: T.int32,
    ):
        with T.Kernel(tiles, places, threads=threads) as (bn, place):
            T.import_source(SOURCE)
            if share > 1:
                T.annotate_min_blocks_per_sm(share)
            body(X, COUNTS, W2, S2, W2, S2, W2, OUT, 0.0, bn, place)

    return down.with_attr("global_symbol", names[1])


def _blackwell(N, K, BT, gated):
    """As ``_product`` on Blackwell: operands are decoded into shared memory, sums lie in the tensor cores' memory."""
    M, S, R, Q = (T.dynamic(n) for n in ("M", "S", "R", "Q"))
    blocks, steps, above, STAGES = -(-N // 64), -(-K // 64), 4 if gated else 2, 3

    @T.macro
    def body(X, COUNTS, W1, S1, W3, S3, WEIGHT, OUT, limit, bn, place):
        x_s = T.alloc_shared((STAGES, BT, 64), "bfloat16")
        c_s = T.alloc_shared((STAGES, above, 2, 256), "uint32")
        s_s = T.alloc_shared((STAGES, above, 1, 32), "uint32")
        w_s = T.alloc_shared((STAGES, 64 * above, 64), "bfloat16")
        gate_t = T.alloc_tmem((128, BT), "float32")
        up_t = T.alloc_tmem((128, BT), "float32") if gated else gate_t
        gate = T.alloc_fragment((128, 32), "float32")
        up = T.alloc_fragment((128, 32), "float32")
        found = T.alloc_local((3,), "int32")
        loaded = T.alloc_barrier([32] * STAGES)
        decoded = T.alloc_barrier([128] * STAGES)
        consumed = T.alloc_barrier([1] * STAGES)
        summed = T.alloc_barrier([1])
        T.annotate_layout({w_s: make_full_bank_swizzled_layout(w_s), x_s: make_full_bank_swizzled_layout(x_s)})
        tx = T.get_thread_binding()
        T.call_extern("handle", f"mx_find_tile<{BT}>", T.access_ptr(COUNTS, "r"), S, place, T.access_ptr(found, "w"))
        slot, first, end = found[0], found[1], found[2]
        n0 = bn * 128
        if found[0] < S:
            if tx < 128:
                for k in T.serial(steps):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(loaded[stage], (k // STAGES) & 1)
                    T.call_extern(
                        "handle", f"mx_spread<{above}>", T.access_ptr(w_s[stage, 0, 0], "w", above * 4096),
                        T.access_ptr(c_s[stage, 0, 0, 0], "r", above * 512),
                        T.access_ptr(s_s[stage, 0, 0, 0], "r", above * 32),
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
                for k in T.serial(steps):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(consumed[stage], ((k // STAGES) & 1) ^ 1)
                    T.tma_copy(X[first : first + BT, k * 64 : (k + 1) * 64], x_s[stage, :, :], barrier=loaded[stage])
                    for i in T.unroll(2):
                        w = (slot * blocks + 2 * bn + i) * steps + k
                        T.tma_copy(W1[2 * w : 2 * w + 2, 0:256], c_s[stage, i, :, :], barrier=loaded[stage])
                        T.tma_copy(S1[w : w + 1, 0:32], s_s[stage, i, :, :], barrier=loaded[stage])
                        if gated:
                            T.tma_copy(W3[2 * w : 2 * w + 2, 0:256], c_s[stage, 2 + i, :, :], barrier=loaded[stage])
                            T.tma_copy(S3[w : w + 1, 0:32], s_s[stage, 2 + i, :, :], barrier=loaded[stage])
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

    return _program(body, N, K, (-(-N // 128), 192, 1), gated, ("gate_up_blackwell", "down_blackwell"), (M, S, R, Q))


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
