"""The weights of a decoder as plain data: what each holds and in which shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Norms are float32 [hidden].

    `qkv`      rows: all query heads, then key heads, then value heads
    `gate_up`  rows: gate, then up
    """

    attention_norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a decoder. `embedding` [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Matrix
