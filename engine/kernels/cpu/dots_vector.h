// The two products of attention with vector registers: scores of a chunk, and its values mixed by their weights.
#pragma once
#include "softmax.h"

struct VectorDots {
  static constexpr int ROWS = 6;  // accumulators of a tile stay in registers

  explicit VectorDots(int) {}
  void begin(int) {}

  void score(Tile& t, int dim, const Keys& keys) const {
    switch (t.n) {
      case 1: return score_rows<1>(t, dim, keys);
      case 2: return score_rows<2>(t, dim, keys);
      case 3: return score_rows<3>(t, dim, keys);
      case 4: return score_rows<4>(t, dim, keys);
      case 5: return score_rows<5>(t, dim, keys);
      default: return score_rows<6>(t, dim, keys);
    }
  }

  void mix(Tile& t, int dim, const Keys& keys, int most) const {
    if (dim % 64 == 0) mix_wide<4>(t, dim, keys, most);
    else if (dim % 32 == 0) mix_wide<2>(t, dim, keys, most);
    else mix_wide<1>(t, dim, keys, most);
  }

 private:
  template <int R> static void score_rows(Tile& t, int dim, const Keys& keys) {
    for (int b = 0; b < keys.num_blocks; b++) {
      f32x16 acc[R];
      for (int r = 0; r < R; r++) acc[r] = f32x16{};
      const uint16_t* k = keys.k + keys.blocks[b] * keys.stride;
      const uint16_t* v = keys.v + keys.blocks[b] * keys.stride;
      for (int d = 0; d < dim / 2; d++) {
        u32x16 key = load_u32(k + d * 32);
        if (keys.is_cold) __builtin_prefetch(v + d * 32);
        for (int r = 0; r < R; r++) {
          uint32_t q; std::memcpy(&q, t.q + r * dim + 2 * d, 4);
          acc[r] = dot2(acc[r], u32x16{} + q, key);
        }
      }
      for (int r = 0; r < R; r++) store(t.score[r] + b * BLOCK, acc[r]);
    }
  }

  template <int S> static void mix_wide(Tile& t, int dim, const Keys& keys, int most) {
    switch (t.n) {
      case 1: return mix_rows<1, S>(t, dim, keys, most);
      case 2: return mix_rows<2, S>(t, dim, keys, most);
      case 3: return mix_rows<3, S>(t, dim, keys, most);
      case 4: return mix_rows<4, S>(t, dim, keys, most);
      case 5: return mix_rows<5, S>(t, dim, keys, most);
      default: return mix_rows<6, S>(t, dim, keys, most);
    }
  }

  // `most`: visible keys of the row that sees most; pairs beyond them may never have been written.
  template <int R, int S> static void mix_rows(Tile& t, int dim, const Keys& keys, int most) {
    for (int base = 0; base < dim; base += 16 * S) {
      f32x16 acc[R][S];
      for (int r = 0; r < R; r++)
        for (int j = 0; j < S; j++) acc[r][j] = load(t.mixed + r * dim + base + 16 * j);
      for (int b = 0; b < keys.num_blocks; b++) {
        const uint16_t* v = keys.v + keys.blocks[b] * keys.stride + base * 2;
        const int last = std::min(BLOCK, most - b * BLOCK);
        for (int p = 0; p * 2 < last; p++) {
          u32x16 value[S];
          if (keys.is_cold && b < keys.next_blocks)
            for (int j = 0; j < S; j++)
              __builtin_prefetch(keys.k + keys.blocks[CHUNK_BLOCKS + b] * keys.stride + base * 16 + (p * S + j) * 32);
          for (int j = 0; j < S; j++) value[j] = load_u32(v + (p * dim + 16 * j) * 2);
          for (int r = 0; r < R; r++) {
            uint32_t w; std::memcpy(&w, &t.weight[r][b * BLOCK + p * 2], 4);
            for (int j = 0; j < S; j++) acc[r][j] = dot2(acc[r][j], u32x16{} + w, value[j]);
          }
        }
      }
      for (int r = 0; r < R; r++)
        for (int j = 0; j < S; j++) store(t.mixed + r * dim + base + 16 * j, acc[r][j]);
    }
  }
};
