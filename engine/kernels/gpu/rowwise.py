"""Kernels over the rows of a step: norm, gated activation, and their way into the format of the next matmul.

FORMAT 0 leaves the type of the output tensor, 1 is int8 with one scale a row after a Hadamard rotation, 2 is fp8 e4m3
with one scale a row. A row that isn't finite gets a NaN scale, so that its product is NaN as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.common import rotated, rounded, to_fp8

FLOAT = 0
INT8 = 1
FP8 = 2
LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def put_row(y, columns, out, scale, row, WIDTH: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    """Stores y [SIZE] float32, zero from WIDTH on, as row `row` of out [rows, WIDTH]."""
    at = out + row.to(tl.int64) * WIDTH + columns
    if FORMAT == 0:
        tl.store(at, y.to(out.dtype.element_ty), mask=columns < WIDTH)
        return
    if FORMAT == 1:
        y = rotated(y, SIZE)
    largest = tl.max(tl.abs(y), axis=0)
    bad = tl.sum(y * 0.0, axis=0)  # NaN where a value isn't finite
    step = largest / 127.0 if FORMAT == 1 else largest / LARGEST_FP8
    is_sound = bad == 0.0
    divisor = tl.where(is_sound & (step > 0.0), step, 1.0)
    small = tl.where(is_sound, y / divisor, 0.0)
    if FORMAT == 1:
        tl.store(at, rounded(small).to(tl.int8), mask=columns < WIDTH)
    else:
        tl.store(at, to_fp8(small, out), mask=columns < WIDTH)
    tl.store(scale + row, tl.where(is_sound, step, float("nan")))


@triton.jit
def norm_rows(
    x,
    delta,
    weight,
    out,
    scale,
    eps,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """RMSNorm of x [rows, WIDTH] float32, of x + delta where there is one, which x then holds."""
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    is_inside = columns < WIDTH
    at = row.to(tl.int64) * WIDTH + columns
    value = tl.load(x + at, mask=is_inside, other=0.0)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(x + at, value, mask=is_inside)
    mean = tl.sum(value * value, axis=0) / WIDTH
    y = value * tl.rsqrt(mean + eps) * tl.load(weight + columns, mask=is_inside, other=0.0)
    put_row(y, columns, out, scale, row, WIDTH, FORMAT, SIZE)


@triton.jit
def pack_rows(x, out, scale, WIDTH: tl.constexpr, SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """x [rows, WIDTH] in the format of a matmul."""
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    value = tl.load(x + row.to(tl.int64) * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    put_row(value, columns, out, scale, row, WIDTH, FORMAT, SIZE)


@triton.jit
def add_normed_rows(x, delta, weight, eps, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """x [rows, WIDTH] += RMSNorm of delta, both float32."""
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    is_inside = columns < WIDTH
    at = row.to(tl.int64) * WIDTH + columns
    value = tl.load(delta + at, mask=is_inside, other=0.0)
    mean = tl.sum(value * value, axis=0) / WIDTH
    value *= tl.rsqrt(mean + eps) * tl.load(weight + columns, mask=is_inside, other=0.0)
    tl.store(x + at, tl.load(x + at, mask=is_inside, other=0.0) + value, mask=is_inside)


@triton.jit
def silu_mul(gate_up, out, scale, WIDTH: tl.constexpr, SIZE: tl.constexpr, FORMAT: tl.constexpr, IS_GELU: tl.constexpr):
    """gate_up [rows, gate | up] -> silu(gate) * up [rows, WIDTH]; IS_GELU: gelu in its approximation by tanh."""
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    at = gate_up + row.to(tl.int64) * (2 * WIDTH) + columns
    gate = tl.load(at, mask=columns < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=columns < WIDTH, other=0.0).to(tl.float32)
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate  # 2 sqrt(2 / pi)
    put_row(gate / (1.0 + tl.exp(-slope)) * up, columns, out, scale, row, WIDTH, FORMAT, SIZE)


def warps_of_row(size: int) -> int:
    """Warps for one row of `size` columns: 16 values a thread, so that rotating them spills nothing."""
    return max(1, min(16, size // 512))
