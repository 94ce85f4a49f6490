"""A model's shape from what is at hand: a config.json, a GGUF file, or a textbook; no weight is read.

Whatever a file says is checked before it is reckoned with: counts by their bounds, a GGUF file's table of tensors
against its metadata and its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.load.families import (
    MOST_LAYERS,
    biases_of,
    fields_of_config,
    fields_of_gguf,
    gguf_windows,
    is_tied,
    windows_of,
)
from engine.load.fields import Fields
from engine.load.gguf import GGUFFile, TensorInfo
from engine.load.meta import read_json, weight_files
from engine.load.names import is_derived
from engine.memory.shape import Matrix, ModelShape, decoder_shape, together

TEXTBOOKS = {
    "llama-70b": ModelShape(
        family="llama",
        matrices=(Matrix(70_000_000_000, 8192),),
        vectors=0,
        embedding=0,
        head=None,
        is_tied=False,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        hidden=8192,
        mlp=28672,
        vocab_size=128256,
        context_tokens=131_072,
    ),
}
"""Shapes as textbooks give them: a round number of parameters, all in matrices of the format asked for."""

_MOST_HEADS = 1 << 16


def read_shape(model: str | Path) -> ModelShape:
    """The shape of a textbook's name, a config.json or its directory, or a GGUF file. Raises ModelError."""
    if str(model) in TEXTBOOKS:
        return TEXTBOOKS[str(model)]
    path = Path(model)
    if path.is_dir():
        return shape_of_config(read_json(path / "config.json"), path / "config.json", _stored_bytes(path))
    if path.suffix == ".json" and path.is_file():
        return shape_of_config(read_json(path), path, _stored_bytes(path.parent))
    if path.is_file():
        return shape_of_gguf(GGUFFile(path))
    raise ModelError(f"There is no model at {path}.")


def shape_of_config(values: Mapping[str, Any], path: Path, stored_bytes: int | None = None) -> ModelShape:
    """From the fields of a config.json. Raises ModelError that names the field."""
    family, source = fields_of_config(values, path)
    layers = source.count("num_hidden_layers", most=MOST_LAYERS)
    heads, hidden = source.count("num_attention_heads", most=_MOST_HEADS), source.count("hidden_size")
    kv_heads = source.count("num_key_value_heads", default=heads, most=_MOST_HEADS)
    biases, windows = biases_of(source, family), windows_of(source, family, layers)
    shape = decoder_shape(
        family=family,
        vocab_size=source.count("vocab_size"),
        hidden=hidden,
        mlp=source.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=source.count("head_dim", default=hidden // heads, most=_MOST_HEADS),
        context_tokens=source.count("max_position_embeddings"),
        is_tied=is_tied(source, family),
        has_qkv_bias=biases.qkv,
        has_out_bias=biases.out,
        has_mlp_bias=biases.mlp,
        has_qk_norm=family in ("qwen3", "gemma3_text"),
        norms_per_layer=4 if family == "gemma3_text" else 2,
        windows=windows,
    )
    return _checked(replace(shape, stored_bytes=stored_bytes), path)


def shape_of_gguf(file: GGUFFile) -> ModelShape:
    """From a GGUF file's metadata and its table of tensors. Raises ModelError that names the field or the tensor."""
    family, source = fields_of_gguf(file.fields, file.path)
    experts = source.values.get("expert_count", 0)
    if not isinstance(experts, int) or experts:
        raise ModelError(f"{file.path} is a mixture of experts, which we can't count.")
    tensors = {name: info for name, info in file.tensors.items() if not is_derived(name)}
    vocab_size, hidden = _two(tensors, "token_embd.weight", file.path)
    has_head = "output.weight" in tensors
    if has_head:
        _expect(tensors, "output.weight", (vocab_size, hidden), file.path)
    layers = source.count("block_count", most=MOST_LAYERS)
    heads = source.count("attention.head_count", most=_MOST_HEADS)
    head_dim = source.count("attention.key_length", default=hidden // heads, most=_MOST_HEADS)
    kv_heads = _even(source, "attention.head_count_kv", heads)
    for layer in range(layers):
        for part in ("attn_k", "attn_v"):
            _expect(tensors, f"blk.{layer}.{part}.weight", (kv_heads * head_dim, hidden), file.path)
    matrices, vectors = [], 0
    for name, info in tensors.items():
        if len(info.shape) == 1:
            vectors += info.shape[0]
        elif name not in ("token_embd.weight", "output.weight"):
            matrices.append(Matrix(math.prod(info.shape), info.shape[-1]))
    windows = gguf_windows(source, family, layers)
    return _checked(
        ModelShape(
            family=family,
            matrices=together(matrices),
            vectors=vectors,
            embedding=vocab_size * hidden,
            head=Matrix(vocab_size * hidden, hidden),
            is_tied=not has_head,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            mlp=source.count("feed_forward_length"),
            vocab_size=vocab_size,
            context_tokens=source.count("context_length"),
            window=max(windows),
            window_layers=sum(map(bool, windows)),
            stored_bytes=sum(info.num_bytes for info in tensors.values()),
        ),
        file.path,
    )


def _two(tensors: Mapping[str, TensorInfo], name: str, path: Path) -> tuple[int, int]:
    """Rows and columns of the tensor `name`."""
    if name not in tensors:
        raise ModelError(f"{path} has no tensor {name}.")
    shape = tensors[name].shape
    if len(shape) != 2:
        raise ModelError(f"{path}: tensor {name} has the shape {list(shape)}, expected rows and columns.")
    return shape[0], shape[1]


def _expect(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, int], path: Path) -> None:
    """Raises ModelError where the tensor's shape is not what the metadata say."""
    if _two(tensors, name, path) != shape:
        raise ModelError(
            f"{path}: tensor {name} has the shape {list(tensors[name].shape)}, but the metadata say {list(shape)}."
        )


def _even(source: Fields, key: str, default: int) -> int:
    """A count that GGUF may give once or for each layer; the same for all."""
    value = source.values.get(key)
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        source = Fields({key: value[0].item()}, source.path)
    return source.count(key, default=default, most=_MOST_HEADS)


def _checked(shape: ModelShape, path: Path) -> ModelShape:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{path}: {shape.num_heads} attention heads can't share {shape.num_kv_heads} KV heads evenly.")
    return shape


def _stored_bytes(directory: Path) -> int | None:
    """Of the weights beside a config.json; None where there are none."""
    try:
        return sum(file.stat().st_size for file in weight_files(directory))
    except (ModelError, OSError):
        return None
