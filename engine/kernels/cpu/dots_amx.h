// The two products of attention with AMX tiles: 16 query rows by 16 keys (or dimensions) an instruction.
//
// The block layouts of K are tiles already: 16 rows of pairs (or fours) by 16 tokens. The processor does nothing for rows
// that a tile doesn't have, so a tile is as high as there are rows; a row's sums don't depend on the others. Up to 64
// dimensions, the output stays in tile registers from chunk to chunk: what a tile stores can't be loaded again at once.
#pragma once
#include "amx.h"
#include "softmax.h"

#if HAS_AMX
class AmxDots {
 public:
  static constexpr int ROWS = MAX_ROWS;
  static constexpr bool IN_PLACE = false;  // a tile of values takes 32 tokens, which are two blocks

  ~AmxDots() { if (height) _tile_release(); }

  // Tiles 0 to 3 hold the output, 4 and 5 sum scores, 6 and 7 are what is multiplied.
  void begin(int rows) {
    if (rows == height) return;
    TileShapes c;
    for (int i = 0; i < 7; i++) c.set(i, rows, 64);
    c.set(7, 16, 64);
    _tile_loadconfig(&c);
    height = rows;
  }

  void pick_up(const Tile& t, int dim) const { if (dim <= HELD) load(t.mixed, dim, dim); }
  void put_down(Tile& t, int dim) const { if (dim <= HELD) save(t.mixed, dim, dim); }

  template <bool IS_INT8> void score(Tile& t, int dim, const Keys& keys) const {
    for (int b = 0; b * BLOCK < keys.visible; b += 2) {
      const bool is_pair = (b + 1) * BLOCK < keys.visible;
      _tile_zero(4); _tile_zero(5);
      for (int at = 0; at < dim * (IS_INT8 ? 1 : 2); at += 64) {  // bytes of a row of q; 16 times that of keys
        _tile_loadd(6, (const char*)t.q + at, dim * (IS_INT8 ? 1 : 2));
        _tile_loadd(7, keys.k[b] + at * 16, 64);
        if (IS_INT8) _tile_dpbssd(4, 6, 7); else _tile_dpbf16ps(4, 6, 7);
        if (!is_pair) continue;
        _tile_loadd(7, keys.k[b + 1] + at * 16, 64);
        if (IS_INT8) _tile_dpbssd(5, 6, 7); else _tile_dpbf16ps(5, 6, 7);
      }
      _tile_stored(4, t.score[0] + b * BLOCK, CHUNK * 4);
      if (is_pair) _tile_stored(5, t.score[0] + (b + 1) * BLOCK, CHUNK * 4);
    }
  }

  void mix(Tile& t, int dim, const Keys& keys) const {
    for (int base = 0; base < dim; base += HELD) {
      const int width = std::min(HELD, dim - base);
      if (dim > HELD) load(t.mixed + base, width, dim);
      for (int token = 0; token < keys.visible; token += 32) {
        const uint16_t* v = keys.v[token / BLOCK] + base * 2;
        _tile_loadd(6, t.weight[0] + token, CHUNK * 2);
        _tile_loadd(7, v, dim * 4); _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, v + 32, dim * 4); _tile_dpbf16ps(1, 6, 7);
        if (width <= 32) continue;
        _tile_loadd(7, v + 64, dim * 4); _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, v + 96, dim * 4); _tile_dpbf16ps(3, 6, 7);
      }
      if (dim > HELD) save(t.mixed + base, width, dim);
    }
  }

 private:
  static constexpr int HELD = 64;

  static void load(const float* mixed, int width, int dim) {
    _tile_loadd(0, mixed, dim * 4); _tile_loadd(1, mixed + 16, dim * 4);
    if (width > 32) { _tile_loadd(2, mixed + 32, dim * 4); _tile_loadd(3, mixed + 48, dim * 4); }
  }
  static void save(float* mixed, int width, int dim) {
    _tile_stored(0, mixed, dim * 4); _tile_stored(1, mixed + 16, dim * 4);
    if (width > 32) { _tile_stored(2, mixed + 32, dim * 4); _tile_stored(3, mixed + 48, dim * 4); }
  }

  int height = 0;
};
#endif
