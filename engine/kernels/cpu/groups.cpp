// Weights of 4 or 8 bits in groups of columns, value = (code - zero) * scale: products with few rows straight from the
// codes, and rows of the matrix as bf16 for the products with many.
//
// A byte holds two codes of 4 bits, the even column low. Few rows: they become integers of 16 bits, chunk by chunk, so
// that products of codes are exact sums of integers, scaled once a chunk. A middle code that stands for zero is taken off
// these sums; other zeros, which may lie between codes (GGUF), at the end, as one product with the groups' sums of x.
#include "team.h"
#include "vec.h"
#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int STEP = 32, CHUNK = 64, QUARTERS = 4;
constexpr int AHEAD = 8192;  // bytes: codes are asked for so early, as the processor looks no further than a page by itself
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

// How codes less the middle one become pairs of bf16 columns.
struct FourBits {
  static constexpr int BYTES = STEP / 2, MIDDLE = 8;
  u32x16 low, high;  // bf16 of each code: in the low half of a lane, and in the high half
  FourBits() {
    for (int code = 0; code < 16; code++) {
      low[code] = to_bf16((float)(code - MIDDLE));
      high[code] = low[code] << 16;
    }
  }
  u32x16 pairs(const uint8_t* p) const {
    const u32x16 v = widen(p);
    return look_up(low, v) | look_up(high, v >> 4);
  }
};
struct EightBits {
  static constexpr int BYTES = STEP, MIDDLE = 128;
  u32x16 pairs(const uint8_t* p) const {
    u16x16 halves;
    std::memcpy(&halves, p, 32);
    const u32x16 v = __builtin_convertvector(halves, u32x16);
    const f32x16 even = __builtin_convertvector((i32x16)(v & 255) - MIDDLE, f32x16);
    const f32x16 odd = __builtin_convertvector((i32x16)(v >> 8) - MIDDLE, f32x16);
    return (as_u32(even) >> 16) | (as_u32(odd) & 0xffff0000u);
  }
};

// acc[i] += the four products of the unsigned bytes of `codes` and the signed ones of `x`.
inline i32x16 dot_codes(i32x16 acc, u32x16 codes, u32x16 x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#else
  for (int shift = 24; shift >= 0; shift -= 8) acc += (i32x16)((codes << shift) >> 24) * ((i32x16)(x << shift) >> 24);
  return acc;
#endif
}

// A chunk's products with integers of 16 bits, given as their high and low bytes.
inline i32x16 dot_halves(u32x16 codes, u32x16 high, u32x16 low) {
  return dot_codes(dot_codes(i32x16{}, codes, high) << 8, codes, low);
}

// Rows of bf16 as the products take them: each CHUNK of columns as a scale times integers of 16 bits, whose high and low
// bytes, both signed, are multiplied apart. No number is off by more than 1/65,024 of the largest in its chunk.
struct Rows {
  int count, chunks, groups;
  std::vector<int8_t> bytes;    // [count][chunks][high, low][CHUNK], columns in the order of the codes
  std::vector<float> scale;     // [count][chunks]
  std::vector<float> sums;      // [count][groups, whole vectors]: of the columns of each group
  std::vector<i32x16> middle;   // [count][chunks]: the products of each chunk with middle codes
  std::vector<int> of;          // [chunks][QUARTERS]: the groups of a chunk's quarters

  static int padded(int groups) { return (groups + 15) / 16 * 16; }

  Rows(const uint16_t* x, int count, const Matrix& w, int bits)
      : count(count), chunks(w.columns / CHUNK), groups(w.columns / w.group), bytes((int64_t)count * chunks * 2 * CHUNK),
        scale((int64_t)count * chunks), sums((int64_t)count * padded(groups)),
        middle((int64_t)count * chunks), of(chunks * QUARTERS) {
    for (int q = 0; q < chunks * QUARTERS; q++) of[q] = q * (CHUNK / QUARTERS) / w.group;
    for (int m = 0; m < count; m++)
      for (int c = 0; c < chunks; c++) take(x + (int64_t)m * w.columns + c * CHUNK, m, c, bits);
  }

  void take(const uint16_t* x, int m, int c, int bits) {
    float values[CHUNK], largest = 0, sound = 0;
    for (int k = 0; k < CHUNK; k++) {
      values[k] = from_bf16(x[k]);
      largest = std::max(largest, std::fabs(values[k]));
      sound += values[k] * 0.f;  // no longer 0 where one isn't finite
    }
    const float unit = largest / 32512, inverse = largest > 0 && sound == 0 ? 1 / unit : 0;
    int8_t *high = bytes.data() + ((int64_t)m * chunks + c) * 2 * CHUNK, *low = high + CHUNK;
    int quarters[QUARTERS] = {};
    for (int k = 0; k < CHUNK; k++) {
      const int value = (int)std::lrintf(values[k] * inverse), top = (value + 128) >> 8;
      const int at = bits == 4 ? k % 2 * (CHUNK / 2) + k / 2 : k;  // even columns first: they are the low codes of bytes
      high[at] = (int8_t)top;
      low[at] = (int8_t)(value - top * 256);
      quarters[k / (CHUNK / QUARTERS)] += value;
    }
    scale[(int64_t)m * chunks + c] = unit + sound;
    const u32x16 codes = u32x16{} + (bits == 4 ? 0x08080808u : 0x80808080u);
    middle[(int64_t)m * chunks + c] = dot_halves(codes, load_u32(high), load_u32(low));
    float* sum = sums.data() + (int64_t)m * padded(groups);
    for (int q = 0; q < QUARTERS; q++) sum[of[c * QUARTERS + q]] += (unit + sound) * quarters[q];
  }
};

// A chunk's codes, one a byte. Of 4 bits: the even columns, then the odd ones.
template <int BITS> inline u32x16 codes_of(const uint8_t* p) {
  if (BITS == 8) return load_u32(p);
#if defined(__AVX512F__)
  const u32x16 twice = (u32x16)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
#else
  u32x16 twice;
  std::memcpy(&twice, p, CHUNK / 2);
  std::memcpy((char*)&twice + CHUNK / 2, p, CHUNK / 2);
#endif
  const u32x16 shift = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
  return (twice >> shift) & 0x0f0f0f0fu;
}

// The scales of a chunk's lanes, whose quarters are of the groups `of`.
template <int BITS> inline f32x16 scales_of(const float* scale, const int* of) {
  const f32x16 a = splat(scale[of[0]]);
  if (of[0] == of[3]) return a;
  const i32x16 is_first = BITS == 8 ? i32x16{-1, -1, -1, -1, -1, -1, -1, -1} : i32x16{-1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1};
  if (of[0] == of[1]) return is_first ? a : splat(scale[of[3]]);
  const i32x16 is_even = BITS == 8 ? i32x16{-1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1}
                                   : i32x16{-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
  const f32x16 low = is_even ? a : splat(scale[of[1]]), high = is_even ? splat(scale[of[2]]) : splat(scale[of[3]]);
  return is_first ? low : high;
}

// Entries [g, g + 16) of an array of `size`, zeros behind it.
template <class T> inline f32x16 some(const T* p, int g, int size) {
  const int count = std::min(size - g, 16);
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 mask = (__mmask16)((1u << count) - 1);
  if constexpr (sizeof(T) == sizeof(float)) return (f32x16)_mm512_maskz_loadu_ps(mask, p + g);
  else return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, p + g)));
#else
  f32x16 v = {};
  for (int i = 0; i < count; i++) v[i] = p[g + i];
  return v;
#endif
}

// What zeros that aren't the middle code take off.
template <int M, int R> void take_zeros_off(const Rows& x, int row, const Matrix& w, int output, f32x16 (&total)[R][M]) {
  for (int r = 0; r < R; r++) {
    const int64_t at = (int64_t)(output + r) * x.groups;
    for (int g = 0; g < x.groups; g += 16) {
      const f32x16 zero = w.zero ? some(w.zero + at, g, x.groups) : some(w.between + at, g, x.groups);
      const f32x16 off = zero * some(w.scale + at, g, x.groups);
      for (int m = 0; m < M; m++) total[r][m] -= off * load(x.sums.data() + (int64_t)(row + m) * Rows::padded(x.groups) + g);
    }
  }
}

// M rows, from `row` on, by R outputs: what is read of rows serves all of these.
template <int BITS, int M, int R> void dot(const Rows& x, int row, const Matrix& w, int output, float* out) {
  const int64_t chunk_bytes = CHUNK * BITS / 8, row_bytes = x.chunks * chunk_bytes;
  const uint8_t *first = w.codes + output * row_bytes, *codes = first;
  const float* scale = w.scale + (int64_t)output * x.groups;
  const bool is_middle = !w.zero && !w.between;
  f32x16 total[R][M] = {};
  for (int c = 0; c < x.chunks; c++, codes += chunk_bytes) {
    for (int64_t i = c * R * chunk_bytes; i < (c + 1) * R * chunk_bytes; i += 64) __builtin_prefetch(first + i + AHEAD, 0, 2);
    u32x16 chunk[R];
    f32x16 scales[R];
    for (int r = 0; r < R; r++) {
      chunk[r] = codes_of<BITS>(codes + r * row_bytes);
      scales[r] = scales_of<BITS>(scale + (int64_t)r * x.groups, x.of.data() + c * QUARTERS);
    }
    for (int m = 0; m < M; m++) {
      const int64_t at = (int64_t)(row + m) * x.chunks + c;
      const u32x16 high = load_u32(x.bytes.data() + at * 2 * CHUNK), low = load_u32(x.bytes.data() + at * 2 * CHUNK + CHUNK);
      const i32x16 off = is_middle ? x.middle[at] : i32x16{};
      const f32x16 unit = splat(x.scale[at]);
      for (int r = 0; r < R; r++) {
        const i32x16 sum = dot_halves(chunk[r], high, low) - off;
        total[r][m] += __builtin_convertvector(sum, f32x16) * (scales[r] * unit);
      }
    }
  }
  if (!is_middle) take_zeros_off<M, R>(x, row, w, output, total);
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) out[(int64_t)m * w.rows + output + r] = sum(total[r][m]);
}

template <int BITS, int M> void dots(const Rows& x, int row, const Matrix& w, float* out) {
  constexpr int R = M == 1 ? 4 : M <= 4 ? 2 : 1;
  in_team((int64_t)w.rows * w.columns > FEW_CODES, [&] {
    const int whole = w.rows / R * R;
    float* to = out + (int64_t)row * w.rows;
#pragma omp for schedule(static)
    for (int output = 0; output < whole; output += R) dot<BITS, M, R>(x, row, w, output, to);
#pragma omp for schedule(static)
    for (int output = whole; output < w.rows; output++) dot<BITS, M, 1>(x, row, w, output, to);
  });
}

// By eight rows at most, then four, two, one: more sizes would only take longer to compile.
template <int BITS> void multiply(const Rows& x, const Matrix& w, float* out) {
  for (int m = 0, size; m < x.count; m += size) {
    const int left = x.count - m;
    size = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const auto run = size == 8 ? dots<BITS, 8> : size == 4 ? dots<BITS, 4> : size == 2 ? dots<BITS, 2> : dots<BITS, 1>;
    run(x, m, w, out);
  }
}

// a in the lanes of the first sixteen of STEP columns, b in those of the others.
inline f32x16 in_halves(float a, float b) {
  const i32x16 is_first = {-1, -1, -1, -1, -1, -1, -1, -1};
  return is_first ? splat(a) : splat(b);
}

template <class Bits> void unpack(const Matrix& w, int first, int count, uint16_t* out) {
  const int groups = w.columns / w.group;
  const int next = w.group < STEP;  // two groups make a step then
  const Bits bits;
#pragma omp parallel for schedule(static)
  for (int i = 0; i < count; i++) {
    const int row = first + i;
    const uint8_t* codes = w.codes + (int64_t)row * (w.columns / STEP) * Bits::BYTES;
    uint16_t* to = out + (int64_t)i * w.columns;
    const auto shift_of = [&](int64_t at) {
      return w.zero ? (float)(w.zero[at] - Bits::MIDDLE) : w.between ? w.between[at] - Bits::MIDDLE : 0.f;
    };
    for (int g = 0; g < groups; g += 1 + next) {
      const int64_t a = (int64_t)row * groups + g, b = a + next;
      const f32x16 scale = in_halves(w.scale[a], w.scale[b]), shift = in_halves(shift_of(a), shift_of(b));
      for (int k = 0; k < w.group; k += STEP, codes += Bits::BYTES, to += STEP) {
        const u32x16 pairs = bits.pairs(codes);
        const u32x16 even = round_bf16((as_f32(pairs << 16) - shift) * scale);
        const u32x16 odd = round_bf16((as_f32(pairs & 0xffff0000u) - shift) * scale);
        const u32x16 both = even | (odd << 16);
        std::memcpy(to, &both, 64);
      }
    }
  }
}

}  // namespace

extern "C" {

// x bf16 [m][columns] times a matrix in groups -> out float32 [m][rows]. Groups hold sixteen columns or whole steps of 32,
// rows whole chunks of 64.
void multiply_groups(const uint16_t* x, int m, const uint8_t* codes, const float* scale, const int16_t* zero,
                     const float* between, int rows, int columns, int group, int bits, float* out) {
  const Matrix w{codes, scale, zero, between, rows, columns, group};
  const Rows ready(x, m, w, bits);
  if (bits == 4) multiply<4>(ready, w, out);
  else multiply<8>(ready, w, out);
}

// Rows [first, first + count) of a matrix in groups as bf16 [count][columns].
void unpack_groups(const uint8_t* codes, const float* scale, const int16_t* zero, const float* between, int rows,
                   int columns, int group, int bits, int first, int count, uint16_t* out) {
  const Matrix w{codes, scale, zero, between, rows, columns, group};
  if (bits == 4) unpack<FourBits>(w, first, count, out);
  else unpack<EightBits>(w, first, count, out);
}

}
