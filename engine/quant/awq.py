"""AWQ: channels with large inputs are scaled up before rounding, and ranges are clipped where that changes less.

After "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration" (arXiv:2306.00978).
Multiplying column j of a matrix by s[j] and dividing its input by s[j] changes nothing, but a larger weight is rounded
to a finer relative error. s = (mean |x|)^a with the a of a grid that changes outputs least; a = 0 changes nothing.

The change of the outputs is computed from H = Σ x xᵀ, not from sampled inputs: it is the same sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.groups import GroupedWeight, Scheme, better_rows, encode, grid, round_to_nearest

EXPONENT_STEPS = 20
CLIP_STEPS = 10
MOST_CLIPPED = 0.5


def search_scale(weight: Tensor, hessian: Tensor, magnitude: Tensor, scheme: Scheme) -> Tensor:
    """The scales [in] for the inputs of `weight` [out, in]; `magnitude` [in] is the mean |x|."""
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(EXPONENT_STEPS):
        scale = magnitude.clamp(min=1e-4).pow(step / EXPONENT_STEPS)
        scale = scale / (scale.amax() * scale.amin()).sqrt()
        change = _change(weight * scale, scaled_moments(hessian, scale), scheme)
        if change < least:
            best, least = scale, change
    return best


def scaled_moments(hessian: Tensor, scale: Tensor) -> Tensor:
    """The second moments of x / scale."""
    return hessian / torch.outer(scale, scale)


def clipped(weight: Tensor, hessian: Tensor, scheme: Scheme) -> GroupedWeight:
    """weight [out, in] rounded with ranges clipped group by group, where that changes outputs less."""
    grouped = weight.float().view(len(weight), -1, scheme.group)
    blocks = _blocks(hessian, scheme.group)
    best = torch.ones(grouped.shape[:2])
    least = torch.full_like(best, float("inf"))
    for step in range(CLIP_STEPS):
        share = 1 - MOST_CLIPPED * step / CLIP_STEPS
        scale, zero = grid(grouped, scheme, share)
        error = (encode(grouped, scale, zero, scheme.top) - zero[..., None]) * scale[..., None] - grouped
        change = (torch.einsum("rgi,gij->rgj", error, blocks) * error).sum(-1)
        is_better = change < least
        best[is_better], least = share, torch.minimum(change, least)
    return better_rows(round_to_nearest(weight, scheme, best), round_to_nearest(weight, scheme), weight, hessian)


def _blocks(hessian: Tensor, size: int) -> Tensor:
    """The square blocks of `size` along the diagonal, [blocks, size, size]."""
    return torch.stack([hessian[i : i + size, i : i + size] for i in range(0, len(hessian), size)])


def _change(weight: Tensor, hessian: Tensor, scheme: Scheme) -> float:
    error = round_to_nearest(weight, scheme).dequantized() - weight
    return float(((error @ hessian) * error).sum())
