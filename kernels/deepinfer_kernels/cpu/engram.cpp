// Hash memory: n-gram row ids, values of table rows, and the gate into the streams.
#include <cmath>
#include "formats.h"

// ids [count], table [V] -> classes [count], -1 of ids below 0 and of ``image``; returns the first id beyond the table,
// or -1
static int64_t token_classes(const int64_t* ids, const int64_t* table, int64_t image, int64_t* classes, int64_t count,
                             int64_t V) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] >= V) return i;
        classes[i] = ids[i] < 0 || ids[i] == image ? -1 : table[ids[i]];
    }
    return -1;
}

// classes [T, nmax]; multipliers [nmax]; primes, offsets [nmax - 1, heads] -> ids [T, (nmax - 1) * heads]
static void engram_hash(const int64_t* classes, int64_t pad, const int64_t* multipliers, const int64_t* primes,
                        const int64_t* offsets, int64_t* ids, int64_t T, int64_t nmax, int64_t heads) {
    for (int64_t t = 0; t < T; t++, classes += nmax) {
        bool blocked = classes[0] < 0;
        int64_t roll = (blocked ? pad : classes[0]) * multipliers[0];
        for (int64_t lag = 1; lag < nmax; lag++) {
            blocked = blocked || classes[lag] < 0;
            roll ^= (blocked ? pad : classes[lag]) * multipliers[lag];
            for (int64_t h = 0; h < heads; h++) {
                const int64_t prime = primes[(lag - 1) * heads + h];
                const int64_t rest = roll % prime;
                *ids++ = (rest < 0 ? rest + prime : rest) + offsets[(lag - 1) * heads + h];
            }
        }
    }
}

// weight [M, width] E4M3, scale [M, width / 32] E8M0
static void dequantise_table(const uint8_t* weight, const uint8_t* scale, uint16_t* out, int64_t M, int64_t width) {
    for (int64_t m = 0; m < M; m++) unpack_fp8(weight + m * width, scale + m * width / 32, out + m * width, width);
}

// weight [R, width] E4M3, scale [R, width / 32] E8M0, ids [count] -> out [count, width]; returns the first id that is
// not in the table, or -1
static int64_t engram_lookup(const uint8_t* weight, const uint8_t* scale, const int64_t* ids, uint16_t* out,
                             int64_t count, int64_t R, int64_t width) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= R) return i;
        unpack_fp8(weight + ids[i] * width, scale + ids[i] * width / 32, out + i * width, width);
    }
    return -1;
}

// X [T, C, H], projected [T, (C + 1) * H], weights of both norms [C, H], dead [T] or null -> out [T, C, H], gate [T, C]
static void engram_gate(const uint16_t* X, const uint16_t* projected, const float* q_weight, const float* k_weight,
                        const uint8_t* dead, uint16_t* out, float* gate, int64_t T, int64_t C, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++, projected += (C + 1) * H)
        for (int64_t c = 0; c < C; c++, X += H, out += H, gate++) {
            const uint16_t *key = projected + c * H, *value = projected + C * H;
            F16 dots = {}, streams = {}, keys = {};
            for (int64_t h = 0; h < H; h += 16) {
                F16 x = load_bf16(X + h, H - h), k = load_bf16(key + h, H - h);
                F16 w = load_f32(q_weight + c * H + h, H - h) * load_f32(k_weight + c * H + h, H - h);
                dots = fma16(x * w, k, dots);
                streams = fma16(x, x, streams);
                keys = fma16(k, k, keys);
            }
            float dot = sum16(dots) * (1.0f / std::sqrt(sum16(streams) / (float)H + eps)) *
                        (1.0f / std::sqrt(sum16(keys) / (float)H + eps)) * (1.0f / std::sqrt((float)H));
            // 1e-6: the release's floor; a dot of +0 counts as positive
            const float size = std::sqrt(std::fabs(dot) < 1e-6f ? 1e-6f : std::fabs(dot));
            *gate = dead && dead[t] ? 0.0f : 1.0f / (1.0f + std::exp(-std::copysign(size, dot)));
            for (int64_t h = 0; h < H; h += 16)
                store_bf16(out + h, load_bf16(X + h, H - h) + *gate * load_bf16(value + h, H - h), H - h);
        }
}

EXPORT(token_classes)
EXPORT(engram_hash)
EXPORT(dequantise_table)
EXPORT(engram_lookup)
EXPORT(engram_gate)
