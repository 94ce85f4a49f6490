"""Changes logits by what their requests ask for: a bias for single tokens, penalties for tokens that came before.

As in vLLM: first the bias; then the repetition penalty, for tokens of prompt and answer (a positive logit is divided by
it, another one multiplied); then the frequency penalty, once for each time that the answer has the token, and the
presence penalty once. All rows at once; a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.sample.row import SampleRow


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Changes logits [R, vocab] in place."""
    biased = [index for index, row in enumerate(rows) if row.params.logit_bias]
    if biased:
        _add_bias(logits, rows, biased)
    penalised = [index for index, row in enumerate(rows) if row.params.has_penalties and row.history]
    if penalised:
        _penalise(logits, rows, penalised)


def _add_bias(logits: Tensor, rows: Sequence[SampleRow], biased: Sequence[int]) -> None:
    pairs = [(index, token, bias) for index in biased for token, bias in rows[index].params.logit_bias]
    at = torch.tensor([pair[:2] for pair in pairs], device=logits.device).T
    bias = torch.tensor([pair[2] for pair in pairs], dtype=logits.dtype, device=logits.device)
    logits[at[0], at[1]] += bias


def _penalise(logits: Tensor, rows: Sequence[SampleRow], penalised: Sequence[int]) -> None:
    """Finds each distinct token of each history, with its count in the answer, and changes these logits only."""
    vocab = logits.shape[-1]
    lengths = [len(rows[index].history) for index in penalised]
    tokens = np.concatenate([np.asarray(rows[index].history, dtype=np.int64) for index in penalised])
    tokens += np.repeat(np.asarray(penalised, dtype=np.int64) * vocab, lengths)
    is_output = np.concatenate(
        [np.arange(len(rows[index].history)) >= rows[index].num_prompt_tokens for index in penalised]
    )
    places, which = np.unique(tokens, return_inverse=True)
    counts = np.bincount(which, weights=is_output)
    owners = places // vocab

    def per_place(name: str) -> Tensor:
        of_row = np.array([getattr(row.params, name) for row in rows], dtype=np.float32)
        return _tensor(of_row[owners], logits)

    at_row, at_token = _tensor(owners), _tensor(places % vocab)
    values, count = logits[at_row, at_token], _tensor(counts.astype(np.float32), logits)
    repetition = per_place("repetition_penalty")
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_place("frequency_penalty") * count
    values -= per_place("presence_penalty") * (count > 0)
    logits[at_row, at_token] = values


def _tensor(array: np.ndarray[Any, np.dtype[Any]], like: Tensor | None = None) -> Tensor:
    found = torch.from_numpy(array)
    return found if like is None else found.to(like.device, like.dtype)
