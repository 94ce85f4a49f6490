"""`.ci/gpu` from end to end where there is no GPU: it says that it is a toy, checks and measures everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ondevice.crew import Clock
from engine.ondevice.loads import FORMATS, SHARED, TOY_LOADS, Load
from engine.ondevice.place import TOY_NOTE

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> tuple[int, list[str]]:
    env = {**os.environ, "PYTHON": sys.executable, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([str(ROOT / ".ci" / "gpu"), *arguments], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_correct_checks_every_kernel_and_a_whole_engine(tmp_path: Path) -> None:
    code, lines = run("correct", "--toy", "--json", str(tmp_path / "found"), "--limit-s", "600")
    assert code == 0, lines
    assert lines[0] == TOY_NOTE
    assert all(line.startswith("right") for line in lines[2:-1]), lines
    kept = json.loads((tmp_path / "found").read_text())
    assert kept["is_right"] and len(kept["checks"]) == len(lines) - 3
    for kernel in ("attend", "store_qkv", "multiply,", "multiply_groups", "silu_mul", "norm_rows", "best", "sample"):
        assert any(kernel in line for line in lines), kernel
    assert "0 failed" in lines[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_speed_measures_kernels_engines_and_the_peer(tmp_path: Path) -> None:
    code, lines = run("speed", "--toy", "--json", str(tmp_path / "found"), "--limit-s", "600")
    assert code == 0, lines
    assert lines[0] == TOY_NOTE
    text = "\n".join(lines)
    for label in FORMATS:
        assert sum(line.startswith(f"{label} ") for line in lines) >= len(TOY_LOADS), label
    assert "unplanned" in text and "transformers" in text
    assert "the time is up" not in text
    kept = json.loads((tmp_path / "found").read_text())
    assert {one["format"] for one in kept["engines"]} >= set(FORMATS)
    assert len(kept["aims"]) == 5 and kept["rates"]["copy_bytes"] > 0


def test_what_does_not_fit_into_the_time_is_not_begun() -> None:
    assert Clock(None).has(1e9)
    assert Clock(100).has(50) and not Clock(100).has(150)
    assert SHARED.name == "2048 shared + 64 in / 128 out, 512 sequences"
    assert Load(10, 3, 2).tokens == 6


def test_an_unknown_word_is_usage() -> None:
    assert run("fast")[0] == 2
