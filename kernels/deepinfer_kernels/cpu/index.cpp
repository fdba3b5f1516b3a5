// Lightning indexer: scores and exact selection.
#include <algorithm>
#include <cmath>
#include "lanes.h"

// iq [B, C, N, Di], iw [B, C, N], keys [B, n, Di], visible [B, C] -> scores [B, C, n], -inf from visible on
EXPORT void index_scores(const uint16_t* iq, const uint16_t* iw, const uint16_t* keys, const int64_t* visible,
                         float* scores, int64_t B, int64_t C, int64_t N, int64_t n, int64_t Di) {
    float* dot = scratch<float, 0>(N * (n + 16));
    const int64_t ld = n + 16;
    for (int64_t b = 0; b < B; b++, keys += n * Di)
        for (int64_t c = 0; c < C; c++, iq += N * Di, iw += N, visible++, scores += n) {
            const int64_t seen = std::min(n, std::max<int64_t>(0, *visible));
            product<Bfloat>(iq, Di, N, keys, Di, seen, Di, dot, ld);
            for (int64_t j = 0; j < seen; j += 16) {
                F16 sum = {};
                for (int64_t h = 0; h < N; h++)
                    sum = sum + larger(load<F16>(dot + h * ld + j), F16{}) * widen(iw[h]);
                std::memcpy(scores + j, &sum, 4 * std::min<int64_t>(16, seen - j));
            }
            std::fill(scores + seen, scores + n, -INFINITY);
        }
}

// scores [rows, n] -> ids [rows, min(k, n)]: the k best ascending, -1 behind them; equal scores: the lowest index.
EXPORT void select_topk(const float* scores, int64_t* ids, int64_t rows, int64_t n, int64_t k) {
    const int64_t width = std::min(k, n);
    float* best = scratch<float, 1>(n);
    for (int64_t r = 0; r < rows; r++, scores += n, ids += width) {
        int64_t real = 0, at = 0;
        for (int64_t j = 0; j < n; j++)
            if (scores[j] > -INFINITY) best[real++] = scores[j];
        float last = -INFINITY;
        int64_t room = 0;  // how many of those equal to the k-th are taken
        if (real > width) {
            std::nth_element(best, best + width - 1, best + real, std::greater<float>());
            last = best[width - 1];
            room = width - std::count_if(best, best + width, [=](float s) { return s > last; });
        }
        for (int64_t j = 0; j < n && at < width; j++) {
            const float s = scores[j];
            if (!(s > -INFINITY)) continue;
            if (s > last || (s == last && room-- > 0)) ids[at++] = j;
        }
        std::fill(ids + at, ids + width, (int64_t)-1);
    }
}
