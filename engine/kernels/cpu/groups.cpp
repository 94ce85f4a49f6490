// Weights of 4 or 8 bits in groups of columns, value = (code - zero) * scale: products with few rows straight from the
// codes, and rows of the matrix as bf16 for the products with many.
//
// A byte holds two codes of 4 bits, the even column low: just the pair of columns that a lane of a bf16 dot product takes.
// Codes less their zero are small integers, exact in bf16; each group's sum is float32 and is scaled once. Where zero lies
// between codes (GGUF), products are made with the middle code for zero, and what that is off by goes to the sum of x.
#include "vec.h"
#include <omp.h>
#include <vector>

namespace {

constexpr int STEP = 32, FOUR_BIT_ZEROS = 17;  // zeros of 16 occur in GPTQ files
constexpr int64_t FEW_CODES = 1 << 17;                        // products that are done sooner than other threads would wake

// Sixteen bytes, one a lane. GCC takes the conversion of such short vectors apart, byte by byte.
inline u32x16 widen(const uint8_t* p) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  u32x16 wide;
  for (int i = 0; i < 16; i++) wide[i] = p[i];
  return wide;
#endif
}

struct Matrix {
  const uint8_t* codes;
  const float* scale;
  const int16_t* zero;  // null: the middle code
  const float* between;  // zeros that aren't codes, or null
  int rows, columns, group;
};

// bf16 of code - zero for each code: in the low half of a lane, and in the high half.
struct Tables {
  u32x16 low[FOUR_BIT_ZEROS], high[FOUR_BIT_ZEROS];
  Tables() {
    for (int zero = 0; zero < FOUR_BIT_ZEROS; zero++)
      for (int code = 0; code < 16; code++) {
        low[zero][code] = to_bf16((float)(code - zero));
        high[zero][code] = low[zero][code] << 16;
      }
  }
};
const Tables tables;

// The entries at the lowest four bits of each lane of `index`.
inline u32x16 look_up(const u32x16& table, u32x16 index) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table);
#else
  u32x16 found;
  for (int i = 0; i < 16; i++) found[i] = table[index[i] & 15];
  return found;
#endif
}

// How a group's codes become pairs of bf16 columns.
struct FourBits {
  static constexpr int BYTES = STEP / 2, MIDDLE = 8;
  u32x16 low, high;
  explicit FourBits(int zero) : low(tables.low[zero]), high(tables.high[zero]) {}
  u32x16 pairs(const uint8_t* p) const {
    const u32x16 v = widen(p);
    return look_up(low, v) | look_up(high, v >> 4);
  }
};
struct EightBits {
  static constexpr int BYTES = STEP, MIDDLE = 128;
  f32x16 zero;
  explicit EightBits(int zero) : zero(splat((float)zero)) {}
  u32x16 pairs(const uint8_t* p) const {
    u16x16 halves;
    std::memcpy(&halves, p, 32);
    const u32x16 v = __builtin_convertvector(halves, u32x16);
    const f32x16 even = __builtin_convertvector((i32x16)(v & 255), f32x16) - zero;
    const f32x16 odd = __builtin_convertvector((i32x16)(v >> 8), f32x16) - zero;
    return (as_u32(even) >> 16) | (as_u32(odd) & 0xffff0000u);
  }
};

// M rows by one output.
// `sums` [m][groups]: of the x of each group, where zeros lie between codes.
template <class Bits, int M> void dot(const uint16_t* x, const float* sums, const Matrix& w, int output, float* out) {
  const int groups = w.columns / w.group;
  const uint8_t* codes = w.codes + (int64_t)output * (w.columns / STEP) * Bits::BYTES;
  f32x16 total[M] = {};
  float beside[M] = {};
  for (int g = 0; g < groups; g++) {
    const int64_t at = (int64_t)output * groups + g;
    const Bits bits(w.zero ? w.zero[at] : Bits::MIDDLE);
    f32x16 part[M] = {};
    for (int k = g * w.group; k < (g + 1) * w.group; k += STEP, codes += Bits::BYTES) {
      const u32x16 pairs = bits.pairs(codes);
      for (int m = 0; m < M; m++) part[m] = dot2(part[m], load_u32(x + (int64_t)m * w.columns + k), pairs);
    }
    const f32x16 scale = splat(w.scale[at]);
    for (int m = 0; m < M; m++) total[m] += scale * part[m];
    if (w.between) {
      const float off = (Bits::MIDDLE - w.between[at]) * w.scale[at];
      for (int m = 0; m < M; m++) beside[m] += off * sums[(int64_t)m * groups + g];
    }
  }
  for (int m = 0; m < M; m++) out[(int64_t)m * w.rows + output] = sum(total[m]) + beside[m];
}

template <class Bits, int M> void dots(const uint16_t* x, const float* sums, const Matrix& w, float* out) {
#pragma omp parallel for schedule(static) if ((int64_t)w.rows * w.columns > FEW_CODES)
  for (int output = 0; output < w.rows; output++) dot<Bits, M>(x, sums, w, output, out);
}

// Of the bf16 numbers of each group of columns.
inline std::vector<float> group_sums(const uint16_t* x, int rows, const Matrix& w) {
  std::vector<float> sums((int64_t)rows * (w.columns / w.group));
  for (size_t i = 0; i < sums.size(); i++) {
    f32x16 total = {};
    for (int k = 0; k < w.group; k += 16) total += load_bf16(x + i * w.group + k);
    sums[i] = sum(total);
  }
  return sums;
}

// By eight rows at most, then four, two, one: more sizes would only take longer to compile.
template <class Bits> void multiply(const uint16_t* x, int rows, const Matrix& w, float* out) {
  const std::vector<float> sums = w.between ? group_sums(x, rows, w) : std::vector<float>();
  for (int m = 0, size; m < rows; m += size) {
    const int left = rows - m;
    size = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const auto run = size == 8 ? dots<Bits, 8> : size == 4 ? dots<Bits, 4> : size == 2 ? dots<Bits, 2> : dots<Bits, 1>;
    run(x + (int64_t)m * w.columns, sums.data() + (w.between ? (int64_t)m * (w.columns / w.group) : 0), w,
        out + (int64_t)m * w.rows);
  }
}

template <class Bits> void unpack(const Matrix& w, int first, int count, uint16_t* out) {
  const int groups = w.columns / w.group;
#pragma omp parallel for schedule(static)
  for (int i = 0; i < count; i++) {
    const int row = first + i;
    const uint8_t* codes = w.codes + (int64_t)row * (w.columns / STEP) * Bits::BYTES;
    uint16_t* to = out + (int64_t)i * w.columns;
    for (int g = 0; g < groups; g++) {
      const int64_t at = (int64_t)row * groups + g;
      const Bits bits(w.zero ? w.zero[at] : Bits::MIDDLE);
      const f32x16 scale = splat(w.scale[at]);
      const f32x16 off = splat(w.between ? (Bits::MIDDLE - w.between[at]) * w.scale[at] : 0.f);
      for (int k = 0; k < w.group; k += STEP, codes += Bits::BYTES, to += STEP) {
        const u32x16 pairs = bits.pairs(codes);
        const u32x16 even = round_bf16(as_f32(pairs << 16) * scale + off);
        const u32x16 odd = round_bf16(as_f32(pairs & 0xffff0000u) * scale + off);
        const u32x16 both = even | (odd << 16);
        std::memcpy(to, &both, 64);
      }
    }
  }
}

}  // namespace

extern "C" {

// x bf16 [m][columns] times a matrix in groups -> out float32 [m][rows]. Groups hold whole steps of 32 columns.
void multiply_groups(const uint16_t* x, int m, const uint8_t* codes, const float* scale, const int16_t* zero,
                     const float* between, int rows, int columns, int group, int bits, float* out) {
  const Matrix w{codes, scale, zero, between, rows, columns, group};
  if (bits == 4) multiply<FourBits>(x, m, w, out);
  else multiply<EightBits>(x, m, w, out);
}

// Rows [first, first + count) of a matrix in groups as bf16 [count][columns].
void unpack_groups(const uint8_t* codes, const float* scale, const int16_t* zero, const float* between, int rows,
                   int columns, int group, int bits, int first, int count, uint16_t* out) {
  const Matrix w{codes, scale, zero, between, rows, columns, group};
  if (bits == 4) unpack<FourBits>(w, first, count, out);
  else unpack<EightBits>(w, first, count, out);
}

}
