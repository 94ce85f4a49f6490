// Where the keys and values of a chunk come from. Keys are multiplied as they lie. Values are laid out afresh, 32 tokens one
// after the other, where a tile takes them, and where they aren't bf16.
//
//   bf16   K [block][kv head][dim / 2][16][2], V [block][kv head][8][dim][2]: pairs of dimensions, pairs of tokens
//   int8   K [block][kv head][dim / 4][16][4], V as above, and behind each head's values one float32 scale for each of the
//          block's 16 tokens. A value's int8 is exact as bf16; scales multiply scores and weights instead. Queries become
//          int8 too, one scale a row, so that scores are sums of integers: exact in whatever order.
#pragma once
#include "quantize.h"
#include "softmax.h"

constexpr int ROUND = 8;  // chunks that are laid out at a time, for all tiles of a span

class Bf16Cache {
 public:
  static constexpr bool IS_INT8 = false;
  static int64_t head_bytes(int dim) { return (int64_t)dim * BLOCK * 2; }

  explicit Bf16Cache(int dim) : values(ROUND * CHUNK * dim) {}

  static void take_q(Tile& t, int r, const uint16_t* q, int dim) { std::memcpy((uint16_t*)t.q + r * dim, q, dim * 2); }

  // `k`, `v`: this head's first block; `stride`: bytes between blocks; `visible` keys of the chunk count. Valid until the
  // same place among the ROUND is opened again. `IN_PLACE`: blocks that are seen as a whole are read where they lie.
  template <bool IN_PLACE>
  Keys open(int place, const uint8_t* k, const uint8_t* v, int64_t stride, int dim, const int32_t* blocks, int visible) {
    uint16_t* to = values.at(place * CHUNK * dim);
    Keys keys{{}, {}, {}, nullptr, visible};
    const int size = dim * BLOCK, whole = visible / 2 * dim * 2, padded = (visible + 31) / 32 * 32 * dim;
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      const int count = std::min(size, whole - b * size);
      keys.k[b] = k + blocks[b * BLOCK < visible ? b : 0] * stride;
      keys.v[b] = to + b * size;
      if (IN_PLACE && count == size) keys.v[b] = (const uint16_t*)(v + blocks[b] * stride);
      else if (count > 0) std::memcpy(to + b * size, v + blocks[b] * stride, count * 2);
    }
    // What lies behind the last visible token was never written, or by somebody else: it may be NaN.
    std::memset(to + whole, 0, (padded - whole) * 2);
    if (visible % 2) {
      const uint16_t* last = (const uint16_t*)(v + blocks[visible / BLOCK] * stride) + visible % BLOCK / 2 * dim * 2;
      for (int i = 0; i < dim * 2; i += 2) to[whole + i] = last[i];
    }
    return keys;
  }

 private:
  Buffer<uint16_t> values;
};

class Int8Cache {
 public:
  static constexpr bool IS_INT8 = true;
  static int64_t head_bytes(int dim) { return (int64_t)dim * BLOCK + BLOCK * 4; }

  explicit Int8Cache(int dim) : values(ROUND * CHUNK * dim), scales(ROUND * CHUNK) {}

  static void take_q(Tile& t, int r, const uint16_t* q, int dim) {
    alignas(64) float x[512];
    for (int i = 0; i < dim; i += 16) store(x + i, load_bf16(q + i));
    t.q_scale[r] = quantize_row(x, dim, (int8_t*)t.q + r * dim);
  }

  template <bool>
  Keys open(int place, const uint8_t* k, const uint8_t* v, int64_t stride, int dim, const int32_t* blocks, int visible) {
    const int size = dim * BLOCK;
    uint16_t* to = values.at(place * CHUNK * dim);
    float* scale = scales.at(place * CHUNK);
    Keys keys{{}, {}, {}, scale, visible};
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      keys.v[b] = to + b * size;
      const int64_t at = blocks[b * BLOCK < visible ? b : 0] * stride;
      keys.k[b] = k + at;
      keys.k_scale[b] = (const float*)(k + at + size);
      if (b * BLOCK >= visible) { std::memset(scale + b * BLOCK, 0, BLOCK * 4); continue; }
      for (int i = 0; i < size; i += 64) widen_bf16(to + b * size + i, v + at + i);
      std::memcpy(scale + b * BLOCK, v + at + size, BLOCK * 4);
    }
    for (int i = visible; i % BLOCK; i++) scale[i] = 0;  // never written, perhaps: must not become NaN
    return keys;
  }

 private:
  Buffer<uint16_t> values;
  Buffer<float> scales;
};
