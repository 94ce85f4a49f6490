// Sixteen-lane vectors for all kernels: GCC's vector extensions, so that one source serves AVX-512, AVX2 and plain
// machines; intrinsics only where one instruction does what the compiler can't find (bf16 pair dot products).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

static inline f32x16 splat(float x) { return f32x16{} + x; }
static inline f32x16 load(const float* p) { f32x16 v; std::memcpy(&v, p, 64); return v; }
static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, 64); }
static inline u32x16 load_u32(const void* p) { u32x16 v; std::memcpy(&v, p, 64); return v; }
static inline f32x16 as_f32(u32x16 v) { return (f32x16)v; }
static inline u32x16 as_u32(f32x16 v) { return (u32x16)v; }

// bf16 <-> float32, round to nearest even; NaN stays NaN because its payload's top bit survives.
static inline float from_bf16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; std::memcpy(&f, &u, 4); return f; }
static inline uint16_t to_bf16(float f) {
  uint32_t u; std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
static inline f32x16 load_bf16(const uint16_t* p) {
  u16x16 h; std::memcpy(&h, p, 32);
  return as_f32(__builtin_convertvector(h, u32x16) << 16);
}
static inline u32x16 round_bf16(f32x16 v) {  // bf16 bits in the low half of each lane
#if defined(__AVX512BF16__)
  u16x16 h; __m256bh b = _mm512_cvtneps_pbh((__m512)v); std::memcpy(&h, &b, 32);
  return __builtin_convertvector(h, u32x16);
#else
  u32x16 u = as_u32(v);
  return (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
#endif
}
static inline void store_halves(uint16_t* p, u32x16 v) {
  u16x16 h = __builtin_convertvector(v, u16x16);
  std::memcpy(p, &h, 32);
}
static inline void store_bf16(uint16_t* p, f32x16 v) { store_halves(p, round_bf16(v)); }

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over 16 pairs of bf16.
static inline f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc += as_f32(a << 16) * as_f32(b << 16);
  return acc + as_f32(a & 0xffff0000u) * as_f32(b & 0xffff0000u);
#endif
}

static inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0; for (int i = 0; i < 16; i++) s += v[i]; return s;
#endif
}
static inline bool any_above(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  i32x16 above = a > b; bool any = false;
  for (int i = 0; i < 16; i++) any |= above[i] != 0;
  return any;
#endif
}
static inline f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
static inline float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float s = v[0]; for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s; return s;
#endif
}

// exp(x) for x <= 0: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2]; relative error below 2e-7. Below -87 it is 0.
static inline f32x16 exp_negative(f32x16 x) {
  f32x16 t = x * splat(1.44269504f);
  f32x16 n = (t + splat(12582912.f)) - splat(12582912.f);  // round to nearest
  f32x16 r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
  f32x16 p = splat(1.3981999e-3f);
  p = p * r + splat(8.3334519e-3f);
  p = p * r + splat(4.1665795e-2f);
  p = p * r + splat(1.6666665e-1f);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.f);
  p = p * r + splat(1.f);
  i32x16 e = __builtin_convertvector(n, i32x16);
  f32x16 y = (f32x16)((i32x16)p + (e << 23));
  return (f32x16)((u32x16)y & (u32x16)(x > splat(-87.f)));
}

static inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}
// 2^x by a polynomial of degree 4 on [0, 1), relative error below 3e-6: what it is for is rounded to bf16. NaN stays NaN;
// infinities give NaN.
static inline f32x16 exp2_fast(f32x16 x) {
#if defined(__AVX512DQ__)
  f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  x = maximum(x, splat(-126.f));
  f32x16 n = (x + splat(12582912.f)) - splat(12582912.f);  // nearest, then the one below
  n = n > x ? n - splat(1.f) : n;
  f32x16 r = x - n;
#endif
  f32x16 p = fused(splat(0.0135340909f), r, splat(0.0520116085f));
  p = fused(p, r, splat(0.24144267f));
  p = fused(p, r, splat(0.693003851f));
  p = fused(p, r, splat(1.00000259f));
#if defined(__AVX512DQ__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
#else
  return (f32x16)((i32x16)p + (__builtin_convertvector(n, i32x16) << 23));
#endif
}
static inline void store_bf16_pair(uint16_t* p, f32x16 a, f32x16 b) {  // 32 of them
#if defined(__AVX512BF16__)
  __m512bh h = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a); std::memcpy(p, &h, 64);
#else
  store_bf16(p, a); store_bf16(p + 16, b);
#endif
}
