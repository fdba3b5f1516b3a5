// Cache rows: quantise and store, load and dequantise.
#include "formats.h"

EXPORT void pack_rows(const uint16_t* x, uint8_t* out, int64_t rows, int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D);
    for (int64_t r = 0; r < rows; r++) pack_record(x + r * D, out + r * bytes, D, kind);
}

EXPORT void unpack_rows(const uint8_t* in, uint16_t* out, int64_t rows, int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D);
    for (int64_t r = 0; r < rows; r++) unpack_record(in + r * bytes, out + r * D, D, kind);
}

// store [total, bytes], slots [rows]; returns the first place with a slot beyond the store, or -1. A slot of -1 is
// row 0, which no real slot names.
EXPORT int64_t load_rows(const uint8_t* store, int64_t total, const int64_t* slots, uint16_t* out, int64_t rows,
                         int64_t D, int32_t kind) {
    const int64_t bytes = record_bytes(kind, D);
    for (int64_t r = 0; r < rows; r++) {
        if (slots[r] >= total) return r;
        unpack_record(store + (slots[r] < 0 ? 0 : slots[r]) * bytes, out + r * D, D, kind);
    }
    return -1;
}

EXPORT int64_t store_rows(uint8_t* store, int64_t total, const int64_t* slots, const uint8_t* packed, int64_t rows,
                          int64_t bytes) {
    for (int64_t r = 0; r < rows; r++)
        if (slots[r] >= total) return r;
    for (int64_t r = 0; r < rows; r++)
        std::memcpy(store + (slots[r] < 0 ? 0 : slots[r]) * bytes, packed + r * bytes, bytes);
    return -1;
}

// MXFP4 there and back
EXPORT void quantise_index_query(const uint16_t* x, uint16_t* out, int64_t rows, int64_t D) {
    uint8_t* record = scratch<uint8_t, 0>(record_bytes(INDEX, D));
    for (int64_t r = 0; r < rows; r++) {
        pack_record(x + r * D, record, D, INDEX);
        unpack_record(record, out + r * D, D, INDEX);
    }
}
