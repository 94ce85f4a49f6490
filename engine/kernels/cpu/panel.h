// A panel: some rows times 32 columns of a packed matrix, whose layout is told in matmul.cpp.
#pragma once
#include <cstdint>

constexpr int PANEL = 32, BLOCK_ROWS = 256, TILE_BYTES = 1024;
