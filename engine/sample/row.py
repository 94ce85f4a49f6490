"""How one row of logits is sampled: all that its id depends on beside the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.request import SamplingParams
from engine.sample.random import Purpose, uniform


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row is sampled. `position` is the absolute position of the token; `masked_ids` may not come. `allowed`
    has a bit for each token that may, int32 [words]; None: all may. `history` are all tokens before `position`, the
    first `num_prompt_tokens` of them the prompt; () where no penalty needs them."""

    params: SamplingParams
    position: int
    choice: int = 0
    masked_ids: tuple[int, ...] = ()
    allowed: NDArray[np.int32] | None = None
    history: tuple[int, ...] = ()
    num_prompt_tokens: int = 0

    @property
    def is_argmax(self) -> bool:
        """Whether its id is that of the largest logit that may come, and nothing else of the logits counts."""
        return takes_largest(self.params) and not self.params.needs_logits

    @property
    def is_masked(self) -> bool:
        """Whether some token may not come."""
        return self.allowed is not None or bool(self.masked_ids)

    @property
    def draw(self) -> float:
        return uniform(self.params.seed, self.choice, self.position, Purpose.SAMPLE)


def takes_largest(params: SamplingParams) -> bool:
    """Whether nothing is drawn."""
    return params.is_greedy or params.top_k == 1


def row_sums(mass: Tensor) -> Tensor:
    """[R, n] -> [R, 1]. A single row alone would be added up in another order than one among others."""
    return (mass.repeat(2, 1).sum(dim=-1)[:1] if len(mass) == 1 else mass.sum(dim=-1))[:, None]
