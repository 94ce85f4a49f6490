"""Examples that share their first tokens, as one forward pass in which these are computed once.

A row sees the shared rows and those of its own example, at or before its position: as if each example ran alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distill.targets import Targets, joined


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer. What stands at `first` and later is to be learned; `targets` has a row for each."""

    token_ids: tuple[int, ...]
    first: int
    targets: Targets


@dataclass(frozen=True, slots=True)
class Pack:
    """T rows: the shared ones, then those of each example. R of them predict a token that is to be learned.

    `owners` are 0 for shared rows, else the number of the example; `rows` are the places of the R rows, `next_ids` what
    came after them and `targets` what the teacher thought of it.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    owners: Tensor  # int64 [T]
    rows: Tensor  # int64 [R]
    next_ids: Tensor  # int64 [R]
    targets: Targets

    def mask(self, window: int = 0) -> Tensor:
        """Which rows see which, bool [T, T]; those of a layer with a window see so many positions, 0 for all."""
        back = self.positions[:, None] - self.positions[None, :]
        owners = self.owners
        seen = (back >= 0) & ((owners[None, :] == 0) | (owners[None, :] == owners[:, None]))
        return seen & (back < window) if window else seen


def pack(examples: Sequence[Example]) -> Pack:
    """One forward pass for these."""
    shared = common_tokens([example.token_ids for example in examples], min(one.first for one in examples) - 1)
    token_ids = list(examples[0].token_ids[:shared])
    positions, owners = list(range(shared)), [0] * shared
    rows: list[int] = []
    next_ids: list[int] = []
    for number, example in enumerate(examples, 1):
        start, size = len(token_ids), len(example.token_ids) - 1  # the last token is predicted, never read
        token_ids += example.token_ids[shared:size]
        positions += range(shared, size)
        owners += [number] * (size - shared)
        rows += range(start + example.first - 1 - shared, start + size - shared)
        next_ids += example.token_ids[example.first :]
    return Pack(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        owners=torch.tensor(owners),
        rows=torch.tensor(rows),
        next_ids=torch.tensor(next_ids),
        targets=joined([example.targets for example in examples]),
    )


def common_tokens(texts: Sequence[Sequence[int]], most: int) -> int:
    """How many first tokens all have in common, at most `most`."""
    for place in range(most):
        if any(text[place] != texts[0][place] for text in texts):
            return place
    return max(most, 0)


def packed_order(
    families: Sequence[int], sizes: Sequence[int], order: Sequence[int], room: Sequence[int]
) -> list[list[int]]:
    """Which examples go into which pack: `order` visits them, those of one family (who share a beginning) go together,
    as many as `room[family]` has tokens for, each its own `sizes`. Every example is in one pack; one that is larger
    alone is a pack of its own."""
    filling: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    packs: list[list[int]] = []
    for index in order:
        family = families[index]
        if family not in filling or sizes[index] > left[family]:
            filling[family] = []
            packs.append(filling[family])
            left[family] = room[family]
        filling[family].append(index)
        left[family] -= sizes[index]
    return packs
