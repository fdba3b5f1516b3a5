// Pooling of token pairs into one latent.
#include "lanes.h"

// Softmax of the two gates of every channel, applied to their values: u0, g0, u1, g1 [D] -> z [D]
INLINE void pool_row(const float* u0, const float* g0, const float* u1, const float* g1, uint16_t* z, int64_t D) {
    for (int64_t d = 0; d < D; d += 16) {
        const F16 a = load_f32(g0 + d, D - d), b = load_f32(g1 + d, D - d), top = larger(a, b);
        const F16 e0 = exp16(a - top), e1 = exp16(b - top), sum = e0 + e1;
        store_bf16(z + d, e0 / sum * load_f32(u0 + d, D - d) + e1 / sum * load_f32(u1 + d, D - d), D - d);
    }
}

static void pool_pairs(const float* u0, const float* g0, const float* u1, const float* g1, uint16_t* z, int64_t rows,
                       int64_t D) {
    for (int64_t at = 0; at < rows * D; at += D) pool_row(u0 + at, g0 + at, u1 + at, g1 + at, z + at, D);
}

// value, gate [T, D]; ring [total, 2, D] or null; second, partner, slot [rows], from_ring [rows] -> z [rows, D];
// returns the first pair that names a row beyond its tensor, or -1
static int64_t pool_cached(const float* value, const float* gate, int64_t T, const float* ring, int64_t total,
                           const int64_t* second, const int64_t* partner, const int64_t* slot, const uint8_t* from_ring,
                           uint16_t* z, int64_t rows, int64_t D) {
    for (int64_t r = 0; r < rows; r++, z += D) {
        const bool old = ring && from_ring[r];
        const int64_t one = second[r], other = partner[r], at = slot[r] < 0 ? 0 : slot[r];
        if (one < 0 || one >= T || (old ? at >= total : other < 0 || other >= T)) return r;
        const float *u0 = old ? ring + 2 * at * D : value + other * D, *g0 = old ? u0 + D : gate + other * D;
        pool_row(u0, g0, value + one * D, gate + one * D, z, D);
    }
    return -1;
}

EXPORT(pool_pairs)
EXPORT(pool_cached)
