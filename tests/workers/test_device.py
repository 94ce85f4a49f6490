"""A GPU that fails in the middle of a batch: its worker says so and ends with a code of its own, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchsvc.batches.lifecycle import Status
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import override
from engine.kernels.torch_tier import TorchKernels
from engine.load.weights import open_model
from tests.workers.conftest import World
from tests.workers.test_engine_run import completed, finalized, until, worker
from workers.exits import WorkerExit


class FailingKernels(TorchKernels):
    """Plain torch, until a kernel reads where it mustn't."""

    calls_left = 9

    def attend(self, *arguments: Any, **more: Any) -> Tensor:
        self.calls_left -= 1
        if self.calls_left <= 0:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_")
        return super().attend(*arguments, **more)


def engine_of(model: Path, kernels: Callable[[], TorchKernels]) -> Engine:
    config = EngineConfig(
        model=str(model), weight_format="float32", kv_format="float32", num_blocks=64, max_running=4, device="cpu"
    )
    with override(kernels()):
        return Engine(config)


def test_a_cuda_error_in_mid_batch(sqlite_world: World, tiny: tuple[Path, str]) -> None:
    world, (path, _) = sqlite_world, tiny
    batch_id = world.add_batch(num_lines=16, unit_lines=4, max_tokens=6)
    config, _ = open_model(path)
    formats = {"weight_format": "float32", "kv_format": "float32", "block_tokens": 16}
    with worker(world, engine_of(path, lambda: FailingKernels(config, **formats))) as run:
        until(lambda: run.failure is not None, "the engine fails")
    assert run.failure == (
        "The engine worker stopped: The GPU failed in the middle of a step: "
        "CUDA error: an illegal memory access was encountered."
    )
    assert run.exit_code is WorkerExit.DEVICE
    assert not completed(world, batch_id)()
    assert all(unit.state != "leased" for unit in world.units(batch_id)), "its units are free"
    with worker(world, engine_of(path, lambda: TorchKernels(config, **formats)), name="other"):
        until(completed(world, batch_id), "another worker takes them over")
    finalized(world, batch_id, Status.COMPLETED)
