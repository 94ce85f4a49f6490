// All layers of a step in one call: the same kernels in the same order as one by one, without the way back to Python
// between them, in working memory that stays from step to step. One team of threads does it all: with few rows a kernel
// alone isn't worth waking them, but all of them together are.
#include "panel_amx.h"
#include "panel_vector.h"
#include "team.h"
#include <type_traits>

#if HAS_AMX || HAS_VECTOR_PANELS

extern "C" {

void norm_rows(const float* x, const float* weight, float eps, int rows, int width, int8_t* q, float* scale, uint16_t* halves);
void matmul(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
            int num_columns, int row_bytes, void* out);
void matmul_add(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
                int num_columns, int row_bytes, float* residual);
void matmul_gated(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
                  int num_columns, int row_bytes, int is_gelu, float* scratch, int8_t* q, float* scale, uint16_t* halves);
void multiply_groups(const uint16_t* x, int m, const uint8_t* codes, const float* scale, const int16_t* zero,
                     const float* between, int rows, int columns, int group, int bits, float* out);
void gated(int kind, const void* x, const float* row, const float* column, int rows, int inner, int is_gelu, int8_t* q,
           float* scale, uint16_t* halves);
void add(int kind, const void* x, const float* row, const float* column, int rows, int width, const float* norm, float eps,
         float* residual);
void store_qkv(int kind, const void* x, const float* row, const float* column, const float* bias, const float* qk_norm,
               float eps, int rows, int heads, int kv_heads, int dim, const float* cosine, const float* sine,
               const int64_t* slots, float q_scale, int is_int8, int64_t block_bytes, uint16_t* q, uint8_t* k, uint8_t* v);
void attend(int heads, int kv_heads, int dim, int is_int8, int64_t block_bytes, int window, const uint16_t* q, const uint8_t* k,
            const uint8_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans, const int32_t* level_ends,
            int levels, float* state, float* out);

// The fields of all are named as in kernels/values.py, model/layers.py and model/config.py; what a model hasn't is null.
struct MatrixPointers {
  const uint8_t* packed;  // codes in groups where they have `bits`, else tiles
  const float *scale, *bias;
  const int16_t* zero; const float* between;  // at most one of them, as in groups.cpp
  int num_rows, num_columns, group, bits;

  const float* column_scale() const { return bits ? nullptr : scale; }  // what the product has yet to be multiplied with
  int64_t size() const { return (int64_t)num_rows * num_columns; }
};

struct LayerPointers {
  MatrixPointers qkv, out, gate_up, down;
  const float *attention_norm, *qk_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;
  uint8_t *k_cache, *v_cache;
  int64_t window;
};

struct Shapes {
  int num_layers, hidden, mlp, heads, kv_heads, dim, is_int8, is_kv_int8, is_gelu, has_groups;
  int64_t block_bytes;
  float eps, q_scale;
};

struct StepPointers {
  int rows, levels;
  float* x;  // [rows][hidden], in place
  const float *cosine, *sine, *local_cosine, *local_sine;  // the latter of layers with a window
  const int64_t* slots;
  const int32_t *lengths, *tables, *spans, *level_ends;
  float* state;
};

constexpr int64_t MANY = 16 << 20;  // multiplications: fewer are done sooner than the team has met at every kernel's end

// Working memory of a step: bytes for `rows` rows. Every array begins on a cache line.
struct Work {
  void* qkv; uint16_t* q; float* mixed; uint8_t* ready; float* ready_scale; float* scratch; uint8_t* gated; float* gated_scale;
  int64_t size = 0;
  Work(const Shapes& s, int64_t rows, char* memory) {
    const int64_t width = (int64_t)s.heads * s.dim, element = s.is_int8 ? 1 : 2;
    const auto take = [&](auto*& pointer, int64_t bytes) { pointer = (std::remove_reference_t<decltype(pointer)>)(memory + size); size += (bytes + 63) / 64 * 64; };
    uint8_t* sums;
    take(sums, rows * (width + 2 * (int64_t)s.kv_heads * s.dim) * 4); qkv = sums;
    take(q, rows * width * 2);
    take(mixed, rows * width * 4);
    take(ready, rows * (s.hidden > width ? s.hidden : width) * element);
    take(ready_scale, rows * 4);
    const int64_t inner = s.has_groups ? 2 * (int64_t)s.mlp : s.mlp;  // tiles make gate and up side by side
    take(scratch, rows * (s.hidden > inner ? s.hidden : inner) * 4);
    take(gated, rows * s.mlp * element);
    take(gated_scale, rows * 4);
  }
};

int64_t layers_work(const Shapes* s, int rows) { return Work(*s, rows, nullptr).size; }

void run_layers(const Shapes* shapes, const LayerPointers* layers, const StepPointers* step, char* memory) {
  const Shapes& s = *shapes;
  const StepPointers& p = *step;
  const Work w(s, p.rows, memory);
  const int width = s.heads * s.dim, element = s.is_int8 ? 1 : 2, kind = s.is_int8 ? 0 : 1;
  const float* scale = s.is_int8 ? w.ready_scale : nullptr;
  const auto prepare = [&](const float* x, const float* weight, int columns) {
    norm_rows(x, weight, s.eps, p.rows, columns, (int8_t*)w.ready, w.ready_scale, s.is_int8 ? nullptr : (uint16_t*)w.ready);
  };
  const auto multiply = [&](const MatrixPointers& m, const uint8_t* rows, const float* row_scale, void* out) {
    if (m.bits)
      multiply_groups((const uint16_t*)rows, p.rows, m.packed, m.scale, m.zero, m.between, m.num_rows, m.num_columns, m.group,
                      m.bits, (float*)out);
    else matmul(rows, m.packed, row_scale, m.scale, p.rows, m.num_rows, m.num_columns * element, out);
  };
  const auto add_product = [&](const MatrixPointers& m, const uint8_t* rows, const float* row_scale, const float* norm) {
    if (!norm && !m.bits)
      return matmul_add(rows, m.packed, row_scale, m.scale, p.rows, s.hidden, m.num_columns * element, p.x);
    multiply(m, rows, row_scale, w.scratch);
    add(kind, w.scratch, row_scale, m.column_scale(), p.rows, s.hidden, norm, s.eps, p.x);
  };
  uint16_t* halves = s.is_int8 ? nullptr : (uint16_t*)w.gated;
  const LayerPointers& first = layers[0];
  const int64_t numbers = first.qkv.size() + first.out.size() + first.gate_up.size() + first.down.size();
  in_team(p.rows * numbers * s.num_layers > MANY, [&] {
    for (int i = 0; i < s.num_layers; i++) {
      const LayerPointers& l = layers[i];
      prepare(p.x, l.attention_norm, s.hidden);
      multiply(l.qkv, w.ready, scale, w.qkv);
      store_qkv(kind, w.qkv, scale, l.qkv.column_scale(), l.qkv.bias, l.qk_norm, s.eps, p.rows, s.heads, s.kv_heads, s.dim,
                l.window ? p.local_cosine : p.cosine, l.window ? p.local_sine : p.sine, p.slots, s.q_scale, s.is_kv_int8,
                s.block_bytes, w.q, l.k_cache, l.v_cache);
      attend(s.heads, s.kv_heads, s.dim, s.is_kv_int8, s.block_bytes, l.window, w.q, l.k_cache, l.v_cache, p.lengths, p.tables,
             p.spans, p.level_ends, p.levels, p.state, w.mixed);
      prepare(w.mixed, nullptr, width);
      add_product(l.out, w.ready, scale, l.attention_post_norm);
      prepare(p.x, l.mlp_norm, s.hidden);
      if (l.gate_up.bits) {
        multiply(l.gate_up, w.ready, scale, w.scratch);
        gated(kind, w.scratch, scale, nullptr, p.rows, s.mlp, s.is_gelu, (int8_t*)w.gated, w.gated_scale, halves);
      } else {
        matmul_gated(w.ready, l.gate_up.packed, scale, l.gate_up.scale, p.rows, 2 * s.mlp, s.hidden * element, s.is_gelu,
                     w.scratch, (int8_t*)w.gated, w.gated_scale, halves);
      }
      add_product(l.down, w.gated, s.is_int8 ? w.gated_scale : nullptr, l.mlp_post_norm);
    }
  });
}
}
#endif
