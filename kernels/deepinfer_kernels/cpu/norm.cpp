// RMSNorm and rotary embedding.
#include "rows.h"

// weight is bf16, or f32 where wide
static void rms_norm(const uint16_t* x, const void* weight, int32_t wide, uint16_t* y, int64_t rows, int64_t H,
                     float eps) {
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * H, weight, wide, y + r * H, H, eps);
}

// x, y [T, inner, D]; cos, sin [T, half]; turns the last 2 * half elements, sign is -1 for the inverse.
static void rope(const uint16_t* x, const float* cos, const float* sin, uint16_t* y, int64_t T, int64_t inner,
                 int64_t D, int64_t half, float sign) {
    for (int64_t t = 0; t < T; t++, cos += half, sin += half)
        for (int64_t n = 0; n < inner; n++, x += D, y += D) rotate_row(x, cos, sin, y, D, half, sign);
}

EXPORT(rms_norm)
EXPORT(rope)
