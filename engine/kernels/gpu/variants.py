"""Every variant of every GPU kernel that the engine launches: the types of its pointers, its constants, its warps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton

from engine.kernels.gpu import attention, cache, groups, matmul, rowwise, sampling

ARCHES = (80, 89, 90)
FIRST_FP8 = 89
"""The oldest architecture whose compiler knows e4m3."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for the types of its pointers and the values of its constants. `stages`: triton's own number, where a
    launch says none."""

    kernel: str
    dtype: str
    head_dim: int
    block: str
    function: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 3


_KV = {"bf16": ("*bf16", 0), "int8": ("*i8", 1), "fp8": ("*fp8e4nv", 1)}
_OUT = {"bf16": ("*bf16", rowwise.FLOAT), "int8": ("*i8", rowwise.INT8), "fp8": ("*fp8e4nv", rowwise.FP8)}


def _types(**types: str) -> tuple[tuple[str, str], ...]:
    return tuple(types.items())


def _constants(**values: int) -> tuple[tuple[str, int], ...]:
    return tuple(values.items())


def _attention() -> Iterator[Variant]:
    floats = {"k_scale": "*fp32", "v_scale": "*fp32"}
    ints = {"lengths": "*i32", "tables": "*i32", "pieces": "*i32"}
    results = {"out": "*fp32", "partial": "*fp32", "state": "*fp32"}
    for (kv, (pointer, is_scaled)), dim, tile in itertools.product(_KV.items(), (64, 128, 256), attention.TILE_ROWS):
        types = _types(q="*bf16", k=pointer, v=pointer, **floats, **ints, **results, window="i32")
        walk = attention.walk_of(tile, dim)
        shape = _constants(HEADS=32, KV_HEADS=8, DIM=dim, DIM_SIZE=dim, BLOCK_TOKENS=16)
        tiles, block = _constants(ROWS=tile, KEYS=walk.keys, IS_SCALED=is_scaled), f"{tile}x{walk.keys}"
        yield Variant("attend", kv, dim, block, attention.attend, types, shape + tiles, walk.warps, walk.stages)
    for dim in (64, 128, 256):
        types = _types(partial="*fp32", state="*fp32", slots="*i32", slot_ends="*i32", out="*fp32")
        constants = _constants(HEADS=32, DIM=dim, DIM_SIZE=dim)
        yield Variant("merge", "fp32", dim, "1", attention.merge, types, constants, 1)


def _rows() -> Iterator[Variant]:
    for (name, (pointer, form)), width in itertools.product(_OUT.items(), (576, 4096, 14336)):
        size = triton.next_power_of_2(width)
        shape, warps = _constants(WIDTH=width, SIZE=size, FORMAT=form), rowwise.warps_of_row(size)
        out = {"out": pointer, "scale": "*fp32"}
        types = _types(x="*fp32", delta="*fp32", weight="*fp32", **out, eps="fp32")
        if width < 8192:
            constants = (*shape, ("HAS_DELTA", 0))
            yield Variant("norm_rows", name, 0, str(width), rowwise.norm_rows, types, constants, warps)
        types = _types(x="*bf16" if form == rowwise.FP8 else "*fp32", **out)
        yield Variant("pack_rows", name, 0, str(width), rowwise.pack_rows, types, shape, warps)
        types = _types(gate_up="*bf16", **out)
        for gelu in (0, 1):
            block = f"{width}{' gelu' if gelu else ''}"
            constants = (*shape, ("IS_GELU", gelu))
            yield Variant("silu_mul", name, 0, block, rowwise.silu_mul, types, constants, warps)
    for width in (576, 4096):
        size = triton.next_power_of_2(width)
        types, shape = _types(x="*fp32", delta="*fp32", weight="*fp32", eps="fp32"), _constants(WIDTH=width, SIZE=size)
        warps = rowwise.warps_of_row(size)
        yield Variant("add_normed_rows", "fp32", 0, str(width), rowwise.add_normed_rows, types, shape, warps)
    for (kv, (pointer, _)), dim in itertools.product(_KV.items(), (64, 128, 256)):
        types = _types(
            qkv="*fp32",
            cosine="*fp32",
            sine="*fp32",
            slots="*i64",
            q="*bf16",
            k=pointer,
            v=pointer,
            k_scale="*fp32",
            v_scale="*fp32",
            qk_norm="*fp32",
            q_factor="fp32",
            eps="fp32",
        )
        constants = (
            *_constants(HEADS=32, KV_HEADS=8, DIM=dim, HALF_SIZE=dim // 2, BLOCK_TOKENS=16, FORMAT=_OUT[kv][1]),
            ("HAS_QK_NORM", 1),
        )
        yield Variant("store_qkv", kv, dim, "1", cache.store_qkv, types, constants, 1)


def _matmuls() -> Iterator[Variant]:
    sizes = {"num_rows": "i32", "num_columns": "i32", "width": "i32"}
    scales = {"row_scale": "*fp32", "column_scale": "*fp32", "bias": "*fp32"}
    tiles, results = (matmul.NARROW, *matmul.TILES, matmul.ADDING), (("fp32", 1), ("fp32", 0), ("bf16", 0))
    for (name, (pointer, form)), tile, (out, adds) in itertools.product(_OUT.items(), tiles, results):
        if tile is (matmul.TILES[-1] if adds else matmul.ADDING):
            continue
        types = _types(rows=pointer, weight=pointer, **scales, out=f"*{out}", **sizes)
        flags = _constants(IS_INT8=form == rowwise.INT8, HAS_SCALES=form != rowwise.FLOAT, HAS_BIAS=1, ADDS=adds)
        constants = _constants(M=tile.rows, N=tile.columns, K=tile.depth) + flags
        block = f"{tile} {'adds to' if adds else 'gives'} {out}"
        yield Variant("multiply", name, 0, block, matmul.multiply, types, constants, tile.warps, tile.stages)
    weights, how = {"codes": "*u8", "scale": "*fp32", "zero": "*i16"}, (groups.WARPS, groups.STAGES)
    for bits, group in itertools.product((4, 8), groups.SIZES):
        shape = _constants(K=min(group, 64), GROUP=group, BITS=bits, HAS_ZERO=1)
        for m, n in itertools.product(groups.TILE_ROWS, (32, 64)):
            types = _types(rows="*bf16", **weights, bias="*fp32", out="*fp32", **sizes)
            constants = (*_constants(M=m, N=n), *shape, *_constants(HAS_BIAS=1, ADDS=1))
            name, block = f"int{bits}", f"{m}x{n}x{min(group, 64)} g{group}"
            yield Variant("multiply_groups", name, 0, block, groups.multiply_groups, types, constants, *how)
        types = _types(**weights, out="*bf16", num_columns="i32", width="i32")
        constants = (("N", 32), *shape)
        yield Variant("dequantize", f"int{bits}", 0, f"g{group}", groups.dequantize, types, constants, *how)


def _sampling() -> Iterator[Variant]:
    size = _constants(SIZE=sampling.CHUNK)
    types = _types(logits="*fp32", masks="*i32", ids="*i64", width="i32", num_masked="i32", words="i32")
    yield Variant("best_rows", "fp32", 0, str(sampling.CHUNK), sampling.best_rows, types, size, 8)
    rows = {"logits": "*fp32", "masks": "*i32", "ids": "*i64"}
    sizes = {"width": "i32", "num_masked": "i32", "words": "i32"}
    types = _types(**rows, numbers="*fp32", top_ks="*i32", **sizes)
    yield Variant("sample_rows", "fp32", 0, str(sampling.CHUNK), sampling.sample_rows, types, size, 8)


@functools.cache
def variants() -> tuple[Variant, ...]:
    """All that the engine launches."""
    return (*_attention(), *_rows(), *_matmuls(), *_sampling())


def why_unsupported(variant: Variant, arch: int) -> str | None:
    """Why an architecture has no such variant; None if it has."""
    if variant.dtype == "fp8" and arch < FIRST_FP8:
        return f"sm_{arch} has no fp8 e4m3"
    return None


def samples() -> list[tuple[int, int]]:
    """Indices of a few variants, each with an architecture: the largest of each kernel and type, architectures by
    turns. What CI compiles."""
    largest = {(variant.kernel, variant.dtype): index for index, variant in enumerate(variants())}
    turns = itertools.cycle(ARCHES)
    chosen = []
    for index in largest.values():
        arch = next(turns)
        if why_unsupported(variants()[index], arch):
            arch = next(turns)
        chosen.append((index, arch))
    return chosen
