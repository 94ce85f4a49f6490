"""Products with weights of 4 or 8 bits in groups: the weights become floating-point, panel by panel, at each product.

A matrix keeps two codes of 4 bits in a byte (the even column low), and a scale and perhaps a zero for each group of
columns: value = (code - zero) * scale. Activations stay as they are, so that what calibration found is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.values import Matrix
from engine.memory.formats import head_format, weight_format
from engine.quant.groups import GroupedWeight, Scheme, round_to_nearest
from engine.quant.pack import pack_bytes, unpack_bytes

_PANEL_ROWS = 512


def head_in_groups(weight: Tensor) -> GroupedWeight | None:
    """The head [vocab, hidden] in 8 bits, as memory/formats.py counts it beside weights in groups; None where no groups
    fit."""
    form = head_format(weight_format("w8a16"), weight.shape[1])
    return None if form.group is None else round_to_nearest(weight, Scheme(bits=form.bits, group=form.group))


def pack(weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
    """Weights of the same bits and groups, one below the other."""
    bits = weights[0].bits
    zero = None
    if any(weight.zero is not None for weight in weights):
        zeros = [_zeros(weight) for weight in weights]
        is_exact = any(part.is_floating_point() for part in zeros)
        zero = torch.cat([part.float() if is_exact else part for part in zeros])
    return Matrix(
        packed=torch.cat([pack_bytes(weight.codes, bits) for weight in weights]),
        num_rows=sum(len(weight.codes) for weight in weights),
        num_columns=weights[0].codes.shape[1],
        bias=bias,
        scale=torch.cat([weight.scale for weight in weights]),
        zero=zero,
        bits=bits,
    )


def multiply(values: Tensor, matrix: Matrix) -> Tensor:
    """values [T, in] times the matrix, without its bias: [T, out], of the type of `values`."""
    starts = range(0, matrix.num_rows, _PANEL_ROWS)
    panels = [torch.nn.functional.linear(values, panel(matrix, start, values.dtype)) for start in starts]
    return panels[0] if len(panels) == 1 else torch.cat(panels, dim=1)


def panel(matrix: Matrix, start: int, dtype: torch.dtype, rows: int = _PANEL_ROWS) -> Tensor:
    """Rows [start, start + rows) of the matrix as numbers, [at most rows, in]."""
    assert matrix.scale is not None, "weights in groups have scales"
    part = slice(start, start + rows)
    weight = GroupedWeight(
        bits=matrix.bits,
        codes=unpack_bytes(matrix.packed[part], matrix.bits),
        scale=matrix.scale[part],
        zero=None if matrix.zero is None else matrix.zero[part],
    )
    return weight.dequantized().to(dtype)


def _zeros(weight: GroupedWeight) -> Tensor:
    if weight.zero is None:
        return torch.full(weight.scale.shape, 1 << (weight.bits - 1), dtype=torch.int16)
    return weight.zero if weight.zero.is_floating_point() else weight.zero.to(torch.int16)
