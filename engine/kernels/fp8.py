"""Products of fp8 rows with fp8 matrices, as a device with fp8 arithmetic gives them: on a CPU they are emulated.

1. A row x = scale * q with q of e4m3 and scale = largest |x| / 448; or with the one scale that a checkpoint was
   calibrated with, beyond which numbers are clamped.
2. Products of two e4m3 numbers are exact in float32, in which they are summed. The scales come back afterwards; those
   of blocks of columns with the weights, panel by panel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.values import Matrix, Product
from engine.quant.fp8 import DTYPE, LARGEST, Fp8Weight, encode, spread

EMULATED = (
    "Weights in fp8 take half the memory of bf16, but no less time: a CPU has no fp8 arithmetic, so it is emulated."
)
_PANEL_ROWS = 1024


def pack(weights: Sequence[Fp8Weight], bias: Tensor | None) -> Matrix:
    """Weights one below the other. They share the largest of their input scales, if all have one."""
    columns = weights[0].values.shape[1]
    blocks = max(weight.scale.shape[1] for weight in weights)
    scales = [weight.scale.expand(-1, blocks) for weight in weights]
    given = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return Matrix(
        packed=torch.cat([weight.values for weight in weights]),
        num_rows=sum(len(weight.values) for weight in weights),
        num_columns=columns,
        bias=None if bias is None else bias.float(),
        scale=torch.cat(scales),
        block=min(weight.block for weight in weights),
        input_scale=max(given) if len(given) == len(weights) else None,
    )


def is_fp8(matrix: Matrix) -> bool:
    return matrix.packed.dtype == DTYPE


def quantize_rows(x: Tensor, given: float | None = None) -> tuple[Tensor, Tensor]:
    """x [T, columns] float32 -> e4m3 [T, columns] and scale float32 [T]; a row that isn't finite has a NaN scale."""
    largest = x.abs().amax(dim=-1)
    scale = largest / LARGEST if given is None else torch.full_like(largest, given)
    is_sound = largest.isfinite()
    divisor = torch.where(is_sound & (scale > 0), scale, 1.0)
    values = encode(torch.where(is_sound[:, None], x, 0.0), divisor[:, None])
    return values, torch.where(is_sound, scale, float("nan"))


def multiply(values: Tensor, matrix: Matrix) -> Product:
    """values [T, in], floating-point, times the matrix."""
    assert matrix.scale is not None, "fp8 weights have scales"
    rows, scale = quantize_rows(values.float(), matrix.input_scale)
    exact = rows.float()
    starts = range(0, matrix.num_rows, _PANEL_ROWS)
    panels = [torch.nn.functional.linear(exact, _panel(matrix, matrix.scale, start)) for start in starts]
    sums = panels[0] if len(panels) == 1 else torch.cat(panels, dim=1)
    column = matrix.scale[:, 0] if matrix.scale.shape[1] == 1 else torch.ones(matrix.num_rows)
    return Product(sums, scale, column.contiguous(), matrix.bias)


def _panel(matrix: Matrix, scale: Tensor, start: int) -> Tensor:
    """Rows [start, start + _PANEL_ROWS) as float32, with the scales of blocks but without those of whole rows."""
    part = slice(start, start + _PANEL_ROWS)
    numbers = matrix.packed[part].float()
    return numbers if scale.shape[1] == 1 else numbers * spread(scale[part], matrix.block, matrix.num_columns)
