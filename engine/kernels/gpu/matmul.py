"""Rows times a weight [out, in], with scales, bias and the sum with the residual stream fused behind it.

Programs take tiles of the output in an order that keeps a few rows of tiles, and so the weights they share, in the
second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.gpu.common import dot, dot_ints

TILE_ROWS = tl.constexpr(8)
"""Rows of tiles that are walked side by side."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows and columns of a program's tile of the output, columns of both operands that it takes at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"


TILES = (TileShape(16, 64, 128, 4, 3), TileShape(64, 64, 64, 4, 3), TileShape(128, 128, 64, 8, 3))
"""By the number of rows, least first."""
NARROW = TileShape(16, 32, 128, 4, 4)
"""For few rows of a matrix that would keep only half of a device's processors at work."""
NARROW_COLUMNS = 8192
ADDING = TileShape(128, 64, 64, 8, 3)
"""In place of the largest where its sums are added to what is there, which needs registers too."""


def tile_for(num_rows: int, num_columns: int, *, adds: bool) -> TileShape:
    """The smallest tile that isn't mostly empty."""
    if num_rows <= NARROW.rows and num_columns <= NARROW_COLUMNS:
        return NARROW
    large = ADDING if adds else TILES[-1]
    return next((tile for tile in TILES[:-1] if num_rows <= tile.rows), large)


@triton.jit
def tile_of(index, num_rows, num_columns, M: tl.constexpr, N: tl.constexpr):
    down, across = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    band = index // (TILE_ROWS * across)
    height = tl.minimum(down - band * TILE_ROWS, TILE_ROWS)
    inside = index % (TILE_ROWS * across)
    return band * TILE_ROWS + inside % height, inside // height


@triton.jit
def put_tile(total, out, bias, m, n, num_rows, num_columns, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    is_cell = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_columns, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * num_columns + n[None, :]
    if ADDS:
        total += tl.load(at, mask=is_cell, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=is_cell)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    rows, weight, row_scale, column_scale, bias, out, num_rows, num_columns, width,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    IS_INT8: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """out [num_rows, num_columns] = or += rows [num_rows, width] times weight [num_columns, width], times the scale of
    each row and column where there are scales, plus bias."""
    down, across = tile_of(tl.program_id(0), num_rows, num_columns, M, N)
    m, n, k = down * M + tl.arange(0, M), across * N + tl.arange(0, N), tl.arange(0, K)
    left = rows + (m % num_rows).to(tl.int64)[:, None] * width + k[None, :]
    right = weight + (n % num_columns).to(tl.int64)[None, :] * width + k[:, None]
    total = tl.zeros((M, N), tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, width, K):
        is_inside = k < width - start
        a = tl.load(left + start, mask=is_inside[None, :], other=0 if IS_INT8 else 0.0)
        b = tl.load(right + start, mask=is_inside[:, None], other=0 if IS_INT8 else 0.0)
        total = dot_ints(a, b, total) if IS_INT8 else dot(a, b, total)
    product = total.to(tl.float32)
    if HAS_SCALES:
        product *= tl.load(row_scale + m, mask=m < num_rows, other=0.0)[:, None]
        product *= tl.load(column_scale + n, mask=n < num_columns, other=0.0)[None, :]
    put_tile(product, out, bias, m, n, num_rows, num_columns, HAS_BIAS, ADDS)
