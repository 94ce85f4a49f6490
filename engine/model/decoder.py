"""The Llama decoder: one forward pass over the rows of a step. Differences between models are config fields.

The residual stream stays float32; what the other tensors are is the business of the kernels.
"""

from __future__ import annotations

from torch import Tensor

from engine.batch import StepInputs
from engine.cache.pool import KVPool
from engine.kernels import Kernels, Matrix, Rows
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Weights
from engine.model.rope import angles, frequencies


def run_layer(
    op: Kernels,
    layer: Layer,
    cache: tuple[Tensor, Tensor],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inputs: StepInputs,
    eps: float,
) -> None:
    """Takes x [T, hidden] through one layer, verb by verb, and writes the KV of its rows into the layer's `cache`."""
    k_cache, v_cache = cache
    qkv = op.linear(op.norm(x, layer.attention_norm, eps), layer.qkv)
    q = op.store_qkv(qkv, cos, sin, k_cache, v_cache, inputs.slots)
    mixed = op.attend(q, k_cache, v_cache, inputs.attention)
    op.linear_add(op.pack_rows(mixed), layer.out, x)
    gated = op.linear_silu(op.norm(x, layer.mlp_norm, eps), layer.gate_up)
    op.linear_add(gated, layer.down, x)


class Decoder:
    """A loaded model. `forward` writes the KV of a step and returns its hidden rows; `logits` is the head alone."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self._weights = weights
        self._kernels = kernels
        self._freqs = frequencies(config)

    def forward(self, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Runs all layers on the step's T rows -> float32 [T, hidden] before the last norm."""
        op, eps = self._kernels, self.config.norm_eps
        x = self._weights.embedding.index_select(0, inputs.token_ids).float()
        cos, sin = angles(inputs.positions, self._freqs)
        if op.run_layers(self._weights.layers, pool.layer, x, cos, sin, inputs.slots, inputs.attention, eps):
            return x
        for index, layer in enumerate(self._weights.layers):
            run_layer(op, layer, pool.layer(index), x, cos, sin, inputs, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        return self._kernels.logits(self._kernels.linear(self._head_rows(hidden), self._weights.head))

    def best(self, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> the likeliest ids, int64 [R], without their logits; -1 where a logit isn't finite.
        `allowed` int32 [M, words] are masks of ids for the first M rows."""
        return self._kernels.best(self._head_rows(hidden), self._weights.head, allowed)

    def states(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> the states after the last norm, float32 [R, hidden]: what vectors are made of."""
        scale = hidden.float().square().mean(dim=-1, keepdim=True).add(self.config.norm_eps).rsqrt()
        return hidden.float() * scale * self._weights.norm

    def _head_rows(self, hidden: Tensor) -> Rows:
        return self._kernels.norm(hidden, self._weights.norm, self.config.norm_eps)

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of the first layer, in order of use, then the head."""
        first = self._weights.layers[0]
        return [first.qkv, first.out, first.gate_up, first.down, self._weights.head]
