"""Builds a decoder's weights from a checkpoint: shapes checked, nothing missing, nothing left over.

Projections that read the same input are fused into one matrix while loading, piece by piece, so that memory peaks at
the finished weights plus one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, Matrix
from engine.load.gguf import GGUFFile
from engine.load.meta import read_json
from engine.load.names import from_gguf, is_derived, spelled
from engine.load.quantization import read_quantization
from engine.load.quantized import quantized_source
from engine.load.safetensors import SafetensorsSource
from engine.model.config import ModelConfig, config_from_directory, config_from_gguf
from engine.model.layers import Layer, Weights
from engine.quant.groups import GroupedWeight


class Source(Protocol):
    """A checkpoint by parameter name."""

    path: Path

    @property
    def names(self) -> set[str]: ...

    def load(self, name: str) -> Tensor: ...

    def grouped(self, name: str) -> GroupedWeight | None:
        """The weight as the checkpoint has it, if that is as integers in groups."""


class GGUFSource:
    """Tensors of a GGUF file by parameter name, dequantized, with the row order of Hugging Face.

    GGUF stores the rows of a Llama's q and k so that rotary pairs are neighbours; here they are halves again.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._config = config
        self._home = {from_gguf(name) or name: name for name in file.tensors if not is_derived(name)}

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def load(self, name: str) -> Tensor:
        # a copy: the mapped file is read-only, and torch tensors are not
        tensor = torch.from_numpy(self._file.load(self._home[name]).copy())
        part = name.split(".")[1]
        if part in ("q", "k"):
            heads = self._config.num_heads if part == "q" else self._config.num_kv_heads
            tensor = _halves(tensor, heads, name, self.path)
        return tensor

    def grouped(self, name: str) -> GroupedWeight | None:
        return None


def open_model(path: Path) -> tuple[ModelConfig, Source]:
    """The configuration and the tensors of the model at `path`. Raises ModelError."""
    if path.is_dir():
        model, plain = config_from_directory(path), SafetensorsSource(path)
        quantization = read_quantization(read_json(path / "config.json"), path)
        return model, plain if quantization is None else quantized_source(plain, quantization, model)
    file = GGUFFile(path)
    table = tuple(file.load("rope_freqs.weight").tolist()) if "rope_freqs.weight" in file.tensors else ()
    config = config_from_gguf(file.fields, file.tensors, path, table)
    return config, GGUFSource(file, config)


def load_weights(config: ModelConfig, source: Source, kernels: Kernels, dtype: torch.dtype) -> Weights:
    """Reads all weights and packs the matrices as `kernels` want them; the embedding has `dtype`, norms are float32.

    Raises ModelError for a missing, left-over or misshapen tensor.
    """
    reader = WeightReader(config, source, kernels, dtype)
    embedding = reader.matrix(["embedding"], config.hidden, [config.vocab_size])
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    norm, head = reader.norm("norm"), reader.head()
    reader.check_empty()
    packed = kernels.pack_matrix(embedding if head is None else head, None)
    return Weights(embedding=embedding, layers=layers, norm=norm, head=packed)


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
        return Layer(
            attention_norm=self.norm(at + "attention_norm"),
            qkv=self._linear([at + "q", at + "k", at + "v"], c.hidden, [query, kv, kv], c.has_qkv_bias),
            out=self._linear([at + "out"], query, [c.hidden], c.has_out_bias),
            mlp_norm=self.norm(at + "mlp_norm"),
            gate_up=self._linear([at + "gate", at + "up"], c.hidden, [c.mlp, c.mlp], c.has_mlp_bias),
            down=self._linear([at + "down"], c.mlp, [c.hidden], c.has_mlp_bias),
        )

    def norm(self, name: str) -> Tensor:
        return self._take(f"{name}.weight", (self._config.hidden,)).float()

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
            names = {_spelled(name, self._source) for name in self.left}
            raise ModelError(f"{self._source.path} has tensors this model has no place for: {_some(names)}.")

    def _linear(self, names: list[str], columns: int, rows: list[int], has_bias: bool) -> Matrix:
        bias = None
        if has_bias:
            pieces = [self._take(f"{name}.bias", (size,)) for name, size in zip(names, rows, strict=True)]
            bias = torch.cat(pieces).to(self._dtype)
        if self._kernels.takes_groups and (groups := self._groups(names, columns, rows)):
            return self._kernels.pack_groups(groups, bias)
        return self._kernels.pack_matrix(self.matrix(names, columns, rows), bias)

    def _groups(self, names: list[str], columns: int, rows: list[int]) -> list[GroupedWeight] | None:
        """The matrices as the checkpoint has them, if all are of integers in groups of one size."""
        found = [self._source.grouped(f"{name}.weight") if f"{name}.weight" in self.left else None for name in names]
        weights = [weight for weight in found if weight is not None]
        schemes = {(weight.bits, weight.group) for weight in weights}
        if len(weights) < len(names) or len(schemes) > 1 or columns % 2:  # codes of 4 bits lie in pairs
            return None
        for name, weight, size in zip(names, weights, rows, strict=True):
            self._check(f"{name}.weight", weight.codes, (size, columns))
            self.left.remove(f"{name}.weight")
        return weights

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.left:
            raise ModelError(f"{self._source.path} lacks the tensor {_spelled(name, self._source)}.")
        self.left.remove(name)
        tensor = self._source.load(name)
        self._check(name, tensor, shape)
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise ModelError(
                f"{self._source.path}: tensor {_spelled(name, self._source)} holds numbers that aren't finite."
            )
        return tensor

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._source.path}: tensor {_spelled(name, self._source)} has the shape {list(tensor.shape)}, "
                f"expected {list(shape)}."
            )


def _halves(tensor: Tensor, heads: int, name: str, path: Path) -> Tensor:
    """Rows of each head from (pair, side) to (side, pair) order; works on matrices and biases."""
    if len(tensor) % (2 * heads):
        raise ModelError(f"{path}: tensor {name} has {len(tensor)} rows, which {heads} heads can't share.")
    pairs = tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _spelled(name: str, source: Source) -> str:
    """A tensor as the checkpoint itself calls it."""
    return spelled(name, is_gguf=source.path.is_file())


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
