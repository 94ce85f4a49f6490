// What attention keeps of a tile of query rows while it walks the keys, and the online softmax of one chunk.
//
// Scores are powers of two (q was scaled by log2 e), so a weight is 2^(score - largest). Weights are rounded to bf16
// for the values; their sum is kept in float32, a lane a sixteenth of the keys.
#pragma once
#include "vec.h"
#include <algorithm>
#include <limits>

constexpr int BLOCK = 16, CHUNK_BLOCKS = 4, CHUNK = BLOCK * CHUNK_BLOCKS, MAX_ROWS = 16, MAX_DIM = 512;

struct Tile {
  int n;  // rows in use; the others hold zeros
  alignas(64) uint16_t q[MAX_ROWS * MAX_DIM];      // [row][dim]
  alignas(64) float mixed[MAX_ROWS * MAX_DIM];     // [row][dim] unnormalized output
  alignas(64) float score[MAX_ROWS][CHUNK];
  alignas(64) uint16_t weight[MAX_ROWS][CHUNK];
  alignas(64) float total[MAX_ROWS][16];           // sum of weights, lane by lane
  float top[MAX_ROWS];
};

constexpr float GROWTH = 8, LOWEST = -3e38f;

inline void rescale(Tile& t, int dim, int r, float top) {
  const f32x16 keep = t.top[r] > LOWEST ? exp2_fast(splat(t.top[r] - top)) : f32x16{};
  t.top[r] = top;
  store(t.total[r], load(t.total[r]) * keep);
  float* mixed = t.mixed + r * dim;
  for (int i = 0; i < dim; i += 16) store(mixed + i, load(mixed + i) * keep);
}

// The keys of one chunk: its blocks' ids, how many of them hold visible keys, and what comes next (to prefetch).
struct Keys {
  const uint16_t *k, *v;  // of this kv head
  int64_t stride;         // between blocks, in bf16 elements
  const int32_t* blocks;
  int num_blocks, next_blocks;
  bool is_cold;  // nobody has read them just now: worth prefetching
  const float *k_scale = nullptr, *v_scale = nullptr;  // one a token of the chunk, where values are int8
};

// score -> weight and total of each row. `seen[r]` keys of the chunk are visible to row r (0 to 64). Weights are relative
// to `top`, which follows the largest score only when that has grown by more than GROWTH: then `mixed` is rescaled.
template <bool IS_SCALED> void weigh(Tile& t, int dim, const int* seen, const Keys& keys) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int r = 0; r < t.n; r++) {
    if (seen[r] <= 0) { std::memset(t.weight[r], 0, sizeof t.weight[r]); continue; }
    f32x16 s[CHUNK_BLOCKS];
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      s[b] = load(t.score[r] + b * BLOCK);
      if (IS_SCALED) s[b] *= load(keys.k_scale + b * BLOCK);
      if (seen[r] < CHUNK) s[b] = lane < (i32x16{} + (seen[r] - b * BLOCK)) ? s[b] : splat(LOWEST);
    }
    const f32x16 most = maximum(maximum(s[0], s[1]), maximum(s[2], s[3]));
    if (any_above(most, splat(t.top[r] + GROWTH))) rescale(t, dim, r, largest(most));
    for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] = exp2_fast(s[b] - splat(t.top[r]));
    if (seen[r] < CHUNK)
      for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] = lane < (i32x16{} + (seen[r] - b * BLOCK)) ? s[b] : f32x16{};
    store(t.total[r], load(t.total[r]) + ((s[0] + s[1]) + (s[2] + s[3])));
    if (IS_SCALED)
      for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] *= load(keys.v_scale + b * BLOCK);
    store_bf16_pair(t.weight[r], s[0], s[1]);
    store_bf16_pair(t.weight[r] + 32, s[2], s[3]);
  }
}
