// Router, routed experts, shared expert, and their sum.
#include <algorithm>
#include <cmath>
#include "packed.h"

// x [T, H] bf16, weight [E, H] f32, bias [E] or one row per token (stride E) -> ids [T, k] ascending, w [T, k]
static void gate_topk(const uint16_t* x, const float* weight, const float* bias, int64_t bias_stride, int64_t* ids,
                      float* w, int64_t T, int64_t H, int64_t E, int64_t k, int32_t normalise, float scale,
                      float temperature) {
    const int64_t block = 16;
    float* wide = scratch<float, 0>(block * H);
    float* score = scratch<float, 1>(block * E);
    char* taken = scratch<char, 2>(E);
    for (int64_t start = 0; start < T; start += block) {
        const int64_t rows = T - start < block ? T - start : block;
        for (int64_t i = 0; i < rows * H; i++) wide[i] = widen(x[start * H + i]);
        product<Float>(wide, H, rows, weight, H, E, H, score, E);
        for (int64_t r = 0; r < rows; r++) {
            float* s = score + r * E;
            const float* b = bias + (start + r) * bias_stride;
            for (int64_t e = 0; e < E; e++) {
                const float z = s[e] / temperature;
                s[e] = std::sqrt(z > 20.0f ? z : std::log1p(std::exp(z)));  // 20: where softplus is its argument
            }
            std::fill(taken, taken + E, (char)0);
            for (int64_t n = 0; n < k; n++) {
                int64_t best = -1;
                for (int64_t e = 0; e < E; e++)  // strictly greater: the lowest id wins a tie
                    if (!taken[e] && (best < 0 || s[e] + b[e] > s[best] + b[best])) best = e;
                taken[best] = 1;
            }
            int64_t* id = ids + (start + r) * k;
            float* out = w + (start + r) * k;
            float sum = 0;
            int64_t n = 0;
            for (int64_t e = 0; e < E; e++)
                if (taken[e]) {
                    id[n] = e;
                    sum += out[n++] = s[e];
                }
            for (n = 0; n < k; n++) {
                if (normalise && k > 1) out[n] = out[n] / (sum + 1e-20f);
                out[n] = out[n] * scale;
            }
        }
    }
}

// silu(min(g, limit)) * clamp(u, +-limit) * factor, over g in place
INLINE void swiglu(uint16_t* g, const uint16_t* u, int64_t I, float limit, float factor) {
    for (int64_t i = 0; i < I; i += 16) {
        F16 gate = smaller(splat(limit), load_bf16(g + i, I - i));
        F16 up = larger(splat(-limit), smaller(splat(limit), load_bf16(u + i, I - i)));
        store_bf16(g + i, gate / (1.0f + exp16(-gate)) * up * factor, I - i);
    }
}

INLINE void into(const uint16_t* x, int64_t rows, const Rows& w, int64_t outs, int64_t K, uint16_t* y) {
    panel_product(x, K, rows, w, outs, K, y, outs);
}
INLINE void into(const uint16_t* x, int64_t rows, const Packed& w, int64_t outs, int64_t K, uint16_t* y) {
    packed_product(x, K, rows, w, outs, y, outs);
}

// One expert on rows of x [rows, H]: w1, w3 [I, H], w2 [H, I], factor [rows] or null -> y [rows, H]
template <class W>
static void expert(const uint16_t* x, const W& w1, const W& w3, const W& w2, const float* factor, uint16_t* y,
                   int64_t rows, int64_t H, int64_t I, float limit) {
    const int64_t block = 64;  // rows whose intermediate values stay in the first cache
    uint16_t* g = scratch<uint16_t, 3>(block * I);
    uint16_t* u = scratch<uint16_t, 4>(block * I);
    for (int64_t r = 0; r < rows; r += block) {
        const int64_t n = rows - r < block ? rows - r : block;
        into(x + r * H, n, w1, I, H, g);
        into(x + r * H, n, w3, I, H, u);
        for (int64_t i = 0; i < n; i++) swiglu(g + i * I, u + i * I, I, limit, factor ? factor[r + i] : 1.0f);
        into(g, n, w2, H, I, y + r * H);
    }
}

// x [M, H] sorted by slot, counts [S], codes and scales of [S, I, H] twice and [S, H, I], factor [M] -> y [M, H];
// returns the sum of the counts, and computes nothing where that is not M
static int64_t moe_experts(const uint16_t* x, const int64_t* counts, const uint8_t* w1, const uint8_t* s1,
                           const uint8_t* w3, const uint8_t* s3, const uint8_t* w2, const uint8_t* s2,
                           const float* factor, uint16_t* y, int64_t M, int64_t S, int64_t H, int64_t I, float limit) {
    const Packed gate{w1, s1, H}, up{w3, s3, H}, down{w2, s2, I};
    int64_t start = 0, total = 0;
    for (int64_t s = 0; s < S; s++) total += counts[s];
    if (total != M) return total;
    for (int64_t s = 0; s < S; start += counts[s], s++)
        if (counts[s])
            expert(x + start * H, gate.at(s, I), up.at(s, I), down.at(s, H), factor + start, y + start * H, counts[s],
                   H, I, limit);
    return total;
}

static void shared_expert(const uint16_t* x, const uint16_t* w1, const uint16_t* w3, const uint16_t* w2, uint16_t* y,
                          int64_t rows, int64_t H, int64_t I, float limit) {
    expert(x, Rows{w1, H}, Rows{w3, H}, Rows{w2, I}, nullptr, y, rows, H, I, limit);
}

// y [T * k, H] in slot order, order [T * k], shared [T, H] -> out [T, H]; f32 sum in order of the choices
static void moe_combine(const uint16_t* y, const int64_t* order, const uint16_t* shared, uint16_t* out, int64_t T,
                        int64_t k, int64_t H) {
    for (int64_t t = 0; t < T; t++, order += k, shared += H, out += H)
        for (int64_t h = 0; h < H; h += 16) {
            F16 sum = load_bf16(y + order[0] * H + h, H - h);
            for (int64_t n = 1; n < k; n++) sum = sum + load_bf16(y + order[n] * H + h, H - h);
            store_bf16(out + h, sum + load_bf16(shared + h, H - h), H - h);
        }
}

EXPORT(gate_topk)
EXPORT(moe_experts)
EXPORT(shared_expert)
EXPORT(moe_combine)
