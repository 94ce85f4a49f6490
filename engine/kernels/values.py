"""What passes between kernels: activation rows, packed matrices and the products of the two."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations ready for a matmul, [T, columns].

    float formats: `values` in the weights' dtype. int8: `values` int8, turned by Hadamard blocks and divided by
    `scale` float32 [T].
    """

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight [out, in] as its kernels keep it. int8: `scale` float32 [out]; `bias` [out] or None.

    `is_tiled`: packed for the CPU's own matmul, not for torch's. `bits`: of the codes of a weight in groups, whose
    `scale` and `zero` are [out, groups] (groups.py); else 0. fp8: `scale` [out, blocks of `block` columns], and the
    `input_scale` of all rows where they don't have their own (fp8.py).
    """

    packed: Tensor
    num_rows: int
    num_columns: int
    bias: Tensor | None = None
    scale: Tensor | None = None
    is_tiled: bool = False
    zero: Tensor | None = None
    bits: int = 0
    block: int = 0
    input_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times a matrix, [T, out], before its scales and bias: value = values * row * column + bias.

    `values` are int32, or the same integers as float32, where `row` [T] and `column` [out] are given; else they are
    the product itself. Without a `bias` there is none, or it is in there.
    """

    values: Tensor
    row: Tensor | None = None
    column: Tensor | None = None
    bias: Tensor | None = None

    def dequantized(self) -> Tensor:
        """float32 [T, out]."""
        exact = self.values.float()
        if self.row is not None and self.column is not None:
            exact = exact * self.row[:, None] * self.column
        return exact if self.bias is None else exact + self.bias
