"""What the `quantization_config` of a config.json says: in which layout a checkpoint keeps its weights; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.fields import MOST
from engine.load.meta import read_json

_BITS = (4, 8)
_PACKED, _SCALED = "pack-quantized", ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A checkpoint's layout.

    `layout`       gptq, awq, compressed-tensors (integers in groups), or scaled (int8 or fp8 values and their scales)
    `bits`         of a weight
    `zero_offset`  what GPTQ's files have subtracted from each zero
    `is_ordered`   groups aren't runs of columns: each column tells its own
    `group`        columns that share a scale; None: a row has one
    `has_zeros`    each group may have a zero of its own
    `block`        rows and columns that share a scale, where the file says so
    `is_float`     values of 8 bits are fp8 numbers
    `is_mixed`     some matrices are stored as in scaled checkpoints
    `is_static`    inputs are divided by a scale that the file has, not by each row's own
    """

    layout: str
    bits: int
    zero_offset: int = 0
    is_ordered: bool = False
    group: int | None = None
    has_zeros: bool = False
    block: tuple[int, int] | None = None
    is_float: bool = False
    is_mixed: bool = False
    is_static: bool = False

    @property
    def weight_format(self) -> str | None:
        """The engine's format that keeps these weights as they are; None: they are made floating-point."""
        if self.layout == "scaled":
            return "fp8" if self.is_float else None
        return None if self.is_ordered else f"w{self.bits}a16"


def read_quantization(config: dict[str, Any], path: Path) -> Quantization | None:
    """Of a config.json; None where weights aren't quantized. Raises ModelError for what isn't supported."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: the quantization_config of config.json is no object.")
    method = str(found.get("quant_method", "")).lower()
    if method == "gptq":
        return _gptq(found, path)
    if method == "awq":
        return _awq(found, path)
    if method == "compressed-tensors":
        return _compressed_tensors(found, path)
    if method == "fp8":
        return Quantization(
            layout="scaled",
            bits=8,
            block=_block(found.get("weight_block_size"), path),
            is_float=True,
            is_static=str(found.get("activation_scheme", "dynamic")).lower() == "static",
        )
    raise ModelError(
        f"{path} is quantized by {method!r}; supported are gptq, awq, compressed-tensors and fp8 checkpoints."
    )


def stored_format(path: Path) -> str | None:
    """The engine's format of the weights of the model at `path` as they are; None where they aren't quantized, or not
    in a way that the engine keeps. Raises ModelError."""
    quantization = read_quantization(read_json(path / "config.json"), path) if path.is_dir() else None
    return quantization.weight_format if quantization is not None else None


def _gptq(found: dict[str, Any], path: Path) -> Quantization:
    rules = found.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not str(name).startswith("-:") for name in rules):
        raise ModelError(f"{path} has GPTQ rules for single modules (dynamic), which are not supported.")
    version = str(found.get("checkpoint_format", "gptq")).lower()
    if version not in ("gptq", "gptq_v2"):
        raise ModelError(f"{path} has the GPTQ checkpoint format {version!r}; supported are gptq and gptq_v2.")
    is_ordered = bool(found.get("desc_act", False)) and found.get("group_size") != -1
    return Quantization(
        layout="gptq",
        bits=_bits(found.get("bits"), path),
        zero_offset=1 if version == "gptq" else 0,
        is_ordered=is_ordered and not found.get("static_groups", False),
        group=_group(found.get("group_size"), path),
        has_zeros=not found.get("sym", True),
    )


def _awq(found: dict[str, Any], path: Path) -> Quantization:
    version = str(found.get("version", "gemm")).lower()
    bits = _bits(found.get("bits", found.get("w_bit")), path)
    if version != "gemm" or bits != 4:
        raise ModelError(f"{path} has AWQ weights of {bits} bits for {version!r}; 4 bits for 'gemm' are supported.")
    group = _group(found.get("group_size", found.get("q_group_size")), path)
    return Quantization(layout="awq", bits=bits, group=group, has_zeros=bool(found.get("zero_point", True)))


def _compressed_tensors(found: dict[str, Any], path: Path) -> Quantization:
    for what in ("transform_config", "sparsity_config"):
        said = found.get(what) or {}
        if not isinstance(said, dict) or said.get("config_groups") or said.get("format", "dense") != "dense":
            raise ModelError(f"{path} has compressed-tensors with a {what}, which is not supported.")
    groups = found.get("config_groups")
    schemes = [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []
    formats = {str(scheme.get("format") or found.get("format")) for scheme in schemes}
    weights = [scheme["weights"] for scheme in schemes if isinstance(scheme.get("weights"), dict)]
    if formats and formats <= set(_SCALED):
        return _scaled(schemes, weights, path)
    is_packed = [str(scheme.get("format") or found.get("format")) == _PACKED for scheme in schemes]
    packed = [scheme.get("weights") for scheme, is_so in zip(schemes, is_packed, strict=True) if is_so]
    bits = [weight.get("num_bits") for weight in packed if isinstance(weight, dict)]
    if not formats <= {_PACKED, *_SCALED} or not bits or any(other != bits[0] for other in bits):
        named = ", ".join(sorted(formats)) or "none"
        raise ModelError(
            f"{path} has compressed-tensors of the format {named} with {sorted(set(map(str, bits)))} bits; "
            f"supported are one width in {_PACKED}, and {', '.join(_SCALED)}."
        )
    weights = [weight for weight in packed if isinstance(weight, dict)]
    return Quantization(
        layout="compressed-tensors",
        bits=_bits(bits[0], path),
        is_ordered=any(weight.get("actorder") in ("group", "dynamic", True) for weight in weights),
        group=min((size for weight in weights if (size := _group(weight.get("group_size"), path))), default=None),
        has_zeros=not all(weight.get("symmetric", True) for weight in weights),
        is_mixed=len(formats) > 1,
    )


def _scaled(schemes: list[dict[str, Any]], weights: list[dict[str, Any]], path: Path) -> Quantization:
    inputs = [scheme["input_activations"] for scheme in schemes if isinstance(scheme.get("input_activations"), dict)]
    blocks = {_block(weight.get("block_structure"), path) for weight in weights}
    if len(blocks) > 1:
        raise ModelError(f"{path} has compressed-tensors with several block_structures; one is supported.")
    return Quantization(
        layout="scaled",
        bits=8,
        block=next(iter(blocks), None),
        is_float=all(weight.get("type") == "float" for weight in weights),
        is_static=bool(inputs) and all(given.get("dynamic") in (False, None) for given in inputs),
    )


def _block(value: object, path: Path) -> tuple[int, int] | None:
    """Rows and columns of a block, from [rows, columns] or "rowsxcolumns"; None where nothing is said."""
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2:
        known = [int(size) for size in sizes if len(str(size)) < 10 and str(size).isdecimal() and 0 < int(size) <= MOST]
        if len(known) == 2:
            return known[0], known[1]
    raise ModelError(f"{path} has scales of blocks of {str(value)[:40]!r}; two sizes are expected, as in [128, 128].")


def _group(value: object, path: Path) -> int | None:
    """Columns of a group; None where a row has one scale, which is spelled -1."""
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST:
        raise ModelError(f"{path} has groups of {str(value)[:40]!r} columns; a whole number above 0 is expected.")
    return value


def _bits(value: object, path: Path) -> int:
    if value not in _BITS or not isinstance(value, int):
        raise ModelError(f"{path} has weights of {value!r} bits; supported are 4 and 8.")
    return value
