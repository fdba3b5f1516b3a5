// Products with MXFP4 weights as ``prepare_weight`` leaves them for the CPU, in panels of sixteen outputs. A block of 64
// bytes holds eight elements of K of each output: output j has the 32-bit word j, whose lower half has the codes of
// elements 0, 2, 4, 6 and whose upper half those of 1, 3, 5, 7, each from its lowest bits on. Decoding the lowest bits of
// all halves and shifting them out gives the vectors of a panel one after the other. Scales: sixteen bytes per 32
// elements of K.
//
// The values are those of a bf16 copy of the weights, and the sums run as they do over one.
#pragma once
#include "formats.h"
#include "panel.h"

struct Packed {
    const uint8_t *codes, *scales;
    int64_t K;

    const uint8_t* block(int64_t panel, int64_t k) const { return codes + (panel * K + k) * 8; }
    const uint8_t* scale(int64_t panel, int64_t k) const { return scales + (panel * K + k) / 2; }
    // one of a stack of matrices of so many outputs
    Packed at(int64_t index, int64_t outs) const {
        const int64_t panel = index * (outs / 16);
        return {block(panel, 0), scale(panel, 0), K};
    }
#ifdef HALF_LANES
    void panel(int64_t o, int64_t outs, int64_t K, float* out) const;
#else
    void panel(int64_t o, int64_t outs, int64_t K, U16* out, int64_t step) const;
#endif
};

INLINE F16 scale_values(const uint8_t* bytes) {
    float s[16];
    for (int i = 0; i < 16; i++) s[i] = e8m0_value(bytes[i]);
    return load<F16>(s);
}

#ifdef HALF_LANES
inline void Packed::panel(int64_t o, int64_t, int64_t, float* out) const {
    const __m256 size = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    for (int64_t k = 0; k < K; k += 8, out += 128) {
        const F16 by = scale_values(scale(o / 16, k / 32 * 32));
        for (int half = 0; half < 2; half++) {
            const __m256i words = _mm256_loadu_si256((const __m256i*)block(o / 16, k) + half);
            for (int i = 0; i < 8; i++) {
                const int shift = 16 * (i % 2) + 4 * (i / 2);
                const __m256 minus = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(words, 28 - shift), sign));
                const __m256 value = _mm256_permutevar8x32_ps(size, _mm256_srli_epi32(words, shift));
                const __m256 v = _mm256_mul_ps(_mm256_or_ps(value, minus), (__m256)(half ? by.hi : by.lo));
                _mm256_store_ps(out + 16 * i + 8 * half, v);
            }
        }
    }
}
#else
// Whether scales only move the exponents of bf16 values: not the two smallest and the three largest.
inline bool only_exponents(const uint8_t* scales, int64_t n) {
    uint8_t others = 0;
    for (int64_t i = 0; i < n; i++) others |= (uint8_t)(scales[i] - 2) > 250;
    return !others;
}

// What such scales of sixteen outputs add to either half of a word of bf16 values.
INLINE U16 exponents(const uint8_t* scales) {
    const U16 k = (from_u8(load<B16>(scales)) - 127u) << 7;
    return k << 16 | (k & 0xffffu);
}

// The next two elements of sixteen outputs, from the lowest bits of both halves of ``block``, which moves on.
INLINE U16 decode_pair(U16& block, U16 added) {
    // zero has no exponent to move
#if defined(__AVX512BW__)
    // bf16 of the codes; the lookup takes five bits of its index, one too many
    const U16 table = {0x3f000000, 0x3fc03f80, 0x40404000, 0x40c04080, 0xbf008000, 0xbfc0bf80, 0xc040c000, 0xc0c0c080,
                       0x3f000000, 0x3fc03f80, 0x40404000, 0x40c04080, 0xbf008000, 0xbfc0bf80, 0xc040c000, 0xc0c0c080};
    const __m512i value = _mm512_permutexvar_epi16((__m512i)block, (__m512i)table);
    const __mmask32 some = _mm512_test_epi16_mask((__m512i)block, _mm512_set1_epi16(7));
    block = (U16)_mm512_srli_epi16((__m512i)block, 4);
    return (U16)_mm512_mask_add_epi16(value, some, value, (__m512i)added);
#else
    typedef uint16_t U32 __attribute__((vector_size(64)));
    const U32 code = (U32)block, size = code & 7;
    // 0.5, 1, 1.5, 2, 3, 4, 6: two steps per power of two but for the first
    U32 value = (size << 6) + 0x3f00 - ((U32)(size == 1) & 0x40) + (U32)added;
    value = (value & (U32)(size != 0)) | ((code & 8) << 12);
    block = (U16)(code >> 4);
    return (U16)value;
#endif
}

// The four pairs of a block whatever its scales are.
inline void decode_any(U16 block, F16 scale, U16* out, int64_t step) {
    for (int i = 0; i < 4; i++, block = block >> 4) {
        const U16 low = from_u16(to_bf16(e2m1_value(block & 15u) * scale));
        out[i * step] = low | from_u16(to_bf16(e2m1_value((block >> 16) & 15u) * scale)) << 16;
    }
}

inline void Packed::panel(int64_t o, int64_t, int64_t, U16* out, int64_t step) const {
    for (int64_t k = 0; k < K; k += 32) {
        const uint8_t* s = scale(o / 16, k);
        const bool plain = only_exponents(s, 16);
        const U16 added = exponents(s);
        for (int64_t b = k; b < k + 32; b += 8, out += 4 * step) {
            U16 words = load<U16>(block(o / 16, b));
            if (plain)
                for (int i = 0; i < 4; i++) out[i * step] = decode_pair(words, added);
            else
                decode_any(words, scale_values(s), out, step);
        }
    }
}
#endif

#if defined(__AVX512BW__)
// V panels times R rows, decoded on the way, where ``only_exponents``; the sums run as those of panel_tile.
template <int R, int V, class Y>
INLINE void packed_tile(const uint16_t* x, int64_t ldx, const Packed& w, int64_t panel, Y* y, int64_t ldy) {
    F16 total[R * V] = {};
    for (int64_t start = 0; start < w.K; start += 2 * FOLD) {
        F16 acc[R * V] = {};
        const int64_t end = start + 2 * FOLD < w.K ? start + 2 * FOLD : w.K;
        for (int64_t k = start; k < end; k += 32) {
            U16 added[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) added[v] = exponents(w.scale(panel + v, k));
            for (int64_t b = k; b < k + 32; b += 8) {
                U16 block[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) block[v] = load<U16>(w.block(panel + v, b));
#pragma GCC unroll 4
                for (int i = 0; i < 8; i += 2) {
                    U16 pair[V];
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) pair[v] = decode_pair(block[v], added[v]);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        uint32_t two;
                        std::memcpy(&two, x + r * ldx + b + i, 4);
                        const U16 both = U16{} + two;
#pragma GCC unroll 4
                        for (int v = 0; v < V; v++) acc[r * V + v] = pair_step(both, pair[v], acc[r * V + v]);
                    }
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < R * V; i++) total[i] = total[i] + acc[i];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) put_lanes(y + r * ldy + 16 * v, total[r * V + v], 16);
}

// R rows times all outputs, up to sixteen sums at a time: few rows share what is decoded with more panels.
template <int R, class Y>
void packed_rows(const uint16_t* x, int64_t ldx, const Packed& w, int64_t outs, Y* y, int64_t ldy) {
    int64_t o = 0;
    if (R <= 4)
        for (; o + 64 <= outs; o += 64) packed_tile<R, R <= 4 ? 4 : 1>(x, ldx, w, o / 16, y + o, ldy);
    for (; o + 32 <= outs; o += 32) packed_tile<R, 2>(x, ldx, w, o / 16, y + o, ldy);
    if (o < outs) packed_tile<R, 1>(x, ldx, w, o / 16, y + o, ldy);
}
#endif

// y[r, o] = x[r] . w[o] in f32, rounded to Y; x [rows, K] with ldx elements between rows, y with ldy; outs % 16 = 0.
// Panels of decoded weights are written nowhere where registers hold what a tile needs: eight rows use what is decoded
// for them as fast as they could read it.
template <class Y>
void packed_product(const uint16_t* x, int64_t ldx, int64_t rows, const Packed& w, int64_t outs, Y* y, int64_t ldy) {
#if defined(__AVX512BW__)
    if (only_exponents(w.scales, outs * w.K / 32)) {
        for (; rows >= 8; rows -= 8, x += 8 * ldx, y += 8 * ldy) packed_rows<8>(x, ldx, w, outs, y, ldy);
        switch (rows) {
            case 0: return;
            case 1: return packed_rows<1>(x, ldx, w, outs, y, ldy);
            case 2: return packed_rows<2>(x, ldx, w, outs, y, ldy);
            case 3: return packed_rows<3>(x, ldx, w, outs, y, ldy);
            case 4: return packed_rows<4>(x, ldx, w, outs, y, ldy);
            case 5: return packed_rows<5>(x, ldx, w, outs, y, ldy);
            case 6: return packed_rows<6>(x, ldx, w, outs, y, ldy);
            case 7: return packed_rows<7>(x, ldx, w, outs, y, ldy);
        }
    }
#endif
    panel_product(x, ldx, rows, w, outs, w.K, y, ldy);
}
