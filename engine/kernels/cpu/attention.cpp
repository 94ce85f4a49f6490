// Paged attention over bf16 KV for one layer: every token of a step, prefill or decode, is one row with its block
// table and length. Keys are walked in chunks of 64 at the same absolute positions whoever shares them, and a row's
// arithmetic doesn't depend on the rows beside it: grouping changes the speed, never a bit of the result.
//
// Layouts (block_tokens is 16):
//   q    [rows][heads][dim]                 bf16, scaled
//   K    [block][kv head][dim / 2][16][2]   bf16: 16 tokens' pairs of dimensions fill one register
//   V    [block][kv head][8][dim][2]        bf16: pairs of tokens
//   state[rows][heads][dim + 2]             float32: unnormalized output, running maximum, running sum
//
// The shared pass leaves its running state and the private pass starts from it, so the merge is exact and free.
#include "vec.h"
#include <algorithm>
#include <limits>

namespace {

constexpr int BLOCK = 16, CHUNK_BLOCKS = 4, CHUNK = BLOCK * CHUNK_BLOCKS, TILE = 6;

struct Shape { int heads, kv_heads, dim; int64_t block_stride; };  // block_stride in bf16 elements, K and V alike

// One chunk of keys for R rows. `seen[r]` keys of the chunk are visible to row r (0 to 64); `blocks` has the ids of
// its blocks, `num_blocks` of them hold visible keys.
template <int R, int S>
void attend_chunk(const Shape& s, const uint32_t* const* q, const uint16_t* k, const uint16_t* v, const int32_t* blocks,
                  int num_blocks, const int* seen, float* const* state, int ahead) {
  const int pairs = s.dim / 2;
  alignas(64) float score[R][CHUNK];
  alignas(64) uint16_t weight[R][CHUNK];
  const f32x16 low = splat(-std::numeric_limits<float>::infinity());
  for (int b = 0; b < CHUNK_BLOCKS; b++) {
    f32x16 acc[R];
    for (int r = 0; r < R; r++) acc[r] = f32x16{};
    if (b < num_blocks) {
      const uint16_t* kb = k + blocks[b] * s.block_stride;
      for (int d = 0; d < pairs; d++) {
        u32x16 key = load_u32(kb + d * 32);
        __builtin_prefetch(v + blocks[b] * s.block_stride + d * 32);
        for (int r = 0; r < R; r++) acc[r] = dot2(acc[r], u32x16{} + q[r][d], key);
      }
    }
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int r = 0; r < R; r++) {
      i32x16 visible = lane < (i32x16{} + (seen[r] - b * BLOCK));
      store(score[r] + b * BLOCK, visible ? acc[r] : low);
    }
  }
  for (int r = 0; r < R; r++) {
    if (seen[r] <= 0) { std::memset(weight[r], 0, sizeof weight[r]); continue; }
    float* st = state[r];
    f32x16 a = load(score[r]), b = load(score[r] + 16), c = load(score[r] + 32), d = load(score[r] + 48);
    float old = st[s.dim], top = std::max(old, largest(maximum(maximum(a, b), maximum(c, d))));
    f32x16 t = splat(top);
    u32x16 wa = round_bf16(exp_negative(a - t)), wb = round_bf16(exp_negative(b - t));
    u32x16 wc = round_bf16(exp_negative(c - t)), wd = round_bf16(exp_negative(d - t));
    store_halves(weight[r], wa); store_halves(weight[r] + 16, wb);
    store_halves(weight[r] + 32, wc); store_halves(weight[r] + 48, wd);
    float total = sum((as_f32(wa << 16) + as_f32(wb << 16)) + (as_f32(wc << 16) + as_f32(wd << 16)));
    float keep = old == top ? 1.f : exp_negative(splat(old - top))[0];
    st[s.dim] = top;
    st[s.dim + 1] = st[s.dim + 1] * keep + total;
    if (keep != 1.f)
      for (int i = 0; i < s.dim; i += 16) store(st + i, load(st + i) * splat(keep));
  }
  int most = 0;
  for (int r = 0; r < R; r++) most = std::max(most, seen[r]);
  for (int base = 0; base < s.dim; base += 16 * S) {
    f32x16 acc[R][S];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < S; j++) acc[r][j] = load(state[r] + base + 16 * j);
    for (int b = 0; b < num_blocks; b++) {
      const uint16_t* vb = v + blocks[b] * s.block_stride + base * 2;
      const int last = std::min(BLOCK, most - b * BLOCK);
      for (int p = 0; p * 2 < last; p++) {
        u32x16 value[S];
        if (ahead > b)
          for (int j = 0; j < S; j++) __builtin_prefetch(k + blocks[CHUNK_BLOCKS + b] * s.block_stride + base * 16 + (p * S + j) * 32);
        for (int j = 0; j < S; j++) value[j] = load_u32(vb + (p * s.dim + 16 * j) * 2);
        for (int r = 0; r < R; r++) {
          uint32_t w; std::memcpy(&w, &weight[r][b * BLOCK + p * 2], 4);
          for (int j = 0; j < S; j++) acc[r][j] = dot2(acc[r][j], u32x16{} + w, value[j]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < S; j++) store(state[r] + base + 16 * j, acc[r][j]);
  }
}

template <int S>
void attend_tile(int n, const Shape& s, const uint32_t* const* q, const uint16_t* k, const uint16_t* v,
                 const int32_t* blocks, int num_blocks, const int* seen, float* const* state, int ahead) {
  switch (n) {
    case 1: return attend_chunk<1, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
    case 2: return attend_chunk<2, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
    case 3: return attend_chunk<3, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
    case 4: return attend_chunk<4, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
    case 5: return attend_chunk<5, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
    default: return attend_chunk<6, S>(s, q, k, v, blocks, num_blocks, seen, state, ahead);
  }
}

// Rows [first, last) of one kv head over chunks [from, to) of one block table.
void attend_rows(const Shape& s, int head, int first, int last, int from, int to, const int32_t* table,
                 const int32_t* lengths, const uint16_t* q, const uint16_t* k, const uint16_t* v, float* state) {
  const int group = s.heads / s.kv_heads, total = (last - first) * group;
  k += (int64_t)head * s.dim * BLOCK;
  v += (int64_t)head * s.dim * BLOCK;
  for (int at = 0; at < total; at += TILE) {
    const int n = std::min(TILE, total - at);
    const uint32_t* rows[TILE]; float* states[TILE]; int length[TILE], most = 0;
    for (int i = 0; i < n; i++) {
      const int row = first + (at + i) / group, h = head * group + (at + i) % group;
      rows[i] = (const uint32_t*)(q + ((int64_t)row * s.heads + h) * s.dim);
      states[i] = state + ((int64_t)row * s.heads + h) * (s.dim + 2);
      length[i] = lengths[row];
      most = std::max(most, length[i]);
    }
    for (int c = from; c < to && c * CHUNK < most; c++) {
      int seen[TILE], widest = 0;
      for (int i = 0; i < n; i++) {
        seen[i] = std::min(CHUNK, std::max(0, length[i] - c * CHUNK));
        widest = std::max(widest, seen[i]);
      }
      const int ahead = c + 1 < to ? std::min(CHUNK_BLOCKS, std::max(0, (most - (c + 1) * CHUNK + BLOCK - 1) / BLOCK)) : 0;
      const int blocks = (widest + BLOCK - 1) / BLOCK;
      if (s.dim % 64 == 0) attend_tile<4>(n, s, rows, k, v, table + c * CHUNK_BLOCKS, blocks, seen, states, ahead);
      else if (s.dim % 32 == 0) attend_tile<2>(n, s, rows, k, v, table + c * CHUNK_BLOCKS, blocks, seen, states, ahead);
      else attend_tile<1>(n, s, rows, k, v, table + c * CHUNK_BLOCKS, blocks, seen, states, ahead);
    }
  }
}

}  // namespace

// Spans are runs of rows that walk one table together: [first row, last row, first chunk, last chunk, table offset].
// `levels` of them in order: all spans of a level are done before the next level begins.
extern "C" void attend(int heads, int kv_heads, int dim, int64_t block_stride, const uint16_t* q, const uint16_t* k,
                       const uint16_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans,
                       const int32_t* level_ends, int levels, int rows, float* state, float* out) {
  const Shape s{heads, kv_heads, dim, block_stride};
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (int64_t)rows * heads; i++) {
      float* st = state + i * (dim + 2);
      std::memset(st, 0, dim * 4);
      st[dim] = -std::numeric_limits<float>::infinity();
      st[dim + 1] = 0;
    }
    int begin = 0;
    for (int level = 0; level < levels; level++) {
      const int items = (level_ends[level] - begin) * kv_heads;
#pragma omp for schedule(dynamic, 1)
      for (int item = 0; item < items; item++) {
        const int32_t* span = spans + (int64_t)(begin + item / kv_heads) * 5;
        attend_rows(s, item % kv_heads, span[0], span[1], span[2], span[3], tables + span[4], lengths, q, k, v, state);
      }
      begin = level_ends[level];
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (int64_t)rows * heads; i++) {
      const float* st = state + i * (dim + 2);
      const f32x16 scale = splat(1.f / st[dim + 1]);
      for (int d = 0; d < dim; d += 16) store(out + i * dim + d, load(st + d) * scale);
    }
  }
}
