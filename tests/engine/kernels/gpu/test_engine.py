"""A whole engine on the GPU path, in the interpreter: plain torch's tokens in float32, its logits in other formats.

Prompts share a prefix (groups), decodes are cut into several pieces of keys (merged), steps overlap, and those that
only decode are recorded and replayed as CUDA graphs are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import Forward, override
from engine.kernels.gpu.graphs import DecodeGraphs
from engine.kernels.gpu.tier import GpuKernels
from engine.kernels.torch_tier import TorchKernels
from engine.load.weights import open_model
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from tests.engine.kernels.gpu.test_graphs import CPU, Replayed
from tests.engine.quant.test_quantize import run_quantize
from tests.engine.stepping import Stepper, make_runner

SHARED = [(7 * i + 3) % 380 + 3 for i in range(70)]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)
REQUESTS = [
    *(Request(id=f"s{i}", prompt_ids=[*SHARED, 9 + i, 30 + i], params=GREEDY) for i in range(3)),
    Request(id="own", prompt_ids=list(range(20, 61)), params=GREEDY),
    Request(id="short", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=5, temperature=0.0, min_tokens=4)),
]


class Recording(GpuKernels):
    """The GPU's tier as it is on a device of 24 processors, with graphs."""

    def __init__(self, *arguments: object, **formats: object) -> None:
        super().__init__(*arguments, **formats, device=CPU, dtype=torch.float32)
        self._processors = 24
        self.recorded: list[Replayed] = []

    def graphs(self, forward: Forward, most_rows: int) -> DecodeGraphs:
        def make() -> Replayed:
            self.recorded.append(Replayed())
            return self.recorded[-1]

        return DecodeGraphs(forward, self, most_rows, lambda: make)


class Float32(TorchKernels):
    """Plain torch whose activations are float32 in every format, as the interpreter needs them."""

    def __init__(self, *arguments: object, **formats: object) -> None:
        super().__init__(*arguments, **formats)
        self._dtype = torch.float32


def answers(kernels: TorchKernels | GpuKernels, config: EngineConfig, requests: list[Request]) -> list[tuple[int, ...]]:
    with override(kernels):
        runner = ModelRunner(config)
    assert runner.kernels is kernels
    return [done.token_ids for done in Engine(config, runner=runner).run(requests)]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", ["float32", "fp8"])
def test_same_tokens_as_plain_torch(tiny_model: Path, name: str) -> None:
    model, _ = open_model(tiny_model)
    formats = {"weight_format": name, "kv_format": name}
    config = EngineConfig(
        model=str(tiny_model), **formats, num_blocks=40, step_tokens=48, max_running=8, threads=1, overlap=True,
        spec="off", device="cpu",
    )  # fmt: skip
    gpu = Recording(model, **formats, block_tokens=16)
    plain = Float32(model, **formats, block_tokens=16)
    assert answers(gpu, config, REQUESTS) == answers(plain, config, REQUESTS)
    assert sum(graph.replays for graph in gpu.recorded), "steps of decodes were replayed"


@pytest.mark.parametrize(("weights", "kv"), [("int8", "int8"), ("fp8", "fp8"), ("w4a16", "float32")])
def test_same_logits_as_plain_torch(tmp_path: Path, tiny_model: Path, weights: str, kv: str) -> None:
    """In chunks, the second of which reads what the first one wrote. A value may round to the other side."""
    path = tiny_model
    if weights == "w4a16":
        path = tmp_path / "w4"
        run_quantize(tiny_model, path, symmetric=False)
    model, _ = open_model(path)
    formats = {"weight_format": weights, "kv_format": kv}
    found = []
    for kernels in (Recording(model, **formats, block_tokens=16), Float32(model, **formats, block_tokens=16)):
        with override(kernels):
            runner = make_runner(path, **formats)
        found.append(Stepper(runner, [list(range(5, 25))]).logits([12])[0])
    assert (found[0] - found[1]).abs().mean() < 1e-2


def test_draws_are_those_of_the_definition_while_no_boundary_is_near(tiny_model: Path) -> None:
    """Drawn on the device in float32, on the host in float64, from the same numbers. With filters the host goes through
    candidates by their probability and the device by their ids, so that draws differ there."""
    model, _ = open_model(tiny_model)
    formats = {"weight_format": "float32", "kv_format": "float32"}
    config = EngineConfig(model=str(tiny_model), **formats, num_blocks=40, threads=1, device="cpu")
    requests = [Request(id=f"d{i}", prompt_ids=[5 + i, 6, 7], params=DRAWN) for i in range(2)]
    gpu, plain = Recording(model, **formats, block_tokens=16), Float32(model, **formats, block_tokens=16)
    assert answers(gpu, config, requests) == answers(plain, config, requests)
