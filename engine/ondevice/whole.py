"""Whole engines on a random model: how long a workload takes from the first request to the last answer."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import override
from engine.kernels.gpu.tier import GpuKernels
from engine.ondevice.llama import LLAMA_8B, TOY, random_model
from engine.ondevice.loads import Load
from engine.ondevice.place import Place
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner

_WARM_TOKENS = 64  # of a prompt's own, and
_WARM_OUTPUT = 4  # of an answer, in the run that compiles kernels and records sizes before the clock starts


class Whole:
    """One model in one format; the weights stay while workloads come and go. `num_layers`, `num_blocks`: of a smaller
    one, which needs the same kernels."""

    def __init__(
        self,
        place: Place,
        weights: str,
        kv: str,
        *,
        num_layers: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        model = TOY if place.is_toy else LLAMA_8B
        model = replace(model, num_layers=num_layers or model.num_layers)
        if place.is_toy:
            kv = "float32" if kv == "bf16" else kv
        self._place = place
        self._config = EngineConfig(
            model="",
            weight_format=weights,
            kv_format=kv,
            num_blocks=64 if place.is_toy else num_blocks,
            step_tokens=64 if place.is_toy else 8192,
            max_running=512,
            device="cpu" if place.is_toy else "cuda",
            overlap=True,
            spec="off",
        )
        kernels = None
        if place.is_toy:
            kernels = GpuKernels(
                model,
                weight_format=weights,
                kv_format=kv,
                block_tokens=16,
                device=torch.device("cpu"),
                dtype=place.dtype,
            )
        with override(kernels) if kernels is not None else nullcontext():
            self._runner = ModelRunner(self._config, loaded=random_model(model, group=32 if place.is_toy else 128))
        self._turn = 0

    def run(self, load: Load, *, plans: bool = True) -> float:
        """Seconds. Not `plans`, behind such a run: each sequence computes and reads its own copy of what they share."""
        if plans and not self._place.is_toy:
            self.warm(load)
        return self._timed(load, plans=plans)

    def warm(self, load: Load) -> None:
        """Runs every kernel that the load needs: as many sequences, of short prompts and answers."""
        shared = min(load.shared, 256)
        prompt, output = shared + min(load.prompt - load.shared, _WARM_TOKENS), min(load.output, _WARM_OUTPUT)
        self._timed(replace(load, prompt=prompt, output=output, shared=shared), plans=True)

    def _timed(self, load: Load, *, plans: bool) -> float:
        self._turn += 1
        config = self._config if plans else replace(self._config, prefix_cache=False)
        engine = Engine(config, runner=self._runner)
        params = SamplingParams(max_tokens=load.output, temperature=0.0, ignore_eos=True)
        random = torch.Generator().manual_seed(self._turn)
        tokens = torch.randint(3, self._runner.vocab_size, (load.count, load.prompt), generator=random)
        tokens[:, : load.shared] = tokens[0, : load.shared]
        requests = [Request(id=f"{i}", prompt_ids=ids, params=params) for i, ids in enumerate(tokens.tolist())]
        self._place.wait()
        start = time.perf_counter()
        ended = sum(len(done.token_ids) for done in engine.run(requests))
        self._place.wait()
        assert ended == load.count * load.output, "every sequence gave all of its tokens"
        return time.perf_counter() - start
