"""TileLang programs of sparse latent attention: a query per block, its heads are the rows of every product."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

from pathlib import Path
from typing import Any

import tilelang.language as T

_RECORDS = Path(__file__).with_name("records.cuh").read_text()
_LOG2E = 1.4426950408889634
BK = 64
PASSES = {
    name: {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True} for name in ("attend", "attend_wide")
}


def attend(*, N: int, D: int, HEADS: int, SPLIT: bool) -> Any:
    """out[t] over W window places and G slots: tiles of 64 keys one after the other, any D that 32 divides."""
    rows, T_, W, G, S, R, E, P = (T.dynamic(n) for n in ("rows", "T", "W", "G", "S", "R", "E", "P"))
    threads = 128 if HEADS < 64 else 256
    chunks = D // 32
    out_shape = (P, T_, N, D) if SPLIT else (T_, N, D)
    out_type = "float32" if SPLIT else "bfloat16"
    state_shape = (P, T_, N, 2) if SPLIT else (P, 1, 1, 2)

    @T.prim_func
    def attend(
        Q: T.Tensor((T_, N, D), "bfloat16"),
        LOCAL: T.Tensor((rows, D), "bfloat16"),
        WINDOW: T.Tensor((T_, W), "int64"),
        RINGS: T.Tensor((R, D + D // 32), "uint8"),
        SLOT: T.Tensor((S, G), "int64"),
        ENTRIES: T.Tensor((E, D // 2 + D // 16), "uint8"),
        SINK: T.Tensor((N,), "float32"),
        OUT: T.Tensor(out_shape, out_type),
        STATE: T.Tensor(state_shape, "float32"),
        scale: T.float32,
        found: T.int32,
        each: T.int32,
    ):
        with T.Kernel(T_, T.ceildiv(N, HEADS), P, threads=threads) as (t, hb, part):
            T.import_source(_RECORDS)
            q = T.alloc_shared((HEADS, D), "bfloat16")
            keys = T.alloc_shared((BK, D), "bfloat16")
            probs = T.alloc_shared((HEADS, BK), "bfloat16")
            hidden = T.alloc_shared((BK,), "float32")
            keep_shared = T.alloc_shared((HEADS,), "float32")
            total_shared = T.alloc_shared((HEADS,), "float32")
            logit = T.alloc_fragment((HEADS, BK), "float32")
            acc = T.alloc_fragment((HEADS, D), "float32")
            top = T.alloc_fragment((HEADS,), "float32")
            last = T.alloc_fragment((HEADS,), "float32")
            keep = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            fresh = T.alloc_fragment((HEADS,), "float32")
            raw = T.alloc_local((8,), "uint32")
            values = T.alloc_local((32,), "bfloat16")
            tid = T.get_thread_binding()

            for h, d in T.Parallel(HEADS, D):
                q[h, d] = T.if_then_else(hb * HEADS + h < N, Q[t, T.min(hb * HEADS + h, N - 1), d], T.bfloat16(0))
            T.fill(acc, 0)
            for h in T.Parallel(HEADS):
                top[h] = SINK[T.min(hb * HEADS + h, N - 1)] * _LOG2E
                total[h] = T.if_then_else(part == 0, 1.0, 0.0)
            windows = T.ceildiv(W, BK)
            tiles = windows + T.ceildiv(found, BK)
            for i in T.serial(T.max(0, T.min(each, tiles - part * each))):
                tile = part * each + i
                for u in T.serial(T.ceildiv(BK * chunks, threads)):
                    unit = u * threads + tid
                    row = unit % BK
                    chunk = unit // BK
                    if unit < BK * chunks:
                        if tile < windows:
                            at = T.if_then_else(
                                tile * BK + row < W, WINDOW[t, T.min(tile * BK + row, W - 1)], T.int64(-1)
                            )
                            T.call_extern(
                                "void",
                                f"records::window_chunk<{D}>",
                                T.address_of(LOCAL[0, 0]),
                                T.address_of(RINGS[0, 0]),
                                T.cast(at, "int32"),
                                chunk,
                                T.address_of(values[0]),
                            )
                            if chunk == 0:
                                hidden[row] = T.if_then_else(at == -1, -T.infinity("float32"), 0.0)
                        else:
                            place = (tile - windows) * BK + row
                            slot = T.if_then_else(place < found, SLOT[t, T.min(place, found - 1)], T.int64(-1))
                            T.call_extern(
                                "void",
                                f"records::fetch_global<{D}>",
                                T.address_of(ENTRIES[0, 0]),
                                T.cast(slot, "int32"),
                                chunk,
                                T.address_of(raw[0]),
                            )
                            T.call_extern(
                                "void", "records::decode_global", T.address_of(raw[0]), T.address_of(values[0])
                            )
                            if chunk == 0:
                                hidden[row] = T.if_then_else(slot < 0, -T.infinity("float32"), 0.0)
                        for j in T.unroll(4):
                            for v in T.vectorized(8):
                                keys[row, chunk * 32 + j * 8 + v] = values[j * 8 + v]
                T.gemm(q, keys, logit, transpose_B=True, clear_accum=True)
                T.copy(top, last)
                for h, k in T.Parallel(HEADS, BK):
                    logit[h, k] = logit[h, k] * (scale * _LOG2E) + hidden[k]
                T.reduce_max(logit, top, dim=1, clear=False)
                for h in T.Parallel(HEADS):
                    keep[h] = T.exp2(last[h] - top[h])
                for h, k in T.Parallel(HEADS, BK):
                    logit[h, k] = T.exp2(logit[h, k] - top[h])
                T.reduce_sum(logit, fresh, dim=1)
                for h in T.Parallel(HEADS):
                    total[h] = total[h] * keep[h] + fresh[h]
                T.copy(logit, probs)
                T.copy(keep, keep_shared)
                for h, d in T.Parallel(HEADS, D):
                    acc[h, d] = acc[h, d] * keep_shared[h]
                T.gemm(probs, keys, acc)
            if SPLIT:
                for h in T.Parallel(HEADS):
                    if hb * HEADS + h < N:
                        STATE[part, t, hb * HEADS + h, 0] = top[h]
                        STATE[part, t, hb * HEADS + h, 1] = total[h]
                for h, d in T.Parallel(HEADS, D):
                    if hb * HEADS + h < N:
                        OUT[part, t, hb * HEADS + h, d] = acc[h, d]
            else:
                T.copy(total, total_shared)
                for h, d in T.Parallel(HEADS, D):
                    if hb * HEADS + h < N:
                        OUT[t, hb * HEADS + h, d] = acc[h, d] / total_shared[h]

    return attend


def attend_wide(*, N: int, D: int, SPLIT: bool, PRODUCERS: int) -> Any:
    """``attend`` of 512 wide keys and up to 64 heads a block on Hopper, by three groups of four warps.

    The last group decodes tiles into two buffers. The first computes the logits of even tiles, the second those of
    odd ones; each adds every tile to its half of the columns. A tile's maximum waits for that of the tile before.
    """
    rows, T_, W, G, S, R, E, P = (T.dynamic(n) for n in ("rows", "T", "W", "G", "S", "R", "E", "P"))
    HEADS, half, ROWS = 64, D // 2, 8 // PRODUCERS
    threads = 256 + 128 * PRODUCERS
    out_shape = (P, T_, N, D) if SPLIT else (T_, N, D)
    out_type = "float32" if SPLIT else "bfloat16"
    state_shape = (P, T_, N, 2) if SPLIT else (P, 1, 1, 2)

    @T.macro
    def softmax(g, logit, top, last, keep, total, fresh, hidden, tops, keeps, probs, scale):
        """The logits of tile buffer g become probabilities, after the maximum of the tile before is known."""
        for h, k in T.Parallel(HEADS, BK):
            logit[h, k] = logit[h, k] * scale + hidden[g, k]
        T.copy(last, top)
        T.reduce_max(logit, top, dim=1, clear=False)
        for h in T.Parallel(HEADS):
            keep[h] = T.exp2(last[h] - top[h])
        for h, k in T.Parallel(HEADS, BK):
            logit[h, k] = T.exp2(logit[h, k] - top[h])
        T.copy(logit, probs[g, :, :])
        T.copy(top, tops[g, :])
        T.copy(keep, keeps[g, :])
        T.reduce_sum(logit, fresh, dim=1)

    @T.macro
    def slots_of(SLOT, t, tile, first, lane, found, at):
        """The slots of this thread's rows of a tile, −1 behind the last one."""
        for r in T.unroll(ROWS):
            at[r] = -1
            if tile * BK + (first + r) * 8 + lane < found:
                at[r] = T.cast(SLOT[t, tile * BK + (first + r) * 8 + lane], "int32")

    @T.macro
    def fetch(ENTRIES, at, r, chunk, raw, place):
        T.call_extern(
            "void",
            f"records::fetch_global<{D}>",
            T.address_of(ENTRIES[0, 0]),
            at[r],
            chunk,
            T.address_of(raw[place * 5]),
        )

    @T.macro
    def decode(raw, place, values):
        T.call_extern("void", "records::decode_global", T.address_of(raw[place * 5]), T.address_of(values[0]))

    @T.macro
    def put(keys, values, s, row, chunk):
        for j in T.unroll(4):
            for v in T.vectorized(8):
                keys[s[0], row, chunk * 32 + j * 8 + v] = values[j * 8 + v]

    @T.prim_func
    def attend_wide(
        Q: T.Tensor((T_, N, D), "bfloat16"),
        LOCAL: T.Tensor((rows, D), "bfloat16"),
        WINDOW: T.Tensor((T_, W), "int64"),
        RINGS: T.Tensor((R, D + D // 32), "uint8"),
        SLOT: T.Tensor((S, G), "int64"),
        ENTRIES: T.Tensor((E, D // 2 + D // 16), "uint8"),
        SINK: T.Tensor((N,), "float32"),
        OUT: T.Tensor(out_shape, out_type),
        STATE: T.Tensor(state_shape, "float32"),
        scale: T.float32,
        found: T.int32,
        each: T.int32,
    ):
        with T.Kernel(T_, T.ceildiv(N, HEADS), P, threads=threads) as (t, hb, part):
            T.import_source(_RECORDS)
            q = T.alloc_shared((HEADS, D), "bfloat16")
            keys = T.alloc_shared((2, BK, D), "bfloat16")
            probs = T.alloc_shared((2, HEADS, BK), "bfloat16")
            hidden = T.alloc_shared((2, BK), "float32")
            tops = T.alloc_shared((2, HEADS), "float32")
            keeps = T.alloc_shared((2, HEADS), "float32")
            totals = T.alloc_shared((2, HEADS), "float32")
            ready = T.alloc_barrier(arrive_count=[128 * PRODUCERS, 128 * PRODUCERS])
            free = T.alloc_barrier(arrive_count=[256, 256])
            known = T.alloc_barrier(arrive_count=[128, 128])
            logit0 = T.alloc_fragment((HEADS, BK), "float32")
            logit1 = T.alloc_fragment((HEADS, BK), "float32")
            acc0 = T.alloc_fragment((HEADS, half), "float32")
            acc1 = T.alloc_fragment((HEADS, half), "float32")
            top0 = T.alloc_fragment((HEADS,), "float32")
            top1 = T.alloc_fragment((HEADS,), "float32")
            last0 = T.alloc_fragment((HEADS,), "float32")
            last1 = T.alloc_fragment((HEADS,), "float32")
            keep0 = T.alloc_fragment((HEADS,), "float32")
            keep1 = T.alloc_fragment((HEADS,), "float32")
            total0 = T.alloc_fragment((HEADS,), "float32")
            total1 = T.alloc_fragment((HEADS,), "float32")
            fresh0 = T.alloc_fragment((HEADS,), "float32")
            fresh1 = T.alloc_fragment((HEADS,), "float32")
            raw = T.alloc_local((4 * 5,), "uint32")
            at = T.alloc_local((ROWS,), "int32")
            coming = T.alloc_local((ROWS,), "int32")
            s = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            values = T.alloc_local((32,), "bfloat16")
            tid = T.get_thread_binding()

            for i in T.serial(T.ceildiv(HEADS * D // 8, threads)):
                unit = i * threads + tid
                if unit < HEADS * D // 8:
                    for v in T.vectorized(8):
                        q[unit // (D // 8), unit % (D // 8) * 8 + v] = Q[
                            t, T.min(hb * HEADS + unit // (D // 8), N - 1), unit % (D // 8) * 8 + v
                        ]
            for h in T.Parallel(HEADS):
                tops[1, h] = SINK[T.min(hb * HEADS + h, N - 1)] * _LOG2E
            windows = T.ceildiv(W, BK)
            tiles = windows + T.ceildiv(found, BK)
            count = T.max(0, T.min(each, tiles - part * each))
            pairs = T.ceildiv(count, 2)
            T.sync_threads()

            if tid >= 256:
                T.set_max_nreg(88, 0)
                lane = tid % 8
                first = (tid - 256) // 128 * ROWS
                chunk = tid % 128 // 8
                for n in T.serial(2 * pairs):
                    s[0] = n % 2
                    tile[0] = T.if_then_else(n < count, part * each + n, tiles)
                    if tile[0] < windows:
                        for r in T.unroll(ROWS):
                            place = tile[0] * BK + (first + r) * 8 + lane
                            at[r] = -1
                            if place < W:
                                at[r] = T.cast(WINDOW[t, place], "int32")
                        T.barrier_wait(free[s[0]], (n // 2 & 1) ^ 1)
                        for r in T.unroll(ROWS):
                            T.call_extern(
                                "void",
                                f"records::window_chunk<{D}>",
                                T.address_of(LOCAL[0, 0]),
                                T.address_of(RINGS[0, 0]),
                                at[r],
                                chunk,
                                T.address_of(values[0]),
                            )
                            put(keys, values, s, (first + r) * 8 + lane, chunk)
                            if chunk == 0:
                                hidden[s[0], (first + r) * 8 + lane] = T.if_then_else(
                                    at[r] == -1, -T.infinity("float32"), 0.0
                                )
                    else:
                        if n == 0 or tile[0] == windows:
                            slots_of(SLOT, t, tile[0] - windows, first, lane, found, at)
                            for r in T.unroll(4):
                                fetch(ENTRIES, at, r, chunk, raw, r)
                        slots_of(
                            SLOT,
                            t,
                            T.if_then_else(n + 1 < count, tile[0] + 1 - windows, tiles),
                            first,
                            lane,
                            found,
                            coming,
                        )
                        T.barrier_wait(free[s[0]], (n // 2 & 1) ^ 1)
                        for r in T.unroll(ROWS):
                            decode(raw, r % 4, values)
                            # four records are always on their way, those of the next tile behind those of this one
                            if r + 4 < ROWS:
                                fetch(ENTRIES, at, r + 4, chunk, raw, r % 4)
                            else:
                                fetch(ENTRIES, coming, r + 4 - ROWS, chunk, raw, r % 4)
                            put(keys, values, s, (first + r) * 8 + lane, chunk)
                            if chunk == 0:
                                hidden[s[0], (first + r) * 8 + lane] = T.if_then_else(
                                    at[r] < 0, -T.infinity("float32"), 0.0
                                )
                        for r in T.unroll(ROWS):
                            at[r] = coming[r]
                    T.fence_proxy_async()
                    T.barrier_arrive(ready[s[0]])
            elif tid < 128:
                T.set_max_nreg(208, 1)
                T.fill(acc0, 0)
                for h in T.Parallel(HEADS):
                    total0[h] = T.if_then_else(part == 0, 1.0, 0.0)
                for i in T.serial(pairs):
                    T.barrier_wait(ready[0], i & 1)
                    T.wgmma_gemm(q, keys[0, :, :], logit0, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    # the second group's last maximum was known before this group added its tile
                    T.copy(tops[1, :], last0)
                    softmax(0, logit0, top0, last0, keep0, total0, fresh0, hidden, tops, keeps, probs, scale * _LOG2E)
                    T.fence_proxy_async()
                    T.barrier_arrive(known[0])
                    for h in T.Parallel(HEADS):
                        total0[h] = total0[h] * keep0[h] + fresh0[h]
                    for h, d in T.Parallel(HEADS, half):
                        acc0[h, d] = acc0[h, d] * keep0[h]
                    T.wgmma_gemm(probs[0, :, :], keys[0, :, :half], acc0)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[0])
                    T.barrier_wait(known[1], i & 1)
                    T.copy(keeps[1, :], keep0)
                    for h in T.Parallel(HEADS):
                        total0[h] = total0[h] * keep0[h]
                    for h, d in T.Parallel(HEADS, half):
                        acc0[h, d] = acc0[h, d] * keep0[h]
                    T.wgmma_gemm(probs[1, :, :], keys[1, :, :half], acc0)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[1])
                T.copy(total0, totals[0, :])
                T.barrier_arrive(known[0])
                T.barrier_wait(known[1], pairs & 1)
                T.copy(totals[1, :], fresh0)
                for h in T.Parallel(HEADS):
                    total0[h] = total0[h] + fresh0[h]
                if SPLIT:
                    T.copy(tops[1, :], top0)
                    for h in T.Parallel(HEADS):
                        if hb * HEADS + h < N:
                            STATE[part, t, hb * HEADS + h, 0] = top0[h]
                            STATE[part, t, hb * HEADS + h, 1] = total0[h]
                    for h, d in T.Parallel(HEADS, half):
                        if hb * HEADS + h < N:
                            OUT[part, t, hb * HEADS + h, d] = acc0[h, d]
                else:
                    for h, d in T.Parallel(HEADS, half):
                        acc0[h, d] = acc0[h, d] / total0[h]
                    T.copy(acc0, q[:, :half])
                    for h, d in T.Parallel(HEADS, half):
                        if hb * HEADS + h < N:
                            OUT[t, hb * HEADS + h, d] = q[h, d]
            else:
                T.set_max_nreg(208, 1)
                T.fill(acc1, 0)
                T.fill(total1, 0)
                for i in T.serial(pairs):
                    T.barrier_wait(ready[1], i & 1)
                    T.wgmma_gemm(q, keys[1, :, :], logit1, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(known[0], i & 1)
                    T.copy(keeps[0, :], keep1)
                    for h in T.Parallel(HEADS):
                        total1[h] = total1[h] * keep1[h]
                    for h, d in T.Parallel(HEADS, half):
                        acc1[h, d] = acc1[h, d] * keep1[h]
                    T.wgmma_gemm(probs[0, :, :], keys[0, :, half:], acc1)
                    T.copy(tops[0, :], last1)
                    softmax(1, logit1, top1, last1, keep1, total1, fresh1, hidden, tops, keeps, probs, scale * _LOG2E)
                    T.fence_proxy_async()
                    T.barrier_arrive(known[1])
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[0])
                    for h in T.Parallel(HEADS):
                        total1[h] = total1[h] * keep1[h] + fresh1[h]
                    for h, d in T.Parallel(HEADS, half):
                        acc1[h, d] = acc1[h, d] * keep1[h]
                    T.wgmma_gemm(probs[1, :, :], keys[1, :, half:], acc1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[1])
                T.copy(total1, totals[1, :])
                T.barrier_arrive(known[1])
                T.barrier_wait(known[0], pairs & 1)
                T.copy(totals[0, :], fresh1)
                for h in T.Parallel(HEADS):
                    total1[h] = total1[h] + fresh1[h]
                if SPLIT:
                    for h, d in T.Parallel(HEADS, half):
                        if hb * HEADS + h < N:
                            OUT[part, t, hb * HEADS + h, half + d] = acc1[h, d]
                else:
                    for h, d in T.Parallel(HEADS, half):
                        acc1[h, d] = acc1[h, d] / total1[h]
                    T.copy(acc1, q[:, half:])
                    for h, d in T.Parallel(HEADS, half):
                        if hb * HEADS + h < N:
                            OUT[t, hb * HEADS + h, half + d] = q[h, half + d]

    return attend_wide


def join(*, N: int, D: int) -> Any:
    """out of P parts that are not yet normalised, added in order."""
    T_, P = T.dynamic("T"), T.dynamic("P")

    @T.prim_func
    def join(
        PART: T.Tensor((P, T_, N, D), "float32"),
        STATE: T.Tensor((P, T_, N, 2), "float32"),
        OUT: T.Tensor((T_, N, D), "bfloat16"),
    ):
        with T.Kernel(T_, N, threads=D // 4 if D <= 2048 else 512) as (t, n):
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            weight = T.alloc_local((1,), "float32")
            acc = T.alloc_fragment((D,), "float32")
            T.fill(acc, 0)
            top[0] = -T.infinity("float32")
            total[0] = 0.0
            for p in T.serial(P):
                top[0] = T.max(top[0], STATE[p, t, n, 0])
            for p in T.serial(P):
                weight[0] = T.exp2(STATE[p, t, n, 0] - top[0])
                total[0] += weight[0] * STATE[p, t, n, 1]
                for d in T.Parallel(D):
                    acc[d] += weight[0] * PART[p, t, n, d]
            for d in T.Parallel(D):
                OUT[t, n, d] = acc[d] / total[0]

    return join
