"""A runner whose memory is plain Python: it shows at once when a block is reused, copied or read wrongly.

Memory maps (block, offset) to the token whose KV would lie there. A sampled token is a function of what the chunk
reads through its block table, as in a real model, so a wrong block changes the answer; `answer` is the same function
without any paging. Reading a position that was never written, or was freed, fails on the spot.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.request import FinishReason, Lane, Request, SamplingParams
from engine.sched.plan import PLACEHOLDER, Chunk, LastState, StepPlan, StepResult
from engine.spec.verify import verified

VOCAB = 50
EOS = 0
POISON = -7


def next_token(history: Sequence[int], params: SamplingParams) -> int:
    """Depends on every token before it, on the seed and on nothing else; about one in 16 is EOS."""
    digest = zlib.crc32(repr((tuple(history), params.seed)).encode())
    return EOS if digest % 16 == 0 else 1 + digest // 16 % (VOCAB - 1)


def answer(request: Request, context_tokens: int = 10**9) -> tuple[list[int], FinishReason]:
    """What a request must produce, computed without engine, batch or cache."""
    tokens, params = list(request.prompt_ids), request.params
    while True:
        tokens.append(next_token(tokens, params))
        outputs = tokens[len(request.prompt_ids) :]
        if tokens[-1] == EOS and not params.ignore_eos and len(outputs) > params.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(tokens) >= context_tokens:
            return outputs, FinishReason.LENGTH


def request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, *, salt: str = "", lane: int = Lane.BATCH, **params: Any
) -> Request:
    return Request(
        id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
        salt=salt,
        lane=lane,
    )


@dataclass
class OracleRunner:
    """Executes plans in the order they were made. `fail_at` names requests whose row turns NaN at a position. A kept
    state is the list of the tokens that it comes of."""

    block_tokens: int
    num_blocks: int
    context_tokens: int = 10**9
    vocab_size: int = VOCAB
    eos_ids: frozenset[int] = frozenset({EOS})
    layout_id: str = "oracle"
    digest: str = "model"
    sample: Callable[[list[int], Chunk], int] = lambda history, chunk: next_token(history, chunk.params)
    fail_at: dict[str, int] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    last_sampled: dict[str, int] = field(default_factory=dict)
    last_step: int = -1
    keeps_states: bool = False
    max_step_tokens: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1, "steps are executed in order"
        assert plan.chunks, "a step computes something"
        self.last_step = plan.step
        self.max_step_tokens = max(self.max_step_tokens, plan.num_tokens)
        size = self.block_tokens
        copied = {block for copy in plan.copies for block in (copy.source, copy.target)}
        assert not copied & set(plan.freed_blocks)
        for block in plan.freed_blocks:
            for offset in range(size):
                self.memory[block, offset] = POISON
        read = {(copy, o): self.memory.get((copy.source, o), POISON) for copy in plan.copies for o in range(size)}
        for (copy, offset), token in read.items():
            self.memory[copy.target, offset] = token

        ids = {chunk.seq_id: self._resolve(chunk.seq_id, chunk.token_ids) for chunk in plan.chunks}
        assert len(ids) == len(plan.chunks), "one chunk a sequence"
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            assert len(chunk.block_ids) == -(-end // size), "a table covers exactly the chunk's positions"
            assert len(set(chunk.block_ids)) == len(chunk.block_ids)
            assert all(0 <= block < self.num_blocks for block in chunk.block_ids)
            for position, token in enumerate(ids[chunk.seq_id], chunk.start):
                slot = (chunk.block_ids[position // size], position % size)
                assert slot not in written, "two sequences write the same slot"
                written.add(slot)
                self.memory[slot] = token

        asked: list[tuple[list[int], Chunk]] = []
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            history = [self.memory.get((chunk.block_ids[p // size], p % size), POISON) for p in range(end)]
            assert POISON not in history, f"{chunk.seq_id} reads a block that was freed or never written"
            assert history[chunk.start :] == ids[chunk.seq_id]
            asked += [(history[: chunk.start + row + 1], chunk) for row in chunk.logit_rows]
        drawn, read = iter(self.sample_all(asked)), iter(asked)
        sampled: dict[str, tuple[int, ...]] = {}
        states: dict[str, LastState] = {}
        failed: dict[str, str] = {}
        for chunk in [chunk for chunk in plan.chunks if chunk.logit_rows]:
            known = self.verify(chunk.draft, [next(drawn) for _ in chunk.logit_rows])
            histories = [next(read)[0] for _ in chunk.logit_rows]
            if known:
                sampled[chunk.seq_id] = known
                last = histories[len(known) - 1]
                states[chunk.seq_id] = LastState(len(last) + 1, np.array(last, np.float32))
            else:
                failed[chunk.seq_id] = "the logits are not finite"
        self.last_sampled = {name: tokens[-1] for name, tokens in sampled.items()}
        # a failed row leaves NaN behind; what is computed from it is thrown away when the failure is read
        self.last_sampled |= dict.fromkeys(failed, EOS)
        return StepResult(sampled, failed, states=states if self.keeps_states else {})

    def sample_all(self, asked: Sequence[tuple[list[int], Chunk]]) -> list[int | None]:
        """The tokens of a step's rows: what each reads, and of which chunk it is."""
        return [
            None if self.fail_at.get(chunk.seq_id) == len(history) else self.sample(history, chunk)
            for history, chunk in asked
        ]

    def verify(self, draft: Sequence[int], sampled: Sequence[int | None]) -> tuple[int, ...]:
        return verified(draft, sampled)

    def _resolve(self, seq_id: str, token_ids: Sequence[int]) -> list[int]:
        return [self.last_sampled[seq_id] if token == PLACEHOLDER else token for token in token_ids]
