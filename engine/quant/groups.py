"""Weights as small integers in groups: value = (code - zero) * scale, with a scale and a zero for each group.

A group is a run of columns of one row: those that one output multiplies its inputs with. Symmetric schemes have the
middle code as their zero everywhere, which is then not kept. Codes reach one further below the middle than above it, so
their lowest is the largest weight, whatever its sign: scales may be negative. Steps get smaller by a sixteenth (of 4
bits), and the largest weights, which count most, are exact. Without calibration, in groups of 64 on the default model,
mean KL is 0.283 so; with positive scales, whose codes end half a step before the largest weight, it is 0.383, and 0.403
where these are rounded up when they are stored, which makes all of the largest weights smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (4, 8)
GROUPS = (32, 64, 128)
_LEAST_SCALE = 2.0**-20  # still has a few digits as float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights become integers. Scales have no more digits than `scale_dtype`, in which they are stored.

    `is_float`: they become fp8 numbers (fp8.py) instead, with a scale a row."""

    bits: int
    group: int
    symmetric: bool = True
    is_float: bool = False
    scale_dtype: torch.dtype = torch.float16

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [out, in]: `codes` uint8 [out, in], `scale` float32 [out, groups], `zero` [out, groups] or None for the
    middle code. Zeros are integers, or float32 where zero lies between codes, as in some files of GGUF."""

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantized(self) -> Tensor:
        """float32 [out, in]."""
        grouped = self.codes.view(*self.scale.shape, -1).float()
        return ((grouped - _zeros(self.zero, self.bits)) * self.scale[..., None]).view(self.codes.shape)

    def rows(self, start: int, end: int) -> GroupedWeight:
        """Rows [start, end)."""
        zero = None if self.zero is None else self.zero[start:end]
        return GroupedWeight(bits=self.bits, codes=self.codes[start:end], scale=self.scale[start:end], zero=zero)

    def widened(self, bits: int, group: int) -> GroupedWeight:
        """The same numbers in codes of as many bits or more, and in groups that divide these."""
        times = self.group // group
        shift = 0 if self.zero is not None else (1 << (bits - 1)) - (1 << (self.bits - 1))
        zero = None if self.zero is None else self.zero.repeat_interleave(times, 1)
        return GroupedWeight(
            bits=bits, codes=self.codes + shift, scale=self.scale.repeat_interleave(times, 1), zero=zero
        )


def alike(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """The same numbers in codes of the widest of them, and in groups that divide those of each."""
    bits, group = max(weight.bits for weight in weights), math.gcd(*(weight.group for weight in weights))
    return [w if (w.bits, w.group) == (bits, group) else w.widened(bits, group) for w in weights]


def grid(grouped: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """The scale and zero, float32 [...], that cover each group of `grouped` [..., group], or `shrink` times as much."""
    if scheme.symmetric:
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        scale = largest * shrink / -((scheme.top + 1) / 2)
    else:
        low, high = grouped.amin(-1).clamp(max=0) * shrink, grouped.amax(-1).clamp(min=0) * shrink
        scale = (high - low) / scheme.top
    scale = torch.where(scale.abs() < _LEAST_SCALE, _LEAST_SCALE, scale).to(scheme.scale_dtype).float()
    if scheme.symmetric:
        return scale, torch.full_like(scale, (scheme.top + 1) / 2)
    return scale, (-low / scale).round().clamp(0, scheme.top)


def encode(grouped: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """The nearest codes, as floats: `grouped` [..., group], `scale` and `zero` [...]."""
    return ((grouped / scale[..., None]).round_() + zero[..., None]).clamp_(0, top)


def round_to_nearest(weight: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0) -> GroupedWeight:
    """weight [out, in], each value by itself. `shrink` [out, groups]: the share of each range that codes cover."""
    grouped = weight.float().view(len(weight), -1, scheme.group)
    scale, zero = grid(grouped, scheme, shrink)
    return assemble(encode(grouped, scale, zero, scheme.top).view(weight.shape), scale, zero, scheme)


def assemble(codes: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> GroupedWeight:
    """A weight of codes [out, in], scale and zero [out, groups], all floats."""
    kept = None if scheme.symmetric else zero.to(torch.uint8)
    return GroupedWeight(bits=scheme.bits, codes=codes.to(torch.uint8), scale=scale, zero=kept)


def better_rows(one: GroupedWeight, other: GroupedWeight, weight: Tensor, hessian: Tensor) -> GroupedWeight:
    """Row by row that of two quantizations of `weight` which changes outputs less: rows don't depend on each other."""
    is_one = output_error(one, weight, hessian) <= output_error(other, weight, hessian)

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(is_one[:, None], a, b)

    zero = None if one.zero is None or other.zero is None else chosen(one.zero, other.zero)
    return GroupedWeight(
        bits=one.bits, codes=chosen(one.codes, other.codes), scale=chosen(one.scale, other.scale), zero=zero
    )


def output_error(quantized: GroupedWeight, weight: Tensor, hessian: Tensor) -> Tensor:
    """The summed squared change of each output over the inputs x that `hessian`, the sum of all x xᵀ, was made of:
    float64 [out]."""
    change = (quantized.dequantized() - weight.float()).double()
    return ((change @ hessian.double()) * change).sum(-1)


def _zeros(zero: Tensor | None, bits: int) -> Tensor | float:
    return float(1 << (bits - 1)) if zero is None else zero.float()[..., None]
