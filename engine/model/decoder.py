"""The decoder of all families: one forward pass over the rows of a step. Models differ in fields of their config.

The residual stream stays float32; what the other tensors are is the business of the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import StepInputs
from engine.cache.pool import KVPool
from engine.kernels import Kernels, Matrix, Rows
from engine.kernels.reference import best
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Weights, on_device
from engine.model.rope import Angles, Rope

_UNSCORED = -1e30
"""The logit of tokens that a reduced head doesn't score: finite, as a sum of logits tells whether a row is sound."""


def embed(config: ModelConfig, embedding: Tensor, token_ids: Tensor) -> Tensor:
    """The residual stream before the first layer, float32 [T, hidden]."""
    return embedding.index_select(0, token_ids).float().mul_(config.embedding_scale)


def run_layer(
    op: Kernels, layer: Layer, cache: tuple[Tensor, Tensor], x: Tensor, angles: Angles, inputs: StepInputs, eps: float
) -> None:
    """Takes x [T, hidden] through one layer, verb by verb, and writes the KV of its rows into the layer's `cache`."""
    k_cache, v_cache = cache
    cos, sin = angles.of(layer.window)
    qkv = op.linear(op.norm(x, layer.attention_norm, eps), layer.qkv)
    q = op.store_qkv(qkv, cos, sin, k_cache, v_cache, inputs.slots, layer.qk_norm)
    mixed = op.attend(q, k_cache, v_cache, inputs.attention, layer.window)
    op.linear_add(op.pack_rows(mixed), layer.out, x, layer.attention_post_norm)
    gated = op.linear_gated(op.norm(x, layer.mlp_norm, eps), layer.gate_up)
    op.linear_add(gated, layer.down, x, layer.mlp_post_norm)


class Decoder:
    """A loaded model. `forward` writes the KV of a step and returns its hidden rows; `logits` is the head alone."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self._weights = on_device(weights, kernels.device)
        self._kernels = kernels
        self._rope = Rope(config, kernels.device)

    def forward(self, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Runs all layers on the step's T rows -> float32 [T, hidden] before the last norm."""
        op, eps = self._kernels, self.config.norm_eps
        x = embed(self.config, self._weights.embedding, inputs.token_ids)
        angles = self._rope.angles(inputs.positions)
        if op.run_layers(self._weights.layers, pool.layer, x, angles, inputs.slots, inputs.attention, eps):
            return x
        for index, layer in enumerate(self._weights.layers):
            run_layer(op, layer, pool.layer(index), x, angles, inputs, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        logits = self._kernels.logits(self._kernels.linear(self._head_rows(hidden), self._weights.head))
        cap, ids = self.config.logit_softcap, self._weights.head_ids
        logits = logits if not cap else logits.div_(cap).tanh_().mul_(cap)
        if ids is None:
            return logits
        return logits.new_full((len(logits), self.config.vocab_size), _UNSCORED).index_copy_(1, ids, logits)

    def best(self, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> the likeliest ids, int64 [R], without their logits; -1 where a logit isn't finite.
        `allowed` int32 [M, words] are masks of ids for the first M rows."""
        ids = self._weights.head_ids
        if ids is None:
            return self._kernels.best(self._head_rows(hidden), self._weights.head, allowed)
        if allowed is not None:  # of all ids, so all are scored
            return best(self.logits(hidden), allowed)
        places = self._kernels.best(self._head_rows(hidden), self._weights.head, None)
        return torch.where(places < 0, places, ids[places.clamp_min(0)])

    def states(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> the states after the last norm, float32 [R, hidden]: what vectors are made of."""
        scale = hidden.float().square().mean(dim=-1, keepdim=True).add(self.config.norm_eps).rsqrt()
        return hidden.float() * scale * self._weights.norm

    @property
    def embedding(self) -> Tensor:
        return self._weights.embedding

    def _head_rows(self, hidden: Tensor) -> Rows:
        return self._kernels.norm(hidden, self._weights.norm, self.config.norm_eps)

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of the first layer, in order of use, then the head."""
        first = self._weights.layers[0]
        return [first.qkv, first.out, first.gate_up, first.down, self._weights.head]
