"""What sets model families apart in their files: which there are, what a config.json may leave out, biases, windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import ModelError
from engine.load.fields import Fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
"""As `model_type` of a config.json spells them; of "gemma3" only the text model counts, which is a "gemma3_text"."""

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
"""As `general.architecture` of a GGUF file spells them; files of Mistral say "llama"."""

MOST_LAYERS = 10_000

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

_WINDOW = 4096  # where a config.json leaves it out
_GEMMA_PATTERN = 6  # of so many layers, the last sees the whole context
_WINDOWED = "sliding_attention"
_WHOLE = "full_attention"


class Biases(NamedTuple):
    """Which projections have biases."""

    qkv: bool
    out: bool
    mlp: bool


def fields_of_config(values: Mapping[str, Any], path: Path) -> tuple[str, Fields]:
    """The family and the fields of a config.json, with what it leaves out. Raises ModelError."""
    family = _known(values.get("model_type"), "model_type", FAMILIES, path)
    if family == "gemma3":
        outer, values = values, values.get("text_config") or {}
        if not isinstance(values, dict):
            raise ModelError(f"{path} doesn't give a usable text_config.")
        values, family = {"tie_word_embeddings": outer.get("tie_word_embeddings"), **values}, "gemma3_text"
    given = {key: value for key, value in values.items() if value is not None or key == "sliding_window"}
    return family, Fields({**_DEFAULTS.get(family, {}), **given}, path)


def fields_of_gguf(fields: Mapping[str, Any], path: Path) -> tuple[str, Fields]:
    """The architecture and the metadata of a GGUF file, its own keys without that prefix. Raises ModelError."""
    family = _known(fields.get("general.architecture"), "general.architecture", GGUF_FAMILIES, path)
    return family, Fields({key.removeprefix(f"{family}."): value for key, value in fields.items()}, path)


def is_tied(source: Fields, family: str) -> bool:
    """Whether the head is the embedding."""
    return source.flag("tie_word_embeddings", default=family == "gemma3_text")


def norm_shift(family: str) -> float:
    """What Hugging Face's files leave out of the weights of norms."""
    return 1.0 if family == "gemma3_text" else 0.0


def biases_of(source: Fields, family: str) -> Biases:
    """Of a config.json: some families have them whatever it says, some never."""
    has_all = family not in ("mistral", "qwen2") and source.flag("attention_bias")
    return Biases(has_all or family == "qwen2", has_all, family == "llama" and source.flag("mlp_bias"))


def windows_of(source: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Tokens that each layer of a config.json looks back, its own included; 0: the whole context."""
    window = _window(source, family)
    if not window:
        return (0,) * layers
    if family == "mistral":
        return (window,) * layers
    types = source.values.get("layer_types")
    if types is not None:
        known = (_WINDOWED, _WHOLE)
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise ModelError(
                f"{source.path} doesn't give a usable layer_types: {_WINDOWED} or {_WHOLE} is expected "
                f"for each of {layers} layers."
            )
        return tuple(window if kind == _WINDOWED else 0 for kind in types)
    if family == "gemma3_text":
        return _by_pattern(window, source.count("sliding_window_pattern", default=_GEMMA_PATTERN), layers)
    first = 0 if source.values.get("max_window_layers") == 0 else source.count("max_window_layers", default=28)
    return tuple(0 if index < first else window for index in range(layers))


def gguf_windows(source: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Likewise of GGUF metadata, which give a window to Gemma and, from some writers, to Mistral."""
    has_window = family == "gemma3" or (family == "llama" and "attention.sliding_window" in source.values)
    if not has_window:
        return (0,) * layers
    window, pattern = source.count("attention.sliding_window"), source.values.get("attention.sliding_window_pattern")
    if family == "llama":
        return (window,) * layers
    if isinstance(pattern, np.ndarray | list):
        if len(pattern) != layers:
            raise ModelError(
                f"{source.path} has {layers} layers, but attention.sliding_window_pattern tells of {len(pattern)}."
            )
        return tuple(window if is_windowed else 0 for is_windowed in pattern)
    return _by_pattern(window, source.count("attention.sliding_window_pattern", default=_GEMMA_PATTERN), layers)


def _by_pattern(window: int, pattern: int, layers: int) -> tuple[int, ...]:
    return tuple(window if (index + 1) % pattern else 0 for index in range(layers))


def _window(source: Fields, family: str) -> int:
    """Tokens that a layer with a window looks back; 0 where no layer has one."""
    if source.values.get("sliding_window", 0) is None or family == "llama":
        return 0
    if family in ("qwen2", "qwen3") and not source.flag("use_sliding_window"):
        return 0
    return source.count("sliding_window", default=_WINDOW)


def _known(family: object, field: str, known: tuple[str, ...], path: Path) -> str:
    if not isinstance(family, str) or family not in known:
        shown = repr(family[:40] if isinstance(family, str) else family)[:60]
        raise ModelError(f"{path} has the {field} {shown}; the families we know are {', '.join(known)}.")
    return family
