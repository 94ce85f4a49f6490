"""Variants of the GPU's kernels, compiled ahead of time without a GPU: nothing spills, and all fit their devices."""

import json
import os
import subprocess
import sys

import pytest

from engine.kernels.gpu.compile import ARCHES, Compiled, table
from engine.kernels.gpu.variants import samples, variants, why_unsupported

KERNELS = {
    *("attend", "merge", "store_qkv", "norm_rows", "add_normed_rows", "pack_rows", "silu_mul"),
    *("multiply", "multiply_groups", "dequantize", "best_rows", "sample_rows"),
}


def compiled(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code and rows of the command, in a process that doesn't interpret kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.gpu.compile", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_largest_of_each_kernel_and_type() -> None:
    code, rows = compiled("--sample")
    assert code == 0, [row for row in rows if row["spills"]]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["arch"] for row in rows} == {"sm_80", "sm_89", "sm_90"}
    assert all(0 < row["registers"] <= 255 and not row["unsupported"] for row in rows)


def test_the_sample_names_every_kernel_and_type_once_and_what_no_device_lacks() -> None:
    chosen = [(variants()[index], arch) for index, arch in samples()]
    assert len(chosen) == len({(variant.kernel, variant.dtype) for variant in variants()})
    assert {variant.kernel for variant, _ in chosen} == KERNELS
    assert not any(why_unsupported(variant, arch) for variant, arch in chosen)


def test_the_table_has_a_line_for_each_kernel_and_type() -> None:
    def row(arch: int, dtype: str, **needs: object) -> Compiled:
        return Compiled(kernel="attend", dtype=dtype, head_dim=64, block="16x64", arch=f"sm_{arch}", **needs)

    rows = [row(arch, "bf16", registers=arch, shared_bytes=2048) for arch in ARCHES]
    rows += [row(80, "fp8", unsupported="sm_80 has no fp8 e4m3"), row(89, "fp8", registers=9, spills=8)]
    assert table(rows).splitlines()[2:] == [
        "| attend | bf16 | 1 | 80 / 2 | 89 / 2 | 90 / 2 |",
        "| attend | fp8 | 1 | no fp8 | 9 / 0, 8 B spilled | no fp8 |",
    ]
    assert [one.fits for one in rows] == [True] * 4 + [False]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_variants_fit_their_architecture() -> None:
    code, rows = compiled()
    assert code == 0, [row for row in rows if row["spills"]]
    assert len(rows) == 3 * len(variants())
    assert {row["kernel"] for row in rows} == KERNELS
    lacking = [row for row in rows if row["unsupported"]]
    assert {(row["dtype"], row["arch"]) for row in lacking} == {("fp8", "sm_80")}
