"""Rotary positions: the frequencies of a model, with their scaling, and the angles of a step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling


class Turns(NamedTuple):
    """Cosine and sine for some positions: two float32 [T, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class Angles(NamedTuple):
    """Of a step's rows, in layers that see the whole context and in those with a window."""

    whole: Turns
    local: Turns

    def of(self, window: int) -> Turns:
        """For a layer that looks back so many tokens; 0 for all."""
        return self.local if window else self.whole


class Rope:
    """The rotary frequencies of a model: radians that a position turns each pair of dimensions."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        self.whole = _frequencies(config).to(device)
        theta = config.local_rope_theta
        self.local = self.whole if theta is None else _plain(theta, config.head_dim).to(device)

    def angles(self, positions: Tensor) -> Angles:
        """For `positions` [T]."""
        whole = _turns(positions, self.whole)
        return Angles(whole, whole if self.local is self.whole else _turns(positions, self.local))


def _plain(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (theta**exponents)
    return frequencies


def _frequencies(config: ModelConfig) -> Tensor:
    """float32 [head_dim / 2], scaled as the model says."""
    plain = _plain(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if len(scaling.table) != len(plain):
        raise ModelError(f"rope_freqs.weight has {len(scaling.table)} numbers, expected {len(plain)}.")
    return plain / torch.tensor(scaling.table, dtype=torch.float32)


def _turns(positions: Tensor, freqs: Tensor) -> Turns:
    turns = positions.to(torch.float32)[:, None] * freqs
    return Turns(turns.cos(), turns.sin())


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves shorter than the old context / high_freq_factor stay, longer than / low_freq_factor are stretched."""
    waves = 2 * math.pi / plain
    blend = scaling.original_context_tokens / waves - scaling.low_freq_factor
    blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain
