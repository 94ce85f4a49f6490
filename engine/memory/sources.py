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
from engine.load.fields import Fields
from engine.load.gguf import GGUFFile, TensorInfo
from engine.load.meta import read_json, weight_files
from engine.load.names import is_derived
from engine.memory.shape import Matrix, ModelShape, decoder_shape, together

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
"""`model_type` of a config.json that we can count; "gemma3" counts its text model alone."""

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
"""`general.architecture` likewise; GGUF files of Mistral say "llama"."""

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

_DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "qwen3": {"head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
"""What a config.json may leave out: what transformers then takes."""

_MOST_LAYERS = 10_000
_MOST_HEADS = 1 << 16
_WINDOW = 4096  # where a config.json leaves it out
_GEMMA_PATTERN = 6  # of so many layers, the last sees the whole context
_WINDOWED = "sliding_attention"
_WHOLE = "full_attention"


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
    family = Fields(values, path).text("model_type", default="")
    if family not in FAMILIES:
        raise ModelError(f"{path} has the model_type {family[:40]!r}; those we can count are {', '.join(FAMILIES)}.")
    if family == "gemma3":
        outer, values = values, values.get("text_config") or {}
        if not isinstance(values, dict):
            raise ModelError(f"{path} doesn't give a usable text_config.")
        values, family = {"tie_word_embeddings": outer.get("tie_word_embeddings"), **values}, "gemma3_text"
    given = {key: value for key, value in values.items() if value is not None or key == "sliding_window"}
    source = Fields({**_DEFAULTS.get(family, {}), **given}, path)
    layers = source.count("num_hidden_layers", most=_MOST_LAYERS)
    heads, hidden = source.count("num_attention_heads", most=_MOST_HEADS), source.count("hidden_size")
    kv_heads = source.count("num_key_value_heads", default=heads, most=_MOST_HEADS)
    has_bias = family not in ("mistral", "qwen2") and source.flag("attention_bias")
    window = _window(source, family)
    is_gemma = family == "gemma3_text"
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
        is_tied=source.flag("tie_word_embeddings", default=is_gemma),
        has_qkv_bias=has_bias or family == "qwen2",
        has_out_bias=has_bias,
        has_mlp_bias=family == "llama" and source.flag("mlp_bias"),
        has_qk_norm=family in ("qwen3", "gemma3_text"),
        norms_per_layer=4 if is_gemma else 2,
        window=window,
        window_layers=_window_layers(source, family, layers) if window else 0,
    )
    return _checked(replace(shape, stored_bytes=stored_bytes), path)


def shape_of_gguf(file: GGUFFile) -> ModelShape:
    """From a GGUF file's metadata and its table of tensors. Raises ModelError that names the field or the tensor."""
    named = Fields(file.fields, file.path).text("general.architecture", default="")
    if named not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise ModelError(f"{file.path} has the general.architecture {named[:40]!r}; those we can count are {known}.")
    source = Fields({key.removeprefix(f"{named}."): value for key, value in file.fields.items()}, file.path)
    experts = source.values.get("expert_count", 0)
    if not isinstance(experts, int) or experts:
        raise ModelError(f"{file.path} is a mixture of experts, which we can't count.")
    tensors = {name: info for name, info in file.tensors.items() if not is_derived(name)}
    vocab_size, hidden = _two(tensors, "token_embd.weight", file.path)
    is_tied = "output.weight" not in tensors
    if not is_tied:
        _expect(tensors, "output.weight", (vocab_size, hidden), file.path)
    layers = source.count("block_count", most=_MOST_LAYERS)
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
    window = source.count("attention.sliding_window") if named == "gemma3" else 0
    return _checked(
        ModelShape(
            family=named,
            matrices=together(matrices),
            vectors=vectors,
            embedding=vocab_size * hidden,
            head=Matrix(vocab_size * hidden, hidden),
            is_tied=is_tied,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            mlp=source.count("feed_forward_length"),
            vocab_size=vocab_size,
            context_tokens=source.count("context_length"),
            window=window,
            window_layers=layers - layers // _GEMMA_PATTERN if window else 0,
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


def _window(source: Fields, family: str) -> int:
    """Tokens that a layer with a window looks back; 0 where no layer has one."""
    if source.values.get("sliding_window", 0) is None or family == "llama":
        return 0
    if family in ("qwen2", "qwen3") and not source.flag("use_sliding_window"):
        return 0
    return source.count("sliding_window", default=_WINDOW)


def _window_layers(source: Fields, family: str, layers: int) -> int:
    """How many layers have the window."""
    if family == "mistral":
        return layers
    types = source.values.get("layer_types")
    if types is not None:
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(kind not in (_WINDOWED, _WHOLE) for kind in types)
        ):
            raise ModelError(
                f"{source.path} doesn't give a usable layer_types: {_WINDOWED} or {_WHOLE} is expected "
                f"for each of {layers} layers."
            )
        return types.count(_WINDOWED)
    if family == "gemma3_text":
        pattern = source.count("sliding_window_pattern", default=_GEMMA_PATTERN)
        return layers - layers // pattern
    return max(0, layers - source.count("max_window_layers", default=28))


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
