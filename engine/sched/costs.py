"""What a step costs by what it computes: a line through the steps that were measured, learned as they go by.

    seconds = step + token · prompt tokens + pair · earlier tokens that these look at
                   + row · decoded rows    + context · tokens of context that these read

The five numbers are a least-squares fit with older steps fading out. Errors count in proportion to the step's length,
so a few long steps don't outweigh many short ones, and one that took ten times as long because something else ran
counts a hundredth. Numbers about which no step has told anything yet keep the proportions of a guess, scaled by what
was measured; none is ever negative.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from engine.sched.plan import StepPlan

_KEEPS = 1 - 1 / 256  # the share of its weight that a step keeps with a further one
_DOUBT = 0.01  # steps that the guess weighs


class Work(NamedTuple):
    """What a step computes. `pairs` counts, for each prompt token, the tokens before it; `context_tokens`, for each
    sequence that decodes, the tokens whose KV it reads."""

    prompt_tokens: float = 0.0
    pairs: float = 0.0
    rows: float = 0.0
    context_tokens: float = 0.0


def prompt_work(start: int, num_tokens: int) -> Work:
    """A chunk of a prompt behind `start` tokens whose KV exists."""
    return Work(prompt_tokens=num_tokens, pairs=num_tokens * (start + num_tokens / 2))


def decode_work(start: int, num_rows: int = 1) -> Work:
    """The next token of a sequence of `start` tokens, and a draft behind it."""
    return Work(rows=num_rows, context_tokens=start + num_rows)


def work_of(plan: StepPlan) -> Work:
    """All of a step."""
    kinds = (
        (decode_work if chunk.is_decode else prompt_work)(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks
    )
    return Work(*map(sum, zip(*kinds, strict=True)))


class Costs(NamedTuple):
    """Seconds of a step without any work, and of each unit of it."""

    step_s: float
    token_s: float
    pair_s: float
    row_s: float
    context_token_s: float

    def of(self, work: Work) -> float:
        """Of work in a step that runs anyway."""
        prompts_s = self.token_s * work.prompt_tokens + self.pair_s * work.pairs
        return prompts_s + self.row_s * work.rows + self.context_token_s * work.context_tokens

    def prompt_tokens(self, start: int, seconds: float) -> int:
        """How many tokens of a prompt, behind `start` others, can be computed in the time."""
        if seconds <= 0.0:
            return 0
        slope, curve = self.token_s + self.pair_s * start, self.pair_s / 2
        # the positive root of curve·n² + slope·n = seconds, in a form that stays exact where curve is next to nothing
        root = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * curve * seconds) + 1e-30)
        return int(min(root, 1e9))


GUESS = Costs(step_s=0.01, token_s=0.0006, pair_s=2e-7, row_s=0.001, context_token_s=1.5e-6)
"""A small model on two CPU cores. Only the proportions count, once a step was measured."""


class MeasuredCosts:
    """The fit. Not thread-safe."""

    def __init__(self) -> None:
        self._guess = np.array(GUESS)
        self._products = np.zeros((5, 5))  # of the guessed costs of each kind, over the measured one
        self._sums = np.zeros(5)
        self._log_scale = self._weight = 0.0
        self._costs: Costs | None = GUESS

    def observe(self, work: Work, seconds: float) -> None:
        """A step took so long."""
        shares = self._guess * np.array([1.0, *work]) / max(seconds, 1e-9)
        self._products = self._products * _KEEPS + np.outer(shares, shares)
        self._sums = self._sums * _KEEPS + shares
        self._log_scale = self._log_scale * _KEEPS - math.log(shares.sum())
        self._weight = self._weight * _KEEPS + 1.0
        self._costs = None

    @property
    def costs(self) -> Costs:
        """As far as they are known."""
        if self._costs is None:
            self._costs = Costs(*(self._fit() * self._guess).tolist())
        return self._costs

    def _fit(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Factors on the guess. Those that would be negative are 0, and the others fitted without them."""
        scale = math.exp(self._log_scale / self._weight)
        factors = np.zeros(5)
        kept = np.arange(5)
        while kept.size:
            products = self._products[np.ix_(kept, kept)] + _DOUBT * np.eye(kept.size)
            found = np.linalg.solve(products, self._sums[kept] + _DOUBT * scale)
            if found.min() >= 0.0:
                factors[kept] = found
                break
            kept = np.delete(kept, int(found.argmin()))
        return factors
