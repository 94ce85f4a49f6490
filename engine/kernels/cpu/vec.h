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

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over 16 pairs of bf16. In assembly, because of intrinsics that add to an
// operand GCC makes copies.
static inline f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
  return acc;
#else
  acc += as_f32(a << 16) * as_f32(b << 16);
  return acc + as_f32(a & 0xffff0000u) * as_f32(b & 0xffff0000u);
#endif
}

// acc[i] += the four products of the int8 a[4i] to a[4i + 3] with b's, which are given plus 128: the instruction wants one
// side unsigned. So acc begins at `dot4_origin` of a's whole row.
static inline i32x16 dot4(i32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
  return acc;
#else
  for (int shift = 24; shift >= 0; shift -= 8)
    acc += ((i32x16)(a << shift) >> 24) * (i32x16)((b >> (24 - shift)) & 0xffu);
  return acc;
#endif
}

// -128 times the sum of n numbers.
static inline int32_t dot4_origin(const int8_t* a, int n) {
  int i = 0;
  int32_t sum = 0;
#if defined(__AVX512VNNI__)
  i32x16 sums = i32x16{};
  for (; i + 64 <= n; i += 64) sums = dot4(sums, load_u32(a + i), u32x16{} + 0x01010101u);
  sum = _mm512_reduce_add_epi32((__m512i)sums);
#endif
  for (; i < n; i++) sum += a[i];
  return -128 * sum;
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

// 64 int8, none of them -128, as bf16: exact.
#if defined(__AVX512VBMI__)
struct alignas(64) Bf16OfInt8 {  // the two bytes of 0 to 127, each a table that one instruction looks up
  uint8_t low[128], high[128];
  constexpr Bf16OfInt8() : low(), high() {
    for (int n = 1; n < 128; n++) {
      int exponent = 0;
      while (n >> (exponent + 1)) exponent++;
      const int bits = (127 + exponent) << 7 | ((n << (7 - exponent)) & 0x7f);
      low[n] = (uint8_t)bits; high[n] = (uint8_t)(bits >> 8);
    }
  }
};
static inline void widen_bf16(uint16_t* to, const uint8_t* from) {
  static constexpr Bf16OfInt8 OF{};
  // Interleaving works in lanes of 16 bytes: put first what each lane shall need.
  const __m512i x = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), _mm512_loadu_si512(from));
  const __m512i size = _mm512_abs_epi8(x);
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(OF.low), size, _mm512_load_si512(OF.low + 64));
  const __m512i top = _mm512_permutex2var_epi8(_mm512_load_si512(OF.high), size, _mm512_load_si512(OF.high + 64));
  const __m512i high = _mm512_ternarylogic_epi32(top, x, _mm512_set1_epi8((char)0x80), 0xF8);  // and its sign
  _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
  _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}
#else
typedef int16_t i16x16 __attribute__((vector_size(32)));
static inline void widen_bf16(uint16_t* to, const uint8_t* from) {
  for (int i = 0; i < 64; i += 16) {  // a step at a time: GCC takes int8 to float apart, element by element
    i8x16 b; std::memcpy(&b, from + i, 16);
    store_bf16(to + i, __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(b, i16x16), i32x16), f32x16));
  }
}
#endif
