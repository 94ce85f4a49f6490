// All layers of a step in one call: the same kernels in the same order as one by one, without the way back to Python
// between them, in working memory that stays from step to step.
#include "amx.h"
#include <type_traits>

#if HAS_AMX

extern "C" {

void norm_rows(const float* x, const float* weight, float eps, int rows, int width, int8_t* q, float* scale, uint16_t* halves);
void matmul(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
            int num_columns, int row_bytes, void* out);
void matmul_add(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
                int num_columns, int row_bytes, float* residual);
void matmul_gated(const uint8_t* rows, const uint8_t* tiles, const float* row_scale, const float* column_scale, int num_rows,
                  int num_columns, int row_bytes, int is_gelu, float* scratch, int8_t* q, float* scale, uint16_t* halves);
void add(int kind, const void* x, const float* row, const float* column, int rows, int width, const float* norm, float eps,
         float* residual);
void store_qkv(int kind, const void* x, const float* row, const float* column, const float* bias, const float* qk_norm,
               float eps, int rows, int heads, int kv_heads, int dim, const float* cosine, const float* sine,
               const int64_t* slots, float q_scale, int is_int8, int64_t block_bytes, uint16_t* q, uint8_t* k, uint8_t* v);
void attend(int heads, int kv_heads, int dim, int is_int8, int64_t block_bytes, int window, const uint16_t* q, const uint8_t* k,
            const uint8_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans, const int32_t* level_ends,
            int levels, float* state, float* out);

// The fields of both are named as in model/layers.py and model/config.py; scales are null for bf16, and whatever else a
// model hasn't is null too.
struct LayerPointers {
  const float* attention_norm;
  const uint8_t* qkv; const float* qkv_scale; const float *qkv_bias, *qk_norm;
  const uint8_t* out; const float *out_scale, *attention_post_norm;
  const float* mlp_norm;
  const uint8_t* gate_up; const float* gate_up_scale;
  const uint8_t* down; const float *down_scale, *mlp_post_norm;
  uint8_t *k_cache, *v_cache;
  int64_t window;
};

struct Shapes {
  int num_layers, hidden, mlp, heads, kv_heads, dim, is_int8, is_kv_int8, is_gelu;
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
    take(scratch, rows * (s.hidden > s.mlp ? s.hidden : s.mlp) * 4);
    take(gated, rows * s.mlp * element);
    take(gated_scale, rows * 4);
  }
};

int64_t layers_work(const Shapes* s, int rows) { return Work(*s, rows, nullptr).size; }

void run_layers(const Shapes* shapes, const LayerPointers* layers, const StepPointers* step, char* memory) {
  const Shapes& s = *shapes;
  const StepPointers& p = *step;
  const Work w(s, p.rows, memory);
  const int width = s.heads * s.dim, qkv_width = width + 2 * s.kv_heads * s.dim, element = s.is_int8 ? 1 : 2, kind = s.is_int8 ? 0 : 1;
  const float* scale = s.is_int8 ? w.ready_scale : nullptr;
  const auto prepare = [&](const float* x, const float* weight, int columns) {
    norm_rows(x, weight, s.eps, p.rows, columns, (int8_t*)w.ready, w.ready_scale, s.is_int8 ? nullptr : (uint16_t*)w.ready);
  };
  const auto add_product = [&](const uint8_t* rows, const float* row_scale, const uint8_t* matrix, const float* column_scale,
                               int columns, const float* norm) {
    if (!norm) return matmul_add(rows, matrix, row_scale, column_scale, p.rows, s.hidden, columns * element, p.x);
    matmul(rows, matrix, row_scale, column_scale, p.rows, s.hidden, columns * element, w.scratch);
    add(kind, w.scratch, row_scale, column_scale, p.rows, s.hidden, norm, s.eps, p.x);
  };
  for (int i = 0; i < s.num_layers; i++) {
    const LayerPointers& l = layers[i];
    prepare(p.x, l.attention_norm, s.hidden);
    matmul(w.ready, l.qkv, scale, l.qkv_scale, p.rows, qkv_width, s.hidden * element, w.qkv);
    store_qkv(kind, w.qkv, scale, l.qkv_scale, l.qkv_bias, l.qk_norm, s.eps, p.rows, s.heads, s.kv_heads, s.dim,
              l.window ? p.local_cosine : p.cosine, l.window ? p.local_sine : p.sine, p.slots, s.q_scale, s.is_kv_int8,
              s.block_bytes, w.q, l.k_cache, l.v_cache);
    attend(s.heads, s.kv_heads, s.dim, s.is_kv_int8, s.block_bytes, l.window, w.q, l.k_cache, l.v_cache, p.lengths, p.tables,
           p.spans, p.level_ends, p.levels, p.state, w.mixed);
    prepare(w.mixed, nullptr, width);
    add_product(w.ready, scale, l.out, l.out_scale, width, l.attention_post_norm);
    prepare(p.x, l.mlp_norm, s.hidden);
    matmul_gated(w.ready, l.gate_up, scale, l.gate_up_scale, p.rows, 2 * s.mlp, s.hidden * element, s.is_gelu, w.scratch,
                 (int8_t*)w.gated, w.gated_scale, s.is_int8 ? nullptr : (uint16_t*)w.gated);
    add_product(w.gated, s.is_int8 ? w.gated_scale : nullptr, l.down, l.down_scale, s.mlp, l.mlp_post_norm);
  }
}
}
#endif
