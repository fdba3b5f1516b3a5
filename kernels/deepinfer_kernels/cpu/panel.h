// The product of bf16 rows with bf16 weights, by panels: sixteen outputs are turned so that one vector holds the same
// two elements of K for each of them, and a row then needs no sums across lanes. Turning costs about as much as three
// rows, so this is right from the first row on.
//
// Every output of every row is one lane that runs over K in pairs, folded into a total every FOLD pairs.
#pragma once
#include "lanes.h"

static const int64_t FOLD = 256;  // pairs; keeps the rounding error of a long sum near that of a short one

#ifdef HALF_LANES
// Eight bf16 weights of eight outputs, turned: f32 vector k holds element k of all eight.
INLINE void turn_eight(const __m128i v[8], float* out, int64_t step) {
    __m128i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m128i even = _mm_unpacklo_epi64(b[i], b[i + 4]), odd = _mm_unpackhi_epi64(b[i], b[i + 4]);
        _mm256_store_ps(out + 2 * i * step, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(even), 16)));
        _mm256_store_ps(out + (2 * i + 1) * step, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(odd), 16)));
    }
}

// w [outs <= 16, K] -> panel [K, 16] f32; missing outputs are zero
INLINE void turn_panel(const uint16_t* w, int64_t ldw, int64_t outs, int64_t K, float* panel) {
    for (int64_t side = 0; side < 16; side += 8)
        for (int64_t k = 0; k < K; k += 8) {
            __m128i v[8];
            const int64_t left = K - k;
            for (int64_t o = 0; o < 8; o++) {
                v[o] = _mm_setzero_si128();
                if (side + o >= outs) continue;
                const uint16_t* from = w + (side + o) * ldw + k;
                if (left >= 8) v[o] = _mm_loadu_si128((const __m128i*)from);
                else std::memcpy(&v[o], from, 2 * left);
            }
            turn_eight(v, panel + k * 16 + side, 16);
        }
}

// Weights as bf16 rows.
struct Rows {
    const uint16_t* w;
    int64_t ld;

    // sixteen outputs from ``o`` on, of which there are ``outs``
    void panel(int64_t o, int64_t outs, int64_t K, float* out) const { turn_panel(w + o * ld, ld, outs, K, out); }
};

// The first n of eight lanes, at most all.
INLINE void put_half(float* y, __m256 v, int64_t n) {
    if (n >= 8) return _mm256_storeu_ps(y, v);
    if (n > 0) std::memcpy(y, &v, 4 * n);
}
INLINE void put_half(uint16_t* y, __m256 v, int64_t n) {
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    if (n >= 8) return _mm_storeu_si128((__m128i*)y, half);
    if (n > 0) std::memcpy(y, &half, 2 * n);
}

// R rows times V panels of sixteen outputs; every output is one lane that runs over K in order, folded every FOLD pairs.
template <int R, int V, class Y>
INLINE void panel_tile(const float* x, int64_t ldx, const float* panel, int64_t ldp, int64_t K, Y* y, int64_t ldy,
                       int64_t outs) {
    __m256 total[R * V * 2];
    for (int64_t start = 0; start < K; start += 2 * FOLD) {
        __m256 acc[R * V * 2];
#pragma GCC unroll 16
        for (int i = 0; i < R * V * 2; i++) acc[i] = _mm256_setzero_ps();
        const int64_t end = start + 2 * FOLD < K ? start + 2 * FOLD : K;
        for (int64_t k = start; k < end; k++) {
            __m256 w[2 * V];
#pragma GCC unroll 8
            for (int v = 0; v < 2 * V; v++) w[v] = _mm256_load_ps(panel + (v / 2) * ldp + k * 16 + 8 * (v % 2));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256 both = _mm256_broadcast_ss(x + r * ldx + k);
#pragma GCC unroll 8
                for (int v = 0; v < 2 * V; v++) acc[r * V * 2 + v] = _mm256_fmadd_ps(both, w[v], acc[r * V * 2 + v]);
            }
        }
        if (start == 0) {
#pragma GCC unroll 16
            for (int i = 0; i < R * V * 2; i++) total[i] = _mm256_add_ps(_mm256_setzero_ps(), acc[i]);
        } else {
            for (int i = 0; i < R * V * 2; i++) total[i] = _mm256_add_ps(total[i], acc[i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; v++) put_half(y + r * ldy + 8 * v, total[r * V * 2 + v], outs - 8 * v);
}

template <int R, int V, class Y>
void panel_group(const float* x, int64_t ldx, const float* panel, int64_t ldp, int64_t K, Y* y, int64_t ldy,
                 int64_t outs) {
    for (int64_t o = 0; o < outs; o += 16 * V)
        panel_tile<R, V>(x, ldx, panel + o / 16 * ldp, ldp, K, y + o, ldy, outs - o < 16 * V ? outs - o : 16 * V);
}

// y[r, o] = x[r] . w[o] in f32, rounded to Y; arguments as for ``product``, weights as Rows or the like
template <class W, class Y>
void panel_product(const uint16_t* x, int64_t ldx, int64_t rows, const W& w, int64_t outs, int64_t K, Y* y,
                   int64_t ldy) {
    const int64_t deep = (K + 7) / 8 * 8, ldp = deep * 16, most = 96;  // rows that stay in the second cache
    float* panel = (float*)aligned_scratch<9>(deep * 4 + 4);           // up to 64 outputs, in vectors of sixteen f32
    float* wide_rows = scratch<float, 10>((rows < most ? rows : most) * K);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = rows - first < most ? rows - first : most;
        for (int64_t r = 0; r < count; r++)
            for (int64_t k = 0; k < K; k++) wide_rows[r * K + k] = widen(x[(first + r) * ldx + k]);
        for (int64_t o = 0; o < outs; o += 64) {
            const int64_t across = outs - o < 64 ? outs - o : 64;
            for (int64_t v = 0; v < across; v += 16)
                w.panel(o + v, across - v < 16 ? across - v : 16, K, panel + v / 16 * ldp);
            const int64_t filled = (across + 15) / 16;  // a tile of few rows reads four panels
            std::fill(panel + filled * ldp, panel + 4 * ldp, 0.0f);
            const float* at = wide_rows;
            Y* to = y + first * ldy + o;
            int64_t r = 0;
            for (; r + 6 <= count; r += 6) panel_group<6, 1>(at + r * K, K, panel, ldp, K, to + r * ldy, ldy, across);
            for (; r + 3 <= count; r += 3) panel_group<3, 1>(at + r * K, K, panel, ldp, K, to + r * ldy, ldy, across);
            for (; r + 2 <= count; r += 2) panel_group<2, 2>(at + r * K, K, panel, ldp, K, to + r * ldy, ldy, across);
            for (; r < count; r++) panel_group<1, 4>(at + r * K, K, panel, ldp, K, to + r * ldy, ldy, across);
        }
    }
}
#else
INLINE F16 pair_step(U16 x, U16 w, F16 acc) {
#if defined(__AVX512BF16__)
    return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
#else
    acc = fma16((F16)(x << 16), (F16)(w << 16), acc);
    return fma16((F16)(x & 0xffff0000u), (F16)(w & 0xffff0000u), acc);
#endif
}

// Sixteen vectors of sixteen: element j of v[i] goes to element i of v[j].
INLINE void turn(U16 v[16]) {
    U16 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        t[2 * i] = SHUFFLE(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t[2 * i + 1] = SHUFFLE(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(v, t, sizeof t);
}

// w [outs <= 16, K] -> panel: K / 2 (rounded up) vectors, ``step`` vectors apart; missing outputs are zero
INLINE void turn_panel(const uint16_t* w, int64_t ldw, int64_t outs, int64_t K, U16* panel, int64_t step) {
    const int64_t pairs = (K + 1) / 2;
    for (int64_t p = 0; p < pairs; p += 16) {
        const int64_t left = K - 2 * p;
        U16 v[16] = {};
        for (int64_t o = 0; o < outs; o++)
            v[o] = left >= 32 ? load<U16>(w + o * ldw + 2 * p) : load_some<U16>(w + o * ldw + 2 * p, left);
        for (int n = 0; n < 4; n++) turn(v);  // each exchanges one bit of the two numbers
        const int64_t n = pairs - p < 16 ? pairs - p : 16;
        for (int64_t i = 0; i < n; i++) panel[(p + i) * step] = v[i];
    }
}

// Weights as bf16 rows.
struct Rows {
    const uint16_t* w;
    int64_t ld;

    // sixteen outputs from ``o`` on, of which there are ``outs``
    void panel(int64_t o, int64_t outs, int64_t K, U16* out, int64_t step) const {
        turn_panel(w + o * ld, ld, outs, K, out, step);
    }
};

template <int R, int V, class Y>
INLINE void panel_tile(const uint16_t* x, int64_t ldx, const U16* panel, int64_t K, Y* y, int64_t ldy, int64_t outs) {
    F16 total[R * V] = {};
    const int64_t pairs = K / 2;
    for (int64_t p = 0; p < pairs || (p == pairs && K % 2); p += FOLD) {
        F16 acc[R * V] = {};
        const int64_t end = p + FOLD < pairs ? p + FOLD : pairs;
        for (int64_t i = p; i < end; i++) {
            U16 w[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                w[v] = panel[i * V + v];
#if defined(__AVX512F__)
                __asm__("" : "+v"(w[v]));  // held in a register; the compiler would load it again for every row
#endif
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                uint32_t two;
                std::memcpy(&two, x + r * ldx + 2 * i, 4);
                const U16 both = U16{} + two;
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) acc[r * V + v] = pair_step(both, w[v], acc[r * V + v]);
            }
        }
        if (end == pairs && K % 2)
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++)
                    acc[r * V + v] = pair_step(U16{} + (uint32_t)x[r * ldx + K - 1], panel[pairs * V + v], acc[r * V + v]);
        for (int i = 0; i < R * V; i++) total[i] = total[i] + acc[i];
        if (end == pairs) break;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            put_lanes(y + r * ldy + 16 * v, total[r * V + v], outs - 16 * v < 16 ? outs - 16 * v : 16);
}

template <int V, class Y>
void panel_rows(const uint16_t* x, int64_t ldx, int64_t rows, const U16* panel, int64_t K, Y* y, int64_t ldy,
                int64_t outs) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) panel_tile<4, V>(x + r * ldx, ldx, panel, K, y + r * ldy, ldy, outs);
    for (; r < rows; r++) panel_tile<1, V>(x + r * ldx, ldx, panel, K, y + r * ldy, ldy, outs);
}

// y[r, o] = x[r] . w[o] in f32, rounded to Y; arguments as for ``product``, weights as Rows or the like
template <class W, class Y>
void panel_product(const uint16_t* x, int64_t ldx, int64_t rows, const W& w, int64_t outs, int64_t K, Y* y,
                   int64_t ldy) {
    if (rows == 0) return;
    U16* panel = aligned_scratch<9>((K + 1) / 2 * 4);
    for (int64_t o = 0; o < outs; o += 64) {
        const int64_t wide = outs - o < 64 ? outs - o : 64, vectors = (wide + 15) / 16;
        for (int64_t v = 0; v < vectors; v++) {
            const int64_t left = wide - 16 * v;
            w.panel(o + 16 * v, left < 16 ? left : 16, K, panel + v, vectors);
        }
        if (vectors == 4) panel_rows<4>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 3) panel_rows<3>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 2) panel_rows<2>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 1) panel_rows<1>(x, ldx, rows, panel, K, y + o, ldy, wide);
    }
}
#endif
