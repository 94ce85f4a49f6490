// What attention keeps of a tile of query rows while it walks the keys, and the online softmax of one chunk.
//
// Scores are powers of two (q was scaled by log2 e), so a weight is 2^(score - largest). Weights are rounded to bf16
// for the values; their sum is kept in float32, a lane a sixteenth of the keys.
#pragma once
#include "vec.h"
#include <algorithm>
#include <limits>
#include <new>

constexpr int BLOCK = 16, CHUNK_BLOCKS = 4, CHUNK = BLOCK * CHUNK_BLOCKS, MAX_ROWS = 16;

// Zeros at first, aligned to a cache line: a tile's row that straddles two takes twice as long.
template <class T> class Buffer {
 public:
  explicit Buffer(size_t count = 0) { grow(count); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { operator delete(memory, std::align_val_t(64)); }
  T* at(size_t i) const { return memory + i; }
  // Room for `count`; what was there is lost if that is more than before.
  void grow(size_t count) {
    if (count <= room) return;
    operator delete(memory, std::align_val_t(64));
    memory = (T*)operator new(count * sizeof(T), std::align_val_t(64));
    std::memset((void*)memory, 0, count * sizeof(T));
    room = count;
  }

 private:
  T* memory = nullptr;
  size_t room = 0;
};

// What is written and read again within one chunk: one for all tiles of a thread, so that it stays in the nearest cache.
struct Scratch {
  alignas(64) float score[MAX_ROWS][CHUNK];  // int32 where keys are int8
  alignas(64) uint16_t weight[MAX_ROWS][CHUNK];
};

struct Tile {
  int n;               // rows in use; the others hold anything
  float* mixed;        // [row][dim] unnormalized output
  float (*total)[16];  // sum of weights, lane by lane
  void* q;             // [row][dim] bf16, or int8 with
  float* q_scale;
  float* top;
  float (*score)[CHUNK];
  uint16_t (*weight)[CHUNK];

  static size_t bytes(int dim) { return MAX_ROWS * (dim * 6 + 64 + 8); }
  // `memory`: bytes(dim) of it, aligned to a cache line.
  Tile(char* memory, int dim, Scratch& scratch) : score(scratch.score), weight(scratch.weight) {
    mixed = (float*)memory;
    total = (float(*)[16])(mixed + MAX_ROWS * dim);
    q = total + MAX_ROWS;
    q_scale = (float*)((uint16_t*)q + MAX_ROWS * dim);
    top = q_scale + MAX_ROWS;
  }
  const uint16_t* halves() const { return (const uint16_t*)q; }
  const int8_t* ints() const { return (const int8_t*)q; }
};

// The keys and values of one chunk and kv head. Of blocks that hold no visible key nothing may be used.
struct Keys {
  const uint8_t* k[CHUNK_BLOCKS];       // as they lie in the cache, see chunk.h
  const float* k_scale[CHUNK_BLOCKS];   // [16], where keys are int8
  const uint16_t* v[CHUNK_BLOCKS];      // [8 pairs of tokens][dim][2] bf16; finite beyond the visible ones, as far as 32 tokens
  const float* v_scale;                 // [64], where values were int8; 0 beyond the visible ones
  int visible;
};

// Keys [begin, end) of the chunk that each row of a tile sees; both may lie outside of it.
struct Seen {
  int begin[MAX_ROWS], end[MAX_ROWS];
  bool none(int r) const { return end[r] <= 0 || begin[r] >= CHUNK; }
  bool all(int r) const { return begin[r] <= 0 && end[r] >= CHUNK; }
};

constexpr float GROWTH = 8, LOWEST = -3e38f;

inline void rescale(Tile& t, int dim, int r, float top) {
  const f32x16 keep = exp2_fast(splat(t.top[r] - top));
  t.top[r] = top;
  store(t.total[r], load(t.total[r]) * keep);
  float* mixed = t.mixed + r * dim;
  for (int i = 0; i < dim; i += 16) store(mixed + i, load(mixed + i) * keep);
}

// score -> weight and total of each row, of those keys of the chunk that it sees. Weights are relative
// to `top`, which follows the largest score only when that has grown by more than GROWTH: then `mixed` is rescaled, and
// `dots`, which holds it, has to put it down for that.
template <bool IS_INT8, class Dots> void weigh(Tile& t, int dim, const Seen& seen, const Keys& keys, const Dots& dots) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  bool is_down = false;
  for (int r = 0; r < t.n; r++) {
    if (seen.none(r)) { std::memset(t.weight[r], 0, sizeof t.weight[r]); continue; }
    const auto is_seen = [&](int b) {
      return (lane < (i32x16{} + (seen.end[r] - b * BLOCK))) & (lane >= (i32x16{} + (seen.begin[r] - b * BLOCK)));
    };
    f32x16 s[CHUNK_BLOCKS];
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      s[b] = load(t.score[r] + b * BLOCK);
      if (IS_INT8) s[b] = __builtin_convertvector((i32x16)s[b], f32x16) * (load(keys.k_scale[b]) * splat(t.q_scale[r]));
      if (!seen.all(r)) s[b] = is_seen(b) ? s[b] : splat(LOWEST);
    }
    const f32x16 most = maximum(maximum(s[0], s[1]), maximum(s[2], s[3]));
    if (any_above(most, splat(t.top[r] + GROWTH))) {
      if (t.top[r] < LOWEST) {
        t.top[r] = largest(most);  // its first chunk: nothing is mixed yet
      } else {
        if (!is_down) dots.put_down(t, dim);
        is_down = true;
        rescale(t, dim, r, largest(most));
      }
    }
    for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] = exp2_fast(s[b] - splat(t.top[r]));
    if (!seen.all(r))
      for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] = is_seen(b) ? s[b] : f32x16{};
    store(t.total[r], load(t.total[r]) + ((s[0] + s[1]) + (s[2] + s[3])));
    if (IS_INT8)
      for (int b = 0; b < CHUNK_BLOCKS; b++) s[b] *= load(keys.v_scale + b * BLOCK);
    store_bf16_pair(t.weight[r], s[0], s[1]);
    store_bf16_pair(t.weight[r] + 32, s[2], s[3]);
  }
  if (is_down) dots.pick_up(t, dim);
}
