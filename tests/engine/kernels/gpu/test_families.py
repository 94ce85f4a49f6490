"""Whole models of every family on the GPU path, in the interpreter: plain torch's logits and tokens in float32.

Windows, biases, norms of heads and behind, soft caps, GeGLU, heads that are wider than the model, odd group sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.kernels import override
from engine.kernels.torch_tier import TorchKernels
from engine.load.weights import open_model
from engine.request import Request
from tests.engine.kernels.gpu.test_engine import DRAWN, GREEDY, Recording, answers
from tests.engine.stepping import Stepper, make_runner
from tests.families import gemma3, make_family, mistral, qwen2, qwen3

FORMATS = {"weight_format": "float32", "kv_format": "float32"}
FAMILIES: dict[str, Callable[[], Any]] = {
    "mistral": mistral,
    "qwen2": lambda: qwen2(num_attention_heads=6, num_key_value_heads=2, hidden_size=96),
    "qwen3": qwen3,
    "gemma3": lambda: gemma3(num_key_value_heads=1),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    """Of a text longer than a window, in chunks, beside one of a single token."""
    path = make_family(tmp_path / "m", FAMILIES[name]())
    model, _ = open_model(path)
    prompts, found = [list(range(3, 50)), [7]], []
    for kernels in (Recording(model, **FORMATS, block_tokens=16), TorchKernels(model, **FORMATS, block_tokens=16)):
        with override(kernels):
            runner = make_runner(path, **FORMATS)
        found.append(torch.cat(Stepper(runner, prompts).logits([33, 1, 14])))
    assert found[1].std() > 1, "logits this flat would agree by chance"
    assert (found[0] - found[1]).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_engines_answer_the_same(name: str, tmp_path: Path) -> None:
    """Shared prefixes, decodes behind a window, steps ahead of what is read, some replayed."""
    path = make_family(tmp_path / "m", FAMILIES[name]())
    model, _ = open_model(path)
    config = EngineConfig(
        model=str(path), **FORMATS, num_blocks=40, step_tokens=48, threads=1, overlap=True, spec="off", device="cpu"
    )
    shared = [(7 * i + 3) % 380 + 3 for i in range(66)]
    params = [replace(GREEDY, max_tokens=4), replace(DRAWN, max_tokens=4)]
    requests = [Request(id=f"{i}", prompt_ids=[*shared, 9 + i], params=params[i % 2]) for i in range(3)]
    gpu = Recording(model, **FORMATS, block_tokens=16)
    assert answers(gpu, config, requests) == answers(TorchKernels(model, **FORMATS, block_tokens=16), config, requests)
    assert sum(graph.replays for graph in gpu.recorded), "steps of decodes were replayed"
