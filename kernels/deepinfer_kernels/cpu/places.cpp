// Where things are: slots of index entries, places of window rows, partners of pairs, rows of the embedding.
#include "lanes.h"

// entries [n, K] (null: 0, 1, 2, ...), rows [n], table [B, P] -> slots [n, K]; returns the first of n whose row has
// no blocks in the table, or -1. An entry beyond the blocks of a row is looked for in the last one.
static int64_t entry_slots(const int64_t* entries, const int64_t* rows, const int64_t* table, int64_t* slots, int64_t n,
                           int64_t K, int64_t B, int64_t P, int64_t per_block) {
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= B || (P < 1 && K > 0)) return i;
        const int64_t* blocks = table + rows[i] * P;
        for (int64_t k = i * K; k < (i + 1) * K; k++) {
            const int64_t entry = entries ? entries[k] : k - i * K;
            const int64_t place = entry / per_block;
            slots[k] = entry < 0 ? -1 : blocks[std::min(place, P - 1)] * per_block + entry - place * per_block;
        }
    }
    return -1;
}

// position, row [T]; spans [B, 3] of floor, start, first; rings [B] or null -> places [T, W]; returns the first query
// whose row is not in spans, or -1
static int64_t window_places(const int64_t* position, const int64_t* row, const int64_t* spans, const int64_t* rings,
                             int64_t* places, int64_t T, int64_t B, int64_t W, int64_t ring) {
    for (int64_t t = 0; t < T; t++, places += W) {
        if (row[t] < 0 || row[t] >= B) return t;
        const int64_t *span = spans + 3 * row[t], floor = std::max<int64_t>(span[0], 0), start = span[1];
        const int64_t base = rings ? -2 - rings[row[t]] * ring : 0, oldest = position[t] - W + 1;
        int64_t wrapped = (oldest % ring + ring) % ring;
        for (int64_t u = oldest; u <= position[t]; u++, wrapped = wrapped + 1 < ring ? wrapped + 1 : 0) {
            const int64_t place = rings && u < start ? base - wrapped : u + span[2] - start;
            places[u - oldest] = u < floor ? -1 : place;
        }
    }
    return -1;
}

// second [n], from_ring [n]; position, row, blocks [T]; rings [B] -> partner, slot, first, entry [n]; returns the first
// pair that names what is not there, or -1
static int64_t pair_places(const int64_t* second, const uint8_t* from_ring, const int64_t* position, const int64_t* row,
                           const int64_t* rings, const int64_t* blocks, int64_t* partner, int64_t* slot, int64_t* first,
                           int64_t* entry, int64_t n, int64_t T, int64_t B, int64_t ring) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = second[i];
        if (t < 0 || t >= T || row[t] < 0 || row[t] >= B) return i;
        first[i] = position[t] - 1;
        partner[i] = from_ring[i] ? t : t - 1;
        slot[i] = rings[row[t]] * ring + (first[i] % ring + ring) % ring;
        entry[i] = first[i] & 1 || blocks[t] < 0 ? -1 : blocks[t] / 2;
    }
    return -1;
}

// ids [T], table [V, H] -> X [T, C, H]: the row in each stream; pre [T, C] takes the first, or is null; returns the
// first id that is not in the table, or -1
static int64_t embed(const int64_t* ids, const uint16_t* table, uint16_t* X, float* pre, int64_t T, int64_t V, int64_t C,
                     int64_t H) {
    for (int64_t t = 0; t < T; t++) {
        if (ids[t] < 0 || ids[t] >= V) return t;
        for (int64_t c = 0; c < C; c++, X += H) {
            std::memcpy(X, table + ids[t] * H, 2 * H);
            if (pre) *pre++ = c == 0;
        }
    }
    return -1;
}

EXPORT(entry_slots)
EXPORT(window_places)
EXPORT(pair_places)
EXPORT(embed)
