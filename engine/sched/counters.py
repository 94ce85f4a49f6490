"""What a scheduler counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request import Lane


@dataclass(slots=True)
class LaneCounters:
    """Totals of one lane since the start, but for `open` and `running`, which are sequences of now."""

    open: int = 0
    running: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0

    @property
    def waiting(self) -> int:
        return self.open - self.running


@dataclass(slots=True)
class Counters:
    """Totals since the start. `computed_tokens` counts all work, `recomputed_tokens` the share lost to preemption.
    `drafted_tokens` were computed on trial, in as many windows as `verifications`; `accepted_tokens` were right."""

    steps: int = 0
    chunks: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    shortages: int = 0
    read_blocks: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    lanes: dict[Lane, LaneCounters] = field(default_factory=lambda: {lane: LaneCounters() for lane in Lane})

    @property
    def prompt_tokens(self) -> int:
        return self._total(lambda lane: lane.prompt_tokens)

    @property
    def hit_tokens(self) -> int:
        return self._total(lambda lane: lane.hit_tokens)

    @property
    def computed_tokens(self) -> int:
        return self._total(lambda lane: lane.computed_tokens)

    @property
    def output_tokens(self) -> int:
        return self._total(lambda lane: lane.output_tokens)

    def _total(self, count: Callable[[LaneCounters], int]) -> int:
        return sum(map(count, self.lanes.values()))
