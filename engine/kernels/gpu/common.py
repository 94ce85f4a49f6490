"""What all GPU kernels share: products that the interpreter gets right too, rounding, and the rotation of int8 rows.

Triton's interpreter (TRITON_INTERPRET=1) runs kernels on CPU tensors. It keeps bf16 as bare 16-bit integers and
multiplies those, so operands are made float32 before each product there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away, it rounds a float32 below 2^22 to the nearest integer, ties to even."""


@triton.jit
def dot(a, b, total):
    """total + a b, of floats: float32 operands are not cut to TF32, and sums of fp8 products leave the tensor cores of
    sm_90, which keep 14 digits of them, after each call."""
    if INTERPRETED:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.dtype.is_fp8():
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1])
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def dot_ints(a, b, total):
    """total + a b, of int8, exact in int32."""
    return tl.dot(a, b, total, out_dtype=tl.int32)


@triton.jit
def rounded(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def butterfly(x, HALF: tl.constexpr, SIZE: tl.constexpr):
    """x [SIZE] with sum and difference in the places of each two values that lie HALF apart."""
    pairs = tl.permute(tl.reshape(x, (SIZE // (2 * HALF), 2, HALF)), (0, 2, 1))
    left, right = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), (SIZE,))


@triton.jit
def rotated(x, SIZE: tl.constexpr):
    """x [SIZE] float32 turned by Hadamard blocks of 64, as in kernels/int8.py."""
    for stage in tl.static_range(6):
        x = butterfly(x, 1 << stage, SIZE)
    return x * 0.125


@triton.jit
def to_fp8(x, out):
    """x float32, at most 448, in the type that `out` points to. The interpreter's own rounding loses carries, so there
    the value is rounded to e4m3's digits first."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        normal = bits.to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, rounded(x * 512.0) / 512.0, normal)
    return x.to(out.dtype.element_ty)


@triton.jit
def add_one(x):
    tl.store(x, tl.load(x) + 1)


def prove(device: torch.device) -> None:
    """Runs a kernel. Raises whatever the driver or its loader has against it."""
    x = torch.zeros(1, dtype=torch.int32, device=device)
    add_one[(1,)](x)
    if x.item() != 1:
        raise RuntimeError("a kernel gave a wrong sum")
