"""A step: what it computes so far while it is planned, and what it computes for each sequence once it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.sequence import Sequence
from engine.sched.budget import StepBudget
from engine.sched.plan import Chunk


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

    budget: StepBudget
    chunks: list[Chunk] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
