// Chunks of 32 values of one key, decoded to bf16 by one thread: rows of this step, window and global records.
namespace records {

// a · b of two bf16 values at once; adding −0 keeps the sign of a zero
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
  unsigned r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// values of two E4M3 bytes as f16x2: exact, NaN stays NaN
__device__ __forceinline__ unsigned e4m3x2(unsigned short pair) {
  unsigned r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
  return r;
}

__device__ __forceinline__ unsigned bf16x2(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float2 floats(unsigned halves) {
  float2 r;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(r.x), "=f"(r.y) : "r"(halves));
  return r;
}

// f32 of an E8M0 byte: 2^(b − 127), 0 is 2^-127, 255 is NaN
__device__ __forceinline__ float e8m0(unsigned b) {
  return __uint_as_float(b == 0 ? 0x400000u : b == 255 ? 0x7FC00000u : b << 23);
}

// 8 E2M1 codes times a pair of equal bf16 scales. A code c in a half of its own becomes (c << 12) + (c << 6), which has
// the sign on top and the magnitude in bits 6..8: as bf16 that is the value times 2^-126. A scale of 2^116 makes it the
// value times 2^-10. Half of this runs where products do, because shifts and masks are what such a loop waits for.
__device__ __forceinline__ void e2m1x8(unsigned codes, unsigned scale, unsigned* out) {
  const unsigned even = codes & 0x0F0F0F0Fu, odd = (codes >> 4) & 0x0F0F0F0Fu;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned both;  // of byte k, with the sign of an E2M1 byte, 0, between
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(even), "r"(odd), "r"(0xC480 + 0x1111 * k));
    out[k] = times((both * 0x1040u) & 0x81C081C0u, scale);
  }
}

// values of 16 bytes of codes and 2 of scales times 2^-10
__device__ __forceinline__ void e2m1x32(uint4 codes, unsigned scales, void* values) {
  unsigned* out = static_cast<unsigned*>(values);
  const float2 scale = floats(e4m3x2(static_cast<unsigned short>(scales)));
  const unsigned low = bf16x2(scale.x * 0x1p116f, scale.x * 0x1p116f);
  const unsigned high = bf16x2(scale.y * 0x1p116f, scale.y * 0x1p116f);
  e2m1x8(codes.x, low, out);
  e2m1x8(codes.y, low, out + 4);
  e2m1x8(codes.z, high, out + 8);
  e2m1x8(codes.w, high, out + 12);
}

// columns 32c..32c+31 of a global record; of the first one, but zeros, for a hidden slot
template <int D>
__device__ __forceinline__ void global_chunk(const unsigned char* entries, int slot, int c, void* values) {
  const unsigned char* record = entries + static_cast<long long>(max(slot, 0)) * (D / 2 + D / 16);
  uint4 codes;
  if constexpr (D % 256 == 0) {  // records of whole 16 bytes
    codes = load16(record + 16 * c);
  } else {
    const unsigned* words = reinterpret_cast<const unsigned*>(record + 16 * c);
    codes = make_uint4(__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3));
  }
  const unsigned scales = __ldg(reinterpret_cast<const unsigned short*>(record + D / 2 + 2 * c));
  e2m1x32(codes, slot < 0 ? 0 : scales, values);
}

// values of 32 bytes of codes and one of their scale
__device__ __forceinline__ void e4m3x32(const unsigned* codes, unsigned exponent, void* values) {
  unsigned* out = static_cast<unsigned*>(values);
  const float scale = e8m0(exponent);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 low = floats(e4m3x2(static_cast<unsigned short>(codes[i])));
    const float2 high = floats(e4m3x2(static_cast<unsigned short>(codes[i] >> 16)));
    out[2 * i] = bf16x2(low.x * scale, low.y * scale);
    out[2 * i + 1] = bf16x2(high.x * scale, high.y * scale);
  }
}

// columns 32c..32c+31 of a window place: at >= 0 a row of this step, −1 hidden (zero), below a record of the ring
template <int D>
__device__ __forceinline__ void window_chunk(
    const void* local, const unsigned char* ring, int at, int c, void* values) {
  if (at >= 0) {
    const char* row = static_cast<const char*>(local) + (static_cast<long long>(at) * D + 32 * c) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) static_cast<uint4*>(values)[i] = load16(row + 16 * i);
    return;
  }
  unsigned codes[8] = {};
  unsigned exponent = 0;
  if (at < -1) {
    const unsigned char* record = ring + static_cast<long long>(-2 - at) * (D + D / 32);
    if constexpr (D % 512 == 0) {  // records of whole 16 bytes
      const uint4 a = load16(record + 32 * c), b = load16(record + 32 * c + 16);
      codes[0] = a.x, codes[1] = a.y, codes[2] = a.z, codes[3] = a.w;
      codes[4] = b.x, codes[5] = b.y, codes[6] = b.z, codes[7] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned short* pairs = reinterpret_cast<const unsigned short*>(record + 32 * c + 4 * i);
        codes[i] = __ldg(pairs) | static_cast<unsigned>(__ldg(pairs + 1)) << 16;
      }
    }
    exponent = __ldg(record + D + c);
  }
  e4m3x32(codes, exponent, values);
}

}  // namespace records
