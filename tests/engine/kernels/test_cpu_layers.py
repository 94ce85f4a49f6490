"""All layers in one call give what the verbs give one by one, bit for bit, in the logits and in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.build import library
from engine.quant.__main__ import quantize
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

PROMPTS = ([7] * 40 + list(range(5, 45)), list(range(90, 110)), [3])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)


def run(
    model: Path, weight_format: str, kv_format: str, sizes: tuple[int, ...] = (16, 1, 33)
) -> tuple[list[torch.Tensor], torch.Tensor]:
    runner = make_runner(model, weight_format=weight_format, kv_format=kv_format, num_blocks=16, threads=2)
    logits = Stepper(runner, PROMPTS).logits(sizes)
    caches = [cache.view(torch.uint8).flatten() for index in range(2) for cache in runner.pool.layer(index)]
    return logits, torch.cat(caches)


@pytest.mark.parametrize("weight_format", ["int8", "bf16"])
@pytest.mark.parametrize("kv_format", ["int8", "bf16"])
def test_one_call_is_verb_by_verb(
    model: Path, weight_format: str, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(model, weight_format, kv_format, monkeypatch)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_few_rows_of_weights_in_groups_go_in_one_call_too(
    model: Path, tmp_path: Path, bits: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "grouped"
    quantize(str(model), target, method="rtn", bits=bits, group=64, layout="compressed-tensors", symmetric=symmetric)
    compare(target, f"w{bits}a16", "int8", monkeypatch, (7, 1, 8))


def compare(
    model: Path,
    weight_format: str,
    kv_format: str,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...] = (16, 1, 33),
) -> None:
    results = []
    in_one_call = CpuKernels.run_layers

    def watched(self: CpuKernels, *args: Any) -> bool:
        results.append(in_one_call(self, *args))
        return results[-1]

    monkeypatch.setattr(CpuKernels, "run_layers", watched)
    logits, caches = run(model, weight_format, kv_format, sizes)
    assert results and set(results) == {bool(library().has_tiles())}, "one call wherever the processor has tiles"
    monkeypatch.setattr(CpuKernels, "run_layers", lambda *_: False)
    expected, expected_caches = run(model, weight_format, kv_format, sizes)
    assert all(torch.equal(got, want) for got, want in zip(logits, expected, strict=True))
    assert torch.equal(caches, expected_caches)
