"""Weights of quantized checkpoints by parameter name: as integers in groups for kernels that read them, or as floats.

Two kinds: integers packed in groups (GPTQ, AWQ, compressed-tensors), and int8 or fp8 values with scales beside them,
one for the matrix, for each row or for each block, which become floating-point here.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.load.kept import GroupScheme
from engine.load.names import from_hf
from engine.load.quantization import Quantization
from engine.load.safetensors import FLOATS, SafetensorsSource
from engine.model.config import ModelConfig
from engine.quant.fp8 import DTYPE, Fp8Weight, spread
from engine.quant.groups import GroupedWeight
from engine.quant.layouts import LAYOUTS, PartError, Stored, dense

_SCALES = ("weight_scale", "weight_scale_inv")
_ZERO, _ORDER = "weight_zero_point", "weight_g_idx"
_INPUT_SCALES = ("input_scale", "activation_scale")
_UNUSED = ("input_zero_point", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "output_scale")
"""Of KV and of int8 activations, whose scales we make afresh for each token."""
_USUAL_BLOCK = (128, 128)


class PackedSource:
    """A checkpoint of integers in groups; `inner` reads what is stored otherwise. Biases of zeros, which some tools
    write for every module, are left out where the model has none."""

    def __init__(self, inner: SafetensorsSource | ScaledSource, quantization: Quantization, model: ModelConfig) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._quantization = quantization
        self._layout = LAYOUTS[quantization.layout]
        self._model = model
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

    @property
    def is_fp8(self) -> bool:
        return self._inner.is_fp8

    def fp8(self, name: str) -> Fp8Weight | None:
        return None if name in self._modules else self._inner.fp8(name)

    def scheme(self, name: str) -> GroupScheme | None:
        said = self._quantization
        if name not in self._modules or said.is_ordered:
            return None
        return GroupScheme(said.bits, self._columns(name) if said.group is None else said.group, 2 * said.has_zeros)

    def kind(self, name: str) -> str | None:
        return f"{self._quantization.layout} of {self._quantization.bits} bits" if name in self._modules else None

    def _columns(self, name: str) -> int:
        part = name.split(".")[-2]
        if part == "down":
            return self._model.mlp
        return self._model.num_heads * self._model.head_dim if part == "out" else self._model.hidden

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

    def __init__(self, inner: SafetensorsSource, quantization: Quantization) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._quantization = quantization
        self._scales: dict[str, str] = {}
        for raw in inner.names:
            module, _, part = raw.rpartition(".")
            if part in _SCALES and (name := from_hf(f"{module}.weight")) and name in inner.names:
                if name in self._scales:
                    raise ModelError(f"{self.path} has both {raw} and {self._scales[name]}.")
                self._scales[name] = raw

    @property
    def names(self) -> set[str]:
        beside = {raw for raw in self._inner.names if raw.rpartition(".")[2] in (*_INPUT_SCALES, *_UNUSED)}
        zeros = {raw.rpartition(".")[0] + "." + part for raw in self._scales.values() for part in (_ZERO, _ORDER)}
        return self._inner.names - beside - zeros - set(self._scales.values())

    @functools.cached_property
    def is_fp8(self) -> bool:
        return any(self._values(name).dtype == DTYPE for name in self._scales)

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The tensor as it is stored, of one of these types. Raises ModelError."""
        return self._inner.tensor(name, dtypes)

    def load(self, name: str) -> Tensor:
        """The tensor, floating-point. Raises ModelError."""
        if name not in self._scales:
            return self._inner.load(name)
        values, scale, block = self._read(name)
        module, columns = self._module(name), values.shape[1]
        numbers = values.float()
        if f"{module}.{_ZERO}" in self._inner.names:
            numbers = numbers - self._spread_zero(f"{module}.{_ZERO}", scale, block, columns)
        if f"{module}.{_ORDER}" not in self._inner.names:
            return numbers * spread(scale, block, columns)
        order = self._inner.tensor(f"{module}.{_ORDER}", (torch.int32, torch.int64)).long()
        if order.shape != (columns,) or not ((order >= 0) & (order < scale.shape[1])).all():
            raise ModelError(
                f"{self.path}: tensor {module}.{_ORDER} doesn't give each of {columns} columns one of "
                f"{scale.shape[1]} groups."
            )
        return numbers * scale[:, order]

    def grouped(self, name: str) -> GroupedWeight | None:
        return None

    def scheme(self, name: str) -> GroupScheme | None:
        return None

    def kind(self, name: str) -> str | None:
        return None

    def fp8(self, name: str) -> Fp8Weight | None:
        """The weight as fp8 numbers, if it is stored so. Raises ModelError."""
        if name not in self._scales or self._values(name).dtype != DTYPE:
            return None
        module = self._module(name)
        if {f"{module}.{_ZERO}", f"{module}.{_ORDER}"} & self._inner.names:
            return None
        values, scale, block = self._read(name)
        if (values.view(torch.uint8) & 127 == 127).any():
            raise ModelError(f"{self.path}: tensor {module}.weight holds numbers that aren't finite.")
        return Fp8Weight(values=values, scale=scale, block=block, input_scale=self._input_scale(module))

    def _module(self, name: str) -> str:
        return self._scales[name].rpartition(".")[0]

    def _values(self, name: str) -> Tensor:
        return self._inner.tensor(name, (torch.int8, DTYPE, *FLOATS))

    def _read(self, name: str) -> tuple[Tensor, Tensor, int]:
        """Values [rows, columns], scales float32 [rows, blocks], and the columns of a block."""
        values, raw = self._values(name), self._scales[name]
        if values.dim() != 2 or not values.numel():
            raise ModelError(f"{self.path}: {raw} are scales of a tensor that is no matrix, {list(values.shape)}.")
        scale = self._inner.tensor(raw, (*FLOATS, torch.float8_e8m0fnu)).float()
        if not scale.numel():
            raise ModelError(f"{self.path}: tensor {raw} has no scale in it, {list(scale.shape)}.")
        if not (scale.isfinite() & (scale != 0)).all():
            raise ModelError(f"{self.path}: tensor {raw} has a scale that is zero or not a number.")
        return values, *self._by_row(scale, values, raw)

    def _by_row(self, scale: Tensor, values: Tensor, raw: str) -> tuple[Tensor, int]:
        """Scales of the matrix, of rows, of groups of columns or of blocks as [rows, blocks of columns]."""
        rows, columns = values.shape
        if scale.numel() == 1:
            return scale.view(1, 1).expand(rows, 1), columns
        high, wide = self._quantization.block or _USUAL_BLOCK
        is_blocks = tuple(scale.shape) == (-(-rows // high), -(-columns // wide))
        if is_blocks and self._quantization.block is not None:
            return scale.repeat_interleave(high, 0)[:rows], wide
        if scale.shape[0] == rows and scale.numel() == rows:
            return scale.view(rows, 1), columns
        if scale.dim() == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
            return scale, columns // scale.shape[1]
        if is_blocks:
            return scale.repeat_interleave(high, 0)[:rows], wide
        raise ModelError(
            f"{self.path}: tensor {raw} has the shape {list(scale.shape)}, no scales of {[rows, columns]}."
        )

    def _spread_zero(self, raw: str, scale: Tensor, block: int, columns: int) -> Tensor:
        zero = self._inner.tensor(raw, (torch.int8, torch.int32, *FLOATS)).float()
        if zero.numel() == 1:
            return zero.view(1, 1)
        if tuple(zero.shape) not in (tuple(scale.shape), (len(scale),)):
            raise ModelError(
                f"{self.path}: tensor {raw} has the shape {list(zero.shape)}, expected {list(scale.shape)}."
            )
        return spread(zero.view(len(scale), -1), block, columns)

    def _input_scale(self, module: str) -> float | None:
        if not self._quantization.is_static:
            return None
        for part in _INPUT_SCALES:
            if f"{module}.{part}" in self._inner.names:
                found = self._inner.tensor(f"{module}.{part}", FLOATS).float()
                if found.numel() != 1 or not float(found) > 0 or not found.isfinite().all():
                    raise ModelError(f"{self.path}: tensor {module}.{part} is no single number above 0.")
                return float(found)
        return None


def quantized_source(
    inner: SafetensorsSource, quantization: Quantization, model: ModelConfig
) -> PackedSource | ScaledSource:
    """The source of a checkpoint in that layout."""
    if quantization.layout == "scaled":
        return ScaledSource(inner, quantization)
    return PackedSource(ScaledSource(inner, quantization) if quantization.is_mixed else inner, quantization, model)


def _has_bias(model: ModelConfig, name: str) -> bool:
    part = name.split(".")[-2]
    if part in ("q", "k", "v"):
        return model.has_qkv_bias
    return model.has_out_bias if part == "out" else model.has_mlp_bias
