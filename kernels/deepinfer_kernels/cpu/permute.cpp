// (token, choice) pairs sorted by physical slot.
#include "lanes.h"

// slots [pairs] -> order [pairs]: the place of each, and counts [S]; pairs of one slot stay in order; returns the first
// pair whose slot is out of range, or -1
static int64_t sort_pairs(const int64_t* slots, int64_t* order, int64_t* counts, int64_t pairs, int64_t S) {
    int64_t* next = scratch<int64_t, 0>(S);
    std::fill(counts, counts + S, (int64_t)0);
    for (int64_t p = 0; p < pairs; p++) {
        if (slots[p] < 0 || slots[p] >= S) return p;
        counts[slots[p]]++;
    }
    for (int64_t s = 0, at = 0; s < S; at += counts[s++]) next[s] = at;
    for (int64_t p = 0; p < pairs; p++) order[p] = next[slots[p]]++;
    return -1;
}

// slots [pairs], k choices per token -> token, order [pairs], counts [S]
static int64_t dispatch_permute(const int64_t* slots, int64_t* token, int64_t* order, int64_t* counts, int64_t pairs,
                                int64_t k, int64_t S) {
    const int64_t bad = sort_pairs(slots, order, counts, pairs, S);
    for (int64_t p = 0; bad < 0 && p < pairs; p++) token[order[p]] = p / k;
    return bad;
}

// x [T, H], slots and weights [T, k] -> rows [T * k, H], weight and order [T * k], counts [S]
static int64_t dispatch_rows(const uint16_t* x, const int64_t* slots, const float* weights, uint16_t* rows,
                             float* weight, int64_t* order, int64_t* counts, int64_t T, int64_t k, int64_t S, int64_t H) {
    const int64_t bad = sort_pairs(slots, order, counts, T * k, S);
    for (int64_t p = 0; bad < 0 && p < T * k; p++) {
        weight[order[p]] = weights[p];
        std::memcpy(rows + order[p] * H, x + p / k * H, 2 * H);
    }
    return bad;
}

EXPORT(dispatch_permute)
EXPORT(dispatch_rows)
