// The two products of attention with vector registers: scores of a chunk, and its values mixed by their weights.
#pragma once
#include "softmax.h"

struct VectorDots {
  static constexpr int ROWS = 6;  // accumulators of a tile stay in registers

  void begin(int) {}
  void pick_up(const Tile&, int) const {}
  void put_down(Tile&, int) const {}

  template <bool IS_INT8> void score(Tile& t, int dim, const Keys& keys) const {
    switch (t.n) {
      case 1: return score_rows<1, IS_INT8>(t, dim, keys);
      case 2: return score_rows<2, IS_INT8>(t, dim, keys);
      case 3: return score_rows<3, IS_INT8>(t, dim, keys);
      case 4: return score_rows<4, IS_INT8>(t, dim, keys);
      case 5: return score_rows<5, IS_INT8>(t, dim, keys);
      default: return score_rows<6, IS_INT8>(t, dim, keys);
    }
  }

  void mix(Tile& t, int dim, const Keys& keys) const {
    if (dim % 64 == 0) mix_wide<4>(t, dim, keys);
    else mix_wide<2>(t, dim, keys);
  }

 private:
  template <int R, bool IS_INT8> static void score_rows(Tile& t, int dim, const Keys& keys) {
    for (int b = 0; b * BLOCK < keys.visible; b++)
      if (IS_INT8) score_ints<R>(t, dim, keys.k[b], b); else score_halves<R>(t, dim, (const uint16_t*)keys.k[b], b);
  }

  template <int R> static void score_halves(Tile& t, int dim, const uint16_t* k, int b) {
    f32x16 acc[R];
    for (int r = 0; r < R; r++) acc[r] = f32x16{};
    for (int d = 0; d < dim / 2; d++) {
      const u32x16 key = load_u32(k + d * 32);
      for (int r = 0; r < R; r++) {
        uint32_t q; std::memcpy(&q, t.halves() + r * dim + 2 * d, 4);
        acc[r] = dot2(acc[r], u32x16{} + q, key);
      }
    }
    for (int r = 0; r < R; r++) store(t.score[r] + b * BLOCK, acc[r]);
  }

  template <int R> static void score_ints(Tile& t, int dim, const uint8_t* k, int b) {
    i32x16 acc[R];
    for (int r = 0; r < R; r++) acc[r] = i32x16{};
    for (int d = 0; d < dim / 4; d++) {
      const u32x16 key = load_u32(k + d * 64);
      for (int r = 0; r < R; r++) {
        uint32_t q; std::memcpy(&q, t.ints() + r * dim + 4 * d, 4);
        acc[r] = dot4(acc[r], u32x16{} + q, key);
      }
    }
    for (int r = 0; r < R; r++) std::memcpy(t.score[r] + b * BLOCK, &acc[r], 64);
  }

  template <int S> static void mix_wide(Tile& t, int dim, const Keys& keys) {
    switch (t.n) {
      case 1: return mix_rows<1, S>(t, dim, keys);
      case 2: return mix_rows<2, S>(t, dim, keys);
      case 3: return mix_rows<3, S>(t, dim, keys);
      case 4: return mix_rows<4, S>(t, dim, keys);
      case 5: return mix_rows<5, S>(t, dim, keys);
      default: return mix_rows<6, S>(t, dim, keys);
    }
  }

  template <int R, int S> static void mix_rows(Tile& t, int dim, const Keys& keys) {
    for (int base = 0; base < dim; base += 16 * S) {
      f32x16 acc[R][S];
      for (int r = 0; r < R; r++)
        for (int j = 0; j < S; j++) acc[r][j] = load(t.mixed + r * dim + base + 16 * j);
      for (int p = 0; p * 2 < keys.visible; p++) {
        u32x16 value[S];
        for (int j = 0; j < S; j++) value[j] = load_u32(keys.v + (p * dim + base + 16 * j) * 2);
        for (int r = 0; r < R; r++) {
          uint32_t w; std::memcpy(&w, &t.weight[r][p * 2], 4);
          for (int j = 0; j < S; j++) acc[r][j] = dot2(acc[r][j], u32x16{} + w, value[j]);
        }
      }
      for (int r = 0; r < R; r++)
        for (int j = 0; j < S; j++) store(t.mixed + r * dim + base + 16 * j, acc[r][j]);
    }
  }
};
