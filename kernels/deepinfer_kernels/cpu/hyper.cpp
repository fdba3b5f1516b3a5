// Hyper-connections: mixing coefficients with Sinkhorn balancing, collapse and expand of the C streams.
#include "rows.h"

static const int64_t MOST = 8;  // streams; ctypes callers check it

static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

static void normalise_columns(float* m, int64_t C, float eps) {
    float sum[MOST] = {};
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = 0; j < C; j++) sum[j] += m[i * C + j];
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = 0; j < C; j++) m[i * C + j] /= sum[j] + eps;
}

static void normalise_rows(float* m, int64_t C, float eps) {
    for (int64_t i = 0; i < C; i++) {
        float sum = 0;
        for (int64_t j = 0; j < C; j++) sum += m[i * C + j];
        for (int64_t j = 0; j < C; j++) m[i * C + j] /= sum + eps;
    }
}

// The same for the release's four streams, a matrix in one vector.
static void balance_four(float* values, float eps, int64_t rounds) {
    F16 m = load<F16>(values);
    for (int64_t n = 0; n < rounds; n++) {
        F16 a = PERMUTE(m, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
        F16 b = PERMUTE(m, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
        F16 c = PERMUTE(m, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14);
        F16 d = PERMUTE(m, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15);
        m = m / ((((a + b) + c) + d) + eps);
        a = PERMUTE(m, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
        b = PERMUTE(m, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
        c = PERMUTE(m, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11);
        d = PERMUTE(m, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15);
        m = m / ((((a + b) + c) + d) + eps);
    }
    std::memcpy(values, &m, sizeof m);
}

// X [T, C, H]; fn [C * (C + 2), C * H], base [C * (C + 2)], scale [3] -> pre, post [T, C], comb [T, C, C]
static void mhc_mixes(const uint16_t* X, const float* fn, const float* base, const float* scale, float* pre,
                      float* post, float* comb, int64_t T, int64_t C, int64_t H, float rms_eps, float hc_eps,
                      int64_t iters) {
    const int64_t K = C * H, outs = C * (C + 2), block = 16;
    float* wide = scratch<float, 0>(block * K);
    float* mix = scratch<float, 1>(block * outs);
    for (int64_t start = 0; start < T; start += block) {
        const int64_t rows = T - start < block ? T - start : block;
        float norm[16];
        for (int64_t r = 0; r < rows; r++) {
            const uint16_t* x = X + (start + r) * K;
            F16 total = {};
            for (int64_t k = 0; k < K; k += 16) {
                F16 v = load_bf16(x + k, K - k);
                std::memcpy(wide + r * K + k, &v, 4 * (K - k < 16 ? K - k : 16));
                total = fma16(v, v, total);
            }
            norm[r] = 1.0f / std::sqrt(sum16(total) / (float)K + rms_eps);
        }
        product<Float>(wide, K, rows, fn, K, outs, K, mix, outs);
        for (int64_t r = 0; r < rows; r++) {
            const float* m = mix + r * outs;
            float* square = comb + (start + r) * C * C;
            for (int64_t c = 0; c < C; c++) {
                pre[(start + r) * C + c] = sigmoid(m[c] * norm[r] * scale[0] + base[c]) + hc_eps;
                post[(start + r) * C + c] = 2 * sigmoid(m[C + c] * norm[r] * scale[1] + base[C + c]);
            }
            for (int64_t i = 0; i < C; i++) {
                float top = -INFINITY, sum = 0;
                for (int64_t j = 0; j < C; j++) {
                    const int64_t at = 2 * C + i * C + j;
                    square[i * C + j] = m[at] * norm[r] * scale[2] + base[at];
                    top = std::fmax(top, square[i * C + j]);
                }
                for (int64_t j = 0; j < C; j++) sum += square[i * C + j] = std::exp(square[i * C + j] - top);
                for (int64_t j = 0; j < C; j++) square[i * C + j] = square[i * C + j] / sum + hc_eps;
            }
            normalise_columns(square, C, hc_eps);
            if (C == 4) {
                balance_four(square, hc_eps, iters - 1);
            } else {
                for (int64_t n = 1; n < iters; n++) {
                    normalise_rows(square, C, hc_eps);
                    normalise_columns(square, C, hc_eps);
                }
            }
        }
    }
}

// X [T, C, H], pre [T, C] -> y [T, H]
static void mhc_collapse(const uint16_t* X, const float* pre, uint16_t* y, int64_t T, int64_t C, int64_t H) {
    for (int64_t t = 0; t < T; t++) collapse_row(X + t * C * H, pre + t * C, y + t * H, C, H);
}

// The same, normed by weight [H], which is bf16, or f32 where wide
static void mhc_collapse_norm(const uint16_t* X, const float* pre, const void* weight, int32_t wide, uint16_t* y,
                              int64_t T, int64_t C, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++, y += H) {
        collapse_row(X + t * C * H, pre + t * C, y, C, H);
        norm_row(y, weight, wide, y, H, eps);
    }
}

// X [T, C, H], y [T, H], post [T, C], comb [T, C, C] -> out [T, C, H]
static void mhc_expand(const uint16_t* X, const uint16_t* y, const float* post, const float* comb, uint16_t* out,
                       int64_t T, int64_t C, int64_t H) {
    for (int64_t t = 0; t < T; t++, X += C * H, y += H, post += C, comb += C * C, out += C * H)
        for (int64_t h = 0; h < H; h += 16) {
            F16 stream[MOST], added = load_bf16(y + h, H - h);
            for (int64_t i = 0; i < C; i++) stream[i] = load_bf16(X + i * H + h, H - h);
            for (int64_t j = 0; j < C; j++) {
                F16 mixed = comb[j] * stream[0];
                for (int64_t i = 1; i < C; i++) mixed = mixed + comb[i * C + j] * stream[i];
                store_bf16(out + j * H + h, post[j] * added + mixed, H - h);
            }
        }
}

EXPORT(mhc_mixes)
EXPORT(mhc_collapse)
EXPORT(mhc_collapse_norm)
EXPORT(mhc_expand)
