// The two products of attention with vector registers: scores of a chunk, and its values mixed by their weights.
#pragma once
#include "softmax.h"

struct VectorDots {
  static constexpr int ROWS = 6;  // accumulators of a tile stay in registers
  static constexpr bool IN_PLACE = true;

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
  // Some blocks at a time: what one row waits for while another is added to.
  template <int R, bool IS_INT8> static void score_rows(Tile& t, int dim, const Keys& keys) {
    constexpr int MANY = R > 3 ? 2 : 4;
    const int blocks = (keys.visible + BLOCK - 1) / BLOCK;
    int32_t origins[R];
    if (IS_INT8)
      for (int r = 0; r < R; r++) origins[r] = dot4_origin(t.ints() + r * dim, dim);
    int b = 0;
    for (; b + MANY <= blocks; b += MANY) score_blocks<R, MANY, IS_INT8>(t, dim, keys, b, origins);
    for (; b < blocks; b++) score_blocks<R, 1, IS_INT8>(t, dim, keys, b, origins);
  }

  template <int R, int B, bool IS_INT8>
  static void score_blocks(Tile& t, int dim, const Keys& keys, int b, const int32_t* origins) {
    u32x16 acc[R][B];
    const uint8_t* k[B];
#pragma GCC unroll 4
    for (int i = 0; i < B; i++) k[i] = keys.k[b + i];
    const char* q = (const char*)t.q;
    const int row_bytes = dim * (IS_INT8 ? 1 : 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < B; i++) acc[r][i] = u32x16{} + (IS_INT8 ? (uint32_t)origins[r] : 0u);
    for (int at = 0; at < row_bytes; at += 4) {
      u32x16 key[B];
#pragma GCC unroll 4
      for (int i = 0; i < B; i++) key[i] = IS_INT8 ? load_u32(k[i] + at * 16) ^ 0x80808080u : load_u32(k[i] + at * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        uint32_t part; std::memcpy(&part, q + r * row_bytes + at, 4);
#pragma GCC unroll 4
        for (int i = 0; i < B; i++)
          acc[r][i] = IS_INT8 ? (u32x16)dot4((i32x16)acc[r][i], u32x16{} + part, key[i])
                              : as_u32(dot2(as_f32(acc[r][i]), u32x16{} + part, key[i]));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < B; i++) store(t.score[r] + (b + i) * BLOCK, as_f32(acc[r][i]));
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
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < S; j++) acc[r][j] = load(t.mixed + r * dim + base + 16 * j);
      for (int first = 0; first < keys.visible; first += BLOCK) {
        const uint16_t* v = keys.v[first / BLOCK] + base * 2;
        for (int at = first; at < std::min(first + BLOCK, keys.visible); at += 2, v += dim * 2) {
          u32x16 value[S];
#pragma GCC unroll 4
          for (int j = 0; j < S; j++) value[j] = load_u32(v + 32 * j);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            uint32_t w; std::memcpy(&w, &t.weight[r][at], 4);
#pragma GCC unroll 4
            for (int j = 0; j < S; j++) acc[r][j] = dot2(acc[r][j], u32x16{} + w, value[j]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < S; j++) store(t.mixed + r * dim + base + 16 * j, acc[r][j]);
    }
  }
};
