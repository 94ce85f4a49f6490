"""Which tokens may come in each row: the masks of a step for the head, or -inf for the logits of those that may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sample.row import SampleRow

_NEVER = float("-inf")


def packed(rows: Sequence[SampleRow], vocab_size: int) -> NDArray[np.int32]:
    """Bit t of row i, in little-endian words: whether token t may come there; int32 [R, words]. Of `masked_ids` a
    grammar's row strikes out those that leave something. Bits behind the vocabulary, whatever a grammar says of them,
    are 0."""
    any_token = np.full((vocab_size + 31) // 32, -1, dtype=np.int32)
    bits = np.stack([any_token if row.allowed is None else row.allowed for row in rows])
    if vocab_size % 32:
        bits[:, -1] &= (1 << vocab_size % 32) - 1
    with_ids: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.masked_ids:
            with_ids.setdefault(row.masked_ids, []).append(index)
    for token_ids, indices in with_ids.items():
        words, kept = _all_but(token_ids)
        place = np.ix_(indices, words)
        before = bits[place]
        bits[place] = before & kept
        for at in np.flatnonzero((bits[place] != before).any(axis=1)).tolist():
            if rows[indices[at]].allowed is not None and not bits[indices[at]].any():
                bits[indices[at], words] = before[at]
    return bits


def mask(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """In place, logits [R, vocab]."""
    formed = [index for index, row in enumerate(rows) if row.allowed is not None]
    if formed:
        words = packed([rows[index] for index in formed], logits.shape[-1]).view(np.uint8)
        bits = np.unpackbits(words, axis=1, count=logits.shape[-1], bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
        # half the time of masked_fill_, which branches
        never = logits.new_tensor(_NEVER)
        if len(formed) == len(rows):
            torch.where(allowed, logits, never, out=logits)
        else:
            logits[formed] = torch.where(allowed, logits[formed], never)
    for index, row in enumerate(rows):
        if row.masked_ids and row.allowed is None:
            logits[index, list(row.masked_ids)] = _NEVER


def few_allowed(rows: Sequence[SampleRow], vocab_size: int, most: int) -> dict[int, list[int]]:
    """By row, the tokens of those whose grammar allows `most` at most; in order."""
    formed = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not formed:
        return {}
    bits = packed([rows[index] for index in formed], vocab_size).view(np.uint32)
    counts = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    few = np.flatnonzero(counts <= most)
    if not few.size:
        return {}
    owners, words = np.nonzero(bits[few])
    lanes = np.unpackbits(bits[few][owners, words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    places, lane = np.nonzero(lanes)
    tokens = np.split(words[places] * 32 + lane, np.cumsum(counts[few])[:-1])
    return {formed[index]: mine.tolist() for index, mine in zip(few.tolist(), tokens, strict=True)}


def gathered(logits: Tensor, tokens: Mapping[int, Sequence[int]], width: int) -> Tensor:
    """Of each row the logits of its tokens, [len(tokens), width]; -inf behind them."""
    at = torch.zeros(len(tokens), width, dtype=torch.int64)
    is_none = torch.ones(len(tokens), width, dtype=torch.bool)
    for row, mine in enumerate(tokens.values()):
        at[row, : len(mine)] = torch.tensor(mine, dtype=torch.int64)
        is_none[row, : len(mine)] = False
    rows = torch.tensor(list(tokens))[:, None]
    found = logits[rows.to(logits.device), at.to(logits.device)]
    return found.masked_fill_(is_none.to(logits.device), _NEVER)


def _all_but(token_ids: Sequence[int]) -> tuple[list[int], NDArray[np.int32]]:
    """The words that tokens are in, and their bits without them."""
    struck: dict[int, int] = {}
    for token_id in token_ids:
        struck[token_id >> 5] = struck.get(token_id >> 5, 0) | 1 << (token_id & 31)
    return list(struck), ~np.array(list(struck.values()), dtype=np.uint32).view(np.int32)
