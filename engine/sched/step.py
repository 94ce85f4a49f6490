"""A step: what it computes so far while it is planned, and what it computes for each sequence once it is in flight."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.sequence import Sequence
from engine.cache.tables import Copy
from engine.pooling import rows_wanted
from engine.sched.budget import StepBudget
from engine.sched.plan import BlockCopy, Chunk, StepPlan


class Share(NamedTuple):
    """What a step in flight computes for one sequence: KV up to `end_tokens`, as of its preemption count then."""

    seq: Sequence
    num_preemptions: int
    end_tokens: int
    samples: bool

    @property
    def is_current(self) -> bool:
        """Whether the sequence still has the blocks that it had then."""
        return self.num_preemptions == self.seq.num_preemptions


@dataclass(slots=True)
class Step:
    """While it is planned."""

    number: int
    budget: StepBudget
    chunks: list[Chunk] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    def add(self, seq: Sequence, num_tokens: int, draft: tuple[int, ...]) -> None:
        """Computes the next tokens of a sequence, which has the blocks for them, and a draft behind them."""
        num_rows = num_tokens + len(draft)
        start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
        token_ids = (*seq.tokens[start:end], *draft)
        samples = seq.advance(num_tokens)
        seq.num_drafted = len(draft)
        seq.last_step = self.number
        seq.num_steps += 1
        chunk = Chunk(
            seq_id=seq.id,
            token_ids=token_ids,
            start=start,
            block_ids=tuple(seq.block_ids),
            logit_rows=tuple(range(num_rows)) if draft else rows_wanted(seq.request, num_tokens, samples),
            num_draft=len(draft),
            params=seq.request.params,
            num_prompt_tokens=seq.num_prompt_tokens,
            choice=seq.request.choice,
            pooling=seq.request.pooling,
            history=tuple(seq.tokens[:start]) if samples and seq.request.params.has_penalties else (),
        )
        self.budget.spend(num_rows, start, is_decode=chunk.is_decode, is_interactive=seq.is_interactive)
        self.shares.append(Share(seq, seq.num_preemptions, end, samples))
        self.chunks.append(chunk)

    def plan(self, copies: tuple[Copy, ...], freed_blocks: Iterable[int], *, written: Set[int]) -> StepPlan:
        """What the runner is given. `written` are blocks that may be written already."""
        touched = {block for copy in copies for block in copy} | written
        return StepPlan(
            step=self.number,
            chunks=tuple(self.chunks),
            copies=tuple(BlockCopy(source=copy.source, target=copy.target) for copy in copies),
            freed_blocks=tuple(block for block in freed_blocks if block not in touched),
        )
