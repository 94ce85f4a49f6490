"""Which tokens a draft scores, if not all: those that the data and the teacher speak of most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.distill.targets import Targets

MULTIPLE = 64
"""Kernels take so many rows of the head at once; a number between costs as much as the next one."""
_READ_SHARE = 0.01


def frequent(captured: Iterable[tuple[Tensor, Targets]], count: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """About `count` token ids, ascending: `always`, then those that the teacher expects most often where something is
    said, what was merely read counting a little, then the first of the vocabulary."""
    worth = torch.zeros(vocab_size, dtype=torch.float64)
    for tokens, targets in captured:
        worth += _READ_SHARE * torch.bincount(tokens, minlength=vocab_size)
        expected = targets.weights.double() * targets.log_p.double().exp()
        worth.index_add_(0, targets.ids.flatten(), expected.flatten())
    return chosen(worth, count, always)


def chosen(worth: Tensor, count: int, always: Iterable[int]) -> Tensor:
    """About `count` token ids, ascending: `always`, then those with the most worth [vocab], of equals the first."""
    for token in always:
        worth[token] = float("inf")
    vocab_size = len(worth)
    size = min(-(-count // MULTIPLE) * MULTIPLE, vocab_size)
    return worth.sort(descending=True, stable=True).indices[:size].sort().values
