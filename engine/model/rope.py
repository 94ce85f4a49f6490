"""Rotary positions: the frequencies of a model, with their scaling, and the angles of a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> Tensor:
    """Radians a position turns each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
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


def angles(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `positions` [T]: two float32 [T, head_dim / 2]."""
    turns = positions.to(torch.float32)[:, None] * freqs
    return turns.cos(), turns.sin()


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves shorter than the old context / high_freq_factor stay, longer than / low_freq_factor are stretched."""
    waves = 2 * math.pi / plain
    blend = scaling.original_context_tokens / waves - scaling.low_freq_factor
    blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain
