"""TileLang programs of row-wise operations for Ascend 950.

A core takes one row, or a tile of tokens, after the other; 64 lanes of f32 are one vector register. Widths that are no
multiple of 64 end with a masked step. bf16 is widened when it is loaded and rounded once when it is stored.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

#: vector cores of an Ascend 950: two beside each of its 28 to 32 cube cores; more blocks than cores wait their turn
CORES = 56
#: f32 lanes of a vector register
LANES = 64
#: threads of a SIMT region and tokens of its tile
THREADS = 128

_BF16, _F32 = "bfloat16", "float32"


def _chunks(width: int) -> tuple[int, int]:
    """(registers of a row, lanes of the last one)."""
    count = -(-width // LANES)
    return count, width - (count - 1) * LANES


@T.macro
def _wide(buffer, at):
    """64 bf16 from ``at`` on, as f32."""
    return S.vcvt(S.vld(buffer[at], dist="UNPK_B16"), _F32, part=0)


@T.macro
def _put(buffer, at, value):
    """64 f32 to ``at``, rounded to bf16."""
    S.vsts(buffer[at], S.vcvt(value, _BF16), dist="PK_B32")


def rms_norm(*, H: int) -> Any:
    """w · x / sqrt(mean(x²) + eps), statistic in f32."""
    n, (chunks, tail) = T.dynamic("T"), _chunks(H)

    @T.prim_func
    def rms_norm(X: T.Tensor((n, H), _BF16), WEIGHT: T.Tensor((H,), _BF16), Y: T.Tensor((n, H), _BF16), eps: T.float32):
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((chunks * LANES,), _BF16)
            w = T.alloc_shared((chunks * LANES,), _BF16)
            y = T.alloc_shared((chunks * LANES,), _BF16)
            T.copy(WEIGHT[0:H], w[0:H])
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(X[row, 0:H], x[0:H])
                with T.SimdVF():
                    total = S.alloc_var(_F32)
                    value = S.alloc_var(_F32)
                    total = S.vdup(0.0, _F32)
                    for c in T.serial(chunks - 1):
                        value = _wide(x, c * LANES)
                        S.vmula(total, value, value)
                    inside = S.update_mask(tail, 32)
                    value = _wide(x, (chunks - 1) * LANES)
                    total = S.vadd(total, S.vmul(value, value, mask=inside))
                    mean = S.vadds(S.vmuls(S.vdupv(S.vcadd(total)), 1.0 / H), eps)
                    scale = S.vdiv(S.vdup(1.0, _F32), S.vsqrt(mean))
                    for c in T.serial(chunks):
                        _put(y, c * LANES, S.vmul(S.vmul(_wide(x, c * LANES), scale), _wide(w, c * LANES)))
                T.copy(y[0:H], Y[row, 0:H])

    return rms_norm


def rope(*, N: int, D: int, DR: int, INVERSE: bool) -> Any:
    """Interleaved pairs of the last DR of D values of N heads, turned in place."""
    n, half = T.dynamic("T"), DR // 2

    @T.prim_func
    def rope(X: T.Tensor((n, N, D), _BF16), COS: T.Tensor((n, half), _F32), SIN: T.Tensor((n, half), _F32)):
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((N, DR), _BF16)
            cos = T.alloc_shared((half,), _F32)
            sin = T.alloc_shared((half,), _F32)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(X[row, 0:N, D - DR : D], x)
                T.copy(COS[row, 0:half], cos)
                T.copy(SIN[row, 0:half], sin)
                with T.SimtVF(threads=THREADS):
                    for h, i in T.Parallel(N, half):
                        a = T.cast(x[h, 2 * i], _F32)
                        b = T.cast(x[h, 2 * i + 1], _F32)
                        s = T.if_then_else(INVERSE, -sin[i], sin[i])
                        x[h, 2 * i] = T.cast(a * cos[i] - b * s, _BF16)
                        x[h, 2 * i + 1] = T.cast(a * s + b * cos[i], _BF16)
                T.copy(x, X[row, 0:N, D - DR : D])

    return rope


def swiglu(*, WIDTH: int) -> Any:
    """silu(min(gate, limit)) · clamp(up, ±limit) · weight of the row."""
    n, (chunks, _) = T.dynamic("M"), _chunks(WIDTH)

    @T.prim_func
    def swiglu(
        GATE: T.Tensor((n, WIDTH), _BF16),
        UP: T.Tensor((n, WIDTH), _BF16),
        WEIGHT: T.Tensor((n,), _F32),
        A: T.Tensor((n, WIDTH), _BF16),
        limit: T.float32,
    ):
        with T.Kernel(CORES) as core:
            g = T.alloc_shared((chunks * LANES,), _BF16)
            u = T.alloc_shared((chunks * LANES,), _BF16)
            a = T.alloc_shared((chunks * LANES,), _BF16)
            w = T.alloc_shared((8,), _F32)
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(GATE[row, 0:WIDTH], g[0:WIDTH])
                T.copy(UP[row, 0:WIDTH], u[0:WIDTH])
                T.copy(WEIGHT[row : row + 1], w[0:1])
                with T.SimdVF():
                    scale = S.vld(w[0], dist="BRC_B32")
                    for c in T.serial(chunks):
                        gate = S.vmins(_wide(g, c * LANES), limit)
                        up = S.vmaxs(S.vmins(_wide(u, c * LANES), limit), -limit)
                        silu = S.vdiv(gate, S.vadds(S.vexp(S.vneg(gate)), 1.0))
                        _put(a, c * LANES, S.vmul(S.vmul(silu, up), scale))
                T.copy(a[0:WIDTH], A[row, 0:WIDTH])

    return swiglu


def moe_combine(*, H: int, K: int) -> Any:
    """Sum of a token's K expert rows, found by their places, and its shared expert; f32 in the order of the choices."""
    n, m, (chunks, _) = T.dynamic("T"), T.dynamic("M"), _chunks(H)

    @T.prim_func
    def moe_combine(
        Y: T.Tensor((m, H), _BF16), ORDER: T.Tensor((n, K), "int64"), SHARED: T.Tensor((n, H), _BF16),
        OUT: T.Tensor((n, H), _BF16),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            y = T.alloc_shared((K, chunks * LANES), _BF16)
            s = T.alloc_shared((chunks * LANES,), _BF16)
            out = T.alloc_shared((chunks * LANES,), _BF16)
            for row in T.Persistent([n], CORES, core, group_size=1):
                for k in T.serial(K):
                    T.copy(Y[ORDER[row, k], 0:H], y[k, 0:H])
                T.copy(SHARED[row, 0:H], s[0:H])
                with T.SimdVF():
                    total = S.alloc_var(_F32)
                    for c in T.serial(chunks):
                        total = S.vcvt(S.vld(y[0, c * LANES], dist="UNPK_B16"), _F32, part=0)
                        for k in T.unroll(K - 1, explicit=True):
                            more = S.vcvt(S.vld(y[k + 1, c * LANES], dist="UNPK_B16"), _F32, part=0)
                            total = S.vadd(total, more)
                        _put(out, c * LANES, S.vadd(total, _wide(s, c * LANES)))
                T.copy(out[0:H], OUT[row, 0:H])

    return moe_combine


def mhc_collapse(*, H: int, C: int) -> Any:
    """Weighted sum of a token's C streams."""
    n, (chunks, _) = T.dynamic("T"), _chunks(H)

    @T.prim_func
    def mhc_collapse(X: T.Tensor((n, C, H), _BF16), PRE: T.Tensor((n, C), _F32), Y: T.Tensor((n, H), _BF16)):
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((C, chunks * LANES), _BF16)
            p = T.alloc_shared((8,), _F32)
            y = T.alloc_shared((chunks * LANES,), _BF16)
            for row in T.Persistent([n], CORES, core, group_size=1):
                for c in T.serial(C):
                    T.copy(X[row, c, 0:H], x[c, 0:H])
                T.copy(PRE[row, 0:C], p[0:C])
                with T.SimdVF():
                    total = S.alloc_var(_F32)
                    weight = S.alloc_local((C,), _F32)
                    for c in T.unroll(C, explicit=True):
                        weight[c] = S.vld(p[c], dist="BRC_B32")
                    for i in T.serial(chunks):
                        total = S.vmul(S.vcvt(S.vld(x[0, i * LANES], dist="UNPK_B16"), _F32, part=0), weight[0])
                        for c in T.unroll(C - 1, explicit=True):
                            stream = S.vcvt(S.vld(x[c + 1, i * LANES], dist="UNPK_B16"), _F32, part=0)
                            S.vmula(total, stream, weight[c + 1])
                        _put(y, i * LANES, total)
                T.copy(y[0:H], Y[row, 0:H])

    return mhc_collapse


def mhc_expand(*, H: int, C: int) -> Any:
    """X'_j = post_j · y + Σ_i comb_ij · X_i."""
    n, (chunks, _) = T.dynamic("T"), _chunks(H)

    @T.prim_func
    def mhc_expand(
        X: T.Tensor((n, C, H), _BF16), Y: T.Tensor((n, H), _BF16), POST: T.Tensor((n, C), _F32),
        COMB: T.Tensor((n, C * C), _F32), OUT: T.Tensor((n, C, H), _BF16),
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((C, chunks * LANES), _BF16)
            y = T.alloc_shared((chunks * LANES,), _BF16)
            out = T.alloc_shared((C, chunks * LANES), _BF16)
            post = T.alloc_shared((8,), _F32)
            comb = T.alloc_shared((-(-C * C // 8) * 8,), _F32)
            for row in T.Persistent([n], CORES, core, group_size=1):
                for c in T.serial(C):
                    T.copy(X[row, c, 0:H], x[c, 0:H])
                T.copy(Y[row, 0:H], y[0:H])
                T.copy(POST[row, 0:C], post[0:C])
                T.copy(COMB[row, 0 : C * C], comb[0 : C * C])
                with T.SimdVF():
                    total = S.alloc_var(_F32)
                    for j in T.unroll(C, explicit=True):
                        for i in T.serial(chunks):
                            total = S.vmul(_wide(y, i * LANES), S.vld(post[j], dist="BRC_B32"))
                            for c in T.unroll(C, explicit=True):
                                stream = S.vcvt(S.vld(x[c, i * LANES], dist="UNPK_B16"), _F32, part=0)
                                S.vmula(total, stream, S.vld(comb[c * C + j], dist="BRC_B32"))
                            S.vsts(out[j, i * LANES], S.vcvt(total, _BF16), dist="PK_B32")
                for c in T.serial(C):
                    T.copy(out[c, 0:H], OUT[row, c, 0:H])

    return mhc_expand


def engram_hash(*, LAGS: int, HEADS: int) -> Any:
    """Table rows of the n-grams that end at each token: products and their xor in int64, then a remainder per table."""
    n, columns = T.dynamic("T"), (LAGS - 1) * HEADS

    @T.prim_func
    def engram_hash(
        CLASSES: T.Tensor((n, LAGS), "int64"),
        MULTIPLIERS: T.Tensor((LAGS,), "int64"),
        PRIMES: T.Tensor((columns,), "int64"),
        OFFSETS: T.Tensor((columns,), "int64"),
        IDS: T.Tensor((n, columns), "int64"),
        pad_class: T.int64,
    ):
        with T.Kernel(CORES) as core:
            classes = T.alloc_shared((THREADS, LAGS), "int64")
            factors = T.alloc_shared((LAGS,), "int64")
            primes = T.alloc_shared((columns,), "int64")
            offsets = T.alloc_shared((columns,), "int64")
            ids = T.alloc_shared((THREADS, columns), "int64")
            T.copy(MULTIPLIERS, factors)
            T.copy(PRIMES, primes)
            T.copy(OFFSETS, offsets)
            for tile in T.Persistent([T.ceildiv(n, THREADS)], CORES, core, group_size=1):
                first = tile * THREADS
                count = T.min(THREADS, n - first)
                T.copy(CLASSES[first : first + count, :], classes[:count, :])
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        value = T.alloc_var("int64")
                        blocked = T.alloc_var("int32")
                        if t < count:
                            value = 0
                            blocked = 0
                            for lag in T.unroll(LAGS):
                                if classes[t, lag] < 0:
                                    blocked = 1  # from the first hidden token on, older ones count as padding
                                token = T.if_then_else(blocked == 1, pad_class, classes[t, lag])
                                value = T.bitwise_xor(value, token * factors[lag])
                                if lag > 0:
                                    for h in T.unroll(HEADS):
                                        column = (lag - 1) * HEADS + h
                                        # T.truncmod is C's remainder; the reference's is never negative
                                        rest = T.truncmod(value, primes[column])
                                        ids[t, column] = (
                                            T.if_then_else(rest < 0, rest + primes[column], rest) + offsets[column]
                                        )
                T.copy(ids[:count, :], IDS[first : first + count, :])

    return engram_hash


def gate_topk(*, E: int, K: int, NORMALISE: bool) -> Any:
    """K experts of the largest sqrt(softplus(logit)) + bias, ascending; their weights without the bias.

    One bias for all tokens; the bias per token of image spans has no form.
    """
    n, tokens = T.dynamic("T"), 32

    @T.prim_func
    def gate_topk(
        LOGITS: T.Tensor((n, E), _F32), BIAS: T.Tensor((E,), _F32), IDS: T.Tensor((n, K), "int64"),
        WEIGHTS: T.Tensor((n, K), _F32), scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            logits = T.alloc_shared((tokens, E), _F32)
            score = T.alloc_shared((tokens, E), _F32)
            bias = T.alloc_shared((E,), _F32)
            ids = T.alloc_shared((tokens, K), "int64")
            weights = T.alloc_shared((tokens, K), _F32)
            T.copy(BIAS, bias)
            for tile in T.Persistent([T.ceildiv(n, tokens)], CORES, core, group_size=1):
                first = tile * tokens
                count = T.min(tokens, n - first)
                T.copy(LOGITS[first : first + count, :], logits[:count, :])
                with T.SimtVF(threads=THREADS):
                    for t, e in T.Parallel(tokens, E):
                        score[t, e] = _sqrt_softplus(logits[t, e])
                with T.SimtVF(threads=tokens):
                    for t in T.Parallel(tokens):
                        best = T.alloc_var(_F32)
                        last = T.alloc_var(_F32)
                        total = T.alloc_var(_F32)
                        chosen = T.alloc_var("int32")
                        before = T.alloc_var("int32")
                        mine = T.alloc_local((K,), "int32")
                        last = 3.0e38
                        before = -1
                        total = 0.0
                        for k in T.unroll(K):
                            best = -3.0e38
                            chosen = 0
                            for e in T.serial(E):
                                biased = score[t, e] + bias[e]
                                # after the last one: a smaller score, or the same of a later expert
                                if (biased < last or (biased == last and e > before)) and biased > best:
                                    best = biased
                                    chosen = e
                            last = best
                            before = chosen
                            mine[k] = chosen
                        for i in T.unroll(K - 1):  # ascending by id: K is small
                            for j in T.unroll(K - 1 - i):
                                if mine[j] > mine[j + 1]:
                                    chosen = mine[j]
                                    mine[j] = mine[j + 1]
                                    mine[j + 1] = chosen
                        for k in T.unroll(K):
                            total = total + score[t, mine[k]]
                        for k in T.unroll(K):
                            ids[t, k] = T.cast(mine[k], "int64")
                            if NORMALISE and K > 1:
                                weights[t, k] = score[t, mine[k]] / (total + 1e-20) * scale
                            else:
                                weights[t, k] = score[t, mine[k]] * scale
                T.copy(ids[:count, :], IDS[first : first + count, :])
                T.copy(weights[:count, :], WEIGHTS[first : first + count, :])

    return gate_topk


def _sqrt_softplus(x):
    """sqrt(log1p(exp(x))), to 1e-6 of it: below 0.1 the series of log1p, because 1 + e forgets what it adds, and the
    simplifier undoes a correction; beyond 20 exp swamps the 1, where torch's softplus switches too."""
    e = T.exp(T.min(x, 20.0))
    series = 0.0
    for n in range(7, 0, -1):
        series = (1.0 if n % 2 else -1.0) / n + e * series
    return T.sqrt(T.if_then_else(x > 20.0, x, T.if_then_else(e < 0.1, e * series, T.log(1.0 + e))))


def mhc_coefficients(*, H: int, C: int, PARTS: int, ITERS: int) -> Any:
    """PRE, POST, COMB of a token from the sums of its streams with the rows of ``fn``, given in PARTS that add up.

    The product is the cube's: with ``fn`` in three bf16 parts it has the bits of f32 that matter.
    """
    n, M, (chunks, tail) = T.dynamic("T"), C * (C + 2), _chunks(C * H)

    @T.prim_func
    def mhc_coefficients(
        X: T.Tensor((n, C * H), _BF16), SUMS: T.Tensor((n, PARTS * M), _F32), BASE: T.Tensor((M,), _F32),
        SCALE: T.Tensor((3,), _F32), PRE: T.Tensor((n, C), _F32), POST: T.Tensor((n, C), _F32),
        COMB: T.Tensor((n, C * C), _F32), rms_eps: T.float32, hc_eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((chunks * LANES,), _BF16)
            sums = T.alloc_shared((PARTS * M,), _F32)
            base = T.alloc_shared((M,), _F32)
            scale = T.alloc_shared((8,), _F32)
            squares = T.alloc_shared((LANES,), _F32)
            pre = T.alloc_shared((8,), _F32)
            post = T.alloc_shared((8,), _F32)
            comb = T.alloc_shared((C * C,), _F32)
            T.copy(BASE, base)
            T.copy(SCALE[0:3], scale[0:3])
            for row in T.Persistent([n], CORES, core, group_size=1):
                T.copy(X[row, 0 : C * H], x[0 : C * H])
                T.copy(SUMS[row, 0 : PARTS * M], sums)
                with T.SimdVF():
                    total = S.alloc_var(_F32)
                    value = S.alloc_var(_F32)
                    total = S.vdup(0.0, _F32)
                    for c in T.serial(chunks - 1):
                        value = _wide(x, c * LANES)
                        S.vmula(total, value, value)
                    inside = S.update_mask(tail, 32)
                    value = _wide(x, (chunks - 1) * LANES)
                    total = S.vadd(total, S.vmul(value, value, mask=inside))
                    S.vsts(squares[0], S.vdupv(S.vcadd(total)))
                with T.SimtVF(threads=32):
                    for one in T.Parallel(32):
                        if one == 0:  # a token's few coefficients, one after the other
                            norm = T.alloc_var(_F32)
                            top = T.alloc_var(_F32)
                            total_1 = T.alloc_var(_F32)
                            m = T.alloc_local((C, C), _F32)
                            norm = 1.0 / T.sqrt(squares[0] / (C * H) + rms_eps)
                            for i in T.unroll(M):
                                total_1 = sums[i]
                                for p in T.unroll(PARTS - 1):
                                    total_1 = total_1 + sums[(p + 1) * M + i]
                                if i < C:
                                    pre[i] = _sigmoid(total_1 * norm * scale[0] + base[i]) + hc_eps
                                elif i < 2 * C:
                                    post[i - C] = 2.0 * _sigmoid(total_1 * norm * scale[1] + base[i])
                                else:
                                    m[(i - 2 * C) // C, (i - 2 * C) % C] = total_1 * norm * scale[2] + base[i]
                            for i in T.unroll(C):
                                top = m[i, 0]
                                for j in T.unroll(C):
                                    top = T.max(top, m[i, j])
                                total_1 = 0.0
                                for j in T.unroll(C):
                                    m[i, j] = T.exp(m[i, j] - top)
                                    total_1 = total_1 + m[i, j]
                                for j in T.unroll(C):
                                    m[i, j] = m[i, j] / total_1 + hc_eps
                            for j in T.unroll(C):
                                total_1 = hc_eps
                                for i in T.unroll(C):
                                    total_1 = total_1 + m[i, j]
                                for i in T.unroll(C):
                                    m[i, j] = m[i, j] / total_1
                            for _ in T.serial(ITERS - 1):
                                for i in T.unroll(C):
                                    total_1 = hc_eps
                                    for j in T.unroll(C):
                                        total_1 = total_1 + m[i, j]
                                    for j in T.unroll(C):
                                        m[i, j] = m[i, j] / total_1
                                for j in T.unroll(C):
                                    total_1 = hc_eps
                                    for i in T.unroll(C):
                                        total_1 = total_1 + m[i, j]
                                    for i in T.unroll(C):
                                        m[i, j] = m[i, j] / total_1
                            for i in T.unroll(C):
                                for j in T.unroll(C):
                                    comb[i * C + j] = m[i, j]
                T.copy(pre[0:C], PRE[row, 0:C])
                T.copy(post[0:C], POST[row, 0:C])
                T.copy(comb, COMB[row, 0 : C * C])

    return mhc_coefficients


def _sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


def engram_gate(*, H: int, C: int) -> Any:
    """The memory's value mixed into C streams by the sigmoid of a signed root of their product with its keys."""
    n, (chunks, tail) = T.dynamic("T"), _chunks(H)

    @T.prim_func
    def engram_gate(
        X: T.Tensor((n, C, H), _BF16), KV: T.Tensor((n, C + 1, H), _BF16), WEIGHT: T.Tensor((C, H), _F32),
        LIVE: T.Tensor((n,), _F32), OUT: T.Tensor((n, C, H), _BF16), GATE: T.Tensor((n, C), _F32), eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(CORES) as core:
            x = T.alloc_shared((chunks * LANES,), _BF16)
            k = T.alloc_shared((chunks * LANES,), _BF16)
            v = T.alloc_shared((chunks * LANES,), _BF16)
            w = T.alloc_shared((chunks * LANES,), _F32)
            out = T.alloc_shared((chunks * LANES,), _BF16)
            live = T.alloc_shared((8,), _F32)
            sums = T.alloc_shared((3, LANES), _F32)
            gate = T.alloc_shared((8,), _F32)
            for row, c in T.Persistent([n, C], CORES, core, group_size=1):
                T.copy(X[row, c, 0:H], x[0:H])
                T.copy(KV[row, c, 0:H], k[0:H])
                T.copy(KV[row, C, 0:H], v[0:H])
                T.copy(WEIGHT[c, 0:H], w[0:H])
                T.copy(LIVE[row : row + 1], live[0:1])
                with T.SimdVF():
                    dot = S.alloc_var(_F32)
                    xx = S.alloc_var(_F32)
                    kk = S.alloc_var(_F32)
                    dot = S.vdup(0.0, _F32)
                    xx = S.vdup(0.0, _F32)
                    kk = S.vdup(0.0, _F32)
                    for i in T.serial(chunks):
                        inside = S.update_mask(T.if_then_else(i == chunks - 1, tail, LANES), 32)
                        a = S.vmuls(_wide(x, i * LANES), 1.0, mask=inside)
                        b = S.vmuls(_wide(k, i * LANES), 1.0, mask=inside)
                        weight = S.vmuls(S.vld(w[i * LANES]), 1.0, mask=inside)
                        dot = S.vadd(dot, S.vmul(S.vmul(a, weight), b))
                        S.vmula(xx, a, a)
                        S.vmula(kk, b, b)
                    S.vsts(sums[0, 0], S.vdupv(S.vcadd(dot)))
                    S.vsts(sums[1, 0], S.vdupv(S.vcadd(xx)))
                    S.vsts(sums[2, 0], S.vdupv(S.vcadd(kk)))
                with T.SimtVF(threads=32):
                    for one in T.Parallel(32):
                        if one == 0:
                            d = T.alloc_var(_F32)
                            root = T.alloc_var(_F32)
                            d = sums[0, 0] / T.sqrt(sums[1, 0] / H + eps) / T.sqrt(sums[2, 0] / H + eps) * (H**-0.5)
                            root = T.sqrt(T.max(T.abs(d), 1e-6))
                            gate[0] = _sigmoid(T.if_then_else(d < 0.0, -root, root)) * live[0]
                with T.SimdVF():
                    scale = S.vld(gate[0], dist="BRC_B32")
                    mixed = S.alloc_var(_F32)
                    for i in T.serial(chunks):
                        mixed = _wide(x, i * LANES)
                        S.vmula(mixed, scale, _wide(v, i * LANES))
                        _put(out, i * LANES, mixed)
                T.copy(out[0:H], OUT[row, c, 0:H])
                T.copy(gate[0:1], GATE[row, c : c + 1])

    return engram_gate
