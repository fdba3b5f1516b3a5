// Cache rows: quantise and store, load and dequantise.
#include "formats.h"
#include "rows.h"

static void pack_rows(const uint16_t* x, uint8_t* out, int64_t rows, int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D);
    for (int64_t r = 0; r < rows; r++) pack_record(x + r * D, out + r * bytes, D, kind);
}

static void unpack_rows(const uint8_t* in, uint16_t* out, int64_t rows, int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D);
    for (int64_t r = 0; r < rows; r++) unpack_record(in + r * bytes, out + r * D, D, kind);
}

// The first place whose slot is beyond a store, or -1.
static int64_t beyond(const int64_t* slots, int64_t rows, int64_t total) {
    for (int64_t r = 0; r < rows; r++)
        if (slots[r] >= total) return r;
    return -1;
}
INLINE int64_t row_of(int64_t slot) { return slot < 0 ? 0 : slot; }

// store [total, bytes], slots [rows]; what stores and loads returns the first place with a slot beyond the store, and
// does nothing then, or -1. A slot of -1 is row 0, which no real slot names.
static int64_t load_rows(const uint8_t* store, int64_t total, const int64_t* slots, uint16_t* out, int64_t rows,
                         int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D), bad = beyond(slots, rows, total);
    for (int64_t r = 0; bad < 0 && r < rows; r++)
        unpack_record(store + row_of(slots[r]) * bytes, out + r * D, D, kind);
    return bad;
}

static int64_t store_rows(uint8_t* store, int64_t total, const int64_t* slots, const uint8_t* packed, int64_t rows,
                          int64_t bytes) {
    const int64_t bad = beyond(slots, rows, total);
    for (int64_t r = 0; bad < 0 && r < rows; r++)
        std::memcpy(store + row_of(slots[r]) * bytes, packed + r * bytes, bytes);
    return bad;
}

// store [total, 2, D] f32; value, gate [rows, D]
static int64_t store_pairs(float* store, int64_t total, const int64_t* slots, const float* value, const float* gate,
                           int64_t rows, int64_t D) {
    const int64_t bad = beyond(slots, rows, total);
    for (int64_t r = 0; bad < 0 && r < rows; r++) {
        float* pair = store + row_of(slots[r]) * 2 * D;
        std::memcpy(pair, value + r * D, 4 * D);
        std::memcpy(pair + D, gate + r * D, 4 * D);
    }
    return bad;
}

// x [rows, D] normed by weight [D] (bf16, or f32 where wide) and turned by cos, sin [rows, half] -> out [rows, D] as
// every reader sees it, packed [rows, bytes] as stored
static void window_rows(const uint16_t* x, const void* weight, int32_t wide, const float* cos, const float* sin,
                        uint16_t* out, uint8_t* packed, int64_t rows, int64_t D, int64_t half, float eps) {
    const int64_t bytes = record_bytes(WINDOW, D);
    for (int64_t r = 0; r < rows; r++, out += D, packed += bytes) {
        norm_row(x + r * D, weight, wide, out, D, eps);
        rotate_row(out, cos + r * half, sin + r * half, out, D, half, 1.0f);
        pack_record(out, packed, D, WINDOW);
        unpack_record(packed, out, D, WINDOW);
    }
}

// The same norm -> normed [rows, D]; its turned rows go, packed, to their slots
static int64_t store_entries(const uint16_t* x, const void* weight, int32_t wide, const float* cos, const float* sin,
                             uint8_t* store, int64_t total, const int64_t* slots, uint16_t* normed, int64_t rows,
                             int64_t D, int64_t half, float eps, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D), bad = beyond(slots, rows, total);
    uint16_t* turned = scratch<uint16_t, 0>(D);
    for (int64_t r = 0; bad < 0 && r < rows; r++, normed += D) {
        norm_row(x + r * D, weight, wide, normed, D, eps);
        rotate_row(normed, cos + r * half, sin + r * half, turned, D, half, 1.0f);
        pack_record(turned, store + row_of(slots[r]) * bytes, D, kind);
    }
    return bad;
}

// MXFP4 there and back
static void quantise_index_query(const uint16_t* x, uint16_t* out, int64_t rows, int64_t D) {
    uint8_t* record = scratch<uint8_t, 0>(record_bytes(INDEX, D));
    for (int64_t r = 0; r < rows; r++) {
        pack_record(x + r * D, record, D, INDEX);
        unpack_record(record, out + r * D, D, INDEX);
    }
}

EXPORT(pack_rows)
EXPORT(unpack_rows)
EXPORT(load_rows)
EXPORT(store_rows)
EXPORT(store_pairs)
EXPORT(window_rows)
EXPORT(store_entries)
EXPORT(quantise_index_query)
