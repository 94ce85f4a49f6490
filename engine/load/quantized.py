"""Weights of quantized checkpoints by parameter name: as integers in groups for kernels that read them, or as floats.

Two kinds: integers packed in groups (GPTQ, AWQ, compressed-tensors), and int8 or fp8 values with scales beside them,
one for the matrix, for each row or for each block, which become floating-point here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.load.names import from_hf
from engine.load.quantization import Quantization
from engine.load.safetensors import FLOATS, SafetensorsSource
from engine.model.config import ModelConfig
from engine.quant.groups import GroupedWeight
from engine.quant.layouts import LAYOUTS, PartError, Stored, dense

_SCALES = ("weight_scale", "weight_scale_inv")
_UNUSED = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale")
"""Scales of activations and KV, which we make afresh for each token."""


class PackedSource:
    """A checkpoint of integers in groups. Biases of zeros, which some tools write for every module, are left out where
    the model has none."""

    def __init__(self, inner: SafetensorsSource, quantization: Quantization, model: ModelConfig) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._quantization = quantization
        self._layout = LAYOUTS[quantization.layout]
        self._modules: dict[str, str] = {}
        for raw in inner.names:
            module, _, part = raw.rpartition(".")
            if part == self._layout.main and (name := from_hf(f"{module}.weight")):
                self._modules[name] = module
        packed = {f"{module}.{part}" for module in self._modules.values() for part in self._layout.parts}
        biases = {name.replace(".weight", ".bias") for name in self._modules if not _has_bias(model, name)}
        empty = {bias for bias in biases & inner.names if not inner.load(bias).any()}
        self._names = (inner.names - packed - empty) | set(self._modules)

    @property
    def names(self) -> set[str]:
        return set(self._names)

    def load(self, name: str) -> Tensor:
        """The tensor, floating-point. Raises ModelError."""
        return dense(self._read(name)) if name in self._modules else self._inner.load(name)

    def grouped(self, name: str) -> GroupedWeight | None:
        """The weight as integers in groups of neighbouring columns; None where it isn't kept so."""
        if name not in self._modules:
            return None
        weight, order = self._read(name)
        return weight if order is None else None

    def _read(self, name: str) -> Stored:
        module = self._modules[name]

        def take(part: str, dtype: torch.dtype | None) -> Tensor:
            return self._inner.tensor(f"{module}.{part}", FLOATS if dtype is None else (dtype,))

        def has(part: str) -> bool:
            return f"{module}.{part}" in self._inner.names

        missing = [part for part in self._layout.needed if not has(part)]
        if missing:
            raise ModelError(f"{self.path} lacks the tensor {module}.{missing[0]}.")
        try:
            return self._layout.read(take, has, self._quantization.bits, self._quantization.zero_offset)
        except PartError as error:
            raise ModelError(f"{self.path}: tensor {module}.{error.part} {error}.") from error


class ScaledSource:
    """A checkpoint of int8 or fp8 values with scales beside them."""

    def __init__(self, inner: SafetensorsSource) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._scales: dict[str, str] = {}
        for raw in inner.names:
            module, _, part = raw.rpartition(".")
            if part in _SCALES and (name := from_hf(f"{module}.weight")) and name in inner.names:
                self._scales[name] = raw

    @property
    def names(self) -> set[str]:
        unused = {raw for raw in self._inner.names if raw.rpartition(".")[2] in _UNUSED}
        return self._inner.names - unused - set(self._scales.values())

    def load(self, name: str) -> Tensor:
        """The tensor, floating-point. Raises ModelError."""
        if name not in self._scales:
            return self._inner.load(name)
        values = self._inner.tensor(name, (torch.int8, torch.float8_e4m3fn, *FLOATS)).float()
        raw = self._scales[name]
        if values.dim() != 2:
            raise ModelError(f"{self.path}: {raw} are scales of a tensor that is no matrix, {list(values.shape)}.")
        scale = self._inner.tensor(raw, FLOATS).float()
        if not (scale.isfinite() & (scale != 0)).all():
            raise ModelError(f"{self.path}: tensor {raw} has a scale that is zero or not a number.")
        return values * self._spread(scale, values, raw)

    def grouped(self, name: str) -> GroupedWeight | None:
        return None

    def _spread(self, scale: Tensor, values: Tensor, raw: str) -> Tensor:
        """One scale for the matrix, for each row or for each square block, as something that multiplies `values`."""
        rows, columns = values.shape
        if scale.numel() == 1:
            return scale.view(1, 1)
        if scale.shape[0] == rows and scale.numel() == rows:
            return scale.view(rows, 1)
        for block in (128, 64, 32):
            if tuple(scale.shape) == (-(-rows // block), -(-columns // block)):
                return scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        raise ModelError(
            f"{self.path}: tensor {raw} has the shape {list(scale.shape)}, no scales of {[rows, columns]}."
        )


def quantized_source(
    inner: SafetensorsSource, quantization: Quantization, model: ModelConfig
) -> PackedSource | ScaledSource:
    """The source of a checkpoint in that layout."""
    return ScaledSource(inner) if quantization.layout == "scaled" else PackedSource(inner, quantization, model)


def _has_bias(model: ModelConfig, name: str) -> bool:
    part = name.split(".")[-2]
    if part in ("q", "k", "v"):
        return model.has_qkv_bias
    return model.has_out_bias if part == "out" else model.has_mlp_bias
