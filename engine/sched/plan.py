"""All that passes from the scheduler to the runner and back: plain picklable data, no torch.

A step is a list of chunks. A chunk is a slice of one sequence whose KV is computed in this step; decoding is a
chunk of one token. Row r of a chunk is token `start + r` of its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.sequence import PLACEHOLDER as PLACEHOLDER
from engine.request import Pooling, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One sequence's share of a step.

    `token_ids` [n]       input ids, PLACEHOLDER where the runner knows the id and the scheduler doesn't yet;
                          the last `num_draft` of them are draft tokens
    `start`               position of the first of them in the sequence; KV for [0, start) exists
    `block_ids` [m]       KV blocks of the sequence, covering positions [0, start + n)
    `logit_rows`          rows of this chunk (0-based) whose logits are wanted; () while a prompt is unfinished
    `pooling`             the result is a vector: `logit_rows` are the rows whose states are pooled, nothing is sampled
    `num_draft`           with k of them k + 1 rows are sampled: the last token before the draft, and each of the draft
    `sample_position`     absolute position of the first sampled token (start + logit_rows[0] + 1): the
                          randomness key, the same whatever the batch
    `history`             all tokens of the sequence before `start`, where penalties need them; else ()
    """

    seq_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    logit_rows: tuple[int, ...]
    params: SamplingParams
    num_prompt_tokens: int
    choice: int = 0
    num_draft: int = 0
    pooling: Pooling | None = None
    history: tuple[int, ...] = ()

    @property
    def draft(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_draft :]

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token, and a draft behind it, to sample what comes next."""
        return len(self.token_ids) == 1 + self.num_draft and bool(self.logit_rows) and self.pooling is None

    @property
    def sample_position(self) -> int:
        return self.start + (self.logit_rows[0] if self.logit_rows else len(self.token_ids) - 1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy-on-write: the runner copies block `source` to block `target` in all layers before the step."""

    source: int
    target: int


TokenMasks = Mapping[str, NDArray[np.int32]]
"""By sequence id, which tokens may come in each sampled row: bit t, in little-endian words [rows, words], says it of
token t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. The runner is a function of this and of its KV pool alone, so other ranks can run it too.

    The order inside a step: freed blocks are poisoned, copies run in their order, then KV is written and read.
    `freed_blocks` lists blocks whose content died since the last plan (a pool in poison mode overwrites them with
    NaN); they may be in use again, but none is the source or the target of a copy.
    `masks` are those of sampled answers that have a form.
    """

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    freed_blocks: tuple[int, ...] = ()
    masks: TokenMasks = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class LastState(NamedTuple):
    """The row of which the newest token of a sequence was sampled, after the last norm: float32 [hidden]. With that
    token the sequence has `num_tokens`."""

    num_tokens: int
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled ids of a step: for each sequence id one, and one more for each right token of its draft; or the reason
    why there is none, or none behind these. `codes` are the codes of reasons other than logits that are no numbers.
    `logprobs` are those of the sampled ids, where they were asked for. `pooled` has the sum of the wanted rows' states
    (float32) of those whose result is a vector. `states` are there if the runner was asked to keep them."""

    sampled: dict[str, tuple[int, ...]]
    failed: dict[str, str]
    codes: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    states: dict[str, LastState] = field(default_factory=dict)
