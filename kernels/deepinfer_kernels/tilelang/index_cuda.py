"""TileLang programs of the lightning indexer's scores: keys of a tile are rows, heads of some queries columns."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false

from pathlib import Path
from typing import Any

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

SOURCE = Path(__file__).with_name("index.cuh").read_text()
PASSES: dict[str, dict[str, Any]] = {}


def index_scores(*, HEADS: int, D: int, QB: int) -> Any:
    """Scores OUT [B, C, n] for Hopper: a block has ``QB`` queries and ``each`` tiles of 128 entries.

    One warp loads keys, two warpgroups take turns on the tensor cores; a row's head sum stays within four lanes.
    """
    B, C, n = T.dynamic("B"), T.dynamic("C"), T.dynamic("n")
    NB = QB * HEADS
    sums = NB // 2
    alone = NB > 128  # on its multiprocessor: the sums take most registers, and loaders give theirs away
    turns = alone  # one multiplies while the other adds up heads; without order they do the same at the same time
    loaders, share, STAGES = (128, 1, 3) if alone else (32, 1, 3) if NB > 64 else (32, 2, 3)

    @T.prim_func
    def index_scores(
        Q: T.Tensor((B, C * HEADS, D), "bfloat16"),
        WEIGHT: T.Tensor((B, C * HEADS), "bfloat16"),
        KEYS: T.Tensor((B, n, D), "bfloat16"),
        VISIBLE: T.Tensor((B, C), "int64"),
        OUT: T.Tensor((B, C, n), "float32"),
        each: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, 128 * each), T.ceildiv(C, QB), B, threads=256 + loaders) as (be, bq, b):
            T.import_source(SOURCE)
            if share > 1:
                T.annotate_min_blocks_per_sm(share)
            q_s = T.alloc_shared((NB, D), "bfloat16")
            k_s = T.alloc_shared((STAGES, 128, D), "bfloat16")
            acc = T.alloc_local((sums,), "float32")
            w = T.alloc_local((NB // 8,), "uint32")
            last = T.alloc_local((1,), "int64")
            full = T.alloc_barrier([loaders] * STAGES)
            empty = T.alloc_barrier([8] * STAGES)
            asked = T.alloc_barrier([loaders])
            T.annotate_layout({q_s: make_full_bank_swizzled_layout(q_s), k_s: make_full_bank_swizzled_layout(k_s)})
            tx = T.get_thread_binding()
            q0, e0 = bq * QB, be * (128 * each)
            last[0] = T.int64(0)
            for i in T.serial(QB):
                if q0 + i < C:
                    last[0] = T.max(last[0], VISIBLE[b, q0 + i])
            # only tiles that some query sees are computed
            seen = T.min(T.min(T.cast(last[0], "int32"), n) - e0 + 127, 128 * each) // 128
            tiles = T.max(seen, 0)
            if tx >= 256:
                if alone:
                    T.dec_max_nreg(40)
                if tiles > 0:
                    T.tma_copy(Q[b, q0 * HEADS : q0 * HEADS + NB, 0:D], q_s, barrier=asked[0])
                    T.mbarrier_arrive(asked[0])
                for k in T.serial(tiles):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(empty[stage], ((k // STAGES) & 1) ^ 1)
                    T.tma_copy(KEYS[b, e0 + k * 128 : e0 + k * 128 + 128, 0:D], k_s[stage, :, :], barrier=full[stage])
                    T.mbarrier_arrive(full[stage])
            else:
                if alone:
                    T.inc_max_nreg(232)
                T.call_extern(
                    "handle",
                    f"ix_weights<{QB}, {HEADS}>",
                    T.access_ptr(w, "w"),
                    T.access_ptr(WEIGHT[b, q0 * HEADS], "r", NB),
                    q0,
                    C,
                )
                group = tx // 128
                if tiles > 0:
                    T.mbarrier_wait_parity(asked[0], 0)
                    if turns and group == 1:
                        T.named_barrier_arrive(5, 256)
                for k in T.serial(tiles):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(full[stage], (k // STAGES) & 1)
                    if turns:
                        T.sync_threads(5 + group, 256)
                    keys = T.alloc_wgmma_desc()
                    queries = T.alloc_wgmma_desc()
                    T.initialize_wgmma_descriptor(keys, k_s.access_ptr("r"), 1, 1, 64)
                    T.initialize_wgmma_descriptor(queries, q_s.access_ptr("r"), 1, 1, 64)
                    T.increase_descriptor_offset(keys, stage * (128 * D * 2) + group * (64 * 128))
                    T.warpgroup_fence_operand(acc, num_regs=sums)
                    T.warpgroup_arrive()
                    for ki in T.unroll(D // 16):
                        T.ptx_wgmma_ss(
                            "float32", f"m64n{NB}k16", True, True, "bf16", "bf16", "fp32",
                            keys.data, ((ki // 4) * (128 * 128) + (ki % 4) * 32) >> 4,
                            queries.data, ((ki // 4) * (NB * 128) + (ki % 4) * 32) >> 4,
                            acc.data, 0, T.if_then_else(ki > 0, 1, 0), 1, 1,
                        )  # fmt: skip
                    T.warpgroup_commit_batch()
                    if turns and (group == 0 or k + 1 < tiles):
                        T.named_barrier_arrive(6 - group, 256)
                    T.warpgroup_wait(0)
                    T.warpgroup_fence_operand(acc, num_regs=sums)
                    if tx % 32 == 0:
                        T.mbarrier_arrive(empty[stage])
                    T.call_extern(
                        "handle", f"ix_scores<{QB}, {HEADS}>", T.access_ptr(acc, "r"), T.access_ptr(w, "r"),
                        T.access_ptr(VISIBLE[b, 0], "r"), T.access_ptr(OUT[b, 0, 0], "w"), q0, C, e0 + k * 128, n,
                    )  # fmt: skip
                T.call_extern(
                    "handle",
                    f"ix_hidden<{QB}, 256>",
                    T.access_ptr(OUT[b, 0, 0], "w"),
                    q0,
                    C,
                    e0 + tiles * 128,
                    e0 + 128 * each,
                    n,
                )

    return index_scores


def index_scores_blackwell(*, HEADS: int, D: int, QB: int) -> Any:
    """As ``index_scores`` on Blackwell: sums of two tiles by turns in the tensor cores' memory; a thread per entry."""
    B, C, n = T.dynamic("B"), T.dynamic("C"), T.dynamic("n")
    NB, part, STAGES = QB * HEADS, min(32, HEADS), 3

    @T.prim_func
    def index_scores_blackwell(
        Q: T.Tensor((B, C * HEADS, D), "bfloat16"),
        WEIGHT: T.Tensor((B, C * HEADS), "bfloat16"),
        KEYS: T.Tensor((B, n, D), "bfloat16"),
        VISIBLE: T.Tensor((B, C), "int64"),
        OUT: T.Tensor((B, C, n), "float32"),
        each: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, 128 * each), T.ceildiv(C, QB), B, threads=192) as (be, bq, b):
            T.import_source(SOURCE)
            q_s = T.alloc_shared((NB, D), "bfloat16")
            k_s = T.alloc_shared((STAGES, 128, D), "bfloat16")
            w_s = T.alloc_shared((NB,), "float32")
            sums = T.alloc_tmem((128, 2 * NB), "float32")
            dots = T.alloc_fragment((128, part), "float32")
            score = T.alloc_fragment((128,), "float32")
            last = T.alloc_local((1,), "int64")
            asked = T.alloc_barrier([32])
            loaded = T.alloc_barrier([32] * STAGES)
            consumed = T.alloc_barrier([1] * STAGES)
            summed = T.alloc_barrier([1] * 2)
            read = T.alloc_barrier([128] * 2)
            tx = T.get_thread_binding()
            q0, e0 = bq * QB, be * (128 * each)
            last[0] = T.int64(0)
            for i in T.serial(QB):
                if q0 + i < C:
                    last[0] = T.max(last[0], VISIBLE[b, q0 + i])
            seen = T.min(T.min(T.cast(last[0], "int32"), n) - e0 + 127, 128 * each) // 128
            tiles = T.max(seen, 0)
            if tx < 128:
                for i in T.Parallel(NB):
                    w_s[i] = T.if_then_else(q0 * HEADS + i < C * HEADS, WEIGHT[b, q0 * HEADS + i], 0.0)
                for k in T.serial(tiles):
                    half = k % 2
                    T.mbarrier_wait_parity(summed[half], (k // 2) & 1)
                    for q in T.serial(QB):
                        T.clear(score)
                        for c in T.serial(HEADS // part):
                            T.copy(
                                sums[:, half * NB + q * HEADS + c * part : half * NB + q * HEADS + (c + 1) * part], dots
                            )
                            for i in T.Parallel(128):
                                for h in T.serial(part):
                                    score[i] += (
                                        T.call_extern("float32", "ix_relu", dots[i, h]) * w_s[q * HEADS + c * part + h]
                                    )
                        if q0 + q < C:
                            for i in T.Parallel(128):
                                if e0 + k * 128 + i < n:
                                    OUT[b, q0 + q, e0 + k * 128 + i] = T.if_then_else(
                                        T.cast(e0 + k * 128 + i, "int64") < VISIBLE[b, q0 + q],
                                        score[i],
                                        -T.infinity("float32"),
                                    )
                    T.mbarrier_arrive(read[half])
                T.call_extern(
                    "handle", f"ix_hidden<{QB}, 128>", T.access_ptr(OUT[b, 0, 0], "w"), q0, C, e0 + tiles * 128,
                    e0 + 128 * each, n,
                )  # fmt: skip
            elif tx < 160:
                if tiles > 0:
                    T.tma_copy(Q[b, q0 * HEADS : q0 * HEADS + NB, 0:D], q_s, barrier=asked[0])
                    T.mbarrier_arrive(asked[0])
                for k in T.serial(tiles):
                    stage = k % STAGES
                    T.mbarrier_wait_parity(consumed[stage], ((k // STAGES) & 1) ^ 1)
                    T.tma_copy(KEYS[b, e0 + k * 128 : e0 + k * 128 + 128, 0:D], k_s[stage, :, :], barrier=loaded[stage])
                    T.mbarrier_arrive(loaded[stage])
            else:
                if tiles > 0:
                    T.mbarrier_wait_parity(asked[0], 0)
                for k in T.serial(tiles):
                    stage, half = k % STAGES, k % 2
                    T.mbarrier_wait_parity(loaded[stage], (k // STAGES) & 1)
                    T.mbarrier_wait_parity(read[half], ((k // 2) & 1) ^ 1)
                    T.tcgen05_gemm(
                        k_s[stage, :, :], q_s, sums[:, half * NB : half * NB + NB], transpose_B=True, clear_accum=True,
                        mbar=consumed[stage],
                    )  # fmt: skip
                    T.tcgen05_mma_arrive(summed[half])

    return index_scores_blackwell
