"""How quantized weights lie in checkpoints that others write and read: GPTQ, AWQ and compressed-tensors.

A module (a matrix) is stored as several tensors `<module>.<part>`. G groups of columns, `pack` codes a 32-bit word:

    gptq                 qweight [in / pack, out] and qzeros [G, out / pack] int32, scales [G, out], g_idx [in] int32
    awq                  qweight [in, out / pack] and qzeros [G, out / pack] int32 in AWQ's order, scales [G, out]
    compressed-tensors   weight_packed [out, in / pack], weight_scale [out, G], weight_zero_point [out / pack, G] unless
                         symmetric, weight_shape [2] int64, weight_g_idx [in]

compressed-tensors also has fp8: weight [out, in] of e4m3 and weight_scale [out, 1]; inputs are made fp8 row by row.
GPTQ's files of version 1 hold each zero less one, word by word: a zero of 0 borrows from the next. With g_idx a column
tells its group; without, groups are runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.quant.groups import GroupedWeight, Scheme
from engine.quant.pack import AWQ_ORDER, pack_words, unpack_words

Take = Callable[[str, torch.dtype | None], Tensor]
"""Reads a part of a module by name; `dtype` is what it must have, None: a floating-point type."""


class Stored(NamedTuple):
    """A weight as a checkpoint has it; `order` [in] are the groups of its columns where they aren't runs."""

    weight: GroupedWeight
    order: Tensor | None


class PartError(Exception):
    """A part doesn't fit the others; the message says how, the loader says where."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class Layout(Protocol):
    """One way to store a module."""

    @property
    def main(self) -> str:
        """The part that every module has."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The parts that can't be missing."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All that one may have."""

    def write(self, weight: GroupedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parts of a module, scales in `dtype`."""

    def read(self, take: Take, has: Callable[[str], bool], bits: int, zero_offset: int) -> Stored:
        """The weight of a module. Raises PartError."""

    def config(self, scheme: Scheme) -> dict[str, Any]:
        """The quantization_config of a model whose layers alone are quantized."""


_LISTS = ("g_idx", "weight_g_idx", "weight_shape")  # all other parts are matrices


def _shaped(take: Take) -> Take:
    """`take`, for parts that aren't empty and have as many dimensions as they should."""

    def checked(part: str, dtype: torch.dtype | None) -> Tensor:
        found = take(part, dtype)
        if part == "weight_scale" and found.numel() == 1:
            found = found.view(1, 1)  # one for the matrix
        if found.dim() != (1 if part in _LISTS else 2) or not found.numel():
            kind = "list" if part in _LISTS else "matrix"
            raise PartError(part, f"has the shape {list(found.shape)}, which is no {kind}'s")
        return found

    return checked


class GptqLayout:
    """Written without zero points, because vLLM reads only such files."""

    main = "qweight"
    needed = ("qweight", "qzeros", "scales")
    parts = (*needed, "g_idx")

    def write(self, weight: GroupedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        assert weight.zero is None, "a zero less one can't be stored where zeros are any"
        columns = weight.codes.shape[1]
        return {
            "qweight": pack_words(weight.codes, weight.bits).t().contiguous(),
            "qzeros": pack_words(_zeros_of(weight).t() - 1, weight.bits),
            "scales": weight.scale.t().to(dtype).contiguous(),
            "g_idx": (torch.arange(columns) // weight.group).to(torch.int32),
        }

    def read(self, take: Take, has: Callable[[str], bool], bits: int, zero_offset: int) -> Stored:
        take = _shaped(take)
        words, scales, zeros = take("qweight", torch.int32), take("scales", None), take("qzeros", torch.int32)
        columns, rows = len(words) * (32 // bits), words.shape[1]
        _check("scales", scales, (len(scales), rows))
        _check("qzeros", zeros, (len(scales), -(-rows * bits // 32)))
        codes = unpack_words(words.t(), bits, columns)
        ones = pack_words(torch.full((1, 32 // bits), zero_offset, dtype=torch.uint8), bits)
        zero = unpack_words(zeros + ones, bits, rows).t()
        order = take("g_idx", torch.int32) if has("g_idx") else None
        return _stored("scales", bits, codes, scales.t(), zero, order)

    def config(self, scheme: Scheme) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }


class AwqLayout:
    main = "qweight"
    parts = needed = ("qweight", "qzeros", "scales")

    def write(self, weight: GroupedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "qweight": pack_words(weight.codes.t(), 4, AWQ_ORDER),
            "qzeros": pack_words(_zeros_of(weight).t(), 4, AWQ_ORDER),
            "scales": weight.scale.t().to(dtype).contiguous(),
        }

    def read(self, take: Take, has: Callable[[str], bool], bits: int, zero_offset: int) -> Stored:
        take = _shaped(take)
        words, scales, zeros = take("qweight", torch.int32), take("scales", None), take("qzeros", torch.int32)
        rows = words.shape[1] * 8
        _check("scales", scales, (len(scales), rows))
        _check("qzeros", zeros, (len(scales), words.shape[1]))
        codes = unpack_words(words, bits, rows, AWQ_ORDER).t().contiguous()
        return _stored("scales", bits, codes, scales.t(), unpack_words(zeros, bits, rows, AWQ_ORDER).t(), None)

    def config(self, scheme: Scheme) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": scheme.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }


class CompressedTensorsLayout:
    main = "weight_packed"
    needed = ("weight_packed", "weight_scale", "weight_shape")
    parts = (*needed, "weight_zero_point", "weight_g_idx")

    def write(self, weight: GroupedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {
            "weight_packed": pack_words(weight.codes, weight.bits),
            "weight_scale": weight.scale.to(dtype),
            "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
        }
        if weight.zero is not None:
            tensors["weight_zero_point"] = pack_words(weight.zero.t(), weight.bits).t().contiguous()
        return tensors

    def read(self, take: Take, has: Callable[[str], bool], bits: int, zero_offset: int) -> Stored:
        take = _shaped(take)
        words, scales = take("weight_packed", torch.int32), take("weight_scale", None)
        shape = take("weight_shape", torch.int64)
        rows, pack = len(words), 32 // bits
        if shape.shape != (2,) or shape[0] != rows or not 0 <= words.shape[1] * pack - shape[1] < pack:
            raise PartError("weight_shape", f"says {shape.tolist()}, but weight_packed has {list(words.shape)} words")
        columns = int(shape[1])
        scales = scales.expand(rows, 1) if scales.numel() == 1 else scales
        _check("weight_scale", scales, (rows, scales.shape[-1]))
        zero = None
        if has("weight_zero_point"):
            zeros = take("weight_zero_point", torch.int32)
            _check("weight_zero_point", zeros, (-(-rows * bits // 32), scales.shape[1]))
            zero = unpack_words(zeros.t(), bits, rows).t()
        order = take("weight_g_idx", torch.int32) if has("weight_g_idx") else None
        return _stored("weight_scale", bits, unpack_words(words, bits, columns), scales, zero, order)

    def config(self, scheme: Scheme) -> dict[str, Any]:
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "group",
            "group_size": scheme.group,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


LAYOUTS: Mapping[str, Layout] = {
    "gptq": GptqLayout(),
    "awq": AwqLayout(),
    "compressed-tensors": CompressedTensorsLayout(),
}


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FP8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
"""The quantization_config of a model whose layers alone are fp8."""


def dense(stored: Stored) -> Tensor:
    """The weight as float32 [out, in], whatever its order."""
    weight, order = stored
    if order is None:
        return weight.dequantized()
    index = order.long()
    zero = 1 << (weight.bits - 1) if weight.zero is None else weight.zero.float()[:, index]
    return (weight.codes.float() - zero) * weight.scale[:, index]


def _stored(part: str, bits: int, codes: Tensor, scales: Tensor, zero: Tensor | None, order: Tensor | None) -> Stored:
    columns, groups = codes.shape[1], scales.shape[1]
    if groups == 0 or columns % groups:
        raise PartError(part, f"has {groups} groups, which {columns} columns can't form")
    scale = scales.float().contiguous()
    if not (scale.isfinite() & (scale != 0)).all():
        raise PartError(part, "has a scale that is zero or not a number")
    if zero is not None:
        zero = None if (zero == 1 << (bits - 1)).all() else zero.contiguous()
    if order is not None:
        if order.shape != (columns,) or not ((order >= 0) & (order < groups)).all():
            raise PartError("g_idx", f"doesn't give each of {columns} columns one of {groups} groups")
        if torch.equal(order.long(), torch.arange(columns) // (columns // groups)):
            order = None
    return Stored(GroupedWeight(bits=bits, codes=codes, scale=scale, zero=zero), order)


def _zeros_of(weight: GroupedWeight) -> Tensor:
    return torch.full_like(weight.scale, 1 << (weight.bits - 1)).to(torch.uint8) if weight.zero is None else weight.zero


def _check(part: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise PartError(part, f"has the shape {list(tensor.shape)}, expected {list(shape)}")
