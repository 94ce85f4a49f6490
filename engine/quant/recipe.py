"""Quantizes a decoder layer by layer: what `batchsvc models quantize` does, without its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.values import Matrix
from engine.load.weights import Source, WeightReader
from engine.model.config import ModelConfig
from engine.model.layers import Layer
from engine.quant import fp8
from engine.quant.awq import clipped, scaled_moments, search_scale
from engine.quant.capture import LayerMoments, ListeningKernels, Walk
from engine.quant.fp8 import Fp8Weight
from engine.quant.gptq import gptq
from engine.quant.groups import GroupedWeight, Scheme, round_to_nearest

METHODS = ("gptq", "awq", "rtn")
CALIBRATED = ("gptq", "awq")

QuantizedWeight = GroupedWeight | Fp8Weight
Parameter = tuple[str, Tensor | QuantizedWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to quantize. `act_order` is GPTQ's (gptq.py)."""

    method: str
    scheme: Scheme
    act_order: bool = True


def check_widths(model: ModelConfig, scheme: Scheme, name: str) -> None:
    """Raises ConfigError where groups don't divide a row."""
    if scheme.is_float:
        return
    for columns in (model.hidden, model.num_heads * model.head_dim, model.mlp):
        if columns % scheme.group:
            fitting = [str(size) for size in (32, 64, 128) if columns % size == 0]
            way_out = f"use {' or '.join(fitting)}" if fitting else "no group size does"
            raise ConfigError(f"Groups of {scheme.group} don't divide the rows of {columns} of {name}; {way_out}.")


def quantized(
    model: ModelConfig,
    source: Source,
    recipe: Recipe,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
) -> Iterator[Parameter]:
    """All parameters of the model, by our names (load/names.py), the matrices of the layers as integers in groups.

    `sequences` are token ids of calibration text; `progress` is told how many layers of how many are done. Raises
    ModelError.
    """
    kernels = ListeningKernels(model)
    reader = WeightReader(model, source, kernels, torch.float32)
    embedding = reader.matrix(["embedding"], model.hidden, [model.vocab_size])
    yield "embedding.weight", embedding
    walk = Walk(model, kernels, embedding, sequences) if recipe.method in CALIBRATED else None
    for index in range(model.num_layers):
        layer = reader.layer(index)
        for name, value in _split(model, *_quantize(layer, model, recipe, kernels, walk)):
            yield f"{index}.{name}", value
        progress(index + 1, model.num_layers)
    yield "norm.weight", reader.norm("norm")
    if (head := reader.head()) is not None:
        yield "head.weight", head
    reader.check_empty()


_Quantized = tuple[Layer, Sequence[QuantizedWeight]]


def _quantize(
    layer: Layer, model: ModelConfig, recipe: Recipe, kernels: ListeningKernels, walk: Walk | None
) -> _Quantized:
    """The layer, perhaps scaled, and its four matrices in groups; the walk goes on to the next layer."""
    if walk is None:
        return layer, [_rounded(matrix.packed, recipe.scheme) for matrix in _matrices(layer)]
    moments = walk.listen(layer)
    if recipe.method == "gptq":
        pairs = zip(_matrices(layer), moments.all, strict=True)
        found = [gptq(matrix.packed, m.hessian, recipe.scheme, act_order=recipe.act_order) for matrix, m in pairs]
        walk.advance(_with_weights(layer, kernels, [weight.dequantized() for weight in found]))
        return layer, found
    walk.advance(layer)
    scaled, scales = scaled_layer(layer, model, recipe.scheme, kernels, moments)
    triples = zip(_matrices(scaled), moments.all, scales, strict=True)
    return scaled, [
        clipped(matrix.packed, scaled_moments(m.hessian, scale), recipe.scheme) for matrix, m, scale in triples
    ]


def _rounded(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    return fp8.quantized(weight, scheme.scale_dtype) if scheme.is_float else round_to_nearest(weight, scheme)


def scaled_layer(
    layer: Layer, model: ModelConfig, scheme: Scheme, kernels: ListeningKernels, moments: LayerMoments
) -> tuple[Layer, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """AWQ's scales of the inputs of the four matrices, and an equal layer in which what goes before each is divided by
    them: a norm, the values of the heads, or the up projection."""
    qkv, out, gate_up, down = (matrix.packed for matrix in _matrices(layer))
    kv_rows = model.num_kv_heads * model.head_dim
    heads = model.num_heads // model.num_kv_heads

    at_qkv = search_scale(qkv, moments.qkv.hessian, moments.qkv.magnitude, scheme)
    at_gate_up = search_scale(gate_up, moments.gate_up.hessian, moments.gate_up.magnitude, scheme)
    at_down = search_scale(down, moments.down.hessian, moments.down.magnitude, scheme)
    # heads that share a value head have its channels in common
    shared = moments.out.magnitude.view(model.num_kv_heads, heads, model.head_dim).mean(1, keepdim=True)
    at_out = search_scale(out, moments.out.hessian, shared.expand(-1, heads, -1).reshape(-1), scheme)
    at_values = at_out.view(model.num_kv_heads, heads, model.head_dim)[:, 0].reshape(-1)

    of_qkv = torch.cat((torch.ones(len(qkv) - kv_rows), at_values))
    of_gate_up = torch.cat((torch.ones(model.mlp), at_down))
    scaled = replace(
        layer,
        attention_norm=layer.attention_norm / at_qkv,
        qkv=_scaled(layer.qkv, at_qkv, of_qkv, kernels),
        out=_scaled(layer.out, at_out, None, kernels),
        mlp_norm=layer.mlp_norm / at_gate_up,
        gate_up=_scaled(layer.gate_up, at_gate_up, of_gate_up, kernels),
        down=_scaled(layer.down, at_down, None, kernels),
    )
    return scaled, (at_qkv, at_out, at_gate_up, at_down)


def _scaled(matrix: Matrix, inputs: Tensor, outputs: Tensor | None, kernels: ListeningKernels) -> Matrix:
    """The matrix for inputs divided by `inputs`, with its outputs divided by `outputs`."""
    weight, bias = matrix.packed * inputs, matrix.bias
    if outputs is not None:
        weight = weight / outputs[:, None]
        bias = None if bias is None else bias / outputs
    return kernels.pack_matrix(weight, bias)


def _with_weights(layer: Layer, kernels: ListeningKernels, weights: list[Tensor]) -> Layer:
    pairs = zip(weights, _matrices(layer), strict=True)
    qkv, out, gate_up, down = (kernels.pack_matrix(weight, matrix.bias) for weight, matrix in pairs)
    return replace(layer, qkv=qkv, out=out, gate_up=gate_up, down=down)


def _matrices(layer: Layer) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _split(model: ModelConfig, layer: Layer, weights: Sequence[QuantizedWeight]) -> Iterator[Parameter]:
    """The parameters of a layer, each matrix by itself."""
    norms = {
        "attention_norm": layer.attention_norm,
        "attention_post_norm": layer.attention_post_norm,
        "mlp_norm": layer.mlp_norm,
        "mlp_post_norm": layer.mlp_post_norm,
    }
    if layer.qk_norm is not None:
        norms["q_norm"], norms["k_norm"] = layer.qk_norm
    for name, norm in norms.items():
        if norm is not None:
            yield f"{name}.weight", norm
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    names = (
        (("q", query), ("k", kv), ("v", kv)),
        (("out", model.hidden),),
        (("gate", model.mlp), ("up", model.mlp)),
        (("down", model.hidden),),
    )
    for parts, matrix, weight in zip(names, _matrices(layer), weights, strict=True):
        start = 0
        for name, rows in parts:
            yield f"{name}.weight", weight.rows(start, start + rows)
            if matrix.bias is not None:
                yield f"{name}.bias", matrix.bias[start : start + rows]
            start += rows
