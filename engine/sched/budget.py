"""The arithmetic of one scheduling round: what is left of the step, and the KV blocks that the future will ask for.

A request is admitted while the predicted peak fits the pool. Sort sequences by the tokens they still write,
r₁ ≥ r₂ ≥ …. When sequence i ends, after rᵢ more steps, sequences 1 … i are left and each has grown by rᵢ, so the
private tokens are Σ_{j≤i} cⱼ + i·rᵢ; the peak is the largest of these sums in whole blocks, plus the blocks that
several share.

How much a request will still write is a guess: engine/sched/forecast.py learns it from siblings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.request import SamplingParams
from engine.sched.costs import GUESS, Costs, decode_work, prompt_work

_LEAST_TOKENS = 16  # of a prompt, in a step that would be empty without them
_LEAST_BESIDE = 4  # of a prompt whose turn it is, in a step that others have filled


@dataclass(slots=True)
class StepBudget:
    """Tokens that may still be computed in the step being planned, and the seconds that they may take.

    Interactive work comes first, and may exceed the seconds: all that decode, and prompts by `prompt_s`, which is kept
    for them, the first of them by a few tokens at least. If a part of a prompt is left over, batch work gets nothing.
    Batch work keeps to what remains, but for a step that would be empty without it, or in which it is due: then it gets
    the next token of one sequence, or a few of a prompt.
    """

    tokens: int
    seconds: float = math.inf
    prompt_s: float = 0.0
    costs: Costs = GUESS
    spent_tokens: int = 0
    is_closed: bool = False  # to batch work
    is_due: bool = False  # batch work, which had nothing for a while
    has_prompt: bool = False  # tokens of an interactive prompt are computed
    batch_tokens: int = 0  # of `spent_tokens`

    @property
    def is_bounded(self) -> bool:
        """Whether seconds count."""
        return self.seconds < math.inf

    def takes_decode(self, start: int, *, is_interactive: bool) -> bool:
        """Whether the next token of a sequence may be computed, behind `start` others."""
        if not self.tokens:
            return False
        if is_interactive or self._owes_batch:
            return True
        if self.is_closed:
            return False
        if not self.is_bounded or not self.spent_tokens:
            return True
        return self.costs.of(decode_work(start)) <= self.seconds

    def chunk_tokens(self, start: int, wanted: int, *, is_interactive: bool) -> int:
        """How many of the `wanted` next tokens of a prompt may be computed, behind `start` others."""
        has_turn = not self.has_prompt if is_interactive else self._owes_batch
        if self.is_closed and not is_interactive and not has_turn:
            return 0
        most = min(wanted, self.tokens)
        if self.is_bounded:
            seconds = max(self.seconds, self.prompt_s) if is_interactive else self.seconds
            least = (_LEAST_BESIDE if has_turn else 0) if self.spent_tokens else _LEAST_TOKENS
            most = min(most, max(self.costs.prompt_tokens(start, seconds), least))
        if is_interactive and most < wanted:
            self.is_closed = True
        return most

    def spend(self, tokens: int, start: int = 0, *, is_decode: bool = False, is_interactive: bool = False) -> None:
        """So many tokens of a sequence are computed, behind `start` others."""
        assert 0 < tokens <= self.tokens, f"{tokens} tokens of a budget of {self.tokens}"
        self.tokens -= tokens
        self.spent_tokens += tokens
        if not is_interactive:
            self.batch_tokens += tokens
        elif not is_decode:
            self.has_prompt = True
        if not self.is_bounded:
            return
        seconds = self.costs.of((decode_work if is_decode else prompt_work)(start, tokens))
        self.seconds -= seconds
        if not is_decode:
            self.prompt_s -= seconds

    @property
    def _owes_batch(self) -> bool:
        return self.is_due and not self.batch_tokens


class Load(NamedTuple):
    """What one sequence asks of the pool: tokens in blocks of its own now, and tokens it is expected to add."""

    private_tokens: int
    growth_tokens: int


def predicted_peak_blocks(loads: Iterable[Load], block_tokens: int) -> int:
    """Most private blocks in use at once, if all sequences grow by one token a step.

    Blocks are counted exactly: with r = k·B + ρ and c = q·B + s, ⌈(c + r) / B⌉ is q + k + 1, one more where
    s + ρ > B and one less where both are 0; so the ends s are counted by value, in O(B) a sequence.
    """
    ends = [0] * block_tokens  # how many sequences so far have how many tokens in their last block
    whole_blocks = peak_blocks = 0
    for count, load in enumerate(sorted(loads, key=lambda load: -load.growth_tokens), 1):
        whole_blocks += load.private_tokens // block_tokens
        ends[load.private_tokens % block_tokens] += 1
        grown_blocks, rest = divmod(load.growth_tokens, block_tokens)
        opened = count - ends[0] if rest == 0 else count + sum(ends[block_tokens - rest + 1 :])
        peak_blocks = max(peak_blocks, whole_blocks + count * grown_blocks + opened)
    return peak_blocks


def too_large(prompt_tokens: int, max_outputs: int, held_tokens: int) -> str:
    """Says that a request can never fit the pool."""
    return (
        f"The request needs more KV cache than there is: {prompt_tokens} prompt tokens and up to {max_outputs} output "
        f"tokens against {held_tokens}; shorten it or give the engine more memory for KV."
    )


def is_known(params: SamplingParams) -> bool:
    """Whether only `max_tokens` can end the answer, so that its length is known."""
    return params.max_tokens == 1 or (params.ignore_eos and not params.stop and not params.stop_token_ids)


def least_outputs(params: SamplingParams, max_outputs: int) -> int:
    """Tokens that the request is certain to produce."""
    return max_outputs if is_known(params) else min(max(params.min_tokens, 1), max_outputs)
