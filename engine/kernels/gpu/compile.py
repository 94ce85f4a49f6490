"""Compiles every variant of every GPU kernel ahead of time, on any machine, and reads what each needs of the device.

`python -m engine.kernels.gpu.compile [--json] [--kernel NAME]`: a row a variant; the exit code is 1 if one spills
registers or needs more shared memory than the device has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu import attention, cache, groups, matmul, rowwise, sampling

ARCHES = (80, 89, 90)
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
"""Shared memory that one program may have."""
FIRST_FP8 = 89
"""The oldest architecture whose compiler knows e4m3."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for the types of its pointers and the values of its constants."""

    kernel: str
    dtype: str
    head_dim: int
    block: str
    function: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one variant needs on one architecture."""

    kernel: str
    dtype: str
    head_dim: int
    block: str
    arch: str
    registers: int
    spills: int
    shared_bytes: int


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
        types = _types(q="*bf16", k=pointer, v=pointer, **floats, **ints, **results)
        keys, warps = attention.keys_and_warps(tile, dim)
        shape = _constants(HEADS=32, KV_HEADS=8, DIM=dim, DIM_SIZE=dim, BLOCK_TOKENS=16)
        tiles = _constants(ROWS=tile, KEYS=keys, IS_SCALED=is_scaled)
        yield Variant("attend", kv, dim, f"{tile}x{keys}", attention.attend, types, shape + tiles, warps)
    for dim in (64, 128, 256):
        types = _types(partial="*fp32", state="*fp32", slots="*i32", slot_ends="*i32", out="*fp32")
        constants = _constants(HEADS=32, DIM=dim, DIM_SIZE=dim)
        yield Variant("merge", "fp32", dim, "1", attention.merge, types, constants, 1)


def _rows() -> Iterator[Variant]:
    for (name, (pointer, form)), width in itertools.product(_OUT.items(), (576, 4096, 14336)):
        size = triton.next_power_of_2(width)
        shape, warps = _constants(WIDTH=width, SIZE=size, FORMAT=form), rowwise.warps_of_row(size)
        out = {"out": pointer, "scale": "*fp32"}
        types = _types(x="*fp32", delta="*bf16", weight="*fp32", **out, eps="fp32")
        if width < 8192:
            constants = (*shape, ("HAS_DELTA", 0))
            yield Variant("norm_rows", name, 0, str(width), rowwise.norm_rows, types, constants, warps)
        types = _types(x="*fp32", **out)
        yield Variant("pack_rows", name, 0, str(width), rowwise.pack_rows, types, shape, warps)
        types = _types(gate_up="*bf16", **out)
        yield Variant("silu_mul", name, 0, str(width), rowwise.silu_mul, types, shape, warps)
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
            q_factor="fp32",
        )
        constants = _constants(HEADS=32, KV_HEADS=8, DIM=dim, HALF_SIZE=dim // 2, BLOCK_TOKENS=16, FORMAT=_OUT[kv][1])
        yield Variant("store_qkv", kv, dim, "1", cache.store_qkv, types, constants, 1)


def _matmuls() -> Iterator[Variant]:
    sizes = {"num_rows": "i32", "num_columns": "i32", "width": "i32"}
    scales = {"row_scale": "*fp32", "column_scale": "*fp32", "bias": "*fp32", "out": "*fp32"}
    for (name, (pointer, form)), tile in itertools.product(_OUT.items(), matmul.TILES):
        types = _types(rows=pointer, weight=pointer, **scales, **sizes)
        flags = _constants(IS_INT8=form == rowwise.INT8, HAS_SCALES=form != rowwise.FLOAT, HAS_BIAS=0, ADDS=1)
        constants = _constants(M=tile.rows, N=tile.columns, K=tile.depth) + flags
        yield Variant("multiply", name, 0, str(tile), matmul.multiply, types, constants, tile.warps, tile.stages)
    weights = {"codes": "*u8", "scale": "*fp32", "zero": "*u8"}
    for bits, group in itertools.product((4, 8), (32, 64, 128)):
        shape = _constants(K=min(group, 64), GROUP=group, BITS=bits, HAS_ZERO=1)
        for m in (16, 64):
            types = _types(rows="*bf16", **weights, bias="*fp32", out="*fp32", **sizes)
            constants = (*_constants(M=m, N=64), *shape, *_constants(HAS_BIAS=0, ADDS=1))
            block = f"{m}x64x{min(group, 64)}"
            yield Variant("multiply_groups", f"int{bits}", 0, block, groups.multiply_groups, types, constants)
        types = _types(**weights, out="*bf16", num_columns="i32", width="i32")
        constants = (("N", 32), *shape)
        yield Variant("dequantize", f"int{bits}", 0, f"g{group}", groups.dequantize, types, constants)


def _sampling() -> Iterator[Variant]:
    size = _constants(SIZE=sampling.CHUNK)
    types = _types(logits="*fp32", masks="*i32", ids="*i64", width="i32", num_masked="i32", words="i32")
    yield Variant("best_rows", "fp32", 0, str(sampling.CHUNK), sampling.best_rows, types, size, 8)
    numbers = {"temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32", "draws": "*fp32"}
    types = _types(logits="*fp32", ids="*i64", **numbers, width="i32")
    yield Variant("sample_rows", "fp32", 0, str(sampling.CHUNK), sampling.sample_rows, types, size, 8)


def variants() -> list[Variant]:
    """All that the engine launches."""
    return [*_attention(), *_rows(), *_matmuls(), *_sampling()]


def is_supported(variant: Variant, arch: int) -> bool:
    return variant.dtype != "fp8" or arch >= FIRST_FP8


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compiles for sm_`arch`; needs no device."""
    types = dict(variant.types) | {name: "constexpr" for name, _ in variant.constants}
    names = variant.function.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    aligned |= {(names.index("width"),): [["tt.divisibility", 16]]} if "width" in types else {}
    source = ASTSource(
        variant.function,
        {name: types[name] for name in names},
        constexprs=dict(variant.constants),
        attrs=aligned,
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = _resources(built.asm["ptx"], built.asm["cubin"])
    return Compiled(
        kernel=variant.kernel,
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        block=variant.block,
        arch=f"sm_{arch}",
        registers=registers,
        spills=spills,
        shared_bytes=built.metadata.shared,
    )


def _resources(ptx: str, cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as the toolkit's own reader and assembler say."""
    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        binary.write_bytes(cubin)
        told = _tool("cuobjdump", "-res-usage", str(binary))
        found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", told, re.DOTALL)
        assert found, "cuobjdump names the registers of a kernel"
        registers, stack, local = map(int, found.groups())
        if not stack and not local:
            return registers, 0
        # a stack may hold more than spilled registers: only the assembler tells which
        text.write_text(ptx)
        target = re.search(r"\.target (\w+)", ptx)
        assert target, "PTX names its target"
        told = _tool("ptxas-blackwell", "-v", f"--gpu-name={target[1]}", str(text), "-o", "/dev/null")
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", told)))


def _tool(name: str, *arguments: str) -> str:
    """What a program of the toolkit that triton brings says."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / name if (folder / name).exists() else folder / "ptxas"
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _compile_on(job: tuple[int, int]) -> Compiled:
    index, arch = job
    return compile_variant(variants()[index], arch)


def compile_all(kernel: str | None = None, workers: int = 2) -> Iterator[Compiled]:
    """Every supported variant, of one kernel or of all, on every architecture, in order."""
    chosen = [(i, variant) for i, variant in enumerate(variants()) if kernel in (None, variant.kernel)]
    jobs = [(i, arch) for i, variant in chosen for arch in ARCHES if is_supported(variant, arch)]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_compile_on, jobs)


def fits(row: Compiled) -> bool:
    """Whether it runs as meant: nothing spilled, and no more shared memory than there is."""
    return not row.spills and row.shared_bytes <= SHARED_BYTES[int(row.arch.removeprefix("sm_"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object a variant")
    parser.add_argument("--kernel", choices=sorted({variant.kernel for variant in variants()}), help="only this one")
    arguments = parser.parse_args()
    failed = 0
    for row in compile_all(arguments.kernel):
        failed += not fits(row)
        told = json.dumps(asdict(row)) if arguments.json else "  ".join(f"{value}" for value in asdict(row).values())
        print(told, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
