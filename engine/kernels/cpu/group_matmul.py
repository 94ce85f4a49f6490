"""Products with weights in groups by `groups.cpp`: straight from the codes for few rows, through bf16 for many."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels import groups
from engine.kernels.values import Matrix

FEW_ROWS = 16
"""Up to here it pays to decode each code once for up to eight rows; beyond, torch's bf16 matmul wins."""

_SHORT, _STEP, _CHUNK = 16, 32, 64  # columns: groups hold the first or whole steps, rows whole chunks
_PANEL_BYTES = 16 << 20


class GroupKernels:
    """Products of bf16 rows. `is_even`: every row by the same kernel, whatever the rows beside it."""

    def __init__(self, library: ctypes.CDLL, *, is_even: bool) -> None:
        self._lib = library
        self.few_rows = 0 if is_even else FEW_ROWS
        self._panel = torch.empty(0, dtype=torch.bfloat16)

    def multiply(self, values: Tensor, matrix: Matrix) -> Tensor:
        """values bf16 [T, in] times the matrix: [T, out], float32 or bf16."""
        assert matrix.scale is not None, "weights in groups have scales"
        assert values.is_contiguous(), "rows are contiguous"
        if not reads(matrix):
            return groups.multiply(values, matrix)
        operands = (
            *(_pointer(tensor) for tensor in (matrix.packed, matrix.scale, *zeros(matrix))),
            *(matrix.num_rows, matrix.num_columns, group_of(matrix), matrix.bits),
        )
        if len(values) <= self.few_rows:
            out = torch.empty(len(values), matrix.num_rows)
            self._lib.multiply_groups(_pointer(values), len(values), *operands, _pointer(out))
            return out
        return self._through_panels(values, matrix, operands)

    def _through_panels(self, values: Tensor, matrix: Matrix, operands: tuple[object, ...]) -> Tensor:
        most = max(_PANEL_BYTES // (2 * matrix.num_columns), 1)
        products = []
        for first in range(0, matrix.num_rows, most):
            count = min(most, matrix.num_rows - first)
            if self._panel.numel() < count * matrix.num_columns:
                self._panel = torch.empty(count * matrix.num_columns, dtype=torch.bfloat16)
            panel = self._panel[: count * matrix.num_columns].view(count, -1)
            self._lib.unpack_groups(*operands, first, count, _pointer(panel))
            products.append(torch.nn.functional.linear(values, panel))
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def group_of(matrix: Matrix) -> int:
    """Columns of a group; 0 for a matrix without groups."""
    return matrix.num_columns // matrix.scale.shape[1] if matrix.bits and matrix.scale is not None else 0


def reads(matrix: Matrix) -> bool:
    """Whether these kernels take the matrix as it is."""
    group = group_of(matrix)
    return matrix.bits > 0 and (group == _SHORT or group % _STEP == 0) and matrix.num_columns % _CHUNK == 0


def zeros(matrix: Matrix) -> tuple[Tensor | None, Tensor | None]:
    """Zeros that are codes, and zeros that lie between them."""
    is_between = matrix.zero is not None and matrix.zero.is_floating_point()
    return (None, matrix.zero) if is_between else (matrix.zero, None)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())
