// Sparse latent attention: one f32 softmax over the visible rows and a sink.
#include <cmath>
#include "lanes.h"

// q [T, N, D], keys [T, K, D], mask [T, K], sink [N] -> o [T, N, D]. Hidden keys are left out before anything is
// summed, so that a row's result does not depend on how far its list was padded.
EXPORT void attend(const uint16_t* q, const uint16_t* keys, const uint8_t* mask, const float* sink, uint16_t* o,
                   int64_t T, int64_t N, int64_t K, int64_t D, float scale) {
    uint16_t* seen = scratch<uint16_t, 0>(K * D);
    float* p = scratch<float, 1>(N * (K + 16));
    const int64_t ld = K + 16;
    for (int64_t t = 0; t < T; t++, q += N * D, keys += K * D, mask += K, o += N * D) {
        int64_t n = 0;
        for (int64_t k = 0; k < K; k++)
            if (mask[k]) std::memcpy(seen + n++ * D, keys + k * D, 2 * D);
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
        for (int64_t h = 0; h < N; h += 4)
            for (int64_t d = 0; d < D; d += 64) {
                const int64_t heads = N - h < 4 ? N - h : 4;
                F16 acc[4][4] = {};
                for (int64_t k = 0; k < n; k++) {
                    F16 v[4] = {};
                    for (int64_t i = 0; i < 4 && d + 16 * i < D; i++)
                        v[i] = load_bf16(seen + k * D + d + 16 * i, D - d - 16 * i);
                    for (int64_t a = 0; a < heads; a++) {
                        F16 w = splat(p[(h + a) * ld + k]);
                        for (int64_t i = 0; i < 4; i++) acc[a][i] = fma16(w, v[i], acc[a][i]);
                    }
                }
                for (int64_t a = 0; a < heads; a++)
                    for (int64_t i = 0; i < 4 && d + 16 * i < D; i++)
                        store_bf16(o + (h + a) * D + d + 16 * i, acc[a][i] / p[(h + a) * ld + n], D - d - 16 * i);
            }
    }
}
