"""The arithmetic of one scheduling round: tokens left in the step, and the KV blocks that the future will ask for.

A request is admitted while the predicted peak fits the pool. Sort sequences by the tokens they still write,
r₁ ≥ r₂ ≥ …. When sequence i ends, after rᵢ more steps, sequences 1 … i are left and each has grown by rᵢ, so the
private tokens are Σ_{j≤i} cⱼ + i·rᵢ; the peak is the largest of these sums in whole blocks, plus the blocks that
several share.

How much a request will still write is a guess: `Forecast` learns it from those that ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.request import SamplingParams


@dataclass(slots=True)
class StepBudget:
    """Tokens that may still be computed in the step being planned."""

    tokens: int
    spent_tokens: int = 0

    def spend(self, tokens: int) -> None:
        assert 0 < tokens <= self.tokens, f"{tokens} tokens of a budget of {self.tokens}"
        self.tokens -= tokens
        self.spent_tokens += tokens


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


class Forecast:
    """Guesses how long answers get, and how much of the pool to keep back for wrong guesses.

    `share` follows the 90th percentile of output tokens ÷ max_tokens: a step up nine times as large as a step down
    comes to rest where nine of ten requests end below. `reserve` is the share of the pool kept free; a preemption
    that memory forced raises it at once, every finished request lets it sink.
    """

    _QUANTILE = 0.9
    _RATE = 0.05
    _MOST_RESERVE = 0.25

    def __init__(self) -> None:
        self.share = 0.5
        self.reserve = 0.0

    def output_tokens(self, params: SamplingParams, num_outputs: int, max_outputs: int) -> int:
        """Expected length of an answer that has `num_outputs` tokens and at most `max_outputs`."""
        if never_stops_early(params):
            return max_outputs
        outgrown = num_outputs + num_outputs // 4 + 16
        guess = max(math.ceil(self.share * params.max_tokens), params.min_tokens)
        return min(max_outputs, guess if num_outputs < guess else outgrown)

    def observe_end(self, params: SamplingParams, num_outputs: int) -> None:
        self.reserve *= 0.98
        if not never_stops_early(params):
            above = num_outputs > self.share * params.max_tokens
            step = self._RATE * (self._QUANTILE if above else self._QUANTILE - 1)
            self.share = min(max(self.share + step, 0.01), 1.0)

    def observe_preemption(self) -> None:
        self.reserve = min(self.reserve + 0.01, self._MOST_RESERVE)


def never_stops_early(params: SamplingParams) -> bool:
    """Whether only `max_tokens` can end the answer, so that its length is known."""
    return params.ignore_eos and not params.stop and not params.stop_token_ids


def least_outputs(params: SamplingParams, max_outputs: int) -> int:
    """Tokens that the request is certain to produce."""
    return max_outputs if never_stops_early(params) else min(max(params.min_tokens, 1), max_outputs)
