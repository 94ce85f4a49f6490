"""What of a checkpoint the engine keeps as integers in groups: the format, its bytes, and what becomes floats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.config import GROUP_FORMATS
from engine.load.quantization import stored_format
from engine.memory.formats import weight_format
from engine.memory.sizing import weight_parts
from engine.model.config import ModelConfig

_SCALE_BYTES = 4
_PLAIN_BYTES = 2


class GroupScheme(NamedTuple):
    """How a weight is kept: bits of a code, columns of a group, bytes of the zero beside each scale."""

    bits: int
    group: int
    zero_bytes: int


class SchemeSource(Protocol):
    """A checkpoint that tells of each weight how it is kept, without reading it."""

    def scheme(self, name: str) -> GroupScheme | None:
        """None: it becomes floating-point."""

    def kind(self, name: str) -> str | None:
        """The quantized format in which the file has it, as its makers call it."""


class Fused(NamedTuple):
    """Matrices of one layer that read the same input: their names, columns, and rows of each."""

    names: tuple[str, ...]
    columns: int
    rows: tuple[int, ...]


def fused(model: ModelConfig, index: int) -> tuple[Fused, Fused, Fused, Fused]:
    """The four matrices of a layer: of the attention's inputs and its output, of the MLP's inputs and its output."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return (
        Fused(tuple(f"{index}.{part}" for part in "qkv"), model.hidden, (query, kv, kv)),
        Fused((f"{index}.out",), query, (model.hidden,)),
        Fused((f"{index}.gate", f"{index}.up"), model.hidden, (model.mlp, model.mlp)),
        Fused((f"{index}.down",), model.mlp, (model.hidden,)),
    )


def kept_format(path: Path) -> str | None:
    """The group format in which the engine can keep the weights of the model at `path`. Raises ModelError."""
    if path.is_dir():
        return stored_format(path)
    from engine.load.gguf import GGUFFile
    from engine.load.gguf_groups import KINDS

    sizes: Counter[int] = Counter()
    for info in GGUFFile(path).tensors.values():
        if info.kind in KINDS and len(info.shape) == 2 and info.name.startswith("blk."):
            sizes[KINDS[info.kind].bits] += info.num_bytes
    return f"w{sizes.most_common(1)[0][0]}a16" if sizes else None


def kept_bytes(model: ModelConfig, source: SchemeSource) -> int:
    """Of all weights, as the engine holds them in a group format."""
    sum_of = weight_parts(replace(model.shape, matrices=()), weight_format("w8a16")).total
    for matrix in _matrices(model):
        rows = sum(matrix.rows)
        if scheme := common_scheme(matrix, source):
            groups = rows * (matrix.columns // scheme.group)
            sum_of += rows * matrix.columns * scheme.bits // 8 + groups * (_SCALE_BYTES + scheme.zero_bytes)
        else:
            sum_of += rows * matrix.columns * _PLAIN_BYTES
    return sum_of


def common_scheme(matrix: Fused, source: SchemeSource) -> GroupScheme | None:
    """The scheme of matrices that can be kept as one, as `alike` makes them: the widest codes and zeros of theirs, in
    groups that divide those of each."""
    schemes = [source.scheme(f"{name}.weight") for name in matrix.names]
    known = [scheme for scheme in schemes if scheme is not None]
    if len(known) < len(schemes) or matrix.columns % 2:  # codes of 4 bits lie in pairs
        return None
    if any(matrix.columns % scheme.group for scheme in known):
        return None
    bits, groups, zero_bytes = zip(*known, strict=True)
    return GroupScheme(max(bits), math.gcd(*groups), max(zero_bytes))


def conversion(model: ModelConfig, source: SchemeSource, chosen: str, name: str, kept: str | None) -> str | None:
    """What becomes of quantized weights that aren't kept, as a sentence; None where nothing does."""
    is_kept = chosen in GROUP_FORMATS
    converted: Counter[str] = Counter()
    for matrix in _matrices(model):
        if is_kept and common_scheme(matrix, source):
            continue
        converted.update(kind for part in matrix.names if (kind := source.kind(f"{part}.weight")))
    if not converted:
        return None
    kinds = " and ".join(f"{count} in {kind}" for kind, count in sorted(converted.items()))
    if is_kept:
        return f"Of the matrices of {name}, {kinds} have no kernel, or lie beside some that have none, and become bf16."
    way_out = f"; the weight format {kept} keeps what it can as it is" if kept else ""
    return f"The matrices of {name} are quantized ({kinds}) and are converted to {chosen}{way_out}."


def _matrices(model: ModelConfig) -> Iterator[Fused]:
    for index in range(model.num_layers):
        yield from fused(model, index)
