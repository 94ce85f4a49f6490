"""Heads on disk: a directory of `heads.json`, which says for which model they are, and `heads.safetensors`.

They may lie in a directory of their own, or among the model's own files, where they count neither as weights nor for
its digest.

    heads.json          {"format": 1, "model_digest": "…", "model": "its name", "num_heads": 4, "hidden": 576,
                         "inner": 576, "vocab_size": 49152, "vocabulary": 4096, …}; more fields say where they come from
    ids                 int32 [vocabulary]: the tokens that heads may propose
    head                [vocabulary, hidden]: one matrix of logits for all of them
    K.gate_up, K.down   [2 * inner, 2 * hidden] and [hidden, inner] of head number K, from 0 on
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.load.fields import Fields
from engine.load.meta import HEADS_FILE, read_json
from engine.load.safetensors import FLOATS
from engine.load.tensor_file import write_tensors

CONFIG_FILE = "heads.json"
MOST_HEADS = 16
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Heads:
    """`parts` are the tensors by name; `head` and those of each head in one floating-point type."""

    model_digest: str
    num_heads: int
    hidden: int
    inner: int
    vocab_size: int
    parts: Mapping[str, Tensor]

    @property
    def ids(self) -> Tensor:
        return self.parts["ids"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        found: dict[str, tuple[int, ...]] = {"ids": (len(self.ids),), "head": (len(self.ids), self.hidden)}
        for place in range(self.num_heads):
            found[f"{place}.gate_up"] = (2 * self.inner, 2 * self.hidden)
            found[f"{place}.down"] = (self.hidden, self.inner)
        return found


def save_heads(directory: Path, heads: Heads, told: Mapping[str, Any]) -> None:
    """Writes both files. `told` says where the heads come from. Raises ModelError."""
    values = {
        **told,
        "format": _FORMAT,
        "model_digest": heads.model_digest,
        "num_heads": heads.num_heads,
        "hidden": heads.hidden,
        "inner": heads.inner,
        "vocab_size": heads.vocab_size,
        "vocabulary": len(heads.ids),
    }
    parts = {name: part.detach().bfloat16().contiguous() for name, part in heads.parts.items() if name != "ids"}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = directory / f".{HEADS_FILE}"
        write_tensors(parts | {"ids": heads.ids.int()}, scratch)
        scratch.replace(directory / HEADS_FILE)
        scratch = directory / f".{CONFIG_FILE}"
        scratch.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        scratch.replace(directory / CONFIG_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The heads can't be written to {directory}: {error}.") from error


def has_heads(directory: Path) -> bool:
    return (directory / HEADS_FILE).is_file()


def read_heads(directory: Path, *, model_digest: str, model: str, hidden: int, vocab_size: int) -> Heads:
    """The heads of the model with this digest. Raises ModelError in one sentence for damaged files and for heads of
    another model, `model` being what the user calls this one."""
    values = read_json(directory / CONFIG_FILE)
    source = Fields(values, directory / CONFIG_FILE)
    if values.get("format") != _FORMAT:
        raise ModelError(f"{directory / CONFIG_FILE} has the format {values.get('format')!r}; {_FORMAT} is supported.")
    if values.get("model_digest") != model_digest:
        raise ModelError(
            f"The heads in {directory} are for {values.get('model') or 'another model'}, and {model} has another "
            "digest: `batchsvc models distill --student heads:4` trains some for it."
        )
    sizes = (source.count("hidden"), source.count("vocab_size"))
    if sizes != (hidden, vocab_size):
        raise ModelError(f"{directory / CONFIG_FILE} speaks of {sizes}, but {model} has {(hidden, vocab_size)}.")
    try:
        with safe_open(str(directory / HEADS_FILE), framework="pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{directory / HEADS_FILE} is no usable safetensors file: {error}.") from error
    heads = Heads(
        model_digest=model_digest,
        num_heads=source.count("num_heads", most=MOST_HEADS),
        hidden=hidden,
        inner=source.count("inner"),
        vocab_size=vocab_size,
        parts=parts,
    )
    _check(heads, directory / HEADS_FILE)
    return heads


def _check(heads: Heads, path: Path) -> None:
    ids = heads.parts.get("ids")
    if ids is None or ids.dtype != torch.int32 or ids.dim() != 1 or not len(ids):
        raise ModelError(f"{path} names no vocabulary: the tensor ids must be int32 in one row.")
    if not bool(((ids >= 0) & (ids < heads.vocab_size)).all()) or len(set(ids.tolist())) < len(ids):
        raise ModelError(f"{path}: ids must be different tokens of the model, from 0 to {heads.vocab_size - 1}.")
    expected = heads.shapes()
    if heads.parts.keys() != expected.keys():
        odd = sorted(heads.parts.keys() ^ expected.keys())
        raise ModelError(f"{path} has not the tensors of {heads.num_heads} heads: see {odd[0]}.")
    for name, shape in expected.items():
        part = heads.parts[name]
        if tuple(part.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has the shape {list(part.shape)}, expected {list(shape)}.")
        if name != "ids" and part.dtype not in FLOATS:
            raise ModelError(f"{path}: tensor {name} has the type {part.dtype}, not supported here.")
        if name != "ids" and not bool(part.isfinite().all()):
            raise ModelError(f"{path}: tensor {name} holds numbers that aren't finite.")
