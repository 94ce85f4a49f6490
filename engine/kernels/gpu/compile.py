"""Compiles every variant of every GPU kernel ahead of time, on any machine, and reads what each needs of the device.

`python -m engine.kernels.gpu.compile [--json | --table] [--kernel NAME] [--sample]`: a row a variant, or README's
table; the exit code is 1 if one spills registers or needs more shared memory than the device has. Pairs that don't
exist are rows too, with the reason. Nothing is taken from an earlier run: kernels go to a directory of this one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu.variants import ARCHES, Variant, samples, variants, why_unsupported

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
"""Shared memory that one program may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one variant needs on one architecture; nothing, where that has no such variant (`unsupported` says why)."""

    kernel: str
    dtype: str
    head_dim: int
    block: str
    arch: str
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    unsupported: str | None = None

    @property
    def fits(self) -> bool:
        """Whether it runs as meant: nothing spilled, and no more shared memory than there is."""
        return not self.spills and self.shared_bytes <= SHARED_BYTES[int(self.arch.removeprefix("sm_"))]


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compiles for sm_`arch`; needs no device."""
    types = dict(variant.types) | {name: "constexpr" for name, _ in variant.constants}
    names = variant.function.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    aligned |= {(names.index(name),): [["tt.divisibility", 16]] for name in ("width", "num_columns") if name in types}
    source = ASTSource(
        variant.function,
        {name: types[name] for name in names},
        constexprs=dict(variant.constants),
        attrs=aligned,
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = _resources(built.asm["ptx"], built.asm["cubin"])
    return _row(variant, arch, registers=registers, spills=spills, shared_bytes=built.metadata.shared)


def _row(variant: Variant, arch: int, **needs: Any) -> Compiled:
    return Compiled(
        kernel=variant.kernel,
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        block=variant.block,
        arch=f"sm_{arch}",
        **needs,
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
    variant = variants()[index]
    if why := why_unsupported(variant, arch):
        return _row(variant, arch, unsupported=why)
    return compile_variant(variant, arch)


def _use_cache(folder: str) -> None:
    triton.knobs.cache.dir = folder


def compile_all(jobs: Sequence[tuple[int, int]], workers: int = 2) -> Iterator[Compiled]:
    """Variants by their index, each on an architecture, in order."""
    with (
        tempfile.TemporaryDirectory(prefix="batchsvc-compile-") as folder,
        ProcessPoolExecutor(workers, initializer=_use_cache, initargs=(folder,)) as pool,
    ):
        yield from pool.map(_compile_on, jobs)


def table(rows: Sequence[Compiled]) -> str:
    """A line a kernel and type: the most registers, and shared KiB, of its variants on each architecture."""
    lines = [
        f"| kernel | type | variants | {' | '.join(f'sm_{arch}' for arch in ARCHES)} |",
        f"| --- | --- | --- | {' | '.join('---' for _ in ARCHES)} |",
    ]
    for kernel, dtype in dict.fromkeys((row.kernel, row.dtype) for row in rows):
        mine = [row for row in rows if (row.kernel, row.dtype) == (kernel, dtype)]
        cells = []
        for arch in ARCHES:
            here = [row for row in mine if row.arch == f"sm_{arch}"]
            ran = [row for row in here if not row.unsupported]
            shared = max((row.shared_bytes for row in ran), default=0) / 1024
            spills = sum(row.spills for row in ran)
            said = f"{max((row.registers for row in ran), default=0)} / {shared:.0f}" if ran else "no fp8"
            cells.append(said + (f", {spills} B spilled" if spills else ""))
        lines.append(f"| {kernel} | {dtype} | {len({(r.head_dim, r.block) for r in mine})} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object a variant")
    parser.add_argument("--table", action="store_true", help="README's table")
    parser.add_argument("--kernel", choices=sorted({variant.kernel for variant in variants()}), help="only this one")
    parser.add_argument("--sample", action="store_true", help="only the largest of each kernel and type, on one device")
    arguments = parser.parse_args()
    jobs = samples() if arguments.sample else [(i, arch) for i in range(len(variants())) for arch in ARCHES]
    rows = []
    for row in compile_all([job for job in jobs if arguments.kernel in (None, variants()[job[0]].kernel)]):
        rows.append(row)
        if arguments.json:
            print(json.dumps(asdict(row)), flush=True)
        elif not arguments.table:
            print("  ".join(f"{value}" for value in asdict(row).values() if value is not None), flush=True)
    if arguments.table:
        print(table(rows))
    return int(not all(row.fits for row in rows))


if __name__ == "__main__":
    sys.exit(main())
