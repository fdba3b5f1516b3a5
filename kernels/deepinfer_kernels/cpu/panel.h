// The product of bf16 rows with bf16 weights, by panels: sixteen outputs are turned so that one vector holds the same
// two elements of K for each of them, and a row then needs no sums across lanes. Turning costs about as much as three
// rows, so this is right from the first row on.
//
// Every output of every row is one lane that runs over K in pairs, folded into a total every FOLD pairs.
#pragma once
#include "lanes.h"

static const int64_t FOLD = 256;  // pairs; keeps the rounding error of a long sum near that of a short one

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

// y[r, o] = x[r] . w[o] in f32, rounded to Y; arguments as for ``product``
template <class Y>
void panel_product(const uint16_t* x, int64_t ldx, int64_t rows, const uint16_t* w, int64_t ldw, int64_t outs,
                   int64_t K, Y* y, int64_t ldy) {
    if (rows == 0) return;
    U16* panel = aligned_scratch<9>((K + 1) / 2 * 4);
    for (int64_t o = 0; o < outs; o += 64) {
        const int64_t wide = outs - o < 64 ? outs - o : 64, vectors = (wide + 15) / 16;
        for (int64_t v = 0; v < vectors; v++) {
            const int64_t left = wide - 16 * v;
            turn_panel(w + (o + 16 * v) * ldw, ldw, left < 16 ? left : 16, K, panel + v, vectors);
        }
        if (vectors == 4) panel_rows<4>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 3) panel_rows<3>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 2) panel_rows<2>(x, ldx, rows, panel, K, y + o, ldy, wide);
        if (vectors == 1) panel_rows<1>(x, ldx, rows, panel, K, y + o, ldy, wide);
    }
}
