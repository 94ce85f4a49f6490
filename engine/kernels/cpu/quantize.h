// A row of floats on its way to int8: the Hadamard rotation, the scale, and the activation that comes before both.
#pragma once
#include "vec.h"
#include <cmath>

// One stage within registers: lane i becomes x[i ^ H] + x[i], or minus it where bit H of i is set.
template <int H> inline f32x16 butterfly(f32x16 x) {
  constexpr i32x16 swap = {0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H,
                           8 ^ H, 9 ^ H, 10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H};
#define SIGN(i) ((i) & H ? -1.f : 1.f)
  constexpr f32x16 sign = {SIGN(0), SIGN(1), SIGN(2), SIGN(3), SIGN(4), SIGN(5), SIGN(6), SIGN(7),
                           SIGN(8), SIGN(9), SIGN(10), SIGN(11), SIGN(12), SIGN(13), SIGN(14), SIGN(15)};
#undef SIGN
#if defined(__clang__)
  f32x16 swapped;
  for (int i = 0; i < 16; i++) swapped[i] = x[i ^ H];
#else
  const f32x16 swapped = __builtin_shuffle(x, swap);
#endif
  return fused(x, sign, swapped);
}

// In place: 64-point fast Walsh-Hadamard transform over 4 registers, scaled by 1/8.
inline void rotate64(float* x) {
  const f32x16 a = load(x), b = load(x + 16), c = load(x + 32), d = load(x + 48);
  const f32x16 s = a + b, t = a - b, u = c + d, w = c - d;
  const f32x16 v[4] = {s + u, t + w, s - u, t - w};
  for (int j = 0; j < 4; j++) store(x + 16 * j, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v[j])))) * splat(0.125f));
}

inline void rotate(float* x, int n) { for (int i = 0; i < n; i += 64) rotate64(x + i); }

inline float quantize_row(const float* x, int n, int8_t* q) {
  f32x16 top = f32x16{}, bad = f32x16{};
  for (int i = 0; i < n; i += 16) {
    f32x16 v = load(x + i);
    top = maximum(top, maximum(v, -v));
    bad += v * splat(0.f);
  }
  if (sum(bad) != 0.f) { std::memset(q, 0, n); return NAN; }  // NaN and infinity go on as NaN, they don't get lost
  const float most = largest(top);
  const float inverse = most > 0 ? 127.f / most : 0.f;
  for (int i = 0; i < n; i += 16) {
    f32x16 r = fused(load(x + i), splat(inverse), splat(12582912.f));  // round to nearest even
    i32x16 v = (i32x16)r - 0x4b400000;
    i8x16 b = __builtin_convertvector(v, i8x16);
    std::memcpy(q + i, &b, 16);
  }
  return most / 127.f;
}

// x / (1 + 2^power); the division as a reciprocal with one Newton step, relative error below 1e-6.
inline f32x16 over_one_plus(f32x16 x, f32x16 power) {
#if defined(__AVX512F__)
  power = (f32x16)_mm512_min_ps((__m512)power, _mm512_set1_ps(100.f));
  const f32x16 d = exp2_fast(power) + splat(1.f), r = (f32x16)_mm512_rcp14_ps((__m512)d);
  return x * (r * (splat(2.f) - d * r));
#else
  return x / (exp2_fast(power < splat(100.f) ? power : splat(100.f)) + splat(1.f));
#endif
}

// x / (1 + e^-x)
inline f32x16 silu(f32x16 x) { return over_one_plus(x, x * splat(-1.44269504f)); }

// x / (1 + e^-2y) with y = sqrt(2 / pi) (x + 0.044715 x^3): the approximation by tanh, as x / 2 (1 + tanh y).
inline f32x16 gelu(f32x16 x) {
  const f32x16 cubic = fused(x * x, splat(0.044715f), splat(1.f));
  return over_one_plus(x, x * cubic * splat(-2.30220819f));
}
