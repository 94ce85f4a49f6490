"""Whole engines that draw on the device: ahead of what is read, with drafts and under forms the answers stay the same.

The model runs on the CPU in int8, whose sums don't depend on what else a step computes; only the ids are chosen by the
GPU's kernel, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import override
from engine.kernels.cpu import CpuKernels
from engine.kernels.gpu import sampling
from engine.load.weights import open_model
from engine.request import Completion, Request, SamplingParams
from engine.runner import ModelRunner
from engine.spec.speculation import Speculation
from engine.structure.grammar import spec_of
from engine.text import load_text
from tests.engine.spec.test_lossless import Recorded
from tests.tiny import make_tiny_model

FORMATS = {"weight_format": "int8", "kv_format": "int8"}
PLAIN = SamplingParams(max_tokens=9, temperature=0.9, seed=5, ignore_eos=True)
REQUESTS = [
    Request(id="greedy", prompt_ids=[9, 8, 7], params=replace(PLAIN, temperature=0.0)),
    Request(id="drawn", prompt_ids=list(range(20, 60)), params=PLAIN),
    Request(id="filtered", prompt_ids=[5], params=replace(PLAIN, top_k=20, top_p=0.9, min_p=0.01)),
    Request(id="late", prompt_ids=[4, 4], params=replace(PLAIN, ignore_eos=False, min_tokens=5)),
    Request(
        id="form", prompt_ids=[30, 31],
        params=replace(PLAIN, grammar=spec_of("regex", "([a-c] ){2,5}end"), ignore_eos=False, max_tokens=12),
    ),
    Request(id="penalties", prompt_ids=[6, 7], params=replace(PLAIN, frequency_penalty=0.5)),
]  # fmt: skip


class Drawing(CpuKernels):
    draws = True
    drawn = 0

    def draw(self, logits: Tensor, numbers: Tensor, top_ks: Tensor, allowed: Tensor | None) -> Tensor:
        self.drawn += len(logits)
        ids = torch.empty(len(logits), dtype=torch.int64)
        masks = torch.zeros(1, 1, dtype=torch.int32) if allowed is None else allowed
        sampling.sample_rows[(len(logits),)](
            logits, masks, ids, numbers, top_ks, logits.shape[1], 0 if allowed is None else len(masks), masks.shape[1],
            SIZE=512,
        )  # fmt: skip
        return ids


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_do_not_depend_on_what_is_ahead_or_proposed(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", hidden=128, mlp=192, heads=4, kv_heads=2)
    (model, _), text = open_model(path), load_text(path)
    kernels = Drawing(model, **FORMATS, block_tokens=16, reproducible=True)
    plain = EngineConfig(model=str(path), **FORMATS, num_blocks=60, threads=1, device="cpu", spec="off", overlap=False)

    def run(speculation: Speculation | None = None, **changes: Any) -> list[Completion]:
        config = replace(plain, **changes)
        with override(kernels):
            runner = ModelRunner(config)
        return list(Engine(config, runner=runner, text=text, speculation=speculation).run(REQUESTS))

    def ids(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
        return {done.request_id: done.token_ids for done in completions}

    wanted = ids(run())
    assert kernels.drawn > 30 and all(len(found) >= 5 for found in wanted.values())
    assert ids(run(overlap=True, max_running=4)) == wanted
    answers = {name: [found] for name, found in wanted.items()}
    proposed = Speculation(Recorded(REQUESTS, 0.8, answers), is_gated=False)
    assert ids(run(proposed, overlap=True)) == wanted
