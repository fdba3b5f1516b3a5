// E4M3, E8M0 and E2M1 in sixteen lanes; bytes and values equal those of the reference quantisers.
#pragma once
#include <cmath>
#include "lanes.h"

INLINE float power_of_two(int32_t k) {
    uint32_t bits = uint32_t(k + 127) << 23;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

INLINE float e8m0_value(uint8_t b) {
    if (b == 0) return 0x1p-127f;
    return b == 255 ? NAN : power_of_two(int32_t(b) - 127);
}

// k with 2^k the smallest power of two >= amax * limit_inverse, read from the bits; 128 of infinity and NaN
INLINE int32_t ceil_exponent(float amax, float limit_inverse) {
    float q = amax * limit_inverse;
    int32_t bits;
    std::memcpy(&bits, &q, 4);
    return std::min(((bits >> 23) & 0xff) - 127 + ((bits & 0x7fffff) != 0), 128);
}

// Nearest even E4M3 codes of values clamped to +-448; 0x7f of any NaN
INLINE U16 e4m3_encode(F16 x) {
    I16 nan = x != x;
    U16 sign = (U16)x & 0x80000000u;
    F16 m = smaller(magnitude(x), splat(448.0f));
    U16 bits = (U16)m;
    U16 normal = (bits + 0x7ffffu + ((bits >> 20) & 1u) - (120u << 23)) >> 20;
    const F16 step = splat(16384.0f);  // its unit in the last place is 2^-9, the step of E4M3's subnormal numbers
    U16 small = (U16)(m + step) - (U16)step;
    I16 below = m < 0.015625f;  // 2^-6, the smallest normal number
    U16 code = (small & (U16)below) | (normal & ~(U16)below);
    return ((code | (sign >> 24)) & ~(U16)nan) | ((U16)nan & 0x7fu);
}

INLINE F16 e4m3_value(U16 b) {
    U16 m = b & 0x7fu;
    F16 normal = (F16)((m << 20) + (120u << 23));
    F16 small = to_float((I16)m) * 0x1p-9f;
    F16 v = pick((I16)(m < 8u), small, normal);
    v = pick((I16)(m == 0x7fu), splat(NAN), v);
    return (F16)((U16)v | ((b & 0x80u) << 24));
}
INLINE float e4m3_value(uint8_t b) { return e4m3_value(U16{} + (uint32_t)b)[0]; }
INLINE uint8_t e4m3_encode(float x) { return (uint8_t)e4m3_encode(splat(x))[0]; }

// Nearest even E2M1 codes of values clamped to +-6; 0 of NaN, which only the scale can tell
INLINE U16 e2m1_encode(F16 x) {
    const F16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    F16 m = smaller(magnitude(x), splat(6.0f));
    F16 fine = (m * 2.0f + shift) - shift;             // 0 .. 4 below 2
    F16 middle = ((m + shift) - shift) + 2.0f;         // 4 .. 6 from 2
    F16 coarse = ((m * 0.5f + shift) - shift) + 4.0f;  // 6, 7 from 4
    F16 code = pick(m < 2.0f, fine, pick(m < 4.0f, middle, coarse));
    return ((U16)to_int(code) | (((U16)x >> 31) << 3)) & (U16)(x == x);
}

INLINE F16 e2m1_value(U16 code) {
#if defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (F16)_mm512_permutexvar_ps((__m512i)code, values);
#else
    U16 c = code & 7u;
    // 0 and 0.5, then two mantissa steps per power of two: the bits of 1, 1.5, 2, 3, 4, 6
    F16 v = (F16)(((c >> 1) + 126u) << 23 | (c & 1u) << 22);
    v = pick((I16)(c < 2u), to_float((I16)c) * 0.5f, v);
    return (F16)((U16)v | ((code & 8u) << 28));
#endif
}

// The greatest magnitude, NaN if there is one: magnitudes are ordered like their bits, NaN above infinity.
INLINE float greatest(const F16* v, int n) {
    I16 top = (I16)magnitude(v[0]);
    for (int i = 1; i < n; i++) {
        const I16 next = (I16)magnitude(v[i]), above = next > top;
        top = (next & above) | (top & ~above);
    }
    int32_t bits[16];
    std::memcpy(bits, &top, sizeof bits);
    const int32_t most = *std::max_element(bits, bits + 16);
    float m;
    std::memcpy(&m, &most, 4);
    return m;
}

// Sixteen codes of four bits to eight bytes, even index low; and back.
INLINE void pack_nibbles(U16 code, uint8_t* out) {
    B16 b = (B16)to_u8(code);
#if defined(__SSE2__)
    const __m128i odd = _mm_srli_epi16((__m128i)b, 4), both = _mm_or_si128((__m128i)b, odd);
    _mm_storel_epi64((__m128i*)out, _mm_packus_epi16(_mm_and_si128(both, _mm_set1_epi16(255)), both));
#else
    for (int i = 0; i < 8; i++) out[i] = b[2 * i] | (b[2 * i + 1] << 4);
#endif
}
INLINE U16 unpack_nibbles(const uint8_t* in) {
#if defined(__SSE2__)
    const __m128i low = _mm_set1_epi8(15), bytes = _mm_loadl_epi64((const __m128i*)in);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    return from_u8((B16)_mm_unpacklo_epi8(_mm_and_si128(bytes, low), odd));
#else
    uint8_t code[16];
    for (int i = 0; i < 8; i++) {
        code[2 * i] = in[i] & 15;
        code[2 * i + 1] = in[i] >> 4;
    }
    return from_u8(load<B16>(code));
#endif
}

// Records of one row: window = E4M3 per 32 with E8M0, global = E2M1 per 16 with E4M3, index = E2M1 per 32 with E8M0.
// A group with a NaN reads back as NaN: by its scale, and in the window also by the element itself.
enum Kind { WINDOW = 0, GLOBAL = 1, INDEX = 2 };

INLINE int64_t record_bytes(int kind, int64_t D) {
    return kind == WINDOW ? D + D / 32 : kind == GLOBAL ? D / 2 + D / 16 : D / 2 + D / 32;
}

INLINE void pack_record(const uint16_t* x, uint8_t* out, int64_t D, int kind) {
    if (kind == GLOBAL) {
        uint8_t* scales = out + D / 2;
        for (int64_t d = 0; d < D; d += 16) {
            F16 v = widen(load<H16>(x + d));
            const float amax = greatest(&v, 1);
            // floor: 6 * 2^-9 gives the smallest subnormal scale
            const uint8_t scale = e4m3_encode((amax < 6 * 0x1p-9f ? 6 * 0x1p-9f : amax) / 6.0f);
            pack_nibbles(e2m1_encode(v / e4m3_value(scale)), out + d / 2);
            scales[d / 16] = scale;
        }
        return;
    }
    uint8_t* scales = out + (kind == WINDOW ? D : D / 2);
    const float floor = kind == WINDOW ? 1e-4f : 6 * 0x1p-126f;
    const float inverse = kind == WINDOW ? (float)(1.0 / 448.0) : (float)(1.0 / 6.0);
    for (int64_t d = 0; d < D; d += 32) {
        F16 v[2] = {widen(load<H16>(x + d)), widen(load<H16>(x + d + 16))};
        const float amax = greatest(v, 2);
        const int32_t k = ceil_exponent(amax < floor ? floor : amax, inverse);
        for (int i = 0; i < 2; i++) {
            F16 y = v[i] / power_of_two(k);
            if (kind == WINDOW) {
                B16 b = (B16)to_u8(e4m3_encode(y));
                std::memcpy(out + d + 16 * i, &b, 16);
            } else {
                pack_nibbles(e2m1_encode(y), out + d / 2 + 8 * i);
            }
        }
        scales[d / 32] = (uint8_t)(k + 127);
    }
}

INLINE void unpack_fp8(const uint8_t* in, const uint8_t* scales, uint16_t* out, int64_t D) {
    for (int64_t d = 0; d < D; d += 16)
        store_bf16(out + d, e4m3_value(from_u8(load<B16>(in + d))) * e8m0_value(scales[d / 32]), 16);
}

INLINE void unpack_record(const uint8_t* in, uint16_t* out, int64_t D, int kind) {
    if (kind == WINDOW) return unpack_fp8(in, in + D, out, D);
    const uint8_t* scales = in + D / 2;
    for (int64_t d = 0; d < D; d += 16) {
        const float scale = kind == GLOBAL ? e4m3_value(scales[d / 16]) : e8m0_value(scales[d / 32]);
        store_bf16(out + d, e2m1_value(unpack_nibbles(in + d / 2)) * scale, 16);
    }
}
