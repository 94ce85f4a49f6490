"""Weights as fp8 numbers (e4m3: four bits of exponent, three of mantissa) with scales: value = number * scale.

A scale covers a row, a block of columns of one, or the whole matrix, whose rows then have it in common. Formats of few
digits lose the same share of a large number and of a small one, so that outliers do no harm and nothing is rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which has no infinity; what lies beyond becomes NaN, so that it is clamped first."""

_LEAST_SCALE = 2.0**-60  # of a row of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight [out, in]: `values` [out, in] of e4m3, `scale` float32 [out, blocks of `block` columns], the last of
    which may be shorter. `input_scale`: what its inputs are divided by; None: each row of them by its own scale."""

    values: Tensor
    scale: Tensor
    block: int
    input_scale: float | None = None

    def dequantized(self) -> Tensor:
        """float32 [out, in]."""
        return self.values.float() * spread(self.scale, self.block, self.values.shape[1])

    def rows(self, start: int, end: int) -> Fp8Weight:
        """Rows [start, end)."""
        part = slice(start, end)
        return Fp8Weight(
            values=self.values[part], scale=self.scale[part], block=self.block, input_scale=self.input_scale
        )


def spread(scale: Tensor, block: int, columns: int) -> Tensor:
    """scale [out, blocks] as something that multiplies [out, columns]."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(block, 1)[:, :columns]


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as the nearest e4m3 numbers; what lies beyond the largest becomes it."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(DTYPE)


def quantized(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> Fp8Weight:
    """weight [out, in] of any float dtype with a scale a row, which has no more digits than `scale_dtype`."""
    exact = weight.float()
    scale = (exact.abs().amax(1, keepdim=True) / LARGEST).clamp(min=_LEAST_SCALE).to(scale_dtype).float()
    return Fp8Weight(values=encode(exact, scale), scale=scale, block=weight.shape[1])
