"""A random model of the shape of Llama 3.1 8B, made where it runs, in any format: speed doesn't ask what it says."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels, Matrix
from engine.loaded import LoadedModel
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Weights
from engine.quant import fp8
from engine.quant.groups import Scheme, round_to_nearest

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden=4096,
    mlp=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_tokens=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
TOY = ModelConfig(
    vocab_size=320,
    hidden=64,
    mlp=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_tokens=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)


def random_model(config: ModelConfig, *, seed: int = 0, group: int = 128, on_host: bool = False) -> LoadedModel:
    """Weights whose sums keep their size. `group`: columns that share a scale, of weights of 4 bits. `on_host`: drawn
    there, so that they are the same whatever the device."""

    def weights(kernels: Kernels, dtype: torch.dtype) -> Weights:
        where = torch.device("cpu") if on_host else kernels.device
        return _Maker(config, kernels, dtype, torch.Generator(where).manual_seed(seed), group).weights()

    return LoadedModel(config=config, digest=f"random-{seed}", eos_ids=frozenset(), weights=weights)


class _Maker:
    def __init__(
        self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, random: torch.Generator, group: int
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._dtype = dtype
        self._group = group
        self._random = random

    def weights(self) -> Weights:
        c = self._config
        return Weights(
            embedding=self._drawn(c.vocab_size, c.hidden).to(self._dtype),
            layers=tuple(self._layer() for _ in range(c.num_layers)),
            norm=self._ones(),
            head=self._kernels.pack_head(self._drawn(c.vocab_size, c.hidden).to(self._dtype)),
        )

    def _layer(self) -> Layer:
        c = self._config
        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Layer(
            attention_norm=self._ones(),
            qkv=self._matrix(query + 2 * kv, c.hidden),
            out=self._matrix(c.hidden, query),
            mlp_norm=self._ones(),
            gate_up=self._matrix(2 * c.mlp, c.hidden),
            down=self._matrix(c.hidden, c.mlp),
        )

    def _matrix(self, rows: int, columns: int) -> Matrix:
        weight = self._drawn(rows, columns) * columns**-0.5
        if self._kernels.takes_groups:
            return self._kernels.pack_groups([round_to_nearest(weight, Scheme(bits=4, group=self._group))], None)
        if self._kernels.takes_fp8:
            return self._kernels.pack_fp8([fp8.quantized(weight)], None)
        return self._kernels.pack_matrix(weight.to(self._dtype), None)

    def _drawn(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._random, device=self._random.device)

    def _ones(self) -> Tensor:
        return torch.ones(self._config.hidden, device=self._kernels.device)
