// Where the keys and values of a chunk come from: bf16 blocks as they lie, int8 blocks turned into bf16 first.
//
//   bf16   K [block][kv head][dim / 2][16][2], V [block][kv head][8][dim][2]: pairs of dimensions, pairs of tokens
//   int8   the same order, and behind each head's values one float32 scale for each of the block's 16 tokens;
//          a value's int8 is exact as bf16, scales multiply scores and weights instead
#pragma once
#include "softmax.h"
#include <vector>

struct Bf16Cache {
  static constexpr bool IS_SCALED = false;
  static int64_t head_bytes(int dim) { return (int64_t)dim * BLOCK * 2; }

  explicit Bf16Cache(int) {}
  // `k`, `v`: this head's first block; `stride`: bytes between blocks; `visible` keys of the chunk count.
  Keys open(const uint8_t* k, const uint8_t* v, int64_t stride, int, const int32_t* blocks, int num_blocks, int next_blocks, int) {
    return {(const uint16_t*)k, (const uint16_t*)v, stride / 2, blocks, num_blocks, next_blocks, true};
  }
};

class Int8Cache {
 public:
  static constexpr bool IS_SCALED = true;
  static int64_t head_bytes(int dim) { return (int64_t)dim * BLOCK + BLOCK * 4; }

  explicit Int8Cache(int dim) : keys(CHUNK * dim), values(CHUNK * dim) {}

  Keys open(const uint8_t* k, const uint8_t* v, int64_t stride, int dim, const int32_t* blocks, int num_blocks, int next_blocks,
            int visible) {
    const int size = dim * BLOCK;
    for (int b = 0; b < num_blocks; b++) {
      unpack(k + blocks[b] * stride, size, keys.data() + b * size, k_scale + b * BLOCK);
      unpack(v + blocks[b] * stride, size, values.data() + b * size, v_scale + b * BLOCK);
    }
    for (int b = 0; b < next_blocks; b++)
      for (int i = 0; i < size; i += 64) {
        __builtin_prefetch(k + blocks[CHUNK_BLOCKS + b] * stride + i);
        __builtin_prefetch(v + blocks[CHUNK_BLOCKS + b] * stride + i);
      }
    for (int i = visible; i < CHUNK; i++) v_scale[i] = 0;  // never written, perhaps: must not become NaN
    static const int32_t IN_ORDER[CHUNK_BLOCKS] = {0, 1, 2, 3};
    return {keys.data(), values.data(), size, IN_ORDER, num_blocks, 0, false, k_scale, v_scale};
  }

 private:
  static void unpack(const uint8_t* from, int size, uint16_t* to, float* scale) {
    for (int i = 0; i < size; i += 32) {
      i8x16 a, b;
      std::memcpy(&a, from + i, 16);
      std::memcpy(&b, from + i + 16, 16);
      store_bf16_pair(to + i, __builtin_convertvector(a, f32x16), __builtin_convertvector(b, f32x16));
    }
    std::memcpy(scale, from + size, BLOCK * 4);
  }

  std::vector<uint16_t> keys, values;
  alignas(64) float k_scale[CHUNK];
  alignas(64) float v_scale[CHUNK];
};
