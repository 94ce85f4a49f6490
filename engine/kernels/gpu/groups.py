"""Rows times a weight of 4 or 8 bits in groups, and the weight made floating-point.

Few rows read the codes and dequantize them on the way to the product. Many rows would do that again for each tile of
rows: for them the weight is made floating-point once (`dequantize`) and multiplied as such. Layout of the codes as in
kernels/groups.py: two of 4 bits in a byte, the even column low; value = (code - zero) * scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.common import dot
from engine.kernels.gpu.matmul import put_tile, tile_of

SIZES = (16, 32, 64, 128)
"""Columns of a group."""

TILE_ROWS = (16, 64)
"""Rows of a tile: of a few sequences, and of more."""
WARPS = 4
STAGES = 4


@triton.jit
def panel(
    codes, scale, zero, n, start, num_columns, width,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Rows n [N] of the weight, columns [start, start + K) of one group, as float32 [N, K]."""
    row = (n % num_columns).to(tl.int64)
    if BITS == 4:
        k = tl.arange(0, K // 2)
        pair = tl.load(codes + row[:, None] * (width // 2) + start // 2 + k[None, :])
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (N, K)).to(tl.float32)
    else:
        code = tl.load(codes + row[:, None] * width + start + tl.arange(0, K)[None, :]).to(tl.float32)
    at = row * (width // GROUP) + start // GROUP
    middle = tl.load(zero + at).to(tl.float32)[:, None] if HAS_ZERO else float(1 << (BITS - 1))
    return (code - middle) * tl.load(scale + at)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def multiply_groups(
    rows, codes, scale, zero, bias, out, num_rows, num_columns, width,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """out [num_rows, num_columns] = or += rows [num_rows, width] times the weight. K divides GROUP, GROUP width."""
    down, across = tile_of(tl.program_id(0), num_rows, num_columns, M, N)
    m, n, k = down * M + tl.arange(0, M), across * N + tl.arange(0, N), tl.arange(0, K)
    left = rows + (m % num_rows).to(tl.int64)[:, None] * width + k[None, :]
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, width, K):
        a = tl.load(left + start)
        b = panel(codes, scale, zero, n, start, num_columns, width, N, K, GROUP, BITS, HAS_ZERO)
        total = dot(a, tl.trans(b.to(a.dtype)), total)
    put_tile(total, out, bias, m, n, num_rows, num_columns, HAS_BIAS, ADDS)


@triton.jit
def dequantize(
    codes, scale, zero, out, num_columns, width,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """out [num_columns, width]: program (N rows, K columns) of the weight."""
    n, start = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * K
    b = panel(codes, scale, zero, n, start, num_columns, width, N, K, GROUP, BITS, HAS_ZERO)
    at = out + n.to(tl.int64)[:, None] * width + start + tl.arange(0, K)[None, :]
    tl.store(at, b.to(out.dtype.element_ty), mask=(n < num_columns)[:, None])
