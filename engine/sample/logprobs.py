"""The logarithms of probabilities: of the sampled tokens, and of the most likely ones.

They are those of the model's own distribution: before temperature, filters, masks, bias and penalties, as in vLLM. All
rows at once; a row's numbers depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import MAX_LOGPROBS, TokenLogprobs
from engine.sample.row import SampleRow, row_sums


class Likelihoods:
    """What logits say before sampling changes them; keeps a copy of the rows that ask for it."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        self._wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        self._rows = rows
        if self._wanted:
            self._logits = logits[self._wanted]  # a copy

    def of(self, ids: Sequence[int | None]) -> dict[int, TokenLogprobs]:
        """By row, of rows that ask for them and have an id; `ids` are those of all rows."""
        found: dict[int, TokenLogprobs] = {}
        if not self._wanted:
            return found
        chosen = [ids[index] for index in self._wanted]
        logits = self._logits.double()
        norm = _log_sum_exp(logits)
        # always as many, because among equals the choice may depend on how many are wanted
        values, tokens = self._logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
        top = zip(tokens.tolist(), (values.double() - norm).tolist(), strict=True)
        at = torch.tensor([token or 0 for token in chosen], device=logits.device)[:, None]
        own = (logits.gather(1, at) - norm)[:, 0].tolist()
        for index, token, logprob, (top_ids, top_logprobs) in zip(self._wanted, chosen, own, top, strict=True):
            if token is not None:
                count = self._rows[index].params.logprobs or 0
                best = tuple(zip(top_ids[:count], top_logprobs[:count], strict=True))
                found[index] = TokenLogprobs(token, logprob, best)
        return found


def _log_sum_exp(logits: Tensor) -> Tensor:
    """[R, vocab] -> [R, 1]."""
    most = logits.amax(dim=-1, keepdim=True)
    return most + row_sums((logits - most).exp_()).log()
