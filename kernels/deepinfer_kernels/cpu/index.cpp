// Lightning indexer: scores and exact selection.
#include <algorithm>
#include <cmath>
#include "panel.h"

static const int64_t TILE_QUERIES = 32, TILE_KEYS = 256;  // products of a tile: 136 KiB at four heads

// iq [B, C, N, Di], iw [B, C, N], keys [B, n, Di], visible [B, C] -> scores [B, C, n], -inf from visible on
static void index_scores(const uint16_t* iq, const uint16_t* iw, const uint16_t* keys, const int64_t* visible,
                         float* scores, int64_t B, int64_t C, int64_t N, int64_t n, int64_t Di) {
    const int64_t ld = TILE_KEYS + 16;
    float* dot = scratch<float, 0>(TILE_QUERIES * N * ld);
    for (int64_t b = 0; b < B; b++, keys += n * Di, iq += C * N * Di, iw += C * N, visible += C, scores += C * n)
        for (int64_t first = 0; first < C; first += TILE_QUERIES) {
            const int64_t last = std::min(C, first + TILE_QUERIES);
            const int64_t most = std::min(n, *std::max_element(visible + first, visible + last));
            for (int64_t k = 0; k < most; k += TILE_KEYS) {
                const int64_t across = std::min(TILE_KEYS, most - k);
                panel_product(iq + first * N * Di, Di, (last - first) * N, Rows{keys + k * Di, Di}, across, Di, dot, ld);
                for (int64_t c = first; c < last; c++) {
                    const float* mine = dot + (c - first) * N * ld;
                    const int64_t seen = std::min(across, visible[c] - k);
                    for (int64_t j = 0; j < seen; j += 16) {
                        F16 sum = {};
                        for (int64_t h = 0; h < N; h++)
                            sum = sum + larger(F16{}, load<F16>(mine + h * ld + j)) * widen(iw[c * N + h]);
                        std::memcpy(scores + c * n + k + j, &sum, 4 * std::min<int64_t>(16, seen - j));
                    }
                }
            }
            for (int64_t c = first; c < last; c++)
                std::fill(scores + c * n + std::max<int64_t>(0, std::min(n, visible[c])), scores + (c + 1) * n, -INFINITY);
        }
}

INLINE bool any16(I16 where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where);
#else
    int64_t parts[8], all = 0;
    std::memcpy(parts, &where, sizeof parts);
    for (int64_t part : parts) all |= part;
    return all;
#endif
}

// A lower bound of the k-th best of n scores: the k-th best of the maxima of about 4 k groups, of eight scores or more.
// The groups of the k best maxima hold k scores that are at least as large. -inf where there are too few groups.
static float bound_of_kth(const float* scores, int64_t n, int64_t k, float* maxima) {
    int64_t groups = 0;
    const int64_t span = 16 * std::max<int64_t>(8, n / (4 * k));
    for (int64_t j = 0; j + span <= n; j += span, groups += 16) {
        F16 m = splat(-INFINITY);  // NaN is never larger
        for (int64_t i = 0; i < span; i += 16) m = larger(load<F16>(scores + j + i), m);
        std::memcpy(maxima + groups, &m, sizeof m);
    }
    if (groups < 2 * k) return -INFINITY;
    std::nth_element(maxima, maxima + k - 1, maxima + groups, std::greater<float>());
    return maxima[k - 1];
}

// scores [rows, n] -> ids [rows, min(k, n)]: the k best ascending, -1 behind them; equal scores: the lowest index.
static void select_topk(const float* scores, int64_t* ids, int64_t rows, int64_t n, int64_t k) {
    const int64_t width = std::min(k, n);
    float* best = scratch<float, 1>(n + 16);
    int64_t* place = scratch<int64_t, 2>(n + 16);
    for (int64_t r = 0; r < rows; r++, scores += n, ids += width) {
        const float bound = bound_of_kth(scores, n, k, best);
        int64_t real = 0, at = 0, j = 0;
        for (; j + 16 <= n; j += 16) {  // few vectors hold a score that may be selected
            const F16 s = load<F16>(scores + j);
            if (!any16(~(s < bound))) continue;
            for (int64_t i = j; i < j + 16; i++)
                if (scores[i] > -INFINITY && scores[i] >= bound) place[real++] = i;
        }
        for (; j < n; j++)
            if (scores[j] > -INFINITY && scores[j] >= bound) place[real++] = j;
        float last = -INFINITY;
        int64_t room = 0;  // how many of those equal to the k-th are taken
        if (real > width) {
            for (int64_t i = 0; i < real; i++) best[i] = scores[place[i]];
            std::nth_element(best, best + width - 1, best + real, std::greater<float>());
            last = best[width - 1];
            room = width - std::count_if(best, best + width, [=](float s) { return s > last; });
        }
        for (int64_t i = 0; i < real && at < width; i++) {
            const float s = scores[place[i]];
            if (s > last || (s == last && room-- > 0)) ids[at++] = place[i];
        }
        std::fill(ids + at, ids + width, (int64_t)-1);
    }
}

EXPORT(index_scores)
EXPORT(select_topk)
