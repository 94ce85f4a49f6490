// Sums of a panel in vector registers, where there are no AMX tiles: AVX-512 with VNNI for int8 and with BF16 for bf16.
//
// Eight rows by 32 columns stay in registers, which is what the assembly is for: of intrinsics GCC makes copies. The int8 instruction wants one side unsigned, so that the matrix was packed
// as its numbers + 128, and each sum begins at -128 times the sum of its row.
#pragma once
#include "panel.h"
#include "vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_VECTOR_PANELS 1
#include <immintrin.h>

struct VectorInt8Dot {
  using Sum = int32_t;
  using Vector = __m512i;
  static Vector add(Vector sum, __m512i weights, __m512i four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(four));
    return sum;
  }
  static Sum origin(const uint8_t* row, int row_bytes) {
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < row_bytes; k += 64)
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)0x80), _mm512_loadu_si512(row + k));
    return -_mm512_reduce_add_epi32(sum);
  }
  static Vector from(Sum origin) { return _mm512_set1_epi32(origin); }
};
struct VectorBf16Dot {
  using Sum = float;
  using Vector = __m512;
  static Vector add(Vector sum, __m512i weights, __m512i two) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(two));
    return sum;
  }
  static Sum origin(const uint8_t*, int) { return 0; }
  static Vector from(Sum origin) { return _mm512_set1_ps(origin); }
};

template <class Dot> class VectorPanel {
 public:
  using Sum = typename Dot::Sum;

  // Before `multiply` of rows out of these `count`, at most BLOCK_ROWS.
  void begin(const uint8_t* rows, int count, int row_bytes, int) {
    for (int r = 0; r < count; r++) origins[r] = Dot::origin(rows + (int64_t)r * row_bytes, row_bytes);
  }

  // `at`: where the first of the rows lies among those of `begin`.
  void multiply(const uint8_t* rows, int at, int count, int row_bytes, const uint8_t* left, const uint8_t* right,
                Sum (*sums)[PANEL]) const {
    int r = 0;
    for (; r + 8 <= count; r += 8) some<8>(rows, at, r, row_bytes, left, right, sums);
    switch (count - r) {
      case 1: return some<1>(rows, at, r, row_bytes, left, right, sums);
      case 2: return some<2>(rows, at, r, row_bytes, left, right, sums);
      case 3: return some<3>(rows, at, r, row_bytes, left, right, sums);
      case 4: return some<4>(rows, at, r, row_bytes, left, right, sums);
      case 5: return some<5>(rows, at, r, row_bytes, left, right, sums);
      case 6: return some<6>(rows, at, r, row_bytes, left, right, sums);
      case 7: return some<7>(rows, at, r, row_bytes, left, right, sums);
    }
  }

 private:
  template <int R>
  void some(const uint8_t* rows, int at, int first, int row_bytes, const uint8_t* left, const uint8_t* right,
            Sum (*sums)[PANEL]) const {
    typename Dot::Vector of_left[R], of_right[R];
    const uint8_t* row = rows + (int64_t)first * row_bytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) of_left[r] = of_right[r] = Dot::from(origins[at + first + r]);
    for (int k = 0; k < row_bytes; k += 4, row += 4, left += 64, right += 64) {
      const __m512i weights = _mm512_loadu_si512(left), others = _mm512_loadu_si512(right);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t bytes;
        std::memcpy(&bytes, row + (int64_t)r * row_bytes, 4);
        const __m512i of_row = _mm512_set1_epi32(bytes);
        of_left[r] = Dot::add(of_left[r], weights, of_row);
        of_right[r] = Dot::add(of_right[r], others, of_row);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      _mm512_storeu_si512(sums[first + r], (__m512i)of_left[r]);
      _mm512_storeu_si512(sums[first + r] + 16, (__m512i)of_right[r]);
    }
  }

  Sum origins[BLOCK_ROWS];
};
#else
#define HAS_VECTOR_PANELS 0
#endif
