"""The Llama decoder: one forward pass over the rows of a step. Differences between models are config fields.

The residual stream stays float32; matrix inputs and outputs have the weights' dtype; keys and values the cache's.
"""

from __future__ import annotations

from torch import Tensor

from engine.batch import StepInputs
from engine.cache.pool import KVPool
from engine.kernels import ops
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Linear, Weights
from engine.model.rope import angles, frequencies


class Decoder:
    """A loaded model. `forward` writes the KV of a step and returns its hidden rows; `logits` is the head alone."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._freqs = frequencies(config)
        self._dtype = weights.embedding.dtype

    def forward(self, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Runs all layers on the step's T rows -> float32 [T, hidden] before the last norm."""
        config, op = self.config, ops()
        x = self._weights.embedding.index_select(0, inputs.token_ids).float()
        cos, sin = angles(inputs.positions, self._freqs)
        for index, layer in enumerate(self._weights.layers):
            normed = op.rms_norm(x, layer.attention_norm, config.norm_eps, self._dtype)
            x += self._attention(normed, layer, inputs, pool, index, cos, sin)
            normed = op.rms_norm(x, layer.mlp_norm, config.norm_eps, self._dtype)
            x += _apply(layer.down, op.silu_mul(_apply(layer.gate_up, normed)))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        normed = ops().rms_norm(hidden, self._weights.norm, self.config.norm_eps, self._dtype)
        return _apply(self._weights.head, normed).float()

    @property
    def matrices(self) -> list[Linear]:
        """The matrices of the first layer, in order of use, then the head."""
        first = self._weights.layers[0]
        return [first.qkv, first.out, first.gate_up, first.down, self._weights.head]

    def _attention(
        self, x: Tensor, layer: Layer, inputs: StepInputs, pool: KVPool, index: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config, op = self.config, ops()
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = _apply(layer.qkv, x).view(len(x), heads + 2 * kv_heads, config.head_dim)
        rotated = op.rope(qkv[:, : heads + kv_heads], cos, sin)
        k_cache, v_cache = pool.layer(index)
        op.write_cache(rotated[:, heads:], qkv[:, heads + kv_heads :], k_cache, v_cache, inputs.slots)
        mixed = op.paged_attention(rotated[:, :heads], k_cache, v_cache, inputs.attention)
        return _apply(layer.out, mixed.to(self._dtype))


def _apply(linear: Linear, x: Tensor) -> Tensor:
    return ops().linear(x, linear.weight, linear.bias)
