"""A whole model on the GPU path, in the interpreter: the same tokens as in plain torch, step by step."""

from pathlib import Path

import pytest
import torch

from engine.kernels import override
from engine.kernels.gpu.tier import GpuKernels
from tests.engine.stepping import Stepper, make_runner

PROMPTS = [[5, 6, 7], list(range(10, 50)), [5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_same_tokens_as_plain_torch(tiny_model: Path, weights: str) -> None:
    plain = make_runner(tiny_model, weight_format=weights)
    config = plain.model_config
    gpu = GpuKernels(
        config,
        weight_format=weights,
        kv_format="float32",
        block_tokens=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    wanted = Stepper(plain, PROMPTS, room=8).generate(4)
    with override(gpu):
        runner = make_runner(tiny_model, weight_format=weights)
    assert runner.kernels is gpu
    assert Stepper(runner, PROMPTS, room=8).generate(4) == wanted
