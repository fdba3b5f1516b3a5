// Sparse latent attention: one f32 softmax over the visible rows and a sink.
#include <cmath>
#include "formats.h"

// One query of N heads over the rows seen [n, D] -> o [N, D]; p has room for N * ld, ld >= n + 16.
INLINE void attend_one(const uint16_t* q, const uint16_t* seen, int64_t n, const float* sink, uint16_t* o, int64_t N,
                       int64_t D, float scale, float* p, int64_t ld) {
    product<Bfloat>(q, D, N, seen, D, n, D, p, ld);
    for (int64_t h = 0; h < N; h++) {
        float* row = p + h * ld;
        for (int64_t k = n; k < n + 16; k++) row[k] = -INFINITY;
        F16 most = splat(sink[h]);
        for (int64_t k = 0; k < n; k += 16) {
            F16 v = load<F16>(row + k) * scale;
            std::memcpy(row + k, &v, sizeof v);
            most = larger(v, most);
        }
        const float top = max16(most);
        F16 total = {};
        for (int64_t k = 0; k < n; k += 16) {
            F16 v = exp16(load<F16>(row + k) - top);
            std::memcpy(row + k, &v, sizeof v);
            total = total + v;
        }
        row[n] = sum16(total) + std::exp(sink[h] - top);
    }
    // outputs whose sums stay in registers: four heads by one vector where registers hold eight lanes, else by four
#ifdef HALF_LANES
    const int64_t across = 1;
#else
    const int64_t across = 4;
#endif
    for (int64_t h = 0; h < N; h += 4)
        for (int64_t d = 0; d < D; d += 16 * across) {
            const int64_t heads = N - h < 4 ? N - h : 4;
            F16 acc[4][across] = {};
            for (int64_t k = 0; k < n; k++) {
                F16 v[across] = {};
                for (int64_t i = 0; i < across && d + 16 * i < D; i++)
                    v[i] = load_bf16(seen + k * D + d + 16 * i, D - d - 16 * i);
                for (int64_t a = 0; a < 4; a++) {
                    F16 w = splat(p[(h + (a < heads ? a : 0)) * ld + k]);
                    for (int64_t i = 0; i < across; i++) acc[a][i] = fma16(w, v[i], acc[a][i]);
                }
            }
            for (int64_t a = 0; a < heads; a++)
                for (int64_t i = 0; i < across && d + 16 * i < D; i++)
                    store_bf16(o + (h + a) * D + d + 16 * i, acc[a][i] / p[(h + a) * ld + n], D - d - 16 * i);
        }
}

// local [rows, D]; window [T, W]: row of local, -1 hidden, or -2 - row of ring; slots [T, K]: row of entries or -1.
// Returns the first query that names a row beyond its store, or -1.
static int64_t attend_cached(const uint16_t* q, const uint16_t* local, int64_t rows, const int64_t* window,
                             const uint8_t* ring, int64_t ring_rows, const int64_t* slots, const uint8_t* entries,
                             int64_t entry_rows, const float* sink, uint16_t* o, int64_t T, int64_t N, int64_t W,
                             int64_t K, int64_t D, float scale) {
    uint16_t* seen = scratch<uint16_t, 0>((W + K) * D);
    float* p = scratch<float, 1>(N * (W + K + 16));
    const int64_t window_bytes = record_bytes(WINDOW, D), entry_bytes = record_bytes(GLOBAL, D);
    for (int64_t t = 0; t < T; t++, q += N * D, window += W, slots += K, o += N * D) {
        int64_t n = 0;
        for (int64_t w = 0; w < W; w++) {
            const int64_t at = window[w];
            if (at >= rows || -2 - at >= ring_rows) return t;
            if (at >= 0) std::memcpy(seen + n++ * D, local + at * D, 2 * D);
            else if (at < -1) unpack_record(ring + (-2 - at) * window_bytes, seen + n++ * D, D, WINDOW);
        }
        for (int64_t k = 0; k < K; k++) {
            if (slots[k] >= entry_rows) return t;
            if (slots[k] >= 0) unpack_record(entries + slots[k] * entry_bytes, seen + n++ * D, D, GLOBAL);
        }
        attend_one(q, seen, n, sink, o, N, D, scale, p, W + K + 16);
    }
    return -1;
}

EXPORT(attend_cached)
