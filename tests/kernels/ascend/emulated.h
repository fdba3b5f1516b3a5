// What an AscendC source of TileLang calls, in plain C++: one core after the other, threads of a SIMT region in turn (they
// only meet in barriers that separate regions), 64 lanes of f32 per register, the cube and the two vector units of a mixed
// kernel in threads of their own. Written from the names and the documentation of the intrinsics; it stands for the device
// in tests of addresses and arithmetic.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <semaphore>
#include <thread>

#define __gm__
#define __ubuf__
#define __global__
#define __vector__
#define __simt_vf__
#define __simd_vf__
#define __launch_bounds__(n)
using std::max;
using std::min;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    bits = x != x ? 0x7FC0 : uint16_t((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t b = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

namespace tl {
struct float_e4m3_t {  // S EEEE MMM, bias 7, no infinity, 0x7F is NaN
  uint8_t byte;
  explicit float_e4m3_t(float x) {
    if (x != x) { byte = 0x7F; return; }
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    const float mag = std::fabs(x);
    if (mag >= 464.0f) { byte = sign | 0x7F; return; }  // beyond the largest and its rounding
    int e = mag == 0 ? -6 : std::max(-6, std::ilogb(mag));
    const float steps = std::nearbyint(std::ldexp(mag, 3 - e));  // to nearest, ties to even
    byte = uint8_t(sign | (int(steps) + (e + 6) * 8));  // 16 steps carry into the exponent by themselves
  }
  operator float() const {
    const int e = (byte >> 3) & 15, m = byte & 7;
    if ((byte & 0x7F) == 0x7F) return NAN;
    const float mag = e == 0 ? std::ldexp(float(m), -9) : std::ldexp(float(8 + m), e - 10);
    return byte & 0x80 ? -mag : mag;
  }
};
}  // namespace tl

// ------------------------------------------------------------------ the core
enum event_t : int {};
enum asc_load_l2_cache_mode : int {};
enum asc_store_l2_cache_mode : int {};
enum { PIPE_S, PIPE_V, PIPE_M, PIPE_FIX, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum { CUBE = 2 };
static thread_local int unit;  // a vector unit 0 or 1, or the cube
static thread_local int64_t block_idx;
static thread_local struct { uint32_t x, y, z; } threadIdx;
alignas(512) static uint8_t ub_of[3][256 * 1024];
#define ub_memory (ub_of[unit])
namespace cce { struct dim3 { uint32_t x, y, z; dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {} }; }

inline void asc_init() {}
inline void asc_sync_notify(int, int, event_t) {}
inline void asc_sync_wait(int, int, event_t) {}
inline void asc_syncthreads() {}  // threads of these programs keep to their own values between two regions

inline void asc_copy_gm2ub_align(uint8_t* to, const uint8_t* from, int bursts, int bytes, int, int, int,
                                 asc_load_l2_cache_mode, int64_t from_stride, int64_t to_stride) {
  for (int i = 0; i < bursts; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
}
inline void asc_copy_ub2gm_align(uint8_t* to, const uint8_t* from, int bursts, int bytes, asc_store_l2_cache_mode,
                                 int64_t to_stride, int64_t from_stride) {
  for (int i = 0; i < bursts; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
}
template <auto Region, class... A> void asc_vf_call(cce::dim3 threads, A... args) {
  for (threadIdx.z = 0; threadIdx.z < threads.z; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < threads.y; ++threadIdx.y)
      for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) Region(args...);
}

// ----------------------------------------------------------------- registers
constexpr int LANES = 64;
struct vector_f32 { float lane[LANES]; };
struct vector_bf16 { bfloat16_t lane[2 * LANES]; };  // 128 lanes; parts are the even and the odd ones
struct vector_bool { int active; };                  // lanes below are active
enum { PAT_ALL, MODE_ZEROING, PART_EVEN, PART_ODD, ROUND_R, RS_ENABLE, POS_LOWEST };
inline vector_bool asc_create_mask_b32(int) { return {LANES}; }
inline vector_bool asc_create_mask_b16(int) { return {2 * LANES}; }

namespace simd_inst {
inline vector_bool update_mask_b32(uint32_t n) { return {int(std::min<uint32_t>(n, LANES))}; }
template <class F> vector_f32 each(vector_bool mask, F f) {
  vector_f32 out;
  for (int i = 0; i < LANES; ++i) out.lane[i] = i < mask.active ? f(i) : 0.0f;
  return out;
}
template <class T> vector_f32 vdup(T x, vector_bool m, int) { return each(m, [&](int) { return x; }); }
inline vector_f32 vdupv(vector_f32 a, vector_bool m, int, int) { return each(m, [&](int) { return a.lane[0]; }); }
inline vector_f32 vadd(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] + b.lane[i]; }); }
inline vector_f32 vsub(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] - b.lane[i]; }); }
inline vector_f32 vmul(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] * b.lane[i]; }); }
inline vector_f32 vmin(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return std::min(a.lane[i], b.lane[i]); }); }
inline vector_f32 vmax(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return std::max(a.lane[i], b.lane[i]); }); }
inline void vmula(vector_f32* a, vector_f32 b, vector_f32 c, vector_bool m, int) {
  for (int i = 0; i < m.active && i < LANES; ++i) a->lane[i] = std::fma(b.lane[i], c.lane[i], a->lane[i]);
}
inline vector_f32 vadds(vector_f32 a, float s, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] + s; }); }
inline vector_f32 vmuls(vector_f32 a, float s, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] * s; }); }
inline vector_f32 vmins(vector_f32 a, float s, vector_bool m, int) { return each(m, [&](int i) { return std::min(a.lane[i], s); }); }
inline vector_f32 vmaxs(vector_f32 a, float s, vector_bool m, int) { return each(m, [&](int i) { return std::max(a.lane[i], s); }); }
inline vector_f32 vneg(vector_f32 a, vector_bool m, int) { return each(m, [&](int i) { return -a.lane[i]; }); }
inline vector_f32 vexp(vector_f32 a, vector_bool m, int) { return each(m, [&](int i) { return std::exp(a.lane[i]); }); }
inline vector_f32 vsqrt(vector_f32 a, vector_bool m, int) { return each(m, [&](int i) { return std::sqrt(a.lane[i]); }); }
inline vector_f32 vdiv_0ulp_ftz_true(vector_f32 a, vector_f32 b, vector_bool m, int) { return each(m, [&](int i) { return a.lane[i] / b.lane[i]; }); }
inline vector_f32 vcadd(vector_f32 a, vector_bool m, int) {  // the sum, in lane 0
  vector_f32 out = each({0}, [](int) { return 0.0f; });
  for (int i = 0; i < std::min(m.active, LANES); ++i) out.lane[0] += a.lane[i];
  return out;
}
template <class T> vector_f32 vlds_brc_elem(const T* at, int offset) { return each({LANES}, [&](int) { return at[offset]; }); }
template <class T> vector_f32 vlds_norm(const T* at, int offset) { return each({LANES}, [&](int i) { return at[offset + i]; }); }
inline void vsts_norm(vector_f32 a, float* at, int offset, vector_bool m) {
  for (int i = 0; i < std::min(m.active, LANES); ++i) at[offset + i] = a.lane[i];
}
template <class T> vector_bf16 vlds_unpack(const T* at, int offset) {  // 64 values, one in every other lane
  vector_bf16 out{};
  for (int i = 0; i < LANES; ++i) out.lane[2 * i] = at[offset + i];
  return out;
}
template <class T> vector_f32 vcvt(vector_bf16 a, vector_bool, int part, int) {
  return each({LANES}, [&](int i) { return float(a.lane[2 * i + (part == PART_ODD)]); });
}
template <class T> vector_bf16 vcvt(vector_f32 a, vector_bool, int, int, int part, int) {
  vector_bf16 out{};
  for (int i = 0; i < LANES; ++i) out.lane[2 * i + (part == PART_ODD)] = bfloat16_t(a.lane[i]);
  return out;
}
template <class T> void vsts_pack_b32(vector_bf16 a, T* at, int offset, vector_bool) {  // every other lane, dense
  for (int i = 0; i < LANES; ++i) at[offset + i] = a.lane[2 * i];
}
}  // namespace simd_inst

// ------------------------------------------------------------------ the cube
// L1 keeps tiles in fractals: columns of 32 bytes, rows of the whole tile below each other in one. L0C is row-major here.
#define __cbuf__
#define __cc__
#define __cube__
enum asc_unit_flag_mode : int {};
enum asc_quant_mode : int {};
enum asc_relu_pre_mode : int {};
alignas(512) static uint8_t l1_memory[512 * 1024];
alignas(512) static uint8_t l0c_memory[256 * 1024];
static thread_local int tile_rows;

inline void asc_set_gm2l1_nz_para(int, int, uint16_t rows, int) { tile_rows = rows; }
template <class T>
void asc_copy_gm2l1_nd2nz(T* to, const T* from, int64_t stride, asc_load_l2_cache_mode, int rows, int columns, int, int) {
  constexpr int C0 = 32 / sizeof(T);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      std::memcpy(&to[c / C0 * tile_rows * C0 + r * C0 + c % C0], (const uint8_t*)from + r * stride + c * sizeof(T), sizeof(T));
}
// scales, two bytes of a row in one value: 16 rows of a column beside each other, then the next column
template <class T>
void asc_copy_gm2l1_dn2nz(T* to, const T* from, int64_t stride, asc_load_l2_cache_mode, int columns, int rows, int, int) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      std::memcpy(&to[(r / 16 * tile_rows + c) * 16 + r % 16], (const uint8_t*)from + r * stride + c * sizeof(T), sizeof(T));
}
struct asc_fill_config { uint64_t repeat, blk_num, dst_gap; };
template <class T> void asc_fill_l1(T* to, uint32_t value, asc_fill_config how) {  // blocks of 32 bytes
  assert(value == 0);
  uint8_t* at = (uint8_t*)to;
  for (uint64_t i = 0; i < how.repeat; ++i, at += (how.blk_num + how.dst_gap) * 32) std::memset(at, 0, how.blk_num * 32);
}
template <class T> float fractal(const T* tile, int rows, int r, int c) {
  constexpr int C0 = 32 / sizeof(T);
  return float(tile[c / C0 * rows * C0 + r * C0 + c % C0]);
}
template <int M, int K, int N, int SUB, bool TRANSPOSED, class T>
void ascend_gemm_l1(float* to, const T* a, const T* b, int clear, int, int) {
  static_assert(TRANSPOSED && K % SUB == 0);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float sum = clear ? 0.0f : to[m * N + n];
      for (int k = 0; k < K; ++k) sum += fractal(a, M, m, k) * fractal(b, N, n, k);
      to[m * N + n] = sum;
    }
}
inline void asc_set_l0c_copy_nz_para(int, int, int) {}
template <class T>
void asc_copy_l0c2gm(T* to, const float* from, int columns, int rows, int stride, int, asc_store_l2_cache_mode,
                            asc_unit_flag_mode, asc_quant_mode, asc_relu_pre_mode, int, int, int, int) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) to[r * stride + c] = T(from[r * columns + c]);
}

struct fp8_e4_t {
  uint8_t byte;
  operator float() const { tl::float_e4m3_t x(0.0f); x.byte = byte; return x; }
};
using fp8_e8_t = uint8_t;
using float8_e4m3_t = fp8_e4_t;
using float8_e8m0fnu = uint8_t;
template <int M, int K, int N, int SUB, bool TRANSPOSED, int PACK, class T, class S, class C>
void ascend_blockscaled_gemm_l1(C* to, const T* a, const T* b, const S* sa, const S* sb, int clear, int, int, int) {
  static_assert(TRANSPOSED && PACK == 2);
  auto scale = [](const S* s, int r, int k) {
    return std::ldexp(1.0f, int(s[((r / 16 * (K / 64) + k / 64) * 16 + r % 16) * 2 + k / 32 % 2]) - 127);
  };
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float sum = clear ? 0.0f : to[m * N + n];
      for (int k = 0; k < K; ++k) sum += fractal(a, M, m, k) * scale(sa, m, k) * fractal(b, N, n, k) * scale(sb, n, k);
      to[m * N + n] = sum;
    }
}

// ------------------------------------------------- cube and vector units together
#define __mix__(cubes, vectors)
#define ASC_IS_AIC (unit == CUBE)
#define ASC_IS_AIV (unit != CUBE)
inline int asc_get_sub_block_id() { return unit; }
struct flag { std::counting_semaphore<> raised{0}; };
static flag to_vector[2][16], to_cube[2][16];  // the cube counts those of the second unit from 16 on
inline void asc_sync_intra_arrive(int, int id) { (unit == CUBE ? to_vector[id / 16][id % 16] : to_cube[unit][id]).raised.release(); }
inline void asc_sync_intra_wait(int, int id) { (unit == CUBE ? to_cube[id / 16][id % 16] : to_vector[unit][id]).raised.acquire(); }

enum asc_dual_dst_mode : int {};
inline void asc_copy_l0c2ub(float* to, const float* from, int columns, int rows, int stride, int, int, asc_dual_dst_mode mode,
                            asc_unit_flag_mode, asc_quant_mode, asc_relu_pre_mode, int, int, int, int) {
  assert(mode == 1 || mode == 2);  // half of the rows, or of the columns, to each vector unit
  const auto at = (uint8_t*)to - ub_memory;
  const int high = mode == 1 ? rows / 2 : rows, wide = mode == 2 ? columns / 2 : columns;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      ((float*)(ub_of[r / high + c / wide] + at))[r % high * stride + c % wide] = from[r * columns + c];
}
template <int ROWS, int COLUMNS, class T, class U> void ascend_nd2nz_scatter(const T* from, U* to) {
  constexpr int C0 = 32 / sizeof(U);  // a row of padding between two columns of fractals
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) to[(c / C0 * (ROWS + 1) + r) * C0 + c % C0] = from[r * COLUMNS + c];
}
inline void asc_copy_ub2l1(void* to, const void* from, int bursts, int length, int from_gap, int to_gap) {  // in 32 bytes
  for (int i = 0; i < bursts; ++i)
    std::memcpy((uint8_t*)to + i * (length + to_gap) * 32, (const uint8_t*)from + i * (length + from_gap) * 32, length * 32);
}
struct float2 { float x, y; };
struct uint1 { uint32_t x; };
struct bfloat16x2_t { bfloat16_t x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 a) { return {bfloat16_t(a.x), bfloat16_t(a.y)}; }

// Runs a kernel on one core; memory on it holds NaN before.
template <class Kernel> void run_on_core(int64_t core, bool mixed, Kernel kernel) {
  std::memset(ub_of, 0xFF, sizeof ub_of);
  std::memset(l1_memory, 0xFF, sizeof l1_memory);
  std::memset(l0c_memory, 0xFF, sizeof l0c_memory);
  auto of = [&](int which) { unit = which; block_idx = core; kernel(); };
  if (!mixed) return of(0);
  std::thread cube(of, CUBE), other(of, 1), first(of, 0);
  cube.join(), other.join(), first.join();
}
