// The column of a row's largest value, looked for lane by lane: the first of equals, of those that a mask allows.
//
// A mask has one bit a column, little-endian in words of 32; columns behind its last word may not come.
#pragma once
#include "vec.h"
#include <limits>

struct Best {
  f32x16 value, bad;
  i32x16 column;

  static Best none() { return {splat(-std::numeric_limits<float>::infinity()), f32x16{}, i32x16{}}; }

  // Values of the columns [first, first + 16); bit i of `allowed` says it of the i-th.
  void see(f32x16 v, int first, uint32_t allowed) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#if defined(__AVX512F__)
    const __mmask16 is_better = _mm512_mask_cmp_ps_mask((__mmask16)allowed, (__m512)v, (__m512)value, _CMP_GT_OQ);
    column = (i32x16)_mm512_mask_mov_epi32((__m512i)column, is_better, (__m512i)(lane + first));
    value = (f32x16)_mm512_mask_mov_ps((__m512)value, is_better, (__m512)v);
#else
    const i32x16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const auto is_better = (v > value) & (((i32x16{} + (int32_t)allowed) & bit) != 0);
    column = is_better ? lane + first : column;
    value = is_better ? v : value;
#endif
    bad += v * splat(0.f);  // NaN from then on where v isn't finite
  }

  // Adds what was seen of other columns of the row.
  void join(const Best& other) {
    const auto is_better = (other.value > value) | ((other.value == value) & (other.column < column));
    column = is_better ? other.column : column;
    value = is_better ? other.value : value;
    bad += other.bad;
  }

  // -1 where a value isn't finite, or no column may come.
  int64_t found() const {
    int best = 0;
    for (int i = 1; i < 16; i++)
      if (value[i] > value[best] || (value[i] == value[best] && column[i] < column[best])) best = i;
    const bool is_sound = sum(bad) == 0.f && value[best] > -std::numeric_limits<float>::infinity();
    return is_sound ? column[best] : -1;
  }
};

// The masks of the first `rows` of a product; the rows behind them have none.
struct Masks {
  const uint32_t* bits;  // [rows][words]
  int rows, words;

  // What the mask of row `m` says of the columns [32 * word, 32 * word + 32).
  uint32_t at(int m, int word) const {
    if (m >= rows) return ~0u;
    return word < words ? bits[(int64_t)m * words + word] : 0u;
  }
};
