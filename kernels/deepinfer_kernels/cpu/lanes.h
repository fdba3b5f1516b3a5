// Sixteen f32 lanes as a compiler vector, bf16 conversion, exp, and the one matrix product of this folder.
//
// Every result depends on its own row only: a product of row r and output o always runs over K in the same steps into
// one accumulator of sixteen lanes, and the lanes are always added by the same tree, whatever the tile around them.
// The sources are built without contraction of a * b + c, so that element-wise code rounds as it is written.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t B16 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I16){__VA_ARGS__})
#endif

template <class V, class T> INLINE V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The first n of a vector's elements, zeros behind them.
template <class V, class T> INLINE V load_some(const T* p, int64_t n) {
    V v = {};
    std::memcpy(&v, p, n * sizeof(T));
    return v;
}

INLINE F16 splat(float x) { return F16{} + x; }
INLINE F16 pick(I16 where, F16 yes, F16 no) { return (F16)(((I16)yes & where) | ((I16)no & ~where)); }
INLINE F16 larger(F16 a, F16 b) { return pick(a > b, a, b); }
INLINE F16 smaller(F16 a, F16 b) { return pick(a < b, a, b); }
INLINE F16 magnitude(F16 a) { return (F16)((U16)a & 0x7fffffffu); }

INLINE F16 fma16(F16 a, F16 b, F16 c) {
#if defined(__AVX512F__)
    return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    F16 out;
    for (int half = 0; half < 2; half++) {
        const float* pa = (const float*)&a + 8 * half;
        const float* pb = (const float*)&b + 8 * half;
        const float* pc = (const float*)&c + 8 * half;
        __m256 r = _mm256_fmadd_ps(_mm256_loadu_ps(pa), _mm256_loadu_ps(pb), _mm256_loadu_ps(pc));
        _mm256_storeu_ps((float*)&out + 8 * half, r);
    }
    return out;
#else
    return a * b + c;
#endif
}

// bf16 is the upper half of an f32.
INLINE F16 widen(H16 h) { return (F16)(__builtin_convertvector(h, U16) << 16); }
INLINE float widen(uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// Round to nearest even; NaN stays NaN.
INLINE H16 to_bf16(F16 x) {
    U16 u = (U16)x, nan = (U16)(x != x);
    U16 r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return __builtin_convertvector((r & ~nan) | (nan & 0x7fc0u), H16);
}

INLINE F16 load_bf16(const uint16_t* p, int64_t n) {
    return widen(n >= 16 ? load<H16>(p) : load_some<H16>(p, n));
}
INLINE F16 load_f32(const float* p, int64_t n) { return n >= 16 ? load<F16>(p) : load_some<F16>(p, n); }
INLINE void store_bf16(uint16_t* p, F16 x, int64_t n) {
    H16 h = to_bf16(x);
    std::memcpy(p, &h, 2 * (n < 16 ? n : 16));
}

// Lanes folded by halves: i + (i + 8), then 4, 2, 1.
INLINE float sum16(F16 v) {
    float a[16];
    std::memcpy(a, &v, sizeof a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
INLINE float max16(F16 v) {
    float a[16], m;
    std::memcpy(a, &v, sizeof a);
    m = a[0];
    for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
    return m;
}

// sum16 of sixteen vectors at once: lane i of the result belongs to a[i]; the same tree as sum16.
INLINE F16 sum16x16(const F16 a[16]) {
    F16 t[8], u[4], w[2];
    for (int i = 0; i < 8; i++)
        t[i] = SHUFFLE(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        u[i] = SHUFFLE(t[i], t[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(t[i], t[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        w[i] = SHUFFLE(u[i], u[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(u[i], u[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(w[0], w[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(w[0], w[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// exp to about one unit in the last place; 0 below the smallest normal number.
INLINE F16 exp16(F16 x) {
    I16 tiny = x < -87.3f;
    x = smaller(larger(x, splat(-87.3f)), splat(88.7f));
    const F16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    F16 n = (x * 1.44269504f + shift) - shift;
    F16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    F16 p = splat(1.0f / 5040);  // Taylor: |r| <= ln 2 / 2 leaves 5e-9
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma16(p, r, splat(c));
    I16 bits = (I16)p + (__builtin_convertvector(n, I16) << 23);
    return pick(tiny, F16{}, (F16)bits);
}

// Elements of a product: how many K one step takes, and one step.
struct Float {
    using T = float;
    using V = F16;
    static constexpr int N = 16;
    INLINE F16 step(V x, V w, F16 acc) { return fma16(x, w, acc); }
};
struct Bfloat {
    using T = uint16_t;
    static constexpr int N = 32;
#if defined(__AVX512BF16__)
    typedef __m512i V;
    INLINE F16 step(V x, V w, F16 acc) { return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w); }
#else
    typedef uint16_t V __attribute__((vector_size(64)));
    INLINE F16 step(V x, V w, F16 acc) {
        H16 a[2], b[2];
        std::memcpy(a, &x, 64);
        std::memcpy(b, &w, 64);
        return fma16(widen(a[1]), widen(b[1]), fma16(widen(a[0]), widen(b[0]), acc));
    }
#endif
};

// Sixteen sums of R rows times O outputs, R * O = 16; lane r * O + o.
template <class E, int R, int O>
INLINE F16 product_tile(const typename E::T* const* x, const typename E::T* const* w, int64_t K) {
    F16 acc[16] = {};
    int64_t k = 0;
    for (; k + E::N <= K; k += E::N) {
        typename E::V row[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) row[r] = load<typename E::V>(x[r] + k);
#pragma GCC unroll 16
        for (int o = 0; o < O; o++) {
            auto column = load<typename E::V>(w[o] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r * O + o] = E::step(row[r], column, acc[r * O + o]);
        }
    }
    if (k < K)
        for (int o = 0; o < O; o++)
            for (int r = 0; r < R; r++)
                acc[r * O + o] = E::step(
                    load_some<typename E::V>(x[r] + k, K - k), load_some<typename E::V>(w[o] + k, K - k), acc[r * O + o]);
    return sum16x16(acc);
}

INLINE void put_lanes(float* y, F16 v, int64_t n) { std::memcpy(y, &v, 4 * n); }
INLINE void put_lanes(uint16_t* y, F16 v, int64_t n) { store_bf16(y, v, n); }

// y[r, o] = x[r] . w[o] in f32, rounded to Y. x [rows, K] with ldx elements between rows, w [outs, K], y with ldy.
template <class E, class Y>
void product(const typename E::T* x, int64_t ldx, int64_t rows, const typename E::T* w, int64_t ldw, int64_t outs,
             int64_t K, Y* y, int64_t ldy) {
    using T = typename E::T;
    for (int64_t o = 0; o < outs; o += 16) {
        const int64_t wide = outs - o < 16 ? outs - o : 16;
        const T* columns[16];
        for (int64_t i = 0; i < 16; i++) columns[i] = w + (o + (i < wide ? i : wide - 1)) * ldw;
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            const T* four[4] = {x + r * ldx, x + (r + 1) * ldx, x + (r + 2) * ldx, x + (r + 3) * ldx};
            for (int64_t i = 0; i < wide; i += 4) {
                F16 sums = product_tile<E, 4, 4>(four, columns + i, K);
                Y lanes[16];
                put_lanes(lanes, sums, 16);
                const int64_t n = wide - i < 4 ? wide - i : 4;
                for (int64_t a = 0; a < 4; a++) std::memcpy(y + (r + a) * ldy + o + i, lanes + 4 * a, n * sizeof(Y));
            }
        }
        for (; r < rows; r++) {
            const T* one[1] = {x + r * ldx};
            put_lanes(y + r * ldy + o, product_tile<E, 1, 16>(one, columns, K), wide);
        }
    }
}

// Working memory of the calling thread, kept between calls; ``use`` names independent areas.
template <class T, int use> T* scratch(int64_t n) {
    thread_local std::vector<T> area;
    if ((int64_t)area.size() < n) area.resize(n);
    return area.data();
}

// The same for vectors, on a boundary of their size.
template <int use> U16* aligned_scratch(int64_t n) {
    auto at = (uintptr_t)scratch<uint8_t, use>((n + 1) * sizeof(U16));
    return (U16*)((at + sizeof(U16) - 1) / sizeof(U16) * sizeof(U16));
}
