// Matrix products with official weights as bf16 (or f32) rows [out, in].
#include "panel.h"

static void linear_bf16(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t outs, int64_t in) {
    panel_product(x, in, rows, Rows{w, in}, outs, in, y, outs);
}

static void linear_f32(const float* x, const float* w, float* y, int64_t rows, int64_t outs, int64_t in) {
    product<Float>(x, in, rows, w, in, outs, in, y, outs);
}

// x [rows, G, in] . w [G, outs, in] -> y [rows, G, outs]
static void linear_grouped(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t groups,
                           int64_t outs, int64_t in) {
    for (int64_t g = 0; g < groups; g++)
        panel_product(x + g * in, groups * in, rows, Rows{w + g * outs * in, in}, outs, in, y + g * outs,
                      groups * outs);
}

static void head_logits(const uint16_t* h, const uint16_t* w, float* y, int64_t rows, int64_t outs, int64_t in) {
    panel_product(h, in, rows, Rows{w, in}, outs, in, y, outs);
}

EXPORT(linear_bf16)
EXPORT(linear_f32)
EXPORT(linear_grouped)
EXPORT(head_logits)
