"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. `computed_tokens` counts all work, `recomputed_tokens` the share lost to preemption.
    `drafted_tokens` were computed on trial, in as many windows as `verifications`; `accepted_tokens` were right."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    shortages: int = 0
    read_blocks: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
