// Device functions of the lightning indexer's scores.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

__device__ __forceinline__ float ix_relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// The head weights of this lane's columns, packed in pairs: `QB` queries of `HEADS` heads from query `q0` of `C` on.
template <int QB, int HEADS>
__device__ __forceinline__ void ix_weights(uint32_t *w, const void *weight, int q0, int C) {
  const uint32_t *at = (const uint32_t *)weight + (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < QB * HEADS / 8; i++) w[i] = q0 + i / (HEADS / 8) < C ? at[4 * i] : 0u;
}

__device__ __forceinline__ float ix_visible(float x, int64_t entry, int64_t seen) {
  return entry < seen ? x : __int_as_float(0xff800000);
}

// Sums over the heads of 64 entries (rows of the product, of this warpgroup) and `QB` queries, to `out` [C, n].
template <int QB, int HEADS>
__device__ __forceinline__ void ix_scores(const float *c, const uint32_t *w, const int64_t *visible, float *out, int q0,
                                          int C, int e0, int n) {
  int warp = (threadIdx.x >> 5) & 7, lane = threadIdx.x & 31, quad = lane & 3;
  float s[2][QB];
#pragma unroll
  for (int q = 0; q < QB; q++) {
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int u = 0; u < HEADS / 8; u++) {
      int i = q * (HEADS / 8) + u;
      float w0 = __uint_as_float(w[i] << 16), w1 = __uint_as_float(w[i] & 0xffff0000u);
      a = fmaf(ix_relu(c[4 * i]), w0, a), a = fmaf(ix_relu(c[4 * i + 1]), w1, a);
      b = fmaf(ix_relu(c[4 * i + 2]), w0, b), b = fmaf(ix_relu(c[4 * i + 3]), w1, b);
    }
    s[0][q] = a, s[1][q] = b;
  }
  // the four lanes of a row add their columns, each keeping the sums of its share of the queries
  constexpr int HALF = QB >= 2 ? QB / 2 : 1, KEPT = QB >= 4 ? QB / 4 : 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int q = 0; q < HALF; q++) {
      bool upper = QB >= 2 && (quad & 2);
      float mine = upper ? s[r][QB >= 2 ? HALF + q : q] : s[r][q], other = upper ? s[r][q] : s[r][QB >= 2 ? HALF + q : q];
      s[r][q] = mine + __shfl_xor_sync(~0u, other, 2);
    }
#pragma unroll
    for (int q = 0; q < KEPT; q++) {
      bool upper = QB >= 4 && (quad & 1);
      float mine = upper ? s[r][QB >= 4 ? KEPT + q : q] : s[r][q], other = upper ? s[r][q] : s[r][QB >= 4 ? KEPT + q : q];
      s[r][q] = mine + __shfl_xor_sync(~0u, other, 1);
    }
  }
  int e = e0 + 16 * warp + (lane >> 2);
  if (QB >= 4 || (quad & (QB == 2 ? 1 : 3)) == 0) {
#pragma unroll
    for (int q = 0; q < KEPT; q++) {
      int query = q0 + (QB >= 4 ? quad * KEPT + q : QB == 2 ? quad >> 1 : 0);
      if (query < C) {
        int64_t seen = visible[query];
        float *at = out + (int64_t)query * n;
        if (e < n) at[e] = ix_visible(s[0][q], e, seen);
        if (e + 8 < n) at[e + 8] = ix_visible(s[1][q], e + 8, seen);
      }
    }
  }
}

// -inf from entry `e0` to `end` of the rows of `QB` queries: what none of them sees.
template <int QB, int THREADS>
__device__ __forceinline__ void ix_hidden(float *out, int q0, int C, int e0, int end, int n) {
  for (int q = q0; q < q0 + QB && q < C; q++)
    for (int e = e0 + threadIdx.x; e < end && e < n; e += THREADS) out[(int64_t)q * n + e] = __int_as_float(0xff800000);
}
