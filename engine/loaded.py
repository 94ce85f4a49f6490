"""A model that a runner can run: what it is, and how its weights come into the form of a tier of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import GROUP_FORMATS, EngineConfig
from engine.errors import ConfigError
from engine.kernels import Kernels
from engine.model.config import ModelConfig
from engine.model.layers import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """`weights(kernels, dtype)` packs them, those that aren't quantized as `dtype`, onto the device of `kernels`.

    `weight_bytes` they then take, where that depends on the file and not on the format alone; `note` says what becomes
    of quantized weights that don't stay as they are.
    """

    config: ModelConfig
    digest: str
    eos_ids: frozenset[int]
    weights: Callable[[Kernels, torch.dtype], Weights]
    weight_bytes: int | None = None
    note: str | None = None


def from_files(config: EngineConfig, *, drafts: bool = False) -> LoadedModel:
    """The model at `config.model`; one that only drafts scores the tokens that it is made for (load/draft_vocab.py).
    Raises ModelError, and ConfigError where it isn't stored in the format asked for."""
    from engine.load.draft_vocab import draft_vocab
    from engine.load.kept import conversion, kept_bytes, kept_format
    from engine.load.meta import read_meta
    from engine.load.weights import load_weights, open_model

    meta = read_meta(config.model)
    model, source = open_model(meta.path)
    head_ids = draft_vocab(meta.path, model.vocab_size) if drafts else None
    kept, is_grouped = kept_format(meta.path), config.weight_format in GROUP_FORMATS
    if is_grouped and kept != config.weight_format:
        raise ConfigError(
            f"The weights of {meta.name} aren't stored as {config.weight_format}; "
            "quantize it with `batchsvc models quantize`, or use another weight format."
        )
    return LoadedModel(
        config=model,
        digest=meta.digest,
        eos_ids=meta.eos_ids,
        weights=lambda kernels, dtype: load_weights(model, source, kernels, dtype, head_ids),
        weight_bytes=kept_bytes(model, source) if is_grouped else None,
        note=conversion(model, source, config.weight_format, meta.name, kept),
    )
