"""Drives a ModelRunner by hand, without a scheduler: every chunk size, block order and mix is the test's choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import Chunk, StepPlan

GREEDY = SamplingParams(max_tokens=64, temperature=0)


def make_runner(model: Path, **changes: object) -> ModelRunner:
    settings = {"weight_format": "float32", "kv_format": "float32", "num_blocks": 256, "threads": 1, **changes}
    return ModelRunner(EngineConfig(model=str(model), **settings))


class Stepper:
    """Several sequences on one runner, each with blocks of its own in random order."""

    def __init__(self, runner: ModelRunner, prompts: Sequence[Sequence[int]], *, room: int = 0, seed: int = 0) -> None:
        self.runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_prompt = [len(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(free)
        size = runner.pool.block_tokens
        self.blocks = [tuple(free.pop() for _ in range(-(-(len(p) + room) // size))) for p in prompts]
        self.unused = tuple(free)

    def chunk(self, index: int, size: int, *, params: SamplingParams = GREEDY, all_rows: bool = False) -> Chunk:
        """The next `size` tokens of sequence `index`; logits of the last row if it ends the sequence, or of all."""
        start = self.computed[index]
        ids = tuple(self.tokens[index][start : start + size])
        self.computed[index] += len(ids)
        is_last = self.computed[index] == len(self.tokens[index])
        rows = tuple(range(len(ids))) if all_rows else (len(ids) - 1,) if is_last else ()
        return Chunk(
            seq_id=str(index),
            token_ids=ids,
            start=start,
            block_ids=self.blocks[index],
            logit_rows=rows,
            params=params,
            num_prompt_tokens=self.num_prompt[index],
        )

    def logits(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Logits of every position of every sequence, all advancing together in chunks of `sizes`, reused in turn."""
        found: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        turn = 0
        while any(done < len(tokens) for done, tokens in zip(self.computed, self.tokens, strict=True)):
            chunks = []
            for index, tokens in enumerate(self.tokens):
                if self.computed[index] < len(tokens):
                    chunks.append(self.chunk(index, sizes[turn % len(sizes)], all_rows=True))
                    turn += 1
            logits = self.runner.logits(StepPlan(step=0, chunks=tuple(chunks)))
            for chunk, part in zip(chunks, logits.split([len(c.token_ids) for c in chunks]), strict=True):
                found[int(chunk.seq_id)].append(part)
        return [torch.cat(parts) for parts in found]

    def generate(self, num_tokens: int, *, params: SamplingParams = GREEDY, chunk: int = 512) -> list[list[int]]:
        """Prefills in chunks while earlier sequences decode already; the sampled tokens of each sequence."""
        while any(len(t) < n + num_tokens for t, n in zip(self.tokens, self.num_prompt, strict=True)):
            chunks = [
                self.chunk(index, chunk, params=params)
                for index, tokens in enumerate(self.tokens)
                if len(tokens) < self.num_prompt[index] + num_tokens
            ]
            result = self.runner.execute(StepPlan(step=0, chunks=tuple(chunks)))
            assert not result.failed, result.failed
            for name, ids in result.sampled.items():
                self.tokens[int(name)] += ids
        return [tokens[n:] for tokens, n in zip(self.tokens, self.num_prompt, strict=True)]
