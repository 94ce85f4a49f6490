"""The weights of a decoder as plain data: what each holds and in which shape."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.kernels import Matrix

Part = TypeVar("Part", "Layer", "Weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Norms are float32 [hidden].

    `qkv`                  rows: all query heads, then key heads, then value heads
    `qk_norm`              float32 [2, head_dim]: of queries, then of keys; None where they aren't normalized
    `gate_up`              rows: gate, then up
    `attention_post_norm`  of what attention gives, before it is added; None where it is added as it is
    `mlp_post_norm`        likewise of the MLP
    `window`               tokens that a row looks back, its own included; 0 for all
    """

    attention_norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    qk_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a decoder. `embedding` [vocab, hidden]. Of a draft whose head scores only some tokens `head_ids` are
    these, int64 and ascending, one for each row."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Matrix
    head_ids: Tensor | None = None


def on_device(weights: Weights, device: torch.device) -> Weights:
    """The same with the embedding and all norms on `device`; matrices are where their kernels packed them."""
    return _moved(replace(weights, layers=tuple(_moved(layer, device) for layer in weights.layers)), device)


def _moved(part: Part, device: torch.device) -> Part:
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {name: one.to(device) for name, one in found.items() if isinstance(one, Tensor)}
    return replace(part, **moved)
