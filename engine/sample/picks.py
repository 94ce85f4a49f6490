"""How the rows of a step get their ids, as arrays that go to the device beside its other inputs.

    best     the largest logit that may come, found in the head
    drawn    on the device, where the tier draws there: one uniform number a row, filters, no more
    others   by engine/sample/sampler.py, from their logits: penalties, bias, log probabilities; on CPU all that draw

The first rows of `best` and of `drawn` are those with masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sample.masks import packed
from engine.sample.row import SampleRow

NUMBERS = 4
"""Of a row that is drawn: temperature, top_p, min_p, draw."""


@dataclass(frozen=True, slots=True)
class Picks:
    """`rows` [R] of a step; `best`, `drawn` and `others` are indices of them. Masks are int32 [rows with masks, words],
    `numbers` float32 [drawn, NUMBERS], `top_ks` int32 [drawn]."""

    rows: Sequence[SampleRow]
    best: NDArray[np.int64]
    drawn: NDArray[np.int64]
    others: list[int]
    best_masks: NDArray[np.int32]
    drawn_masks: NDArray[np.int32]
    numbers: NDArray[np.float32]
    top_ks: NDArray[np.int32]

    @property
    def arrays(self) -> list[NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]]:
        """All that the device needs, in the order of the fields."""
        return [self.best, self.drawn, self.best_masks, self.drawn_masks, self.numbers, self.top_ks]

    @property
    def is_all_best(self) -> bool:
        """Whether the largest logit is the id of every row, in their order."""
        return len(self.best) == len(self.rows) and not len(self.best_masks)


def pick(rows: Sequence[SampleRow], vocab_size: int, *, draws: bool) -> Picks:
    """`draws`: the device does."""
    best: list[int] = []
    drawn: list[int] = []
    others: list[int] = []
    for index, row in enumerate(rows):
        kind = best if row.is_argmax else drawn if draws and not row.params.needs_logits else others
        kind.append(index)
    for kind in (best, drawn):
        kind.sort(key=lambda index: not rows[index].is_masked)
    asked = [rows[index] for index in drawn]
    return Picks(
        rows=rows,
        best=np.array(best, np.int64),
        drawn=np.array(drawn, np.int64),
        others=others,
        best_masks=_masks([rows[index] for index in best], vocab_size),
        drawn_masks=_masks(asked, vocab_size),
        numbers=np.array(
            [(row.params.temperature, row.params.top_p, row.params.min_p, row.draw) for row in asked], np.float32
        ).reshape(-1, NUMBERS),
        top_ks=np.array([row.params.top_k for row in asked], np.int32),
    )


def _masks(rows: Sequence[SampleRow], vocab_size: int) -> NDArray[np.int32]:
    masked = [row for row in rows if row.is_masked]
    return packed(masked, vocab_size) if masked else np.empty((0, 1), np.int32)
