"""Every variant of every GPU kernel, compiled ahead of time without a GPU."""

import json
import os
import subprocess
import sys

import pytest


def compiled(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code and rows of the command, in a process that doesn't interpret kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.gpu.compile", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_one_kernel_on_all_architectures() -> None:
    code, rows = compiled("--kernel", "merge")
    assert code == 0
    assert {row["arch"] for row in rows} == {"sm_80", "sm_89", "sm_90"}
    assert {row["kernel"] for row in rows} == {"merge"}
    assert all(0 < row["registers"] <= 255 and not row["spills"] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_variants_fit_their_architecture() -> None:
    code, rows = compiled()
    assert code == 0, [row for row in rows if row["spills"]]
    assert len({row["kernel"] for row in rows}) >= 9
    assert {row["arch"] for row in rows if row["dtype"] == "fp8"} == {"sm_89", "sm_90"}
