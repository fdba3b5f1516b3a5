// Device functions of the grouped MXFP4 products: tiles of slots, codes to tensor-core operands, stores of results.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

// Slot, first row and one beyond the last row of the slot's rows of tile `place`; slot S where there are fewer tiles.
// Every warp computes it for itself; rows lie sorted by slot, a tile has `BT` rows.
template <int BT>
__device__ __forceinline__ void mx_find_tile(const int64_t *counts, int S, int place, int *out) {
  int lane = threadIdx.x & 31, tiles = 0, rows = 0;
  int slot = S, first = 0, end = 0;
  for (int base = 0; base < S; base += 32) {
    int count = base + lane < S ? (int)counts[base + lane] : 0;
    int own = (count + BT - 1) / BT, t = own, r = count;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int t2 = __shfl_up_sync(~0u, t, d), r2 = __shfl_up_sync(~0u, r, d);
      if (lane >= d) t += t2, r += r2;
    }
    int before = tiles + t - own;
    unsigned hit = __ballot_sync(~0u, own > 0 && before <= place && place < before + own);
    if (hit) {
      int from = __ffs(hit) - 1;
      slot = base + from;
      end = rows + __shfl_sync(~0u, r, from);
      first = end - __shfl_sync(~0u, count, from) + (place - __shfl_sync(~0u, before, from)) * BT;
      break;
    }
    tiles += __shfl_sync(~0u, t, 31);
    rows += __shfl_sync(~0u, r, 31);
  }
  out[0] = slot, out[1] = first, out[2] = end;
}

__device__ __forceinline__ uint32_t mx_times(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ int mx_shared(const void *p) { return (int)__cvta_generic_to_shared(p); }

// 2^126 times the E8M0 scale in byte `g` of `packed`, at most 2, as two bf16.
__device__ __forceinline__ uint32_t mx_scale(uint32_t packed, int g) {
  return __byte_perm(packed, 0, 0x4040 | g | g << 8) * 128 + 0x3F003F00u;
}

// The four registers that a word of a tile (`in_tiles` of the reference) is for: turned and masked, its bits are signs
// and sizes of bf16 values times 2^-126. Rows of the upper and lower half have their own scale.
__device__ __forceinline__ void mx_word(uint32_t *a, uint32_t w, uint32_t upper, uint32_t lower) {
  a[0] = mx_times(w & 0x81C081C0u, upper);
  a[1] = mx_times(w << 4 & 0x81C081C0u, lower);
  a[2] = mx_times(__funnelshift_l(w, w, 10) & 0x81C081C0u, upper);
  a[3] = mx_times((w << 6 & 0x80C080C0u) | (w >> 2 & 0x01000100u), lower);
}

// Operand registers of one thread, from the 16 bytes of its own at `codes` and four scales at `scales`, in shared memory.
__device__ __forceinline__ void mx_tile(uint32_t *a, int codes, int scales) {
  uint32_t w[4], s;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(codes));
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(s) : "r"(scales));
#pragma unroll
  for (int c = 0; c < 4; c++) mx_word(a + 4 * c, w[c], mx_scale(s, c / 2), mx_scale(s, 2 + c / 2));
}

// Where a thread of two warpgroups finds its codes and scales of the first step, `TILES` tiles of 64 inputs, in shared
// memory.
template <int TILES> __device__ __forceinline__ void mx_places(int *at, const void *codes, const void *scales) {
  int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
  at[0] = mx_shared(codes) + group * TILES * 2048 + thread * 16;
  at[1] = mx_shared(scales) + group * TILES * 128 + (thread >> 2) * 4;
  asm volatile("" : "+r"(at[0]), "+r"(at[1]));  // kept, not computed again in every step
}

// Operand registers of this warpgroup's 64 rows in stage `stage`.
template <int TILES> __device__ __forceinline__ void mx_decode(void *frag, const int *at, int stage) {
#pragma unroll
  for (int i = 0; i < TILES; i++)
    mx_tile((uint32_t *)frag + 16 * i, at[0] + stage * TILES * 4096 + i * 2048, at[1] + stage * TILES * 256 + i * 128);
}

// 128 threads decode `TILES` tiles one above the other to bf16 where the tensor cores of Blackwell read them: rows of 64
// inputs, chunks of 16 bytes swizzled by the row.
template <int TILES> __device__ __forceinline__ void mx_spread(void *out, const void *codes, const void *scales) {
  int thread = threadIdx.x & 127, row = 16 * (thread >> 5) + ((thread & 31) >> 2);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    uint32_t a[16];
    mx_tile(a, mx_shared(codes) + i * 2048 + thread * 16, mx_shared(scales) + i * 128 + (thread >> 2) * 4);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      int r = 64 * i + row + 8 * (j & 1), chunk = 2 * (j / 4) + (j / 2 & 1);
      *(uint32_t *)((uint8_t *)out + r * 128 + ((chunk ^ (r & 7)) << 4) + 4 * (thread & 3)) = a[j];
    }
  }
}

__device__ __forceinline__ void mx_store_transposed(const void *at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t p = (uint32_t)__cvta_generic_to_shared(at);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ uint32_t mx_pack(float x, float y) {
  __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  return *(uint32_t *)&v;
}

__device__ __forceinline__ void mx_meet(int threads) { asm volatile("bar.sync 7, %0;" ::"r"(threads) : "memory"); }

__device__ __forceinline__ float mx_swiglu(float gate, float up, float limit, float weight) {
  float g = __bfloat162float(__float2bfloat16_rn(gate)), u = __bfloat162float(__float2bfloat16_rn(up));
  g = g > limit ? limit : g;  // comparisons, because fminf drops NaN
  u = u > limit ? limit : u < -limit ? -limit : u;
  return g / (1.0f + __expf(-g)) * u * weight;
}

// Sums of two warpgroups of 64 rows each to bf16 rows [BT, 128] in shared memory, chunks of 8 swizzled by the row.
template <int BT> __device__ __forceinline__ void mx_stage(const float *c, uint8_t *stage, int rows) {
  int warp = (threadIdx.x >> 5) & 7, lane = threadIdx.x & 31;
  mx_meet(256);  // the memory held operands of the last step
#pragma unroll
  for (int t = 0; t < BT / 8; t += 2) {
    if (8 * t >= rows) break;
    const float *s = c + 4 * t;
    int row = 8 * (t + (lane >> 4)) + (lane & 7), chunk = 2 * warp + ((lane >> 3) & 1);
    mx_store_transposed(stage + row * 256 + ((chunk ^ (row & 7)) << 4), mx_pack(s[0], s[1]), mx_pack(s[2], s[3]),
                        mx_pack(s[4], s[5]), mx_pack(s[6], s[7]));
  }
  mx_meet(256);
}

__device__ __forceinline__ uint4 mx_staged(const uint8_t *stage, int row, int chunk) {
  return *(const uint4 *)(stage + row * 256 + ((chunk ^ (row & 7)) << 4));
}

// The rows of a tile below `end`: 128 outputs from `n0`.
template <int BT>
__device__ __forceinline__ void mx_results(const float *c, void *memory, void *out, int first, int end, int n0, int N) {
  uint8_t *stage = (uint8_t *)memory;
  mx_stage<BT>(c, stage, end - first);
  int chunk = threadIdx.x & 15, n = n0 + 8 * chunk;
  for (int t = threadIdx.x >> 4; t < BT && first + t < end; t += 16)
    if (n < N) *(uint4 *)((__nv_bfloat16 *)out + (int64_t)(first + t) * N + n) = mx_staged(stage, t, chunk);
}

// The first warpgroup's rows are gate, the second's up: 64 routed activations from `n0` of the rows of a tile.
template <int BT>
__device__ __forceinline__ void mx_activate(const float *c, void *memory, const float *weight, void *out, int first,
                                            int end, int n0, int N, float limit) {
  uint8_t *stage = (uint8_t *)memory;
  mx_stage<BT>(c, stage, end - first);
  int chunk = threadIdx.x & 7, n = n0 + 8 * chunk;
  for (int t = threadIdx.x >> 3; t < BT && first + t < end; t += 32) {
    if (n >= N) continue;
    uint4 gate = mx_staged(stage, t, chunk), up = mx_staged(stage, t, chunk + 8), v;
    const uint32_t *g = (const uint32_t *)&gate, *u = (const uint32_t *)&up;
    float w = weight[first + t];
#pragma unroll
    for (int i = 0; i < 4; i++)
      ((uint32_t *)&v)[i] =
          mx_pack(mx_swiglu(__uint_as_float(g[i] << 16), __uint_as_float(u[i] << 16), limit, w),
                  mx_swiglu(__uint_as_float(g[i] & 0xFFFF0000u), __uint_as_float(u[i] & 0xFFFF0000u), limit, w));
    *(uint4 *)((__nv_bfloat16 *)out + (int64_t)(first + t) * N + n) = v;
  }
}
