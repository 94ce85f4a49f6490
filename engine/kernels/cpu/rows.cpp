// Row kernels around the matmuls: what surrounds each linear layer is fused into one pass over its rows.
//
// A row is quantized as  x = scale * q,  q in [-127, 127], scale = largest |x| / 127, after an exact change of basis:
// blocks of 64 columns are rotated by a Hadamard matrix (QuaRot, SpinQuant), which spreads outliers; the weights were
// rotated once at load. A product comes either as int32 accumulators with a scale a row and a scale a column, or as
// bf16. Every row is computed alone: its result doesn't depend on the rows beside it.
#include "best.h"
#include "quantize.h"
#include "team.h"
#include <algorithm>
#include <vector>

namespace {

constexpr int FEW = 8;  // rows that are done sooner than other threads would wake

struct Ints {  // int32 accumulators, scaled by row and column
  const int32_t* acc; const float* row; const float* column; int64_t width;
  f32x16 at(int64_t m, int64_t n) const {
    i32x16 v; std::memcpy(&v, acc + m * width + n, 64);
    return __builtin_convertvector(v, f32x16) * splat(row[m]) * load(column + n);
  }
};
struct Floats {  // the same as float32, rounded once above 2^24
  const float* acc; const float* row; const float* column; int64_t width;
  f32x16 at(int64_t m, int64_t n) const { return load(acc + m * width + n) * splat(row[m]) * load(column + n); }
};
struct Sums {  // float32 as they are
  const float* x; int64_t width;
  f32x16 at(int64_t m, int64_t n) const { return load(x + m * width + n); }
};
struct Halves {
  const uint16_t* x; int64_t width;
  f32x16 at(int64_t m, int64_t n) const { return load_bf16(x + m * width + n); }
};

template <class P>
void gated_rows(const P& p, int rows, int inner, bool is_gelu, int8_t* q, float* scale, uint16_t* halves) {
  in_team(rows >= FEW, [&] {
    std::vector<float> buffer(inner + 16);
    float* x = buffer.data();
#pragma omp for schedule(static)
    for (int m = 0; m < rows; m++) {
      for (int i = 0; i < inner; i += 16) {
        const f32x16 gate = p.at(m, i), y = (is_gelu ? gelu(gate) : silu(gate)) * p.at(m, inner + i);
        if (halves) store_bf16(halves + (int64_t)m * inner + i, y); else store(x + i, y);
      }
      if (!halves) { rotate(x, inner); scale[m] = quantize_row(x, inner, q + (int64_t)m * inner); }
    }
  });
}

template <class P> void add_rows(const P& p, int rows, int width, const float* norm, float eps, float* residual) {
  in_team(rows >= FEW, [&] {
#pragma omp for schedule(static)
    for (int m = 0; m < rows; m++) {
      f32x16 squares = f32x16{};
      if (norm) for (int i = 0; i < width; i += 16) { const f32x16 v = p.at(m, i); squares += v * v; }
      const float inverse = norm ? 1.f / std::sqrt(sum(squares) / width + eps) : 1.f;
      for (int i = 0; i < width; i += 16) {
        float* r = residual + (int64_t)m * width + i;
        const f32x16 v = p.at(m, i);
        store(r, load(r) + (norm ? v * splat(inverse) * load(norm + i) : v));
      }
    }
  });
}

template <class P> void best_rows(const P& p, int rows, int width, const Masks& masks, int64_t* columns) {
#pragma omp parallel for schedule(static) if (rows >= FEW)
  for (int m = 0; m < rows; m++) {
    Best best = Best::none();
    for (int i = 0; i < width; i += 16) best.see(p.at(m, i), i, masks.at(m, i / 32) >> i % 32);
    columns[m] = best.found();
  }
}

struct Caches {  // of one layer; see chunk.h
  uint8_t *k, *v;
  int64_t block_bytes;
  bool is_int8;
};

// One token's key or value of one head, float32 [dim], to slot `at` of its block.
inline void write_k(uint8_t* block, const float* x, int dim, int at) {
  alignas(64) uint16_t line[512];
  for (int i = 0; i < dim; i += 16) store_bf16(line + i, load(x + i));
  for (int i = 0; i < dim / 2; i++) std::memcpy(block + i * 64 + at * 4, line + 2 * i, 4);
}

inline void write_v(uint8_t* block, const float* x, int dim, int at) {
  alignas(64) uint16_t line[512];
  for (int i = 0; i < dim; i += 16) store_bf16(line + i, load(x + i));
  uint16_t* pair = (uint16_t*)block + (at / 2) * dim * 2 + at % 2;
  for (int i = 0; i < dim; i++) pair[i * 2] = line[i];
}

inline void write_int8(uint8_t* block, const float* x, int dim, int at, bool is_v) {
  alignas(64) int8_t line[512];
  const float scale = quantize_row(x, dim, line);
  std::memcpy(block + dim * 16 + at * 4, &scale, 4);
  if (is_v) {
    int8_t* pair = (int8_t*)block + (at / 2) * dim * 2 + at % 2;
    for (int i = 0; i < dim; i++) pair[i * 2] = line[i];
  } else {
    for (int i = 0; i < dim / 4; i++) std::memcpy(block + i * 64 + at * 4, line + 4 * i, 4);
  }
}

inline void normalize(float* x, int dim, const float* weight, float eps) {
  f32x16 squares = f32x16{};
  for (int i = 0; i < dim; i += 16) { const f32x16 v = load(x + i); squares += v * v; }
  const f32x16 inverse = splat(1.f / std::sqrt(sum(squares) / dim + eps));
  for (int i = 0; i < dim; i += 16) store(x + i, load(x + i) * inverse * load(weight + i));
}

// Dequantize, add the bias, normalize q and k by qk_norm [2][dim], turn by the rotary angle, scale q; K and V go to their
// slots of the paged cache. `bias` and `qk_norm` may be null.
template <class P>
void store_qkv_rows(const P& p, const float* bias, const float* qk_norm, float eps, int rows, int heads, int kv_heads, int dim,
                    const float* cosine, const float* sine, const int64_t* slots, float q_scale, const Caches& to, uint16_t* q) {
  const int half = dim / 2;
  const int64_t head_bytes = to.block_bytes / kv_heads;
  in_team(rows >= FEW, [&] {
#pragma omp for schedule(static)
    for (int m = 0; m < rows; m++) {
      const float *c = cosine + (int64_t)m * half, *s = sine + (int64_t)m * half;
      const int64_t block = slots[m] / 16, at = slots[m] % 16;
      alignas(64) float x[512];
      for (int h = 0; h < heads + 2 * kv_heads; h++) {
        const bool is_q = h < heads, is_v = h >= heads + kv_heads;
        const int64_t base = (int64_t)h * dim;
        for (int i = 0; i < dim; i += 16) {
          f32x16 y = p.at(m, base + i);
          if (bias) y += load(bias + base + i);
          store(x + i, y);
        }
        if (!is_v && qk_norm) normalize(x, dim, qk_norm + (is_q ? 0 : dim), eps);
        if (!is_v) {
          const f32x16 scale = splat(is_q ? q_scale : 1.f);
          for (int i = 0; i < half; i += 16) {
            const f32x16 a = load(x + i), b = load(x + half + i), co = load(c + i), si = load(s + i);
            store(x + i, (a * co - b * si) * scale);
            store(x + half + i, (b * co + a * si) * scale);
          }
        }
        if (is_q) {
          for (int i = 0; i < dim; i += 16) store_bf16(q + ((int64_t)m * heads + h) * dim + i, load(x + i));
          continue;
        }
        const int kv_head = is_v ? h - heads - kv_heads : h - heads;
        uint8_t* head = (is_v ? to.v : to.k) + block * to.block_bytes + kv_head * head_bytes;
        if (to.is_int8) write_int8(head, x, dim, at, is_v);
        else if (is_v) write_v(head, x, dim, at);
        else write_k(head, x, dim, at);
      }
    }
  });
}

template <class F> void visit(int kind, const void* x, const float* row, const float* column, int64_t width, F f) {
  if (kind == 0) f(Ints{(const int32_t*)x, row, column, width});
  else if (kind == 1 && row) f(Floats{(const float*)x, row, column, width});
  else if (kind == 1) f(Sums{(const float*)x, width});
  else f(Halves{(const uint16_t*)x, width});
}

}  // namespace

extern "C" {

// x [rows][width] float32 -> normalized rows, rotated and quantized (q, scale) or as bf16 (halves); weight may be null
// (then only the change of format).
void norm_rows(const float* x, const float* weight, float eps, int rows, int width, int8_t* q, float* scale, uint16_t* halves) {
  in_team(rows >= FEW, [&] {
    std::vector<float> buffer(width + 16);
    float* y = buffer.data();
#pragma omp for schedule(static)
    for (int m = 0; m < rows; m++) {
      const float* r = x + (int64_t)m * width;
      f32x16 squares = f32x16{};
      if (weight) for (int i = 0; i < width; i += 16) { f32x16 v = load(r + i); squares += v * v; }
      const float inverse = weight ? 1.f / std::sqrt(sum(squares) / width + eps) : 1.f;
      for (int i = 0; i < width; i += 16) {
        f32x16 v = load(r + i);
        if (weight) v = v * splat(inverse) * load(weight + i);
        if (halves) store_bf16(halves + (int64_t)m * width + i, v); else store(y + i, v);
      }
      if (!halves) { rotate(y, width); scale[m] = quantize_row(y, width, q + (int64_t)m * width); }
    }
  });
}

// silu(gate) * up, or gelu(gate) * up, made ready for the next matmul like norm_rows.
void gated(int kind, const void* x, const float* row, const float* column, int rows, int inner, int is_gelu, int8_t* q,
           float* scale, uint16_t* halves) {
  visit(kind, x, row, column, 2 * (int64_t)inner, [&](auto p) { gated_rows(p, rows, inner, is_gelu, q, scale, halves); });
}

// Adds a product to the residual; where `norm` isn't null, normalized by it.
void add(int kind, const void* x, const float* row, const float* column, int rows, int width, const float* norm, float eps,
         float* residual) {
  visit(kind, x, row, column, width, [&](auto p) { add_rows(p, rows, width, norm, eps, residual); });
}

// As matmul_best in matmul.cpp, of a product that another matmul made.
void best(int kind, const void* x, const float* row, const float* column, int rows, int width, const uint32_t* masks, int masked,
          int words, int64_t* columns) {
  visit(kind, x, row, column, width, [&](auto p) { best_rows(p, rows, width, {masks, masked, words}, columns); });
}

void store_qkv(int kind, const void* x, const float* row, const float* column, const float* bias, const float* qk_norm,
               float eps, int rows, int heads, int kv_heads, int dim, const float* cosine, const float* sine,
               const int64_t* slots, float q_scale, int is_int8, int64_t block_bytes, uint16_t* q, uint8_t* k, uint8_t* v) {
  const Caches to{k, v, block_bytes, is_int8 != 0};
  visit(kind, x, row, column, (heads + 2 * (int64_t)kv_heads) * dim, [&](auto p) {
    store_qkv_rows(p, bias, qk_norm, eps, rows, heads, kv_heads, dim, cosine, sine, slots, q_scale, to, q);
  });
}

}
