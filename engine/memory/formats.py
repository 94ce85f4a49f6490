"""What a weight and a cached number take in each format as the engine holds them, the scales beside them counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.errors import ConfigError

GROUPS = (32, 64, 128)
"""Columns that may share a scale."""

HEAD_GROUP = 64
"""Columns of a group of the head, at most, where the matrices of layers are in groups."""

_SCALE_BITS, _ZERO_BITS = 32, 16  # as our kernels read them; files have less


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the matrices are kept, the head as `head_format` says; embedding, norms and biases stay floating-point, of at
    most 16 bits where `bits` are.

    `group`       columns that share a scale; None: one scale a row, if there are scales at all
    `scale_bits`  of each scale; 0 in formats that have none
    `zero_bits`   of the zero point beside each scale
    `is_stored`   everything stays as the model's file has it
    """

    name: str
    bits: int
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    is_stored: bool = False

    def __str__(self) -> str:
        if self.group is None:
            return self.name
        return f"{self.name} (groups of {self.group}{' with zero points' if self.zero_bits else ''})"

    @property
    def plain_bytes(self) -> int:
        """Of a number that isn't quantized."""
        return 4 if self.bits == 32 else 2


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a number of the KV cache is kept, and the scale that each token and head then has."""

    name: str
    value_bytes: int
    scale_bytes: int = 0

    def __str__(self) -> str:
        return self.name


SCALE_BYTES = 4
"""Of the scale that each token and head has in a quantized cache: a float32."""

_WEIGHTS = {
    "float32": WeightFormat(name="float32", bits=32),
    "bf16": WeightFormat(name="bf16", bits=16),
    "int8": WeightFormat(name="int8", bits=8, scale_bits=_SCALE_BITS),
    "fp8": WeightFormat(name="fp8", bits=8, scale_bits=_SCALE_BITS),
    "int4": WeightFormat(name="int4", bits=4, group=128, scale_bits=_SCALE_BITS),
    "w8a16": WeightFormat(name="w8a16", bits=8, group=64, scale_bits=_SCALE_BITS),
    "w4a16": WeightFormat(name="w4a16", bits=4, group=64, scale_bits=_SCALE_BITS),
    "stored": WeightFormat(name="stored", bits=0, is_stored=True),
}
_WEIGHT_ALIASES = {"32": "float32", "16": "bf16", "fp16": "bf16", "8": "int8", "4": "int4"}
_PACKED = ("gptq", "awq")  # int4 in groups, each with a zero point
_KV = {
    "float32": KvFormat("float32", 4),
    "bf16": KvFormat("bf16", 2),
    "int8": KvFormat("int8", 1, SCALE_BYTES),
    "fp8": KvFormat("fp8", 1, SCALE_BYTES),
}
_KV_ALIASES = {"32": "float32", "16": "bf16", "fp16": "bf16", "8": "int8"}


def weight_format(name: str, *, group: int | None = None, has_zero_points: bool = False) -> WeightFormat:
    """The format of a name or a number of bits. Raises ConfigError that names what there is."""
    spelled = name.strip().lower()
    is_packed = spelled in _PACKED
    found = _WEIGHTS.get("int4" if is_packed else _WEIGHT_ALIASES.get(spelled, spelled))
    if found is None:
        known = ", ".join([*_WEIGHTS, *_PACKED])
        raise ConfigError(f"There is no weight format {name[:40]!r}; there are {known}, or bits: 32, 16, 8, 4.")
    if group is None and not has_zero_points and not is_packed:
        return found
    if found.name not in ("int8", "int4"):
        raise ConfigError(f"Groups and zero points are of int8 and int4, not of {found.name}.")
    if group is not None and group not in GROUPS:
        raise ConfigError(f"A group has {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} columns, not {group}.")
    return replace(
        found,
        name=spelled if is_packed else found.name,
        group=group or found.group or GROUPS[-1],
        zero_bits=_ZERO_BITS if has_zero_points or is_packed else 0,
    )


def head_format(form: WeightFormat, columns: int) -> WeightFormat:
    """How a head of so many columns is kept beside matrices in that format: beside groups in 8 bits, where groups fit,
    because floating-point it would be half of what a small model's answers read."""
    if form.group is None:
        return _WEIGHTS["bf16"] if form.name == "fp8" else form
    group = math.gcd(columns, HEAD_GROUP)
    return replace(_WEIGHTS["w8a16"], group=group) if group in GROUPS else _WEIGHTS["bf16"]


def kv_format(name: str) -> KvFormat:
    """The format of a name or a number of bits. Raises ConfigError that names what there is."""
    spelled = name.strip().lower()
    found = _KV.get(_KV_ALIASES.get(spelled, spelled))
    if found is None:
        raise ConfigError(f"There is no KV format {name[:40]!r}; there are {', '.join(_KV)}, or bits: 32, 16, 8.")
    return found
