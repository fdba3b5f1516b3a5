// Sixteen f32 lanes as a compiler vector, bf16 conversion, exp, and the one matrix product of this folder.
//
// Every result depends on its own row only: a product of row r and output o always runs over K in the same steps into
// one accumulator of sixteen lanes, and the lanes are always added by the same tree, whatever the tile around them.
// The sources are built without contraction of a * b + c, so that element-wise code rounds as it is written.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#include "call.h"

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t B16 __attribute__((vector_size(16)));

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define HALF_LANES 1
#include "pairs.h"
INLINE U16 from_u16(H16 h) { return from_u16((__m256i)h); }
INLINE U16 from_u8(B16 b) { return from_u8((__m128i)b); }
#else
#if defined(__SSE2__)
#include <immintrin.h>
#endif
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I16){__VA_ARGS__})
#endif
#define PERMUTE(a, ...) SHUFFLE(a, a, __VA_ARGS__)

INLINE I16 to_int(F16 x) { return __builtin_convertvector(x, I16); }
INLINE F16 to_float(I16 x) { return __builtin_convertvector(x, F16); }
#if defined(__AVX512F__)  // one instruction each; of the general form the compiler makes up to seventy
INLINE U16 from_u16(H16 h) { return (U16)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE U16 from_u8(B16 b) { return (U16)_mm512_cvtepu8_epi32((__m128i)b); }
INLINE H16 to_u16(U16 v) { return (H16)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE B16 to_u8(U16 v) { return (B16)_mm512_cvtepi32_epi8((__m512i)v); }
#else
INLINE U16 from_u16(H16 h) { return __builtin_convertvector(h, U16); }
INLINE U16 from_u8(B16 b) { return __builtin_convertvector(b, U16); }
INLINE H16 to_u16(U16 v) { return __builtin_convertvector(v, H16); }
INLINE B16 to_u8(U16 v) { return __builtin_convertvector(v, B16); }
#endif

INLINE F16 fma16(F16 a, F16 b, F16 c) {
#if defined(__AVX512F__)
    return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// Lanes folded by halves: i + (i + 8), then 4, 2, 1.
INLINE float sum16(F16 v) {
#if defined(__AVX512F__)
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float a[16];
    std::memcpy(a, &v, sizeof a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
#endif
}
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
// b where either is NaN: a value that shall stay NaN is the second
#if defined(__AVX512F__)
INLINE F16 larger(F16 a, F16 b) { return (F16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE F16 smaller(F16 a, F16 b) { return (F16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE F16 larger(F16 a, F16 b) { return pick(a > b, a, b); }
INLINE F16 smaller(F16 a, F16 b) { return pick(a < b, a, b); }
#endif
INLINE F16 magnitude(F16 a) { return (F16)((U16)a & 0x7fffffffu); }

// bf16 is the upper half of an f32.
INLINE F16 widen(H16 h) { return (F16)(from_u16(h) << 16); }
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
    return (H16)to_u16((r & ~nan) | (nan & 0x7fc0u));
}

INLINE F16 load_bf16(const uint16_t* p, int64_t n) {
    return widen(n >= 16 ? load<H16>(p) : load_some<H16>(p, n));
}
INLINE F16 load_f32(const float* p, int64_t n) { return n >= 16 ? load<F16>(p) : load_some<F16>(p, n); }
INLINE void store_bf16(uint16_t* p, F16 x, int64_t n) {
    H16 h = to_bf16(x);
    if (n >= 16) std::memcpy(p, &h, 32);  // a constant size: an instruction, not a call
    else std::memcpy(p, &h, 2 * n);
}

// The largest lane; NaN if all are.
INLINE float max16(F16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float a[16], m;
    std::memcpy(a, &v, sizeof a);
    m = a[0];
    for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
    return m;
#endif
}

#ifndef HALF_LANES
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
#endif

// exp to about one unit in the last place; 0 below the smallest normal number, NaN of NaN.
INLINE F16 exp16(F16 x) {
    I16 tiny = x < -87.3f;
    x = smaller(splat(88.7f), larger(splat(-87.3f), x));
    const F16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    F16 n = (x * 1.44269504f + shift) - shift;
    F16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    F16 p = splat(1.0f / 5040);  // Taylor: |r| <= ln 2 / 2 leaves 5e-9
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma16(p, r, splat(c));
    I16 bits = (I16)p + (to_int(n) << 23);
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

INLINE void put_lanes(float* y, F16 v, int64_t n) {
    if (n >= 16) std::memcpy(y, &v, 64);
    else std::memcpy(y, &v, 4 * n);
}
INLINE void put_lanes(uint16_t* y, F16 v, int64_t n) { store_bf16(y, v, n); }

#ifdef HALF_LANES
// Sixteen registers of eight lanes: a tile has four sums of sixteen lanes, the rows are widened once per call, and the
// order of every sum is that of the tiles of other processors.

INLINE __m256 widen8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE __m256 lanes8(const uint16_t* p) { return widen8(p); }
INLINE __m256 lanes8(const float* p) { return _mm256_loadu_ps(p); }

// R rows of f32 times O outputs, R * O = 4; K a multiple of 16
template <int R, int O, class T>
INLINE void half_tile(const float* x, int64_t ldx, const T* const* w, int64_t K, float* sums) {
    __m256 low[4], high[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) low[i] = high[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < K; k += 16) {
#pragma GCC unroll 4
        for (int o = 0; o < O; o++) {
            const __m256 a = lanes8(w[o] + k), b = lanes8(w[o] + k + 8);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                low[r * O + o] = _mm256_fmadd_ps(_mm256_loadu_ps(x + r * ldx + k), a, low[r * O + o]);
                high[r * O + o] = _mm256_fmadd_ps(_mm256_loadu_ps(x + r * ldx + k + 8), b, high[r * O + o]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[i] = sum16(F16{(f32x8)low[i], (f32x8)high[i]});
}

INLINE float wide(float x) { return x; }
INLINE float wide(uint16_t x) { return widen(x); }
INLINE void put_lane(float* y, float v) { *y = v; }
INLINE void put_lane(uint16_t* y, float v) { *y = to_bf16(splat(v))[0]; }

// y[r, o] = x[r] . w[o] in f32, rounded to Y. x [rows, K] with ldx elements between rows, w [outs, K], y with ldy.
template <class E, class Y>
void product(const typename E::T* x, int64_t ldx, int64_t rows, const typename E::T* w, int64_t ldw, int64_t outs,
             int64_t K, Y* y, int64_t ldy) {
    using T = typename E::T;
    const int64_t ld = (K + 15) / 16 * 16;
    float* rows_f32 = scratch<float, 10>(rows * ld + 16);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < K; k++) rows_f32[r * ld + k] = wide(x[r * ldx + k]);
        std::fill(rows_f32 + r * ld + K, rows_f32 + (r + 1) * ld, 0.0f);
    }
    T* ends = scratch<T, 11>(4 * ld);  // outputs whose length is no multiple of 16
    for (int64_t o = 0; o < outs; o += 4) {
        const T* columns[4];
        for (int64_t i = 0; i < 4; i++) {
            columns[i] = w + (o + i < outs ? o + i : outs - 1) * ldw;
            if (ld == K) continue;
            std::memcpy(ends + i * ld, columns[i], K * sizeof(T));
            std::memset(ends + i * ld + K, 0, (ld - K) * sizeof(T));
            columns[i] = ends + i * ld;
        }
        const int64_t n = outs - o < 4 ? outs - o : 4;
        float sums[4];
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            for (int64_t i = 0; i < n; i++) {
                half_tile<4, 1>(rows_f32 + r * ld, ld, columns + i, ld, sums);
                for (int64_t a = 0; a < 4; a++) put_lane(y + (r + a) * ldy + o + i, sums[a]);
            }
        for (; r < rows; r++) {
            half_tile<1, 4>(rows_f32 + r * ld, ld, columns, ld, sums);
            for (int64_t i = 0; i < n; i++) put_lane(y + r * ldy + o + i, sums[i]);
        }
    }
}
#else
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
#endif
