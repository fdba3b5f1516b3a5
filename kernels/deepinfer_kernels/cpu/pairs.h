// Sixteen lanes as two registers of eight, for processors with AVX2 and FMA but no AVX512. The compiler's own vectors of
// sixteen go through memory there; these stay in registers. They offer what the sources use of a compiler vector.
#pragma once
#include <immintrin.h>
#include <cstdint>

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

#define INLINE_MEMBER inline __attribute__((always_inline))

template <class V, class T> struct Pair;
typedef Pair<f32x8, float> F16;
typedef Pair<i32x8, int32_t> I16;
typedef Pair<u32x8, uint32_t> U16;

template <class V, class T> struct alignas(64) Pair {
    V lo, hi;
    INLINE_MEMBER T operator[](int i) const { return i < 8 ? lo[i] : hi[i - 8]; }
    // the same bits as another kind of lane
    template <class W, class S> INLINE_MEMBER explicit operator Pair<W, S>() const { return {(W)lo, (W)hi}; }
};

#define PAIR_OPERATOR(op)                                                                                             \
    template <class V, class T> INLINE_MEMBER Pair<V, T> operator op(Pair<V, T> a, Pair<V, T> b) {                    \
        return {a.lo op b.lo, a.hi op b.hi};                                                                          \
    }                                                                                                                 \
    template <class V, class T> INLINE_MEMBER Pair<V, T> operator op(Pair<V, T> a, typename Same<T>::type b) {        \
        return {a.lo op b, a.hi op b};                                                                                \
    }                                                                                                                 \
    template <class V, class T> INLINE_MEMBER Pair<V, T> operator op(typename Same<T>::type a, Pair<V, T> b) {        \
        return {a op b.lo, a op b.hi};                                                                                \
    }
#define PAIR_COMPARISON(op)                                                                                           \
    template <class V, class T> INLINE_MEMBER I16 operator op(Pair<V, T> a, Pair<V, T> b) {                           \
        return {(i32x8)(a.lo op b.lo), (i32x8)(a.hi op b.hi)};                                                        \
    }                                                                                                                 \
    template <class V, class T> INLINE_MEMBER I16 operator op(Pair<V, T> a, typename Same<T>::type b) {               \
        return {(i32x8)(a.lo op b), (i32x8)(a.hi op b)};                                                              \
    }

template <class T> struct Same { typedef T type; };

PAIR_OPERATOR(+) PAIR_OPERATOR(-) PAIR_OPERATOR(*) PAIR_OPERATOR(/) PAIR_OPERATOR(&) PAIR_OPERATOR(|)
PAIR_OPERATOR(<<) PAIR_OPERATOR(>>)
PAIR_COMPARISON(<) PAIR_COMPARISON(>) PAIR_COMPARISON(==) PAIR_COMPARISON(!=)
template <class V, class T> INLINE_MEMBER Pair<V, T> operator~(Pair<V, T> a) { return {~a.lo, ~a.hi}; }
INLINE_MEMBER F16 operator-(F16 a) { return {-a.lo, -a.hi}; }

INLINE_MEMBER F16 fma16(F16 a, F16 b, F16 c) {
    return {(f32x8)_mm256_fmadd_ps((__m256)a.lo, (__m256)b.lo, (__m256)c.lo),
            (f32x8)_mm256_fmadd_ps((__m256)a.hi, (__m256)b.hi, (__m256)c.hi)};
}
INLINE_MEMBER I16 to_int(F16 x) { return {__builtin_convertvector(x.lo, i32x8), __builtin_convertvector(x.hi, i32x8)}; }
INLINE_MEMBER F16 to_float(I16 x) { return {__builtin_convertvector(x.lo, f32x8), __builtin_convertvector(x.hi, f32x8)}; }
INLINE_MEMBER U16 from_u16(__m256i h) {
    return {(u32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h)),
            (u32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1))};
}
INLINE_MEMBER U16 from_u8(__m128i b) {
    return {(u32x8)_mm256_cvtepu8_epi32(b), (u32x8)_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
// lanes below 65536 as sixteen bits
INLINE_MEMBER __m256i to_u16(U16 v) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.lo, (__m256i)v.hi), 0xd8);
}
// lanes below 256 as bytes
INLINE_MEMBER __m128i to_u8(U16 v) {
    const __m256i h = to_u16(v);
    return _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

// lanes of a at the given places
#define PERMUTE(a, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15) \
    (F16 {__builtin_shuffle((a).lo, (a).hi, (i32x8){i0, i1, i2, i3, i4, i5, i6, i7}),    \
          __builtin_shuffle((a).lo, (a).hi, (i32x8){i8, i9, i10, i11, i12, i13, i14, i15})})

// The tree of sum16 of lanes.h.
INLINE_MEMBER float sum16(F16 v) {
    const __m256 eight = (__m256)(v.lo + v.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
