// Sums of a panel on AMX tiles: at most 32 rows by two tiles of 16 columns.
#pragma once
#include "amx.h"
#include "panel.h"

#if HAS_AMX
#include <algorithm>

// Tiles: 0 to 3 are the sums (2 by 2), 4 and 5 rows, 6 and 7 weights.
struct AmxInt8Dot {
  using Sum = int32_t;
  static void top() { _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); }
  static void bottom() { _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7); }
};
struct AmxBf16Dot {
  using Sum = float;
  static void top() { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); }
  static void bottom() { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
};

template <class Dot> class AmxPanel {
 public:
  using Sum = typename Dot::Sum;
  ~AmxPanel() { if (height) _tile_release(); }

  // Before `multiply` of rows out of these, `step` at a time.
  void begin(const uint8_t*, int, int, int step) {
    if (height == step) return;
    height = step;
    TileShapes c;
    const int top = std::min(16, step), bottom = std::max(1, step - 16);
    c.set(0, top, 64); c.set(1, top, 64); c.set(2, bottom, 64); c.set(3, bottom, 64);
    c.set(4, top, 64); c.set(5, bottom, 64); c.set(6, 16, 64); c.set(7, 16, 64);
    _tile_loadconfig(&c);
  }

  void multiply(const uint8_t* rows, int, int count, int row_bytes, const uint8_t* left, const uint8_t* right,
                Sum (*sums)[PANEL]) const {
    if (count > 16) multiply<true>(rows, row_bytes, left, right, sums);
    else multiply<false>(rows, row_bytes, left, right, sums);
  }

 private:
  template <bool HAS_BOTTOM>
  static void multiply(const uint8_t* rows, int row_bytes, const uint8_t* left, const uint8_t* right, Sum (*sums)[PANEL]) {
    _tile_zero(0); _tile_zero(1);
    if (HAS_BOTTOM) { _tile_zero(2); _tile_zero(3); }
    for (int k = 0; k < row_bytes; k += 64, left += TILE_BYTES, right += TILE_BYTES) {
      _tile_loadd(4, rows + k, row_bytes);
      _tile_loadd(6, left, 64);
      _tile_loadd(7, right, 64);
      Dot::top();
      if (HAS_BOTTOM) { _tile_loadd(5, rows + 16 * (int64_t)row_bytes + k, row_bytes); Dot::bottom(); }
    }
    _tile_stored(0, sums[0], PANEL * 4); _tile_stored(1, sums[0] + 16, PANEL * 4);
    if (HAS_BOTTOM) { _tile_stored(2, sums[16], PANEL * 4); _tile_stored(3, sums[16] + 16, PANEL * 4); }
  }

  int height = 0;
};
#endif
