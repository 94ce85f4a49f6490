"""What the weights take of what proposes tokens for a model: of a smaller model, or of heads; no weight is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.config import PLAIN_FORMATS
from engine.errors import ModelError
from engine.load.draft_vocab import draft_vocab
from engine.load.meta import HEADS_FILE
from engine.memory.formats import WeightFormat, weight_format
from engine.memory.shape import Matrix
from engine.memory.sizing import weight_parts
from engine.memory.sources import read_shape


def draft_bytes(draft: Path, form: WeightFormat) -> int:
    """Of the draft in this directory or file, beside a model whose weights have that format. Raises ModelError."""
    is_heads = (draft / HEADS_FILE).is_file() and not (draft / "config.json").is_file()
    return heads_bytes(draft, form) if is_heads else model_bytes(draft, form)


def model_bytes(draft: Path, form: WeightFormat) -> int:
    """Of a model that drafts: in that format, if any model can be; of its head the rows that it drafts with."""
    shape = read_shape(draft)
    ids = draft_vocab(draft, shape.vocab_size)
    if ids is not None:
        shape = replace(shape, head=Matrix(len(ids) * shape.hidden, shape.hidden))
    return weight_parts(shape, _plain(form)).total


def heads_bytes(directory: Path, form: WeightFormat) -> int:
    """Of the heads in `directory`, as floating-point numbers: an estimate from above where they are quantized."""
    try:
        with safe_open(str(directory / HEADS_FILE), framework="numpy") as file:
            names = file.keys()
            elements: int = sum(math.prod(file.get_slice(name).get_shape()) for name in names if name != "ids")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{directory / HEADS_FILE} is no usable safetensors file: {error}.") from error
    return elements * _plain(form).plain_bytes


def _plain(form: WeightFormat) -> WeightFormat:
    return form if form.name in PLAIN_FORMATS else weight_format("bf16")
