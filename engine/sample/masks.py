"""Makes -inf of the logits of tokens that may not come, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sample.row import SampleRow

_NEVER = float("-inf")


def mask(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """In place, logits [R, vocab]. Of `masked_ids` a grammar's row strikes out those that leave something."""
    formed = [(i, _without(row.allowed, row.masked_ids)) for i, row in enumerate(rows) if row.allowed is not None]
    if formed:
        packed = np.stack([words for _, words in formed]).view(np.uint8)
        bits = np.unpackbits(packed, axis=1, count=logits.shape[-1], bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
        # half the time of masked_fill_, which branches
        never = logits.new_tensor(_NEVER)
        if len(formed) == len(rows):
            torch.where(allowed, logits, never, out=logits)
        else:
            indices = [index for index, _ in formed]
            logits[indices] = torch.where(allowed, logits[indices], never)
    for index, row in enumerate(rows):
        if row.masked_ids and row.allowed is None:
            logits[index, list(row.masked_ids)] = _NEVER


def _without(words: NDArray[np.int32], token_ids: Sequence[int]) -> NDArray[np.int32]:
    """The mask without these tokens, if that leaves one."""
    if not token_ids:
        return words
    left = words.copy().view(np.uint32)
    for token_id in token_ids:
        left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return left.view(np.int32) if left.any() else words
