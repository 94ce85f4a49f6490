"""GPTQ: rounds column after column, and lets the columns still to come make up for each rounding.

After "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv:2210.17323). With
H = Σ x xᵀ over the inputs x of a matrix, the change of its outputs is Σ e H eᵀ over the rows' errors e. Rounding column
j leaves an error; the best change of the columns after it is -error / U[j, j] * U[j, after j], where U is the upper
Cholesky factor of H's inverse. All rows use the same U, so that they go together.

`act_order` takes the columns with the largest inputs first, while all the others can still make up for them. Groups
stay those of neighbouring columns, with scales from the weights as they were: so nothing has to be reordered later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.groups import GroupedWeight, Scheme, assemble, better_rows, encode, grid, round_to_nearest

DAMPING = 0.01
"""Added to H's diagonal, as a share of its mean: the inverse must exist."""


def gptq(
    weight: Tensor, hessian: Tensor, scheme: Scheme, *, damping: float = DAMPING, act_order: bool = True
) -> GroupedWeight:
    """weight [out, in] quantized for inputs with the second moments `hessian` [in, in]; no row changes the outputs
    more than rounding to nearest would. Raises ModelError for moments that aren't numbers."""
    if not hessian.isfinite().all():
        raise ModelError("The model's activations on the calibration text aren't numbers.")
    rounded = round_to_nearest(weight, scheme)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(hessian))
    factor = _inverse_factor(hessian[order][:, order], damping).float()
    rest = weight.float()[:, order]
    codes = torch.empty_like(rest)
    scale, zero = grid(weight.float().view(len(weight), -1, scheme.group), scheme)
    for start in range(0, len(hessian), scheme.group):
        end = start + scheme.group
        if not act_order:
            scale[:, start // scheme.group], zero[:, start // scheme.group] = grid(rest[:, start:end], scheme)
        groups = order[start:end] // scheme.group
        codes[:, start:end], errors = _round_block(
            rest[:, start:end].clone(), factor[start:end, start:end], scale[:, groups], zero[:, groups], scheme.top
        )
        rest[:, end:] -= errors @ factor[start:end, end:]
    found = assemble(codes[:, order.argsort()], scale, zero, scheme)
    return better_rows(found, rounded, weight, hessian)


def _round_block(rest: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Codes of a block of columns and, for the columns after it, each column's error over its pivot."""
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)
    for j in range(rest.shape[1]):
        code = encode(rest[:, j, None], scale[:, j], zero[:, j], top)[:, 0]
        error = (rest[:, j] - (code - zero[:, j]) * scale[:, j]) / factor[j, j]
        rest[:, j:] -= torch.outer(error, factor[j, j:])
        codes[:, j], errors[:, j] = code, error
    return codes, errors


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with Uᵀ U the inverse of the damped `hessian`."""
    exact = hessian.double()
    mean = float(exact.diagonal().mean()) or 1.0
    for _ in range(8):
        damped = exact + torch.eye(len(exact), dtype=torch.float64) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor
        damping = max(damping, 1e-6) * 10
    raise ModelError("The second moments of the calibration text's activations can't be inverted.")
