"""TileLang programs of sparse latent attention: a query per block, its heads are the rows of every product."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

from pathlib import Path
from typing import Any

import tilelang.language as T

_RECORDS = Path(__file__).with_name("records.cuh").read_text()
_KEYS = _RECORDS + Path(__file__).with_name("keys.cuh").read_text()
_LOG2E = 1.4426950408889634
BK = 64
#: keys of global records are decoded to their values over this
_UNIT = 1024.0
PASSES = {
    "attend": {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True},
    # what two groups use in turn is used at the same time, which the reuse of shared memory does not see
    "attend_wide": {
        "tl.enable_fast_math": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
    },
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
            values = T.alloc_local((32,), "bfloat16")
            tid = T.get_thread_binding()

            for h, d in T.Parallel(HEADS, D):
                q[h, d] = Q[t, T.min(hb * HEADS + h, N - 1), d]
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
                                f"records::global_chunk<{D}>",
                                T.address_of(ENTRIES[0, 0]),
                                T.cast(slot, "int32"),
                                chunk,
                                T.address_of(values[0]),
                            )
                            if chunk == 0:
                                hidden[row] = T.if_then_else(slot < 0, -T.infinity("float32"), 0.0)
                        for j in T.unroll(4):
                            for v in T.vectorized(8):
                                keys[row, chunk * 32 + j * 8 + v] = values[j * 8 + v]
                T.gemm(q, keys, logit, transpose_B=True, clear_accum=True)
                T.copy(top, last)
                unit_of_keys = T.if_then_else(tile < windows, 1.0, _UNIT)
                for h, k in T.Parallel(HEADS, BK):
                    logit[h, k] = logit[h, k] * (scale * _LOG2E * unit_of_keys) + hidden[k]
                T.reduce_max(logit, top, dim=1, clear=False)
                for h in T.Parallel(HEADS):
                    keep[h] = T.exp2(last[h] - top[h])
                for h, k in T.Parallel(HEADS, BK):
                    logit[h, k] = T.exp2(logit[h, k] - top[h])
                T.reduce_sum(logit, fresh, dim=1)
                for h in T.Parallel(HEADS):
                    total[h] = total[h] * keep[h] + fresh[h]
                T.copy(logit, probs)
                for h in T.Parallel(HEADS):
                    keep[h] = keep[h] * T.if_then_else(tile == windows, 1 / _UNIT, 1.0)
                T.copy(keep, keep_shared)
                for h, d in T.Parallel(HEADS, D):
                    acc[h, d] = acc[h, d] * keep_shared[h]
                T.gemm(probs, keys, acc)
            wide = T.if_then_else(T.min(tiles, part * each + each) > windows, _UNIT, 1.0)
            if SPLIT:
                for h in T.Parallel(HEADS):
                    if hb * HEADS + h < N:
                        STATE[part, t, hb * HEADS + h, 0] = top[h]
                        STATE[part, t, hb * HEADS + h, 1] = total[h]
                for h, d in T.Parallel(HEADS, D):
                    if hb * HEADS + h < N:
                        OUT[part, t, hb * HEADS + h, d] = acc[h, d] * wide
            else:
                for h in T.Parallel(HEADS):
                    total[h] = wide / total[h]
                T.copy(total, total_shared)
                for h, d in T.Parallel(HEADS, D):
                    acc[h, d] = acc[h, d] * total_shared[h]
                T.copy(acc, q)
                for h, d in T.Parallel(HEADS, D):
                    if hb * HEADS + h < N:
                        OUT[t, hb * HEADS + h, d] = q[h, d]

    return attend


def attend_wide(*, N: int, D: int, SPLIT: bool) -> Any:
    """``attend`` of 512 wide keys for 64 heads at a time on Hopper, by four groups of four warps.

    A block goes over every ``blocks``-th job, a part of a query. Two groups copy and decode tiles into two buffers, a
    tile ahead of the other two; of these the first computes the logits of even tiles, the second those of odd ones, and
    each adds every tile to its half of the columns, in two products of a quarter. A tile's maximum waits for that of
    the tile before; its logits do not: they are on their way with the products of the tile before, and begin when the
    slabs of even numbers are made, because what bounds a tile's time is how soon its buffer is free again. Registers of
    a thread: 64 where keys are made, 192 where they are used.
    """
    rows, T_, W, G, S, R, E, P = (T.dynamic(n) for n in ("rows", "T", "W", "G", "S", "R", "E", "P"))
    HEADS, half, quarter, SLABS = 64, D // 2, D // 4, D // 64
    out_shape = (P, T_, N, D) if SPLIT else (T_, N, D)
    out_type = "float32" if SPLIT else "bfloat16"
    state_shape = (P, T_, N, 2) if SPLIT else (P, 1, 1, 2)

    @T.macro
    def score(g, first, q, keys, logit):
        """The products of every other slab of tile buffer g: of those that are made first, or of the others."""
        T.wgmma_gemm(
            q[:, 64 * first : 64 * first + 64],
            keys[g, :, 64 * first : 64 * first + 64],
            logit,
            transpose_B=True,
            clear_accum=first == 0,
        )
        for c in T.unroll(1, SLABS // 2):
            slab = 128 * c + 64 * first
            T.wgmma_gemm(q[:, slab : slab + 64], keys[g, :, slab : slab + 64], logit, transpose_B=True)

    @T.macro
    def peak(g, logit, top, last, keep, hidden, scale):
        """The maximum with the logits of tile buffer g, and what the sums of the tiles before shrink by."""
        for h, k in T.Parallel(HEADS, BK):
            logit[h, k] = logit[h, k] * scale + hidden[g, k]
        T.copy(last, top)
        T.reduce_max(logit, top, dim=1, clear=False)
        for h in T.Parallel(HEADS):
            keep[h] = T.exp2(last[h] - top[h])

    @T.macro
    def weigh(g, logit, top, keep, fresh, tops, keeps, probs):
        """The probabilities of tile buffer g and their sums."""
        for h, k in T.Parallel(HEADS, BK):
            logit[h, k] = T.exp2(logit[h, k] - top[h])
        T.copy(logit, probs[g, :, :])
        T.copy(top, tops[g, :])
        T.copy(keep, keeps[g, :])
        T.fence_proxy_async()
        T.reduce_sum(logit, fresh, dim=1)

    @T.macro
    def add(g, keep, first, second, probs, keys, start, starts_globals):
        """Tile buffer g into a group's columns, which its maximum shrinks first."""
        for h in T.Parallel(HEADS):
            keep[h] *= T.if_then_else(starts_globals, 1 / _UNIT, 1.0)
        for h, d in T.Parallel(HEADS, quarter):
            first[h, d] *= keep[h]
        for h, d in T.Parallel(HEADS, quarter):
            second[h, d] *= keep[h]
        T.wgmma_gemm(probs[g, :, :], keys[g, :, start : start + quarter], first)
        T.wgmma_gemm(probs[g, :, :], keys[g, :, start + quarter : start + half], second)

    @T.macro
    def at_job(job, groups, tiles, each, place):
        """Query, group of heads, part and number of tiles of a job; parts of a query follow each other."""
        place[2] = job % P
        place[1] = job // P % groups
        place[0] = job // P // groups
        place[3] = T.max(0, T.min(each, tiles - place[2] * each))

    @T.macro
    def finish(OUT, keys, t, part, hb, tid, wide, total, first, second, start):
        """A group's columns out: as they are for ``join``, or divided and in their order."""
        if SPLIT:
            for h, d in T.Parallel(HEADS, quarter):
                if hb * HEADS + h < N:
                    OUT[part, t, hb * HEADS + h, start + d] = first[h, d] * wide
            for h, d in T.Parallel(HEADS, quarter):
                if hb * HEADS + h < N:
                    OUT[part, t, hb * HEADS + h, start + quarter + d] = second[h, d] * wide
        else:
            for h in T.Parallel(HEADS):
                total[h] = wide / total[h]
            for h, d in T.Parallel(HEADS, quarter):
                first[h, d] *= total[h]
            for h, d in T.Parallel(HEADS, quarter):
                second[h, d] *= total[h]
            # nobody else reads these columns of the last tile any more
            T.copy(first, keys[1, :, start : start + quarter])
            T.copy(second, keys[1, :, start + quarter : start + half])
            for i in T.unroll(HEADS * half // 8 // 128):
                row = (i * 128 + tid % 128) // (half // 8)
                col = start + (i * 128 + tid % 128) % (half // 8) * 8
                if hb * HEADS + row < N:
                    for v in T.vectorized(8):
                        OUT[t, hb * HEADS + row, col + v] = keys[1, row, col + v]

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
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512) as block:
            T.import_source(_KEYS)
            q = T.alloc_shared((HEADS, D), "bfloat16")
            keys = T.alloc_shared((2, BK, D), "bfloat16")
            probs = T.alloc_shared((2, HEADS, BK), "bfloat16")
            hidden = T.alloc_shared((2, BK), "float32")
            tops = T.alloc_shared((2, HEADS), "float32")
            keeps = T.alloc_shared((2, HEADS), "float32")
            totals = T.alloc_shared((2, HEADS), "float32")
            # of every warp that makes keys, the codes of its eight records of the next tile
            staged = T.alloc_shared((8 * 2048,), "uint8")
            queried = T.alloc_barrier(arrive_count=256)
            asked = T.alloc_barrier(arrive_count=256)
            begun = T.alloc_barrier(arrive_count=[256, 256])
            ready = T.alloc_barrier(arrive_count=[256, 256])
            free = T.alloc_barrier(arrive_count=[256, 256])
            known = T.alloc_barrier(arrive_count=[128, 128])
            logit0 = T.alloc_fragment((HEADS, BK), "float32")
            logit1 = T.alloc_fragment((HEADS, BK), "float32")
            acc0 = T.alloc_fragment((HEADS, quarter), "float32")
            acc1 = T.alloc_fragment((HEADS, quarter), "float32")
            acc2 = T.alloc_fragment((HEADS, quarter), "float32")
            acc3 = T.alloc_fragment((HEADS, quarter), "float32")
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
            codes = T.alloc_local((16,), "uint32")
            scales = T.alloc_local((2,), "uint32")
            sent = T.alloc_local((2,), "uint32")
            at = T.alloc_local((3,), "int32")
            window = T.alloc_local((2,), "int32")
            shared = T.alloc_local((4,), "int32")
            shift = T.alloc_local((1,), "int32")
            behind = T.alloc_local((1,), "int32")
            s = T.alloc_local((1,), "int32")
            unit = T.alloc_local((1,), "float32")
            place = T.alloc_local((4,), "int32")
            after = T.alloc_local((4,), "int32")
            before = T.alloc_local((1,), "int32")
            tid = T.get_thread_binding()

            windows = T.ceildiv(W, BK)
            tiles = windows + T.ceildiv(found, BK)
            groups = T.ceildiv(N, HEADS)
            jobs = T.ceildiv(T_ * groups * P - block, blocks)
            before[0] = 0

            if tid >= 256:
                T.set_max_nreg(64, 0)
                thread = tid - 256
                row = thread // 32 * 8 + thread % 8
                # known by their addresses only, for what these groups share with the others is up to the barriers
                shared[0] = T.call_extern("int32", "keys::shared", T.address_of(q[0, 0]))
                shared[1] = T.call_extern("int32", "keys::shared", T.address_of(keys[0, 0, 0]))
                shared[2] = T.call_extern("int32", "keys::shared", T.address_of(hidden[0, 0]))
                shared[3] = T.call_extern("int32", "keys::shared", T.address_of(staged[0])) + thread // 32 * 2048
                for job in T.serial(jobs):
                    at_job(block + job * blocks, groups, tiles, each, place)
                    t, hb, part, count = place[0], place[1], place[2], place[3]
                    first_global = T.max(0, T.min(count, windows - part * each))
                    shift[0] = (part * each - windows) * BK + row
                    # slots of the next two tiles; behind the last one there are none
                    behind[0] = T.min(found, (part * each + count - windows) * BK)
                    for i in T.unroll(2):
                        at[i] = T.call_extern(
                            "int32",
                            "keys::index",
                            T.address_of(SLOT[t, 0]),
                            shift[0] + (first_global + i) * BK,
                            behind[0],
                        )
                    window[0] = T.call_extern(
                        "int32", "keys::index", T.address_of(WINDOW[t, 0]), part * each * BK + row, W
                    )
                    T.barrier_wait(asked, (job & 1) ^ 1)
                    T.call_extern(
                        "void", "keys::copy_queries", T.address_of(Q[0, 0, 0]), t, hb * HEADS, N, shared[0], thread
                    )
                    T.cp_async_barrier_noinc(queried)
                    T.call_extern(
                        "void",
                        "keys::send",
                        T.address_of(ENTRIES[0, 0]),
                        at[0],
                        shared[3],
                        thread,
                        T.address_of(scales[0]),
                    )
                    if job + 1 < jobs:  # what the next job begins with, into the second-level cache
                        at_job(block + (job + 1) * blocks, groups, tiles, each, after)
                        T.call_extern(
                            "void",
                            "keys::prefetch",
                            T.address_of(Q[0, 0, 0]),
                            after[0] * N + after[1] * HEADS,
                            D * 2,
                            T.min(HEADS, N - after[1] * HEADS),
                            thread,
                        )
                        T.call_extern("void", "keys::prefetch", T.address_of(WINDOW[0, 0]), after[0], W * 8, 1, thread)
                        if found > 0:
                            T.call_extern(
                                "void", "keys::prefetch", T.address_of(SLOT[0, 0]), after[0], found * 8, 1, thread
                            )
                    # an even tile is on its way while the odd one of its pair is sent for
                    for n in T.serial(first_global):
                        s[0] = n % 2
                        window[1] = T.call_extern(
                            "int32", "keys::index", T.address_of(WINDOW[t, 0]), (part * each + n + 1) * BK + row, W
                        )
                        T.barrier_wait(free[s[0]], (before[0] + n // 2 & 1) ^ 1)
                        T.call_extern(
                            "void",
                            "keys::make_window",
                            T.address_of(LOCAL[0, 0]),
                            T.address_of(RINGS[0, 0]),
                            window[0],
                            shared[1] + s[0] * (BK * D * 2),
                            shared[2] + s[0] * (BK * 4),
                            thread,
                        )
                        if n % 2 == 1:
                            T.call_extern("void", "keys::arrived_before")
                            T.barrier_arrive(begun[0])
                            T.barrier_arrive(ready[0])
                            T.call_extern("void", "keys::arrived")
                            T.barrier_arrive(begun[1])
                            T.barrier_arrive(ready[1])
                        window[0] = window[1]
                    if first_global % 2 == 1:
                        T.call_extern("void", "keys::arrived")
                        T.barrier_arrive(begun[0])
                        T.barrier_arrive(ready[0])
                    # the records of a tile are on their way while the one before is decoded, its slots before that
                    for m in T.serial(T.ceildiv(count, 2) * 2 - first_global):
                        n = first_global + m
                        s[0] = n % 2
                        at[2] = T.call_extern(
                            "int32", "keys::index", T.address_of(SLOT[t, 0]), shift[0] + (n + 2) * BK, behind[0]
                        )
                        T.call_extern("void", "keys::receive", shared[3], thread, T.address_of(codes[0]))
                        T.call_extern(
                            "void",
                            "keys::send",
                            T.address_of(ENTRIES[0, 0]),
                            at[1],
                            shared[3],
                            thread,
                            T.address_of(sent[0]),
                        )
                        T.barrier_wait(free[s[0]], (before[0] + n // 2 & 1) ^ 1)
                        T.call_extern(
                            "void",
                            "keys::make_global",
                            T.address_of(codes[0]),
                            T.address_of(scales[0]),
                            0,
                            at[0],
                            shared[1] + s[0] * (BK * D * 2),
                            shared[2] + s[0] * (BK * 4),
                            thread,
                        )
                        T.barrier_arrive(begun[s[0]])
                        T.call_extern(
                            "void",
                            "keys::make_global",
                            T.address_of(codes[0]),
                            T.address_of(scales[0]),
                            1,
                            at[0],
                            shared[1] + s[0] * (BK * D * 2),
                            shared[2] + s[0] * (BK * 4),
                            thread,
                        )
                        for i in T.unroll(2):
                            at[i] = at[i + 1]
                            scales[i] = sent[i]
                        T.barrier_arrive(ready[s[0]])
                    # what was sent for behind the last tile is not to come after what is sent next
                    T.call_extern("void", "keys::arrived")
                    before[0] += T.ceildiv(count, 2)
            elif tid < 128:
                T.set_max_nreg(192, 1)
                for job in T.serial(jobs):
                    at_job(block + job * blocks, groups, tiles, each, place)
                    t, hb, part, count = place[0], place[1], place[2], place[3]
                    pairs = T.ceildiv(count, 2)
                    wide = T.if_then_else(part * each + 2 * pairs > windows, _UNIT, 1.0)
                    T.fill(acc0, 0)
                    T.fill(acc1, 0)
                    for h in T.Parallel(HEADS):
                        total0[h] = T.if_then_else(part == 0, 1.0, 0.0)
                    for h in T.Parallel(HEADS):
                        last0[h] = SINK[T.min(hb * HEADS + h, N - 1)] * _LOG2E
                    T.barrier_wait(queried, job & 1)
                    if pairs > 0:
                        T.barrier_wait(begun[0], before[0] & 1)
                        # here and not where keys are written: a fence waits for the loads that are on their way
                        T.fence_proxy_async()
                        score(0, 0, q, keys, logit0)
                        T.barrier_wait(ready[0], before[0] & 1)
                        T.fence_proxy_async()
                        score(0, 1, q, keys, logit0)
                        T.wait_wgmma(0)
                        if pairs == 1:
                            T.barrier_arrive(asked)
                        unit[0] = T.if_then_else(part * each < windows, 1.0, _UNIT)
                        peak(0, logit0, top0, last0, keep0, hidden, scale * _LOG2E * unit[0])
                        weigh(0, logit0, top0, keep0, fresh0, tops, keeps, probs)
                        T.barrier_arrive(known[0])
                        for h in T.Parallel(HEADS):
                            total0[h] = total0[h] * keep0[h] + fresh0[h]
                        add(0, keep0, acc0, acc1, probs, keys, 0, part * each == windows)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[0])
                    for i in T.serial(pairs - 1):
                        # the odd tile of a pair and the logits of the next even one are multiplied in one go
                        T.barrier_wait(known[1], before[0] + job + i & 1)
                        T.copy(keeps[1, :], keep0)
                        T.copy(tops[1, :], last0)
                        for h in T.Parallel(HEADS):
                            total0[h] = total0[h] * keep0[h]
                        add(1, keep0, acc0, acc1, probs, keys, 0, part * each + 2 * i + 1 == windows)
                        T.barrier_wait(begun[0], before[0] + i + 1 & 1)
                        T.fence_proxy_async()
                        score(0, 0, q, keys, logit0)
                        T.wait_wgmma(SLABS // 2)
                        T.barrier_arrive(free[1])
                        T.barrier_wait(ready[0], before[0] + i + 1 & 1)
                        T.fence_proxy_async()
                        score(0, 1, q, keys, logit0)
                        T.wait_wgmma(0)
                        if i == pairs - 2:
                            T.barrier_arrive(asked)
                        unit[0] = T.if_then_else(part * each + 2 * i + 2 < windows, 1.0, _UNIT)
                        peak(0, logit0, top0, last0, keep0, hidden, scale * _LOG2E * unit[0])
                        weigh(0, logit0, top0, keep0, fresh0, tops, keeps, probs)
                        T.barrier_arrive(known[0])
                        for h in T.Parallel(HEADS):
                            total0[h] = total0[h] * keep0[h] + fresh0[h]
                        add(0, keep0, acc0, acc1, probs, keys, 0, part * each + 2 * i + 2 == windows)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[0])
                    if pairs > 0:
                        T.barrier_wait(known[1], before[0] + job + pairs - 1 & 1)
                        T.copy(keeps[1, :], keep0)
                        for h in T.Parallel(HEADS):
                            total0[h] = total0[h] * keep0[h]
                        add(1, keep0, acc0, acc1, probs, keys, 0, part * each + 2 * pairs - 1 == windows)
                        T.wait_wgmma(0)
                    T.copy(total0, totals[0, :])
                    T.barrier_arrive(known[0])
                    T.barrier_wait(known[1], before[0] + job + pairs & 1)
                    T.copy(totals[1, :], fresh0)
                    for h in T.Parallel(HEADS):
                        total0[h] = total0[h] + fresh0[h]
                    if SPLIT:
                        T.copy(tops[1, :], top0)
                        for h in T.Parallel(HEADS):
                            if hb * HEADS + h < N:
                                STATE[part, t, hb * HEADS + h, 0] = top0[h]
                                STATE[part, t, hb * HEADS + h, 1] = total0[h]
                    finish(OUT, keys, t, part, hb, tid, wide, total0, acc0, acc1, 0)
                    T.barrier_arrive(free[1])
                    before[0] += pairs
            else:
                T.set_max_nreg(192, 1)
                for job in T.serial(jobs):
                    at_job(block + job * blocks, groups, tiles, each, place)
                    t, hb, part, count = place[0], place[1], place[2], place[3]
                    pairs = T.ceildiv(count, 2)
                    wide = T.if_then_else(part * each + 2 * pairs > windows, _UNIT, 1.0)
                    T.fill(acc2, 0)
                    T.fill(acc3, 0)
                    T.fill(total1, 0)
                    T.barrier_wait(queried, job & 1)
                    for i in T.serial(pairs):
                        unit[0] = T.if_then_else(part * each + 2 * i + 1 < windows, 1.0, _UNIT)
                        T.barrier_wait(begun[1], before[0] + i & 1)
                        T.fence_proxy_async()
                        score(1, 0, q, keys, logit1)
                        T.barrier_wait(ready[1], before[0] + i & 1)
                        T.fence_proxy_async()
                        score(1, 1, q, keys, logit1)
                        T.barrier_wait(known[0], before[0] + job + i & 1)
                        T.copy(keeps[0, :], keep1)
                        T.copy(tops[0, :], last1)
                        for h in T.Parallel(HEADS):
                            total1[h] = total1[h] * keep1[h]
                        add(0, keep1, acc2, acc3, probs, keys, half, part * each + 2 * i == windows)
                        # both halves of the even tile may be on their way when the logits of the odd one are there
                        T.wait_wgmma(2)
                        if i == pairs - 1:
                            T.barrier_arrive(asked)
                        peak(1, logit1, top1, last1, keep1, hidden, scale * _LOG2E * unit[0])
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[0])
                        weigh(1, logit1, top1, keep1, fresh1, tops, keeps, probs)
                        T.barrier_arrive(known[1])
                        for h in T.Parallel(HEADS):
                            total1[h] = total1[h] * keep1[h] + fresh1[h]
                        add(1, keep1, acc2, acc3, probs, keys, half, part * each + 2 * i + 1 == windows)
                        T.wait_wgmma(0)
                        if i < pairs - 1:
                            T.barrier_arrive(free[1])
                    T.copy(total1, totals[1, :])
                    T.barrier_arrive(known[1])
                    T.barrier_wait(known[0], before[0] + job + pairs & 1)
                    T.copy(totals[0, :], fresh1)
                    for h in T.Parallel(HEADS):
                        total1[h] = total1[h] + fresh1[h]
                    finish(OUT, keys, t, part, hb, tid, wide, total1, acc2, acc3, half)
                    T.barrier_arrive(free[1])
                    before[0] += pairs

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
