// Tiles of 64 keys of 512 bf16 values, made in shared memory by eight warps: warp w makes rows 8w..8w+7. Rows of a tile
// lie as a product by wgmma reads them: slabs of 64 columns, in a slab 128 bytes after 128 bytes, in which row r has
// its 16 bytes number c at place c ^ (r % 8). Addresses of shared memory are those of its window.
namespace keys {

constexpr int kLocal = 1024, kRing = 528, kRecord = 288;  // bytes of a row of this step, a window and a global record
constexpr int kSlab = 64 * 128, kStaged = 8 * 256;        // of a slab, and of the codes of a warp's records

__device__ __forceinline__ int shared(const void* p) { return static_cast<int>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store16(unsigned to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// the same number, of which nothing is computed ahead: that would take more registers than these warps have
__device__ __forceinline__ unsigned here(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// what this thread copied is there, but for what it copied since the last window tile but one
__device__ __forceinline__ void arrived_before() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// what this thread and the others of its warp copied is there
__device__ __forceinline__ void arrived() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// some rows of a matrix into the second-level cache, 128 bytes at a time by each of 256 threads
__device__ __forceinline__ void prefetch(const void* matrix, int row, int row_bytes, int rows, unsigned thread) {
  thread = here(thread);
  const char* from = static_cast<const char*>(matrix) + static_cast<long long>(row) * row_bytes;
  for (int i = static_cast<int>(thread) * 128; i < rows * row_bytes; i += 256 * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
}

// 64 heads of query t from `first` on, by 256 threads; heads behind the last one are that one
__device__ __forceinline__ void copy_queries(
    const void* queries, int t, int first, int heads, unsigned tile, unsigned thread) {
  thread = here(thread);
  const char* from = static_cast<const char*>(queries) + static_cast<long long>(t) * heads * kLocal + thread % 64 * 16;
  const unsigned to = tile + thread % 64 / 8 * kSlab;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned head = 4 * i + thread / 64;
    copy16(to + head * 128 + ((thread ^ head) & 7) * 16, from + min(first + static_cast<int>(head), heads - 1) * kLocal, 16);
  }
}

// Number `place` of a row of indices, −1 behind the last one. Volatile, as the load of scales below: either would be
// moved behind the wait for a free tile, where the registers of its address are wanted before it has come.
__device__ __forceinline__ int index(const void* row, int place, int count) {
  int found;
  asm volatile("{.reg .pred p; setp.lt.s32 p, %2, %3; mov.b32 %0, -1;\n@p ld.volatile.global.b32 %0, [%1];}"
               : "=&r"(found) : "l"(static_cast<const long long*>(row) + place), "r"(place), "r"(count) : "memory");
  return found;
}

// logits of a key are to be −inf or not; a thread tells it of row 8w + thread % 8
__device__ __forceinline__ void hide(unsigned hidden, bool yes, unsigned thread) {
  if (thread % 32 < 8)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(hidden + (thread / 32 * 8 + thread % 8) * 4),
                 "f"(yes ? __int_as_float(0xFF800000) : 0.f) : "memory");
}

// chunk c of 32 columns of row 8w + thread % 8
__device__ __forceinline__ void store32(unsigned tile, unsigned c, const uint4* values, unsigned thread) {
  const unsigned row = thread % 8, to = tile + c / 2 * kSlab + (thread / 32 * 8 + row) * 128;
#pragma unroll
  for (int k = 0; k < 4; ++k) store16(to + ((c % 2 * 4 + k) ^ row) * 16, values[k]);
}

// A window tile; `at` of row 8w + thread % 8: a row of this step from 0 on, −1 hidden (zero), below a record of the ring.
// A row of this step is sent for by its warp; of the others a thread decodes a quarter of one.
__device__ __forceinline__ void make_window(
    const void* local, const unsigned char* ring, int at, unsigned tile, unsigned hidden, unsigned thread) {
  thread = here(thread);
  const unsigned lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = __shfl_sync(~0u, at, r);
    if (row < 0) continue;
    const char* from = static_cast<const char*>(local) + static_cast<long long>(row) * kLocal + lane * 16;
    const unsigned to = tile + lane / 8 * kSlab + (thread / 32 * 8 + r) * 128 + ((lane ^ r) & 7) * 16;
    copy16(to, from, 16);
    copy16(to + 4 * kSlab, from + 512, 16);
  }
  if (__any_sync(~0u, at < -1)) {
    uint4 codes[8] = {};
    unsigned exponents = 0;
    if (at < -1) {
      const unsigned char* record = ring + static_cast<long long>(-2 - at) * kRing;
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = records::load16(record + lane / 8 * 128 + 16 * i);
      exponents = __ldg(reinterpret_cast<const unsigned*>(record + 512 + lane / 8 * 4));
    }
    if (at < 0)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint4 values[4];
        records::e4m3x32(&codes[2 * j].x, exponents >> 8 * j & 255, values);
        store32(tile, lane / 8 * 4 + j, values, thread);
      }
  } else if (at < 0) {
    const uint4 zero[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) store32(tile, lane / 8 * 4 + j, zero, thread);
  }
  hide(hidden, at == -1, thread);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Sends for the codes of a warp's eight global records, a quarter of a warp after the 256 bytes of one, and for the
// scales of a thread's quarter; `at` is the slot of record thread % 8, a negative one gives zeros. Loads of codes into
// registers would be moved to where they are used. Record r has its 16 bytes number c at place c ^ r.
__device__ __forceinline__ void send(const unsigned char* entries, int at, unsigned staged, unsigned thread, unsigned* scales) {
  thread = here(thread);
  const unsigned lane = thread % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned r = 2 * i + lane / 16;
    const int slot = __shfl_sync(~0u, at, r);
    const unsigned char* from = entries + static_cast<long long>(max(slot, 0)) * kRecord + lane % 16 * 16;
    copy16(staged + r * 256 + ((lane % 16) ^ r) * 16, from, slot < 0 ? 0 : 16);
  }
  const unsigned char* from = entries + static_cast<long long>(max(at, 0)) * kRecord + 256 + lane / 8 * 8;
  asm volatile("{.reg .pred p; setp.ge.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;\n"
               "@p ld.volatile.global.v2.u32 {%0, %1}, [%2];}"
               : "=&r"(scales[0]), "=&r"(scales[1]) : "l"(from), "r"(at) : "memory");
}

// the codes of a thread's quarter of record thread % 8; what comes next may take their place
__device__ __forceinline__ void receive(unsigned staged, unsigned thread, void* codes) {
  thread = here(thread);
  const unsigned lane = thread % 32, r = lane % 8;
  arrived();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint4& v = static_cast<uint4*>(codes)[j];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(staged + r * 256 + ((lane / 8 * 4 + j) ^ r) * 16) : "memory");
  }
  __syncwarp();
}

// Half `half` of a global tile, of which this thread has codes and scales; `at` is the slot they are of. The first half
// are the slabs of even numbers, the second those of odd ones.
__device__ __forceinline__ void make_global(
    const void* codes, const unsigned* scales, int half, int at, unsigned tile, unsigned hidden, unsigned thread) {
  thread = here(thread);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * half + i;
    uint4 values[4];
    records::e2m1x32(static_cast<const uint4*>(codes)[j], scales[half] >> i * 16, values);
    store32(tile, thread % 32 / 8 * 4 + j, values, thread);
  }
  if (half == 1) hide(hidden, at < 0, thread);
}

}  // namespace keys
