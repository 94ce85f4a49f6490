// The two products of attention with AMX tiles: 16 query rows by 16 keys (or dimensions) an instruction.
//
// The block layouts are tiles already: 16 rows of pairs by 16 columns for K, 8 by 16 for V. The processor does nothing
// for rows that a tile doesn't have, so a tile is as high as there are rows; a row's sums don't depend on the others.
#pragma once
#include "amx.h"
#include "softmax.h"

#if HAS_AMX
#include <vector>

class AmxDots {
 public:
  static constexpr int ROWS = MAX_ROWS;

  explicit AmxDots(int dim) : values(BLOCK * dim) {}
  ~AmxDots() { if (height) _tile_release(); }

  // Tiles 0 to 3 accumulate, 4 and 5 multiply for scores (32 dimensions), 6 and 7 for values (16 tokens).
  void begin(int rows) {
    if (rows == height) return;
    TileShapes c;
    for (int i = 0; i < 4; i++) c.set(i, rows, 64);
    c.set(4, rows, 64); c.set(5, 16, 64);
    c.set(6, rows, 32); c.set(7, 8, 64);
    _tile_loadconfig(&c);
    height = rows;
  }

  void score(Tile& t, int dim, const Keys& keys) const {
    const uint16_t* k[CHUNK_BLOCKS];
    for (int b = 0; b < CHUNK_BLOCKS; b++) k[b] = keys.k + keys.blocks[b < keys.num_blocks ? b : 0] * keys.stride;
    for (int b = 0; keys.is_cold && b < keys.num_blocks; b++) {
      const uint16_t* v = keys.v + keys.blocks[b] * keys.stride;
      for (int d = 0; d < dim / 2; d++) __builtin_prefetch(v + d * 32);
    }
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int d = 0; d < dim; d += 32) {
      _tile_loadd(4, t.q + d, dim * 2);
      _tile_loadd(5, k[0] + d * BLOCK, 64); _tile_dpbf16ps(0, 4, 5);
      if (keys.num_blocks > 1) { _tile_loadd(5, k[1] + d * BLOCK, 64); _tile_dpbf16ps(1, 4, 5); }
      if (keys.num_blocks > 2) { _tile_loadd(5, k[2] + d * BLOCK, 64); _tile_dpbf16ps(2, 4, 5); }
      if (keys.num_blocks > 3) { _tile_loadd(5, k[3] + d * BLOCK, 64); _tile_dpbf16ps(3, 4, 5); }
    }
    _tile_stored(0, t.score[0], CHUNK * 4);
    _tile_stored(1, t.score[0] + 16, CHUNK * 4);
    _tile_stored(2, t.score[0] + 32, CHUNK * 4);
    _tile_stored(3, t.score[0] + 48, CHUNK * 4);
  }

  // `most`: visible keys of the row that sees most; pairs beyond them may never have been written.
  void mix(Tile& t, int dim, const Keys& keys, int most) {
    const uint16_t* v[CHUNK_BLOCKS];
    for (int b = 0; b < keys.num_blocks; b++) {
      v[b] = keys.v + keys.blocks[b] * keys.stride;
      if (keys.is_cold && b < keys.next_blocks) {
        const uint16_t* next = keys.k + keys.blocks[CHUNK_BLOCKS + b] * keys.stride;
        for (int d = 0; d < dim / 2; d++) __builtin_prefetch(next + d * 32);
      }
      const int pairs = (most - b * BLOCK + 1) / 2;
      if (pairs >= BLOCK / 2) continue;
      std::memcpy(values.data(), v[b], pairs * dim * 4);
      std::memset(values.data() + pairs * dim * 2, 0, (BLOCK / 2 - pairs) * dim * 4);
      v[b] = values.data();
    }
    for (int base = 0; base < dim; base += 64) {
      const int columns = std::min(4, (dim - base) / 16);
      float* mixed = t.mixed + base;
      _tile_loadd(0, mixed, dim * 4);
      _tile_loadd(1, mixed + 16, dim * 4);
      if (columns > 2) { _tile_loadd(2, mixed + 32, dim * 4); _tile_loadd(3, mixed + 48, dim * 4); }
      for (int b = 0; b < keys.num_blocks; b++) {
        _tile_loadd(6, t.weight[0] + b * BLOCK, CHUNK * 2);
        _tile_loadd(7, v[b] + base * 2, dim * 4); _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, v[b] + (base + 16) * 2, dim * 4); _tile_dpbf16ps(1, 6, 7);
        if (columns > 2) {
          _tile_loadd(7, v[b] + (base + 32) * 2, dim * 4); _tile_dpbf16ps(2, 6, 7);
          _tile_loadd(7, v[b] + (base + 48) * 2, dim * 4); _tile_dpbf16ps(3, 6, 7);
        }
      }
      _tile_stored(0, mixed, dim * 4);
      _tile_stored(1, mixed + 16, dim * 4);
      if (columns > 2) { _tile_stored(2, mixed + 32, dim * 4); _tile_stored(3, mixed + 48, dim * 4); }
    }
  }

 private:
  int height = 0;
  std::vector<uint16_t> values;  // the last block's visible values, the rest zero
};
#endif
