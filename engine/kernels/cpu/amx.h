// Permission for, and the shape of, the AMX tile registers; HAS_AMX where the compiler may use them.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux hands out the tile registers on request, once a process. False: they can't be had.
inline bool amx_allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_allowed;
}

struct __attribute__((packed)) TileShapes {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int height, int width_bytes) { rows[tile] = height; bytes[tile] = width_bytes; }
};
#else
#define HAS_AMX 0
#endif
