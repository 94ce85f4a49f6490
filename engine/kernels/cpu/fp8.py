"""Products with fp8 weights on a CPU: panels of the weight become bf16, for our own bf16 matmul where there is one."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels import fp8
from engine.kernels.values import Matrix, Product

_PANEL_ROWS = 1024  # a panel and its tiles stay in the second-level cache
_EVEN_ROWS = 64


class Fp8Kernels:
    """`is_even`: no row's result may depend on the rows beside it, also where torch multiplies."""

    def __init__(self, library: ctypes.CDLL, *, has_tiles: bool, is_even: bool) -> None:
        self._lib = library
        self._has_tiles = has_tiles
        self._is_even = is_even

    def multiply(self, values: Tensor, matrix: Matrix) -> Product:
        """values bf16 [T, in] times the matrix."""
        assert matrix.scale is not None, "fp8 weights have scales"
        if self._has_tiles and matrix.scale.shape[1] == 1 and not (matrix.num_rows % 32 or matrix.num_columns % 64):
            rows, scale = fp8.quantize_rows(values.float(), matrix.input_scale)
            return Product(self._sums(rows.bfloat16(), matrix), scale, matrix.scale[:, 0], matrix.bias)
        if not self._is_even:
            return fp8.multiply(values, matrix)
        padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % _EVEN_ROWS))
        blocks = [fp8.multiply(block, matrix).dequantized() for block in torch.split(padded, _EVEN_ROWS)]
        return Product(torch.cat(blocks)[: len(values)])

    def _sums(self, rows: Tensor, matrix: Matrix) -> Tensor:
        """rows bf16 [T, in] times the numbers of the matrix: float32 [T, out]."""
        columns = matrix.num_columns
        sums = []
        for start in range(0, matrix.num_rows, _PANEL_ROWS):
            part = matrix.packed[start : start + _PANEL_ROWS]
            plain, tiles = (torch.empty(part.shape, dtype=torch.bfloat16) for _ in range(2))
            self._lib.unpack_fp8(_pointer(part), ctypes.c_int64(part.numel()), _pointer(plain))
            self._lib.pack_tiles(_pointer(plain), len(part), 2 * columns, False, _pointer(tiles))
            out = torch.empty(len(rows), len(part))
            self._lib.matmul(
                _pointer(rows), _pointer(tiles), None, None, len(rows), len(part), 2 * columns, _pointer(out)
            )
            sums.append(out)
        return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
