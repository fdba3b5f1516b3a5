// Steps of one row that several operations take: weighted sum of streams, norm, rotation.
#pragma once
#include <cmath>
#include "lanes.h"

// X [C, H], pre [C] -> y [H]
INLINE void collapse_row(const uint16_t* X, const float* pre, uint16_t* y, int64_t C, int64_t H) {
    for (int64_t h = 0; h < H; h += 16) {
        F16 sum = pre[0] * load_bf16(X + h, H - h);
        for (int64_t c = 1; c < C; c++) sum = sum + pre[c] * load_bf16(X + c * H + h, H - h);
        store_bf16(y + h, sum, H - h);
    }
}

// RMSNorm; weight is bf16, or f32 where wide; y may be x
INLINE void norm_row(const uint16_t* x, const void* weight, int32_t wide, uint16_t* y, int64_t H, float eps) {
    F16 total = {};
    for (int64_t h = 0; h < H; h += 16) {
        F16 v = load_bf16(x + h, H - h);
        total = fma16(v, v, total);
    }
    const float scale = 1.0f / std::sqrt(sum16(total) / (float)H + eps);
    for (int64_t h = 0; h < H; h += 16) {
        F16 w = wide ? load_f32((const float*)weight + h, H - h) : load_bf16((const uint16_t*)weight + h, H - h);
        store_bf16(y + h, w * (load_bf16(x + h, H - h) * scale), H - h);
    }
}

// Turns the last 2 * half elements by cos, sin [half]; sign is -1 for the inverse; y may be x
INLINE void rotate_row(const uint16_t* x, const float* cos, const float* sin, uint16_t* y, int64_t D, int64_t half,
                       float sign) {
    const int64_t keep = D - 2 * half;
    if (y != x) std::memcpy(y, x, 2 * keep);
    for (int64_t i = 0; i < half; i += 8) {
        const int64_t m = half - i < 8 ? half - i : 8;
        float out[16] = {};
        for (int64_t j = 0; j < m; j++) {
            const float a = widen(x[keep + 2 * (i + j)]), b = widen(x[keep + 2 * (i + j) + 1]);
            const float c = cos[i + j], s = sign * sin[i + j];
            out[2 * j] = a * c - b * s;
            out[2 * j + 1] = a * s + b * c;
        }
        store_bf16(y + keep + 2 * i, load<F16>(out), 2 * m);
    }
}
