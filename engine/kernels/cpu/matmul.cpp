// Rows times a packed matrix on AMX tiles or in AVX-512 registers, with what follows each linear layer fused behind it.
//
// int8 rows give exact integer sums, bf16 rows float32 sums; both walk the columns of the matrix in one order whatever
// the number of rows, so a row's result doesn't depend on the rows beside it.
//
// Layout of a packed weight [out][bytes]: [out / 16][bytes / 64][16][16][4], tiles of 16 outputs by 64 bytes; in int8
// without AMX each byte is the number + 128.
#include "panel_amx.h"
#include "panel_vector.h"

#if HAS_AMX || HAS_VECTOR_PANELS
#include "best.h"
#include "quantize.h"
#include "team.h"
#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t FEW_BYTES = 2 << 20;  // products that are done sooner than other threads would wake

struct Operands {
  const uint8_t *rows, *tiles;
  const float *row_scale, *column_scale;  // null for bf16
  int num_rows, num_columns, row_bytes;
  bool is_big() const { return (int64_t)num_rows * num_columns * row_bytes > FEW_BYTES; }
  const uint8_t* row(int m) const { return rows + (int64_t)m * row_bytes; }
  const uint8_t* tile(int column16) const { return tiles + (int64_t)column16 * (row_bytes / 64) * TILE_BYTES; }
};

inline f32x16 floats(const float* p) { return load(p); }
inline f32x16 floats(const int32_t* p) { i32x16 v; std::memcpy(&v, p, 64); return __builtin_convertvector(v, f32x16); }

// The scaled sums of a row, columns [at, at + 16) of the panel.
template <class Sum> f32x16 scaled(const Operands& x, const Sum (*sums)[PANEL], int row, int m, int at, int column) {
  f32x16 v = floats(sums[row] + at);
  return x.row_scale ? v * splat(x.row_scale[m + row]) * load(x.column_scale + column) : v;
}

// What becomes of a panel's sums. `left` and `right` say which tiles of columns panel j multiplies.
template <class Sum> struct Store {
  Sum* out;
  int left(const Operands&, int j) const { return 2 * j; }
  int right(const Operands&, int j) const { return 2 * j + 1; }
  void take(const Operands& x, const Sum (*sums)[PANEL], int m, int rows, int j) const {
    for (int r = 0; r < rows; r++) std::memcpy(out + (int64_t)(m + r) * x.num_columns + j * PANEL, sums[r], PANEL * 4);
  }
};

template <class Sum> struct Add {
  float* residual;
  int left(const Operands&, int j) const { return 2 * j; }
  int right(const Operands&, int j) const { return 2 * j + 1; }
  void take(const Operands& x, const Sum (*sums)[PANEL], int m, int rows, int j) const {
    for (int r = 0; r < rows; r++)
      for (int at = 0; at < PANEL; at += 16) {
        float* to = residual + (int64_t)(m + r) * x.num_columns + j * PANEL + at;
        store(to, load(to) + scaled(x, sums, r, m, at, j * PANEL + at));
      }
  }
};

template <class Sum> struct Gated {  // columns: gate, then up
  float* out;                        // [rows][num_columns / 2]
  bool is_gelu;
  int left(const Operands&, int j) const { return j; }
  int right(const Operands& x, int j) const { return x.num_columns / 32 + j; }
  void take(const Operands& x, const Sum (*sums)[PANEL], int m, int rows, int j) const {
    const int inner = x.num_columns / 2;
    for (int r = 0; r < rows; r++) {
      const f32x16 gate = scaled(x, sums, r, m, 0, j * 16), up = scaled(x, sums, r, m, 16, inner + j * 16);
      store(out + (int64_t)(m + r) * inner + j * 16, (is_gelu ? gelu(gate) : silu(gate)) * up);
    }
  }
};

// The best column of each row that one thread has seen.
template <class Sum> struct Search {
  Best* rows;
  Masks masks;
  int left(const Operands&, int j) const { return 2 * j; }
  int right(const Operands&, int j) const { return 2 * j + 1; }
  void take(const Operands& x, const Sum (*sums)[PANEL], int m, int count, int j) const {
    static_assert(PANEL == 32, "a panel is a word of a mask");
    for (int r = 0; r < count; r++) {
      const uint32_t allowed = masks.at(m + r, j);
      for (int at = 0; at < PANEL; at += 16)
        rows[m + r].see(scaled(x, sums, r, m, at, j * PANEL + at), j * PANEL + at, allowed >> at);
    }
  }
};

// Panel by panel; a task is a block of rows by a run of panels, so that its weights are read once and stay near.
template <class Panel, class Then> void for_each_panel(const Operands& x, const Then& then) {
  const int panels = x.num_columns / PANEL, whole = x.num_rows / PANEL * PANEL, rest = x.num_rows - whole;
  const int blocks = (whole + BLOCK_ROWS - 1) / BLOCK_ROWS + (rest > 0);
  const int run = std::clamp(panels * blocks / (8 * omp_get_num_threads()), 1, 16), runs = (panels + run - 1) / run;
  alignas(64) typename Panel::Sum sums[PANEL][PANEL];
  Panel panel;
#pragma omp for schedule(dynamic, 1)
  for (int task = 0; task < blocks * runs; task++) {
    const int first = task / runs * BLOCK_ROWS;
    const bool is_rest = rest > 0 && task / runs == blocks - 1;
    const int begin = is_rest ? whole : first, end = is_rest ? x.num_rows : std::min(whole, first + BLOCK_ROWS);
    const int step = is_rest ? rest : PANEL;
    panel.begin(x.row(begin), end - begin, x.row_bytes, step);
    for (int j = task % runs * run; j < std::min(panels, (task % runs + 1) * run); j++) {
      const uint8_t *left = x.tile(then.left(x, j)), *right = x.tile(then.right(x, j));
      for (int m = begin; m < end; m += step) {
        panel.multiply(x.row(m), m - begin, step, x.row_bytes, left, right, sums);
        then.take(x, sums, m, step, j);
      }
    }
  }
}

// Calls `f` with a pointer to the type of panel that this machine has for these operands.
template <class F> void with_panel(const Operands& x, F f) {
#if HAS_AMX
  if (amx_allowed()) {
    if (x.row_scale) f((AmxPanel<AmxInt8Dot>*)nullptr); else f((AmxPanel<AmxBf16Dot>*)nullptr);
    return;
  }
#endif
#if HAS_VECTOR_PANELS
  if (x.row_scale) f((VectorPanel<VectorInt8Dot>*)nullptr); else f((VectorPanel<VectorBf16Dot>*)nullptr);
#endif
}

#if HAS_AMX
bool is_unsigned() { return !amx_allowed(); }
#else
bool is_unsigned() { return true; }
#endif

}  // namespace

extern "C" {

int has_tiles() { return HAS_VECTOR_PANELS || !is_unsigned(); }

// weight [out][row_bytes] -> its tiles: four bytes of input (int8) or two halves (bf16) lie side by side.
void pack_tiles(const uint8_t* weight, int out, int row_bytes, int is_int8, uint8_t* tiles) {
  const int steps = row_bytes / 64;
  const uint32_t sign = is_int8 && is_unsigned() ? 0x80808080u : 0u;
#pragma omp parallel for schedule(static)
  for (int n = 0; n < out / 16; n++)
    for (int k = 0; k < steps; k++)
      for (int i = 0; i < 16; i++)
        for (int c = 0; c < 16; c++) {
          uint32_t four;
          std::memcpy(&four, weight + (int64_t)(n * 16 + c) * row_bytes + k * 64 + i * 4, 4);
          four ^= sign;
          std::memcpy(tiles + ((int64_t)n * steps + k) * TILE_BYTES + i * 64 + c * 4, &four, 4);
        }
}

#define OPERANDS const uint8_t *rows, const uint8_t *tiles, const float *row_scale, const float *column_scale, int num_rows, \
                 int num_columns, int row_bytes
#define GIVEN Operands{rows, tiles, row_scale, column_scale, num_rows, num_columns, row_bytes}

void matmul(OPERANDS, void* out) {
  const Operands x = GIVEN;
  with_panel(x, [&](auto* of) {
    using Panel = std::remove_pointer_t<decltype(of)>;
    in_team(x.is_big(), [&] { for_each_panel<Panel>(x, Store<typename Panel::Sum>{(typename Panel::Sum*)out}); });
  });
}

void matmul_add(OPERANDS, float* residual) {
  const Operands x = GIVEN;
  with_panel(x, [&](auto* of) {
    using Panel = std::remove_pointer_t<decltype(of)>;
    in_team(x.is_big(), [&] { for_each_panel<Panel>(x, Add<typename Panel::Sum>{residual}); });
  });
}

// The column of the largest value of each row, the first of equals, of those that its mask allows; -1 where a value isn't
// finite or no column may come. The first `masked` rows have masks, int32 [masked][words].
void matmul_best(OPERANDS, const uint32_t* masks, int masked, int words, int64_t* columns) {
  const Operands x = GIVEN;
  with_panel(x, [&](auto* of) {
    using Panel = std::remove_pointer_t<decltype(of)>;
    std::vector<Best> all;
#pragma omp parallel if (x.is_big())
    {
#pragma omp single
      all.assign((int64_t)omp_get_num_threads() * num_rows, Best::none());
      Best* mine = all.data() + (int64_t)omp_get_thread_num() * num_rows;
      for_each_panel<Panel>(x, Search<typename Panel::Sum>{mine, {masks, masked, words}});
#pragma omp for schedule(static)
      for (int m = 0; m < num_rows; m++) {
        Best best = all[m];
        for (int t = 1; t < omp_get_num_threads(); t++) best.join(all[(int64_t)t * num_rows + m]);
        columns[m] = best.found();
      }
    }
  });
}

// silu(gate) * up or gelu(gate) * up, then made ready for the next matmul: rotated and quantized (q, scale), or as bf16
// (halves).
void matmul_gated(OPERANDS, int is_gelu, float* scratch, int8_t* q, float* scale, uint16_t* halves) {
  const Operands x = GIVEN;
  const int inner = num_columns / 2;
  with_panel(x, [&](auto* of) {
    using Panel = std::remove_pointer_t<decltype(of)>;
    in_team(x.is_big(), [&] {
      for_each_panel<Panel>(x, Gated<typename Panel::Sum>{scratch, is_gelu != 0});
#pragma omp for schedule(static)
      for (int m = 0; m < num_rows; m++) {
        float* y = scratch + (int64_t)m * inner;
        if (halves) {
          for (int i = 0; i < inner; i += 16) store_bf16(halves + (int64_t)m * inner + i, load(y + i));
          continue;
        }
        rotate(y, inner);
        scale[m] = quantize_row(y, inner, q + (int64_t)m * inner);
      }
    });
  });
}
}
#else
extern "C" int has_tiles() { return 0; }
#endif
