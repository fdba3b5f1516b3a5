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
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// The three bits of an E2M1 size moved to the exponent and mantissa of a bf16 are its value times 2^-126.
// `pair` holds two bytes of two codes each; low: codes of the low nibbles, high: of the high ones.
__device__ __forceinline__ void mx_pair(uint32_t pair, uint32_t &low, uint32_t &high) {
  uint32_t d = __byte_perm(pair, 0, 0x1100);
  low = ((d << 4) & 0x80008000u) | ((d >> 2) & 0x01C001C0u);
  high = (d & 0x80008000u) | ((d << 2) & 0x01C001C0u);
}

// Operand registers of a 16 x (32 * GROUPS) slab: rows at `r0` and `r1` (shared memory, at this lane's bytes), whose
// chunks of 16 bytes lie where TMA's swizzle put them (`x0`, `x1`), with E8M0 scales packed in `s0` and `s1`.
template <int GROUPS>
__device__ __forceinline__ void mx_slab(uint32_t *a, const uint8_t *r0, const uint8_t *r1, int x0, int x1, uint32_t s0,
                                        uint32_t s1) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint8_t *p = (r ? r1 : r0) + ((g ^ (r ? x1 : x0)) << 4);
      mx_pair(*(const uint16_t *)p, a[8 * g + r], a[8 * g + 4 + r]);
      mx_pair(*(const uint16_t *)(p + 8), a[8 * g + 2 + r], a[8 * g + 6 + r]);
    }
  }
  if (((s0 | s1) & 0x80808080u) == 0) {
#pragma unroll
    for (int i = 0; i < 8 * GROUPS; i++) {
      uint32_t s = (((i & 1) ? s1 : s0) >> (8 * (i / 8))) & 0xFF;
      a[i] = mx_times(a[i], (s + 126) * 0x00800080u);
    }
  } else {  // a scale above 1: 2^126 times it would leave the range
#pragma unroll
    for (int i = 0; i < 8 * GROUPS; i++) {
      uint32_t s = (((i & 1) ? s1 : s0) >> (8 * (i / 8))) & 0xFF;
      a[i] = mx_times(mx_times(a[i], 0x7E807E80u), s * 0x00800080u);
    }
  }
}

template <int GROUPS> __device__ __forceinline__ uint32_t mx_scales(const uint8_t *p) {
  return GROUPS == 4 ? *(const uint32_t *)p : GROUPS == 2 ? *(const uint16_t *)p : *p;
}

// `apart`: rows between a slab's upper and lower half in `codes` and `scales` (8: one matrix; else gate and up).
template <int GROUPS, int APART>
__device__ __forceinline__ void mx_decode(void *frag, const void *codes, const void *scale_bytes, int stride,
                                          int step) {
  constexpr int WIDE = 16 * GROUPS;
  int warp = (threadIdx.x >> 5) & 7, lane = threadIdx.x & 31;
  int r0 = (APART == 8 ? 16 : 8) * warp + (lane >> 2), r1 = r0 + APART;
  constexpr int SHIFT = GROUPS == 4 ? 1 : 2, MASK = GROUPS - 1;
  const uint8_t *at = (const uint8_t *)codes + 2 * (lane & 3), *scales = (const uint8_t *)scale_bytes;
  mx_slab<GROUPS>((uint32_t *)frag, at + r0 * WIDE, at + r1 * WIDE, (r0 >> SHIFT) & MASK, (r1 >> SHIFT) & MASK,
                  mx_scales<GROUPS>(scales + r0 * stride + step * GROUPS),
                  mx_scales<GROUPS>(scales + r1 * stride + step * GROUPS));
}

// 128 threads decode 64 inputs of `ROWS` rows to bf16 where the tensor cores of Blackwell read them: rows of 128 bytes,
// chunks of 16 bytes swizzled by the row. The codes of a row lie where TMA's swizzle put them.
template <int ROWS>
__device__ __forceinline__ void mx_spread(void *out, const void *codes, const void *scale_bytes, int stride, int step) {
  for (int i = threadIdx.x; i < 2 * ROWS; i += 128) {
    int row = i >> 1, group = i & 1;
    uint4 v = *(const uint4 *)((const uint8_t *)codes + row * 32 + ((group ^ ((row >> 2) & 1)) << 4));
    uint32_t scale = ((const uint8_t *)scale_bytes)[row * stride + 2 * step + group];
    uint32_t words[4] = {v.x, v.y, v.z, v.w}, value[16];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      mx_pair(words[j >> 1] >> (16 * (j & 1)), value[j], value[8 + j]);
    }
#pragma unroll
    for (int j = 0; j < 16; j++) value[j] = mx_times(mx_times(value[j], 0x7E807E80u), scale * 0x00800080u);
#pragma unroll
    for (int j = 0; j < 4; j++)
      *(uint4 *)((uint8_t *)out + row * 128 + (((4 * group + j) ^ (row & 7)) << 4)) =
          make_uint4(value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]);
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

// Rows [BT, WIDE] of results in shared memory, chunks of 8 swizzled by the row, to the rows of a tile below `end`.
template <int BT, int WIDE, int THREADS>
__device__ __forceinline__ void mx_write(const uint8_t *stage, void *out, int first, int end, int n0, int N) {
  constexpr int CHUNKS = WIDE / 8;
  mx_meet(THREADS);
  int chunk = threadIdx.x % CHUNKS, n = n0 + 8 * chunk;
  for (int t = threadIdx.x / CHUNKS; t < BT; t += THREADS / CHUNKS)
    if (first + t < end && n < N)
      *(uint4 *)((__nv_bfloat16 *)out + (int64_t)(first + t) * N + n) = *(const uint4 *)(stage + t * 2 * WIDE + ((chunk ^ (t & 7)) << 4));
}

// Rows r of the sums are gate, rows r + 8 up: routed activations [BT, 64] of a tile.
template <int BT>
__device__ __forceinline__ void mx_activate(const float *c, void *memory, const float *weight, void *out, int first,
                                            int end, int n0, int N, float limit) {
  uint8_t *stage = (uint8_t *)memory;
  int warp = (threadIdx.x >> 5) & 7, lane = threadIdx.x & 31;
  mx_meet(256);  // the memory held operands of the last step
#pragma unroll
  for (int t = 0; t < BT / 8; t += BT >= 32 ? 4 : 2) {
    if (first + 8 * t >= end) break;
    uint32_t v[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < (BT >= 32 ? 4 : 2); i++) {
      int m = first + 8 * (t + i) + 2 * (lane & 3);
      float w0 = m < end ? weight[m] : 0.0f, w1 = m + 1 < end ? weight[m + 1] : 0.0f;
      const float *s = c + 4 * (t + i);
      v[i] = mx_pack(mx_swiglu(s[0], s[2], limit, w0), mx_swiglu(s[1], s[3], limit, w1));
    }
    int row = 8 * (t + (BT >= 32 ? lane >> 3 : (lane >> 3) & 1)) + (lane & 7);
    mx_store_transposed(stage + row * 128 + ((warp ^ (row & 7)) << 4), v[0], v[1], BT >= 32 ? v[2] : v[0],
                        BT >= 32 ? v[3] : v[1]);
  }
  mx_write<BT, 64, 256>(stage, out, first, end, n0, N);
}

// Sums of 128 outputs, rows [BT, 128] of a tile.
template <int BT>
__device__ __forceinline__ void mx_results(const float *c, void *memory, void *out, int first, int end, int n0, int N) {
  uint8_t *stage = (uint8_t *)memory;
  int warp = (threadIdx.x >> 5) & 7, lane = threadIdx.x & 31;
  mx_meet(256);
#pragma unroll
  for (int t = 0; t < BT / 8; t += 2) {
    if (first + 8 * t >= end) break;
    const float *s = c + 4 * t;
    int row = 8 * (t + (lane >> 4)) + (lane & 7), chunk = 2 * warp + ((lane >> 3) & 1);
    mx_store_transposed(stage + row * 256 + ((chunk ^ (row & 7)) << 4), mx_pack(s[0], s[1]), mx_pack(s[2], s[3]),
                        mx_pack(s[4], s[5]), mx_pack(s[6], s[7]));
  }
  mx_write<BT, 128, 256>(stage, out, first, end, n0, N);
}
