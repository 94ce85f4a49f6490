"""The weights of a decoder as plain data: what each holds and in which shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias. `weight` [out, in], `bias` [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Norms are float32 [hidden].

    `qkv`      rows: all query heads, then key heads, then value heads
    `gate_up`  rows: gate, then up
    """

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a decoder. `embedding` [vocab, hidden]; a tied head is the same tensor."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
