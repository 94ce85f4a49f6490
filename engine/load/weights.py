"""Builds a decoder's weights from a checkpoint: shapes checked, nothing missing, nothing left over.

Projections that read the same input are fused into one matrix while loading, piece by piece, so that memory peaks at
the finished weights plus one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, Matrix
from engine.load import gguf_groups
from engine.load.gguf import GGUFFile
from engine.load.kept import GroupScheme
from engine.load.meta import read_json
from engine.load.names import from_gguf, is_derived, spelled
from engine.load.quantization import read_quantization
from engine.load.quantized import quantized_source
from engine.load.safetensors import SafetensorsSource
from engine.model.config import ModelConfig, config_from_directory, config_from_gguf
from engine.model.layers import Layer, Weights
from engine.quant import fp8
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight, alike

_MOST_FREQUENCIES = 4096  # of half a head
_PLAIN_KINDS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class Source(Protocol):
    """A checkpoint by parameter name."""

    path: Path

    @property
    def names(self) -> set[str]: ...

    def load(self, name: str) -> Tensor: ...

    def grouped(self, name: str) -> GroupedWeight | None:
        """The weight as the checkpoint has it, if that is as integers in groups."""

    def fp8(self, name: str) -> Fp8Weight | None:
        """The weight as the checkpoint has it, if that is as fp8 numbers."""

    @property
    def is_fp8(self) -> bool:
        """Whether any weight is stored so: what isn't was left out for a reason."""

    def scheme(self, name: str) -> GroupScheme | None:
        """How `grouped` has it, without reading it."""

    def kind(self, name: str) -> str | None:
        """The quantized format in which the file has it, as its makers call it."""


class GGUFSource:
    """Tensors of a GGUF file by parameter name, dequantized, with the row order of Hugging Face.

    GGUF stores the rows of q and k of a Llama, and of no other family, so that rotary pairs are neighbours; here they
    are halves again.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._config = config
        self._home: dict[str, str] = {}
        for name in file.tensors:
            if is_derived(name):
                continue
            known = self._home.setdefault(from_gguf(name) or name, name)
            if known != name:
                raise ModelError(f"{file.path} has two tensors for one: {known} and {name}.")

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def load(self, name: str) -> Tensor:
        # a copy: the mapped file is read-only, and torch tensors are not
        tensor = torch.from_numpy(self._file.load(self._home[name]).copy())
        heads = self._rotated_heads(name)
        return tensor if heads is None else _halves(tensor, heads, name, self.path)

    is_fp8 = False

    def grouped(self, name: str) -> GroupedWeight | None:
        home = self._home[name]
        info = self._file.tensors[home]
        if len(info.shape) != 2:
            return None
        weight, heads = gguf_groups.grouped(self._file.raw(home), info.kind, info.shape[0]), self._rotated_heads(name)
        if weight is None or heads is None:
            return weight
        codes, scale = (_halves(part, heads, name, self.path) for part in (weight.codes, weight.scale))
        zero = None if weight.zero is None else _halves(weight.zero, heads, name, self.path)
        return GroupedWeight(bits=weight.bits, codes=codes, scale=scale, zero=zero)

    def fp8(self, name: str) -> Fp8Weight | None:
        return None

    def scheme(self, name: str) -> GroupScheme | None:
        home = self._home.get(name)
        stored = gguf_groups.KINDS.get(self._file.tensors[home].kind) if home is not None else None
        return None if stored is None else GroupScheme(stored.bits, stored.group, 4 * stored.has_zeros)

    def kind(self, name: str) -> str | None:
        home = self._home.get(name)
        found = self._file.tensors[home].kind if home is not None else None
        return None if found is None or found in _PLAIN_KINDS else found.name

    def _rotated_heads(self, name: str) -> int | None:
        """The heads whose rows lie in rotary pairs; None where rows lie as they do elsewhere."""
        part = name.split(".")[1]
        if self._config.family != "llama" or part not in ("q", "k"):
            return None
        return self._config.num_heads if part == "q" else self._config.num_kv_heads


def open_model(path: Path) -> tuple[ModelConfig, Source]:
    """The configuration and the tensors of the model at `path`. Raises ModelError."""
    if path.is_dir():
        model = config_from_directory(path)
        plain = SafetensorsSource(path, has_post_norms=model.has_post_norms)
        quantization = read_quantization(read_json(path / "config.json"), path)
        return model, plain if quantization is None else quantized_source(plain, quantization, model)
    file = GGUFFile(path)
    config = config_from_gguf(file.fields, file.tensors, path, _rope_table(file))
    return config, GGUFSource(file, config)


def _rope_table(file: GGUFFile) -> tuple[float, ...]:
    """What the file divides rotary frequencies by, if anything."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    if len(info.shape) != 1 or info.shape[0] > _MOST_FREQUENCIES:
        raise ModelError(f"{file.path}: tensor rope_freqs.weight has the shape {list(info.shape)}, not one row.")
    table = file.load("rope_freqs.weight")
    if not (np.isfinite(table) & (table > 0)).all():
        raise ModelError(f"{file.path}: tensor rope_freqs.weight has a number that isn't above zero and finite.")
    return tuple(table.tolist())


def load_weights(
    config: ModelConfig,
    source: Source,
    kernels: Kernels,
    dtype: torch.dtype,
    head_ids: Sequence[int] | None = None,
) -> Weights:
    """Reads all weights and packs the matrices as `kernels` want them; the embedding has `dtype`, norms are float32.
    With `head_ids` the head scores these tokens alone.

    Raises ModelError for a missing, left-over or misshapen tensor.
    """
    reader = WeightReader(config, source, kernels, dtype)
    embedding = reader.matrix(["embedding"], config.hidden, [config.vocab_size])
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    norm, head = reader.norm("norm"), reader.head()
    reader.check_empty()
    scores, ids = embedding if head is None else head, None
    if head_ids is not None:
        ids = torch.tensor(head_ids)
        scores = scores[ids]
    return Weights(embedding=embedding, layers=layers, norm=norm, head=kernels.pack_head(scores), head_ids=ids)


class WeightReader:
    """Takes tensors from a source by name and expected shape; `left` are the names not taken yet."""

    def __init__(self, config: ModelConfig, source: Source, kernels: Kernels, dtype: torch.dtype) -> None:
        self._config = config
        self._kernels = kernels
        self._source = source
        self._dtype = dtype
        self.left = source.names

    def layer(self, index: int) -> Layer:
        c = self._config
        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        at = f"{index}."
        has_post = c.has_post_norms
        return Layer(
            window=c.window_of(index),
            attention_norm=self.norm(at + "attention_norm"),
            qkv=self._linear([at + "q", at + "k", at + "v"], c.hidden, [query, kv, kv], c.has_qkv_bias),
            qk_norm=self._qk_norm(at) if c.has_qk_norm else None,
            out=self._linear([at + "out"], query, [c.hidden], c.has_out_bias),
            attention_post_norm=self.norm(at + "attention_post_norm") if has_post else None,
            mlp_norm=self.norm(at + "mlp_norm"),
            gate_up=self._linear([at + "gate", at + "up"], c.hidden, [c.mlp, c.mlp], c.has_mlp_bias),
            down=self._linear([at + "down"], c.mlp, [c.hidden], c.has_mlp_bias),
            mlp_post_norm=self.norm(at + "mlp_post_norm") if has_post else None,
        )

    def norm(self, name: str, size: int | None = None) -> Tensor:
        """The weight of a norm over `size` columns (default: the hidden size), as it multiplies."""
        return self._take(f"{name}.weight", (size or self._config.hidden,)).float() + self._config.norm_shift

    def matrix(self, names: list[str], columns: int, rows: list[int]) -> Tensor:
        """The matrices `names` one below the other, [sum(rows), columns]."""
        # the first is checked before memory for all is asked for: a configuration may claim any size
        first = self._take(f"{names[0]}.weight", (rows[0], columns))
        fused = torch.empty(sum(rows), columns, dtype=self._dtype)
        parts = torch.split(fused, rows)
        parts[0].copy_(first)
        del first
        for name, part in zip(names[1:], parts[1:], strict=True):
            part.copy_(self._take(f"{name}.weight", (len(part), columns)))
        return fused

    def head(self) -> Tensor | None:
        """The matrix of the logits, [vocab, hidden]; None where it is the embedding."""
        if self._config.is_tied:
            self.left.discard("head.weight")  # some tied checkpoints repeat the embedding under this name
            return None
        return self.matrix(["head"], self._config.hidden, [self._config.vocab_size])

    def check_empty(self) -> None:
        """Raises ModelError where tensors were left over."""
        if self.left:
            names = {self._spelled(name) for name in self.left}
            raise ModelError(f"{self._source.path} has tensors this model has no place for: {_some(names)}.")

    def _linear(self, names: list[str], columns: int, rows: list[int], has_bias: bool) -> Matrix:
        bias = None
        if has_bias:
            pieces = [self._take(f"{name}.bias", (size,)) for name, size in zip(names, rows, strict=True)]
            bias = torch.cat(pieces).to(self._dtype)
        if self._kernels.takes_groups and (groups := self._groups(names, columns, rows)):
            return self._kernels.pack_groups(groups, bias)
        if self._kernels.takes_fp8 and (numbers := self._fp8(names, columns, rows)):
            return self._kernels.pack_fp8(numbers, bias)
        return self._kernels.pack_matrix(self.matrix(names, columns, rows), bias)

    def _groups(self, names: list[str], columns: int, rows: list[int]) -> list[GroupedWeight] | None:
        """The matrices as the checkpoint has them, if all are of integers in groups, alike in bits and columns."""
        found = [self._source.grouped(f"{name}.weight") if f"{name}.weight" in self.left else None for name in names]
        weights = [weight for weight in found if weight is not None]
        if len(weights) < len(names) or columns % 2:  # codes of 4 bits lie in pairs
            return None
        for name, weight, size in zip(names, weights, rows, strict=True):
            self._check(f"{name}.weight", weight.codes, (size, columns))
            self.left.remove(f"{name}.weight")
        return alike(weights)

    def _fp8(self, names: list[str], columns: int, rows: list[int]) -> list[Fp8Weight] | None:
        """The matrices as the checkpoint has them, if all are fp8; made so, if it has none that are."""
        if not self._source.is_fp8:
            return [fp8.quantized(self.matrix(names, columns, rows))]
        found = [self._source.fp8(f"{name}.weight") if f"{name}.weight" in self.left else None for name in names]
        weights = [weight for weight in found if weight is not None]
        if len(weights) < len(names) or len({weight.block for weight in weights}) > 1:
            return None
        for name, weight, size in zip(names, weights, rows, strict=True):
            self._check(f"{name}.weight", weight.values, (size, columns))
            self.left.remove(f"{name}.weight")
        return weights

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.left:
            raise ModelError(f"{self._source.path} lacks the tensor {self._spelled(name)}.")
        self.left.remove(name)
        tensor = self._source.load(name)
        self._check(name, tensor, shape)
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise ModelError(f"{self._source.path}: tensor {self._spelled(name)} holds numbers that aren't finite.")
        return tensor

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._source.path}: tensor {self._spelled(name)} has the shape {list(tensor.shape)}, "
                f"expected {list(shape)}."
            )

    def _qk_norm(self, at: str) -> Tensor:
        return torch.stack([self.norm(at + part, self._config.head_dim) for part in ("q_norm", "k_norm")])

    def _spelled(self, name: str) -> str:
        """A tensor as the checkpoint itself calls it."""
        is_gguf = self._source.path.is_file()
        return spelled(name, is_gguf=is_gguf, has_post_norms=self._config.has_post_norms)


def _halves(tensor: Tensor, heads: int, name: str, path: Path) -> Tensor:
    """Rows of each head from (pair, side) to (side, pair) order; works on matrices and biases."""
    if len(tensor) % (2 * heads):
        raise ModelError(f"{path}: tensor {name} has {len(tensor)} rows, which {heads} heads can't share.")
    pairs = tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
